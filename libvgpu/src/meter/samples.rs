//! Measuring launches: pairs of events round some of them.
//!
//! A sample is charged like any launch; when its end is reached, the charge is made what was measured. A launch that
//! runs longer than it was charged for is charged on while it runs, as far as anybody looks.
//!
//! Where several streams are in use, single samples cannot tell what overlapped. Then launches are sampled in rows
//! of [`STRETCH`], and each counts with the time that no other one of the row covered.
//!
//! Events measure what the card did only if the card had it all before it began; otherwise they also measure how long
//! the host took from one call to the next. So each event is asked about when it has been queued, and the host's clock is
//! looked at between the calls ([`Recording`](drava_vgpu_abi::recording::Recording)). What that leaves open, what is known of the kind decides
//! ([`Cost::estimate_ns`]).
//!
//! Pairs lie in a ring, are used over and over, and belong to a context. Nobody waits for anybody here: who cannot
//! have the ring's lock does not look, and a launch that finds no pair is not sampled.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::bucket::LONG_KERNEL_US;
use drava_vgpu_abi::contention;
use drava_vgpu_abi::cost::{Cost, LaunchKind, MAX_BELIEVED_NS, SAMPLING_INTERVAL};

use super::Meter;
use super::admission::first;
use super::events::{elapsed_ns, query, record};
use super::lease::Lease;
use crate::card::{Card, current_context};
use crate::cuda::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUstream};
use crate::process::Process;
use crate::share::Share;
use crate::sys;

mod clocks;
mod pair;

use clocks::Clocks;
use pair::{BUSY, EMPTY, IDLE, PENDING, Pair};

/// Samples under way at the same time.
const PAIRS: usize = 128;
const RING: u64 = PAIRS as u64;
/// Samples asked about in one look.
const LOOKS: usize = 8;
/// Time between two looks of launches that could do without one.
const LOOK_PAUSE_US: u64 = 200;
/// Launches in a row that are sampled together.
const STRETCH: u32 = 48;
/// The first of them overlap with what was not sampled.
const EDGE: u32 = 8;
/// After so many samples that saw one stream only, there is one stream only.
const STREAM_MEMORY: u32 = 64;

pub(crate) struct Samples {
    pairs: [Pair; PAIRS],
    /// The next pair to be used, and the oldest that may be under way; both only rise.
    head: AtomicU64,
    tail: AtomicU64,
    /// When somebody looked last.
    polled_us: AtomicU64,
    last_stream: AtomicU64,
    /// More than 0 if several streams are in use.
    mixed: AtomicU32,
    /// Charge by who looks.
    lock: AtomicU32,
    clocks: UnsafeCell<Clocks>,
}

// SAFETY: the clocks are only touched under the lock; the rest are atomics.
unsafe impl Sync for Samples {}

/// A sample whose launch is being made.
#[derive(Clone, Copy)]
pub(super) struct Started(usize);

impl Meter {
    /// Puts the first event before the launch, if it is to be sampled.
    pub(super) fn start_sample(
        &self,
        card: Card,
        kind: LaunchKind,
        stream: CUstream,
        lease: &Lease,
        charged_ns: u64,
    ) -> Option<Started> {
        let cost = self.costs.get(kind);
        let weight = cost.weight();
        let row = self.captures.step_stretch();
        let is_sampled_always = weight.is_none_or(|weight| weight >= SAMPLING_INTERVAL);
        let in_rows = self.samples.is_mixed() && !is_sampled_always;
        let spread = if in_rows { u64::from(STRETCH) } else { 1 };
        let is_due = (lease.is_due(weight, spread) || row != 0) && !cost.is_unmeasurable();
        if !is_due && !Self::follows_launches(card) {
            return None;
        }
        if is_due && in_rows && row == 0 {
            self.captures.begin_stretch(STRETCH.saturating_sub(1));
        }
        let is_at_edge = in_rows && (row == 0 || row > STRETCH.saturating_sub(EDGE));
        let context = current_context()?;
        self.captures
            .without(|| {
                let launch = Launch {
                    card: card.index(),
                    kind,
                    charged_ns,
                    counts: is_due,
                    learns: is_due && !is_at_edge,
                };
                self.samples.start(context, stream, &launch)
            })
            .flatten()
    }

