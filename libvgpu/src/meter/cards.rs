//! Which card a launch goes to: that of the thread's current context.
//!
//! A process that sees one device has only one answer. With several, the driver is asked for the current context, which
//! it only has to read, and what is known of that context says the rest; to ask for the context's device takes several
//! times as long. Contexts can be switched behind our back, through the driver's private tables, so the thread's current
//! one is never remembered.
//!
//! A context can also end behind our back and another one get its handle. So whoever looks more closely at a launch,
//! which is at least once per lease, asks for the device and corrects what is remembered.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::card::{Card, Target, current_context, current_device, target_of, uuid_of};
use crate::cuda::{CUDA_SUCCESS, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::process::{MAX_DEVICES, Process};

/// Contexts that are remembered; further ones take their places.
const CONTEXTS: usize = 64;

/// Handles are multiples of 16 below 2^60, so that a handle and a card's number fit in one word. Others are not
/// remembered.
const HANDLE_SHIFT: u32 = 4;
const CODE: u64 = 0xff;

const NOT_METERED: u32 = 1;
const SEVERAL: u32 = 2;
const FIRST_CARD: u32 = 3;

static DEVICE_COUNT: Original = Original::new(Library::Cuda, c"cuDeviceGetCount");

type GetCount = unsafe extern "C" fn(*mut c_int) -> CUresult;

/// What is known of the card that a launch goes to, without further ado.
pub(super) enum Known {
    /// Its small number.
    Metered(u8),
    /// Its time is not metered.
    NotMetered,
    /// It must be looked up.
    Nothing,
}

/// All zeroes has not looked.
#[repr(C)]
pub(super) struct Cards {
    /// 0 not looked, 1 the only device is not metered, 2 there are several devices, 3 + index of the first share of the
    /// only one.
    only: AtomicU32,
    /// Per CUDA ordinal the same, but for 2.
    by_device: [AtomicU32; MAX_DEVICES],
    /// Handle and 3 + index of metered cards' contexts.
    by_context: [AtomicU64; CONTEXTS],
}

impl Cards {
    /// What is known of the card of this thread's launches.
    #[inline]
    pub(super) fn known(&self) -> Known {
        match self.only.load(Ordering::Relaxed) {
            0 => Known::Nothing,
            NOT_METERED => Known::NotMetered,
            SEVERAL => self.known_by_context(),
            code => metered(code),
        }
    }

    #[inline(never)]
    fn known_by_context(&self) -> Known {
        let Some((context, place)) =
            current_context().and_then(|context| Some((context, self.place(context)?)))
        else {
            return Known::Nothing;
        };
        let found = place.load(Ordering::Relaxed);
        let [code, ..] = found.to_le_bytes();
        if code == 0 || found != word_of(context, code) {
            return Known::Nothing;
        }
        metered(u32::from(code))
    }

    /// Small number of the metered card of this thread's launches, as the driver says.
    pub(super) fn find(&self, process: &'static Process) -> Option<u8> {
        let device = current_device()?;
        let code = self.code_of(process, device);
        match self.only.load(Ordering::Relaxed) {
            0 => {
                let only = if device_count()? == 1 { code } else { SEVERAL };
                self.only.store(only, Ordering::Relaxed);
            }
            SEVERAL => self.remember(code),
            _ => {}
        }
        match metered(code) {
            Known::Metered(card) => Some(card),
            Known::NotMetered | Known::Nothing => None,
        }
    }

    fn code_of(&self, process: &'static Process, device: CUdevice) -> u32 {
        let known = usize::try_from(device)
            .ok()
            .and_then(|ordinal| self.by_device.get(ordinal));
        let Some(known) = known else {
            return NOT_METERED;
        };
        match known.load(Ordering::Relaxed) {
            0 => {
                let code = metered_card(process, device).map_or(NOT_METERED, |card| {
                    FIRST_CARD.wrapping_add(u32::from(card.index()))
                });
                known.store(code, Ordering::Relaxed);
                code
            }
            code => code,
        }
    }

    /// Remembers what the current context is of. Of one that is not metered nothing is: it would never be looked at
    /// more closely.
    fn remember(&self, code: u32) {
        let Some((context, place)) =
            current_context().and_then(|context| Some((context, self.place(context)?)))
        else {
            return;
        };
        let word = match u8::try_from(code) {
            Ok(code)
                if u32::from(code) >= FIRST_CARD
                    && handle_of(word_of(context, code)) == context =>
            {
                word_of(context, code)
            }
            _ => 0,
        };
        place.store(word, Ordering::Relaxed);
    }

    /// Forgets contexts that have ended.
    pub(super) fn forget(&self, ended: impl Fn(u64) -> bool) {
        for place in &self.by_context {
            let found = place.load(Ordering::Relaxed);
            if found != 0 && ended(handle_of(found)) {
                place.store(0, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn place(&self, context: u64) -> Option<&AtomicU64> {
        let hash = context.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        self.by_context.get(usize::try_from(hash).ok()?)
    }
}

#[inline]
fn word_of(context: u64, code: u8) -> u64 {
    context << HANDLE_SHIFT | u64::from(code)
}

fn handle_of(word: u64) -> u64 {
    (word & !CODE) >> HANDLE_SHIFT
}

#[inline]
fn metered(code: u32) -> Known {
    match code.checked_sub(FIRST_CARD).map(u8::try_from) {
        Some(Ok(card)) => Known::Metered(card),
        Some(Err(_)) | None => Known::NotMetered,
    }
}

/// The card, if its GPU time is metered.
fn metered_card(process: &'static Process, device: CUdevice) -> Option<Card> {
    let uuid = uuid_of(device)?;
    match target_of(process, uuid, u32::try_from(device).ok()) {
        Target::Limited(card) if card.is_metered() => Some(card),
        Target::Limited(_) | Target::Unlimited | Target::Denied => None,
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
