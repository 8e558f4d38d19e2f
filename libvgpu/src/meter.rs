//! Metering: a share gets its part of the card's time.
//!
//! | Question | Module |
//! |---|---|
//! | Has this thread time left? | [`lease`] |
//! | If not, when does the share? | [`admission`] |
//! | What does such a launch cost? | [`costs`], learned from [`samples`] |
//! | May events be used now? | [`capture`] |
//! | Which card does it go to? | [`cards`] |
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

use core::sync::atomic::AtomicU64;

use drava_vgpu_abi::cost::{Cost, LaunchKind};

use crate::card::Card;
use crate::cuda::{CUDA_SUCCESS, CUresult, CUstream};
use crate::process::Process;

mod admission;
mod capture;
mod cards;
mod costs;
mod events;
mod lease;
mod samples;
mod stream;

use capture::Captures;
pub(crate) use capture::{
    begin as begin_capture, end as end_capture, forget as forget_stream, is_capturing,
    while_nothing_is_captured,
};
use cards::{Cards, Known};
use costs::Costs;
use lease::Leases;
use samples::Samples;
pub(crate) use stream::{Legacy, NullStream, PerThread};

/// What a process needs to meter its launches. All zeroes is a process that has not launched anything.
///
/// What each launch reads and hardly anything writes lies in one cache line: the end of the first field and the
/// beginning of the second.
#[repr(C, align(64))]
pub(crate) struct Meter {
    captures: Captures,
    cards: Cards,
    leases: Leases,
    costs: Costs,
    samples: Samples,
    /// How long launches take by the clock, others' time slices included; known where the agent is told until when the
    /// share is at work.
    lengths: Costs,
    /// GPU time that was counted too much, to be taken off what is counted next, microseconds.
    overcounted_us: AtomicU64,
    /// Corrections of less than a microsecond, nanoseconds in two's complement.
    corrections_ns: AtomicU64,
}

/// Makes a launch of that kind with the call, when it is the share's turn.
///
/// A macro, because the call is written down twice: where it follows a mere look, nothing must be put aside for it.
macro_rules! metered {
    ($kind:expr, $stream:expr, $call:expr) => {{
        let kind = $kind;
        match $crate::meter::try_fast_path(kind) {
            $crate::meter::FastPath::Admitted => $call,
            $crate::meter::FastPath::Miss => $crate::meter::admitted(kind, $stream, move || $call),
        }
    }};
}
pub(crate) use metered;

/// What a look at a launch says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FastPath {
    /// It is paid for.
    Admitted,
    /// More is to be found out.
    Miss,
}

/// Charges a launch of that kind to the thread's lease, if that covers it.
///
/// Reads four cache lines and writes one, the lease, that no other thread touches.
#[inline(always)]
pub(crate) fn try_fast_path(kind: LaunchKind) -> FastPath {
    // Where a card is known, the process has looked at its limits; a forked child knows none.
    let Some(meter) = Process::mapped().map(|process| &process.meter) else {
        return FastPath::Miss;
    };
    let card = match meter.cards.known() {
        Known::Metered(card) => card,
        Known::NotMetered => return FastPath::Admitted,
        Known::Nothing => return FastPath::Miss,
    };
    let lease = meter.leases.of_this_thread(card);
    if !meter.captures.needs_attention() && lease.spend(meter.costs.get(kind)) {
        FastPath::Admitted
    } else {
        FastPath::Miss
    }
}

/// Makes a launch of that kind with `call`, when it is the share's turn.
#[cold]
#[inline(never)]
pub(crate) fn admitted(
    kind: LaunchKind,
    stream: CUstream,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let meter = &process.meter;
    let card = meter.cards.find(process);
    let Some(card) = card.and_then(|card| Card::at(process, card)) else {
        return call();
    };
    if meter.captures.is_capturing(stream) {
        return call();
    }
    let lease = meter.leases.of_this_thread(card.index());
    let charged_ns = meter.admit(card, kind, lease);
    let Some(sample) = meter.start_sample(card, kind, stream, lease, charged_ns) else {
        return call();
    };
    let result = call();
    meter.end_sample(sample, stream, result == CUDA_SUCCESS);
    result
}

/// What a launch of that kind is known to cost, in nanoseconds.
pub(crate) fn known_cost_ns(kind: LaunchKind) -> Option<u64> {
    let cost = Process::get()?.meter.costs.get(kind);
    (cost.samples() != 0).then(|| cost.ns())
}

/// Forgets what is known of a kind, for `cost`.
pub(crate) fn expect(kind: LaunchKind, cost: Cost) {
    if let Some(process) = Process::get() {
        process.meter.costs.change(kind, |_| cost);
        process.meter.lengths.forget(kind);
    }
}

/// What is known of a kind may not be true any more.
pub(crate) fn mark_stale(kind: LaunchKind) {
    if let Some(process) = Process::get() {
        process.meter.costs.change(kind, Cost::marked_stale);
        process.meter.lengths.change(kind, Cost::marked_stale);
    }
}

/// What is known of any kind may not be true any more: handles of unloaded functions recur.
pub(crate) fn mark_all_stale() {
    if let Some(process) = Process::get() {
        process.meter.costs.mark_all_stale();
        process.meter.lengths.mark_all_stale();
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

/// After a context may have ended: another one may get its handle.
pub(crate) fn forget_card_of(is_it: impl Fn(u64) -> bool) {
    if let Some(process) = Process::get() {
        process.meter.cards.forget(is_it);
    }
}