    /// Puts the second event behind it.
    pub(super) fn end_sample(&self, sample: Started, stream: CUstream, is_launched: bool) {
        let Some(pair) = self.samples.pairs.get(sample.0) else {
            return;
        };
        pair.returned_ns.store(sys::now_ns(), Ordering::Relaxed);
        let is_recorded = is_launched
            && self.captures.without(|| {
                let is_recorded = record(pair.end.load(Ordering::Relaxed), stream);
                if pair.counts.load(Ordering::Relaxed) == 0 {
                    return is_recorded;
                }
                let is_over = is_reached(&pair.end);
                let is_reached = is_over
                    || pair.was_reached.load(Ordering::Relaxed) != 0
                    || is_reached(&pair.start);
                pair.ended_ns.store(sys::now_ns(), Ordering::Relaxed);
                pair.is_over.store(u32::from(is_over), Ordering::Relaxed);
                pair.is_reached
                    .store(u32::from(is_reached), Ordering::Relaxed);
                is_recorded
            }) == Some(true);
        let state = if is_recorded { PENDING } else { IDLE };
        pair.state.store(state, Ordering::Release);
    }

    /// Looks which samples have ended, and corrects what they were charged.
    pub(super) fn poll(&self, now: u64) {
        if self.samples.tail.load(Ordering::Relaxed) == self.samples.head.load(Ordering::Relaxed) {
            return;
        }
        self.captures.without(|| {
            let Some(_lock) = self.samples.try_lock() else {
                return;
            };
            self.poll_locked(now);
        });
    }

    fn poll_locked(&self, now: u64) {
        self.samples.polled_us.store(now, Ordering::Relaxed);
        let head = self.samples.head.load(Ordering::Acquire);
        let oldest = self
            .samples
            .tail
            .load(Ordering::Relaxed)
            .max(head.saturating_sub(RING));
        let mut tail = oldest;
        let mut is_oldest = true;
        let mut looks = 0usize;
        for number in oldest..head {
            let Some(pair) = self.samples.at(number) else {
                break;
            };
            let state = pair.state.load(Ordering::Acquire);
            if state == PENDING {
                looks = looks.saturating_add(1);
                self.look(pair, now);
            }
            let is_over = matches!(pair.state.load(Ordering::Acquire), IDLE | EMPTY);
            is_oldest &= is_over;
            if is_oldest {
                tail = number.wrapping_add(1);
            }
            if looks == LOOKS {
                break;
            }
        }
        self.samples.tail.store(tail, Ordering::Relaxed);
    }

    fn look(&self, pair: &Pair, now: u64) {
        let card = Process::get().and_then(|process| {
            Card::at(
                process,
                u8::try_from(pair.card.load(Ordering::Relaxed)).ok()?,
            )
        });
        let Some(card) = card else {
            pair.state.store(IDLE, Ordering::Release);
            return;
        };
        match query(pair.end.load(Ordering::Relaxed)) {
            CUDA_SUCCESS => {
                if pair.counts.load(Ordering::Relaxed) != 0
                    && let Some(ns) = elapsed_ns(
                        pair.start.load(Ordering::Relaxed),
                        pair.end.load(Ordering::Relaxed),
                    )
                {
                    self.finish(card, pair, ns.unsigned_abs());
                }
                pair.state.store(IDLE, Ordering::Release);
            }
            CUDA_ERROR_NOT_READY if pair.counts.load(Ordering::Relaxed) == 0 => {}
            CUDA_ERROR_NOT_READY => self.charge_on(card, pair, now),
            // The events are gone with their context.
            _ => pair.state.store(EMPTY, Ordering::Release),
        }
    }

