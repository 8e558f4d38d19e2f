//! Metering: a share gets its part of the card's time.
//!
//! | Question | Module |
//! |---|---|
//! | Has this thread time left? | [`lease`] |
//! | If not, when does the share? | [`admission`] |
//! | What does such a launch cost? | [`costs`], learned from [`samples`] |
//! | May events be used now? | [`capture`] |
//!
//! A launch is charged what its kind costs, before it is made. As long as the thread's lease covers that, nothing is
//! touched that other threads write, and no system call is made. Otherwise the share's debt bucket is asked, and if
//! the share is in debt the launch waits, outside of any lock.
//!
//! Invariants:
//! - A launch into a stream that is being captured is not a launch: it is neither charged nor delayed.
//! - While any stream of the process is being captured, nothing waits and no event is used.
//! - Where time cannot be counted (no region, no memory for state), launches go through: what is refused then is
//!   memory, not time.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::cost::{Cost, Kind};

use crate::card::{Card, Target, current_device};
use crate::cuda::{CU_STREAM_PER_THREAD, CUDA_SUCCESS, CUdevice, CUresult, CUstream};
use crate::driver::{Library, Original};
use crate::process::{MAX_DEVICES, Process};

mod admission;
mod capture;
mod costs;
mod events;
mod lease;
mod samples;

use capture::Captures;
pub(crate) use capture::{begin as begin_capture, end as end_capture, forget as forget_stream};
use costs::Costs;
use lease::{Lease, Leases};
use samples::Samples;

/// What a process needs to meter its launches. All zeroes is a process that has not launched anything.
pub(crate) struct Meter {
    /// 0 not looked up, 1 one device, 2 several.
    device_count: AtomicU32,
    /// Per CUDA ordinal: 0 not looked up, 1 not metered, 2 + index of the card's first share.
    cards: [AtomicU32; MAX_DEVICES],
    leases: Leases,
    costs: Costs,
    samples: Samples,
    captures: Captures,
    /// GPU time that was counted too much, to be taken off what is counted next, microseconds.
    overcounted_us: AtomicU64,
    /// Corrections of less than a microsecond, nanoseconds in two's complement.
    corrections_ns: AtomicU64,
}

const ONE_DEVICE: u32 = 1;
const MANY_DEVICES: u32 = 2;
const NOT_METERED: u32 = 1;
const FIRST_CARD: u32 = 2;

static DEVICE_COUNT: Original = Original::new(Library::Cuda, c"cuDeviceGetCount");

type GetCount = unsafe extern "C" fn(*mut c_int) -> CUresult;

/// The stream that a null stream means in functions for per-thread default streams.
pub(crate) fn per_thread(stream: CUstream) -> CUstream {
    if stream.is_null() {
        CU_STREAM_PER_THREAD
    } else {
        stream
    }
}

/// Makes a launch of that kind with `call`, when it is the share's turn.
#[inline]
pub(crate) fn metered(
    kind: impl FnOnce() -> Kind,
    stream: CUstream,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let meter = &process.meter;
    let Some(card) = meter.current_card(process) else {
        return call();
    };
    let kind = kind();
    let cost = meter.costs.get(kind);
    let lease = meter.leases.of_this_thread(card);
    if !meter.captures.needs_attention() && lease.spend(cost) {
        return call();
    }
    meter.with_admission(process, card, kind, stream, lease, call)
}

impl Meter {
    /// Small number of the metered card that launches of this thread go to.
    #[inline]
    fn current_card(&self, process: &'static Process) -> Option<u8> {
        let ordinal = match self.device_count.load(Ordering::Relaxed) {
            ONE_DEVICE => 0,
            MANY_DEVICES => current_device()?,
            _ => return self.find_card(process),
        };
        let known = self.cards.get(usize::try_from(ordinal).ok()?)?;
        match known.load(Ordering::Relaxed) {
            0 => self.find_card(process),
            NOT_METERED => None,
            found => u8::try_from(found.wrapping_sub(FIRST_CARD)).ok(),
        }
    }

    #[cold]
    fn find_card(&self, process: &'static Process) -> Option<u8> {
        let device = current_device()?;
        if self.device_count.load(Ordering::Relaxed) == 0 {
            let count = if device_count()? == 1 {
                ONE_DEVICE
            } else {
                MANY_DEVICES
            };
            self.device_count.store(count, Ordering::Relaxed);
        }
        let known = self.cards.get(usize::try_from(device).ok()?)?;
        let card = metered_card(process, device);
        let code = card.map_or(NOT_METERED, |card| {
            FIRST_CARD.wrapping_add(u32::from(card.index()))
        });
        known.store(code, Ordering::Relaxed);
        card.map(Card::index)
    }

    /// A launch that needs more than a look at the thread's lease.
    #[cold]
    #[inline(never)]
    fn with_admission(
        &self,
        process: &'static Process,
        card: u8,
        kind: Kind,
        stream: CUstream,
        lease: &Lease,
        call: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let Some(card) = Card::at(process, card) else {
            return call();
        };
        if self.captures.is_capturing(stream) {
            return call();
        }
        let charged_ns = self.admit(card, kind, lease);
        let Some(sample) = self.start_sample(card, kind, stream, lease, charged_ns) else {
            return call();
        };
        let result = call();
        self.end_sample(sample, stream, result == CUDA_SUCCESS);
        result
    }
}

/// The card, if its GPU time is metered.
fn metered_card(process: &'static Process, device: CUdevice) -> Option<Card> {
    let uuid = crate::card::uuid_of(device)?;
    match process.target_of(uuid, u32::try_from(device).ok()) {
        Target::Limited(card) if card.is_metered() => Some(card),
        Target::Limited(_) | Target::Unlimited | Target::Refused => None,
    }
}

fn device_count() -> Option<c_int> {
    let get = DEVICE_COUNT.address()?;
    // SAFETY: the signature of `cuDeviceGetCount`.
    let get = unsafe { core::mem::transmute::<core::ptr::NonNull<_>, GetCount>(get) };
    let mut count = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut count) };
    (result == CUDA_SUCCESS).then_some(count)
}

/// What a launch of that kind is known to cost, in nanoseconds.
pub(crate) fn known_cost_ns(kind: Kind) -> Option<u64> {
    let cost = Process::get()?.meter.costs.get(kind);
    (cost.samples() != 0).then(|| cost.ns())
}

/// Forgets what is known of a kind, for a guess if there is one.
pub(crate) fn expect(kind: Kind, guess_ns: Option<u64>) {
    if let Some(process) = Process::get() {
        let cost = guess_ns.map_or(Cost::UNKNOWN, Cost::guess);
        process.meter.costs.change(kind, |_| cost);
    }
}

/// What is known of a kind may not be true any more.
pub(crate) fn doubt(kind: Kind) {
    if let Some(process) = Process::get() {
        process.meter.costs.change(kind, Cost::doubted);
    }
}

/// Before a context ends: its events end with it.
pub(crate) fn forget_context(context: u64) {
    if let Some(process) = Process::get() {
        process.meter.samples.forget(|of| of == context);
    }
}

/// Before any primary context may end.
pub(crate) fn forget_all_contexts() {
    if let Some(process) = Process::get() {
        process.meter.samples.forget(|_| true);
    }
}