    /// A launch that is still running has cost as much as it has run.
    fn charge_on(&self, card: Card, pair: &Pair, now: u64) {
        let now_ns = now.saturating_mul(1_000);
        if let Some(kind) = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed)) {
            let age = now_ns.saturating_sub(pair.returned_ns.load(Ordering::Relaxed));
            self.costs.change(kind, |cost| {
                if cost.samples() == 0 && age > cost.ns() {
                    Cost::guess(age.min(MAX_BELIEVED_NS))
                } else {
                    cost
                }
            });
        }
        if pair.started_us.load(Ordering::Relaxed) == 0 {
            if query(pair.start.load(Ordering::Relaxed)) == CUDA_SUCCESS {
                pair.started_us.store(now, Ordering::Relaxed);
            }
            return;
        }
        let started = pair
            .started_us
            .load(Ordering::Relaxed)
            .saturating_mul(1_000);
        let run_ns = own_part(card, now_ns.saturating_sub(started)).min(MAX_BELIEVED_NS);
        let charged = pair.charged_ns.load(Ordering::Relaxed);
        if run_ns > charged {
            pair.charged_ns.store(run_ns, Ordering::Relaxed);
            self.settle(card, charged, run_ns);
        }
    }

    fn finish(&self, card: Card, pair: &Pair, measured_ns: u64) {
        let kind = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed));
        let cost = kind.map_or(Cost::UNKNOWN, |kind| self.costs.get(kind));
        let sample = pair.recording().sample(measured_ns);
        let Some(taken_ns) = cost.estimate_ns(sample) else {
            return;
        };
        if let Some(share) = first(card) {
            let us = own_part(card, taken_ns) / 1_000;
            share.record_kernel(us, us >= LONG_KERNEL_US);
        }
        let ns = cost.believed_ns(taken_ns);
        let new_ns = self.samples.new_part(pair, ns);
        let own_ns = own_part(card, new_ns);
        self.settle(card, pair.charged_ns.load(Ordering::Relaxed), own_ns);
        if let Some(kind) = kind
            && pair.learns.load(Ordering::Relaxed) != 0
        {
            self.costs
                .change(kind, |cost| cost.learn_from(sample, own_ns));
            if card.shares().any(Share::notifies_agent) {
                self.lengths
                    .change(kind, |length| length.learn_from(sample, new_ns));
            }
        }
    }

    /// Makes a charge of `from` nanoseconds one of `to`.
    fn settle(&self, card: Card, from: u64, to: u64) {
        let difference = to.cast_signed().saturating_sub(from.cast_signed());
        self.correct_ns(card, difference);
        let us = difference.unsigned_abs() / 1_000;
        if us == 0 {
            return;
        }
        if let Some(bucket) = first(card).and_then(Share::bucket) {
            if difference > 0 {
                bucket.charge(us);
            } else {
                bucket.repay(us);
            }
        }
    }
}

/// What is under way by the events behind launches.
#[derive(Clone, Copy, Default)]
pub(super) struct UnderWay {
    pub(super) launches: usize,
    pub(super) ns: u64,
}

/// What is noted of a launch that is sampled, or only followed to its end, which takes the second event alone.
struct Launch {
    card: u8,
    kind: LaunchKind,
    charged_ns: u64,
    counts: bool,
    learns: bool,
}

impl Samples {
    /// Whether none has looked for a while.
    pub(super) fn is_poll_due(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.polled_us.load(Ordering::Relaxed)) >= LOOK_PAUSE_US
    }

    /// The launches whose ends were not seen yet, and what they cost, each of them at least `least_ns`, which stands for
    /// those behind it that are not followed.
    pub(super) fn under_way(&self, card: Card, least_ns: u64) -> UnderWay {
        let head = self.head.load(Ordering::Acquire);
        let tail = self.tail.load(Ordering::Relaxed);
        let numbers = tail.max(head.saturating_sub(RING))..head;
        let is_of_card = |pair: &&Pair| {
            pair.state.load(Ordering::Acquire) == PENDING
                && pair.card.load(Ordering::Relaxed) == u32::from(card.index())
        };
        numbers
            .filter_map(|number| self.at(number))
            .filter(is_of_card)
            .fold(UnderWay::default(), |sum, pair| {
                let charged_ns = pair.charged_ns.load(Ordering::Relaxed);
                UnderWay {
                    launches: sum.launches.saturating_add(1),
                    ns: sum.ns.saturating_add(charged_ns.max(least_ns)),
                }
            })
    }

    fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed) != 0
    }

    fn note_stream(&self, stream: CUstream) {
        let stream = (stream.expose_provenance() as u64) ^ (1 << 63);
        let last = self.last_stream.swap(stream, Ordering::Relaxed);
        let mixed = self.mixed.load(Ordering::Relaxed);
        if last != 0 && last != stream {
            self.mixed.store(STREAM_MEMORY, Ordering::Relaxed);
        } else if mixed != 0 {
            self.mixed.store(mixed.saturating_sub(1), Ordering::Relaxed);
        }
    }

    fn at(&self, number: u64) -> Option<&Pair> {
        self.pairs.get(usize::try_from(number % RING).ok()?)
    }

    fn start(&self, context: u64, stream: CUstream, launch: &Launch) -> Option<Started> {
        if launch.counts {
            self.note_stream(stream);
        }
        let number = self.head.load(Ordering::Relaxed);
        let pair = self.at(number)?;
        let state = pair.state.load(Ordering::Relaxed);
        if !matches!(state, EMPTY | IDLE)
            || pair
                .state
                .compare_exchange(state, BUSY, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
        {
            return None;
        }
        self.head.fetch_add(1, Ordering::AcqRel);
        if state == IDLE && pair.context.load(Ordering::Relaxed) != context {
            pair.destroy();
        }
        let is_ready = (state == IDLE && pair.context.load(Ordering::Relaxed) == context)
            || pair.create(context);
        if is_ready
            && launch.counts
            && self.is_mixed()
            && let Some(_lock) = self.try_lock()
        {
            // SAFETY: under the lock.
            unsafe { &mut *self.clocks.get() }.set(context, stream);
        }
        let begun_ns = sys::now_ns();
        let is_begun =
            is_ready && (!launch.counts || record(pair.start.load(Ordering::Relaxed), stream));
        if !is_begun {
            pair.state
                .store(if is_ready { IDLE } else { EMPTY }, Ordering::Release);
            return None;
        }
        pair.card.store(u32::from(launch.card), Ordering::Relaxed);
        pair.counts
            .store(u32::from(launch.counts), Ordering::Relaxed);
        pair.learns
            .store(u32::from(launch.learns), Ordering::Relaxed);
        pair.kind.store(launch.kind.number(), Ordering::Relaxed);
        pair.charged_ns.store(launch.charged_ns, Ordering::Relaxed);
        pair.begun_ns.store(begun_ns, Ordering::Relaxed);
        pair.started_us.store(0, Ordering::Relaxed);
        if !launch.counts {
            return Some(Started(usize::try_from(number % RING).ok()?));
        }
        let was_reached = is_reached(&pair.start);
        pair.was_reached
            .store(u32::from(was_reached), Ordering::Relaxed);
        pair.called_ns.store(sys::now_ns(), Ordering::Relaxed);
        Some(Started(usize::try_from(number % RING).ok()?))
    }

    fn try_lock(&self) -> Option<Lock<'_>> {
        self.lock
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Lock(&self.lock))
    }

    /// How much of a sample of that length no other sample covers. The caller holds the lock.
    fn new_part(&self, pair: &Pair, ns: u64) -> u64 {
        if !self.is_mixed() {
            return ns;
        }
        let context = pair.context.load(Ordering::Relaxed);
        let start = pair.start.load(Ordering::Relaxed);
        // SAFETY: under the lock.
        unsafe { &mut *self.clocks.get() }.new_part(context, start, ns)
    }

    /// Destroys the events of the contexts that `ends` says yes to, while these are still there.
    pub(super) fn forget(&self, ends: impl Fn(u64) -> bool) {
        let _lock = loop {
            if let Some(lock) = self.try_lock() {
                break lock;
            }
            sys::yield_now();
        };
        for pair in &self.pairs {
            let state = pair.state.load(Ordering::Acquire);
            if matches!(state, IDLE | PENDING)
                && ends(pair.context.load(Ordering::Relaxed))
                && pair
                    .state
                    .compare_exchange(state, BUSY, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                pair.destroy();
                pair.state.store(EMPTY, Ordering::Release);
            }
        }
        // SAFETY: under the lock.
        unsafe { &mut *self.clocks.get() }.forget(ends);
    }
}

/// Whether the card has come to an event, or there is nothing to wait for.
fn is_reached(event: &AtomicU64) -> bool {
    query(event.load(Ordering::Relaxed)) != CUDA_ERROR_NOT_READY
}

struct Lock<'a>(&'a AtomicU32);

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The share's own part of time that events measured.
fn own_part(card: Card, ns: u64) -> u64 {
    let parts = first(card).map_or(contention::ALL_PPM, Share::own_time_ppm);
    if parts == contention::ALL_PPM {
        return ns;
    }
    // In two steps, so that hours do not overflow.
    const ALL: u64 = contention::ALL_PPM as u64;
    let parts = u64::from(parts);
    (ns / ALL)
        .saturating_mul(parts)
        .saturating_add((ns % ALL).saturating_mul(parts) / ALL)
}
