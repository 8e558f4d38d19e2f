//! Measuring launches: pairs of events round some of them.
//!
//! A sample is charged like any launch; when its end is reached, the charge is made what was measured. A launch that
//! runs longer than it was charged for is charged on while it runs, as far as anybody looks.
//!
//! Where several streams are in use, single samples cannot tell what overlapped. Then launches are sampled in rows
//! of [`STRETCH`], and each counts with the time that no other one of the row covered.
//!
//! Events measure what the card did only if the card had it all before it began; otherwise they also measure how long
//! the host took from one call to the next. So each sample has two bounds, and what is learned is what within them is
//! nearest to what was known.
//!
//! Pairs lie in a ring, are used over and over, and belong to a context. Nobody waits for anybody here: who cannot
//! have the ring's lock does not look, and a launch that finds no pair is not sampled.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::bucket::LONG_KERNEL_US;
use drava_vgpu_abi::contention;
use drava_vgpu_abi::cost::{Cost, Kind, SELDOM, Timeline};

use super::Meter;
use super::admission::first;
use super::events::{create, destroy, elapsed_ns, query, record};
use super::lease::Lease;
use crate::card::{Card, current_context};
use crate::cuda::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUstream};
use crate::process::Process;
use crate::sys;

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
/// Contexts whose streams are compared.
const CLOCKS: usize = 8;
/// A context's clock is set anew after this time, or its figures lose precision.
const CLOCK_LIFE_US: u64 = 8_000_000;
/// Events may be reached before the event that set the clock.
const CLOCK_START_NS: i64 = 1 << 40;

const EMPTY: u32 = 0;
const IDLE: u32 = 1;
const BUSY: u32 = 2;
const PENDING: u32 = 3;

/// All zeroes has no events.
struct Pair {
    state: AtomicU32,
    /// Index of the card's first share, and whether its kind learns from it.
    card: AtomicU32,
    learns: AtomicU32,
    context: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    kind: AtomicU64,
    charged_ns: AtomicU64,
    launched_ns: AtomicU64,
    /// When the last of its calls so far had returned.
    recorded_ns: AtomicU64,
    /// How much of what the events measure may be the host's own time between the calls, at most and probably.
    slack_ns: AtomicU64,
    gap_ns: AtomicU64,
    /// When the start was first seen to be reached, 0 before.
    started_us: AtomicU64,
}

/// The time of a context's streams. All zeroes is none.
struct Clock {
    context: u64,
    event: u64,
    set_us: u64,
    timeline: Timeline,
}

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
    /// Held by who looks.
    lock: AtomicU32,
    clocks: UnsafeCell<[Clock; CLOCKS]>,
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
        kind: Kind,
        stream: CUstream,
        lease: &Lease,
        charged_ns: u64,
    ) -> Option<Started> {
        let weight = self.costs.get(kind).weight();
        let row = self.captures.step_stretch();
        let is_sampled_always = weight.is_none_or(|weight| weight >= SELDOM);
        let in_rows = self.samples.is_mixed() && !is_sampled_always;
        let spread = if in_rows { u64::from(STRETCH) } else { 1 };
        let is_due = lease.is_due(weight, spread);
        if !is_due && row == 0 {
            return None;
        }
        if in_rows && row == 0 {
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
                    learns: !is_at_edge,
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
        let returned = sys::now_ns();
        let gap = returned.saturating_sub(pair.recorded_ns.load(Ordering::Relaxed));
        let is_recorded = is_launched
            && self.captures.without(|| {
                let is_recorded = record(pair.end.load(Ordering::Relaxed), stream);
                // If the start was not reached before everything else was queued, the card went through all of it
                // without waiting for the host, and the measure is exact.
                let (slack, gap) = match query(pair.start.load(Ordering::Relaxed)) {
                    CUDA_ERROR_NOT_READY => (0, 0),
                    _ => {
                        let launched = pair.launched_ns.load(Ordering::Relaxed);
                        (sys::now_ns().saturating_sub(launched), gap)
                    }
                };
                pair.slack_ns.store(slack, Ordering::Relaxed);
                pair.gap_ns.store(gap, Ordering::Relaxed);
                pair.recorded_ns.store(returned, Ordering::Relaxed);
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
                if let Some(ns) = elapsed_ns(
                    pair.start.load(Ordering::Relaxed),
                    pair.end.load(Ordering::Relaxed),
                ) {
                    self.finish(card, pair, ns.unsigned_abs());
                }
                pair.state.store(IDLE, Ordering::Release);
            }
            CUDA_ERROR_NOT_READY => self.charge_on(card, pair, now),
            // The events are gone with their context.
            _ => pair.state.store(EMPTY, Ordering::Release),
        }
    }

    /// A launch that is still running has cost as much as it has run.
    fn charge_on(&self, card: Card, pair: &Pair, now: u64) {
        let now_ns = now.saturating_mul(1_000);
        if let Some(kind) = Kind::of_number(pair.kind.load(Ordering::Relaxed)) {
            let age = now_ns.saturating_sub(pair.recorded_ns.load(Ordering::Relaxed));
            self.costs.change(kind, |cost| {
                if cost.samples() == 0 && age > cost.ns() {
                    Cost::guess(age)
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
        let run_ns = own_part(card, now_ns.saturating_sub(started));
        let charged = pair.charged_ns.load(Ordering::Relaxed);
        if run_ns > charged {
            pair.charged_ns.store(run_ns, Ordering::Relaxed);
            self.settle(card, charged, run_ns);
        }
    }

    fn finish(&self, card: Card, pair: &Pair, measured_ns: u64) {
        let kind = Kind::of_number(pair.kind.load(Ordering::Relaxed));
        let cost = kind.map_or(Cost::UNKNOWN, |kind| self.costs.get(kind));
        let ns = likely_ns(
            cost,
            measured_ns,
            pair.gap_ns.load(Ordering::Relaxed),
            pair.slack_ns.load(Ordering::Relaxed),
        );
        let own_ns = own_part(card, self.samples.new_part(pair, ns));
        self.settle(card, pair.charged_ns.load(Ordering::Relaxed), own_ns);
        if let Some(kind) = kind
            && pair.learns.load(Ordering::Relaxed) != 0
        {
            self.costs.change(kind, |cost| cost.learn(own_ns));
        }
        if let Some(share) = first(card) {
            let us = own_part(card, ns) / 1_000;
            share.note_kernel(us, us >= LONG_KERNEL_US);
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
        if let Some(bucket) = first(card).and_then(crate::share::Share::bucket) {
            if difference > 0 {
                bucket.charge(us);
            } else {
                bucket.repay(us);
            }
        }
    }
}

/// What is noted of a launch that is sampled.
struct Launch {
    card: u8,
    kind: Kind,
    charged_ns: u64,
    learns: bool,
}

impl Samples {
    /// Whether nobody has looked for a while.
    pub(super) fn is_poll_due(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.polled_us.load(Ordering::Relaxed)) >= LOOK_PAUSE_US
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
        self.note_stream(stream);
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
        if is_ready && self.is_mixed() {
            self.set_clock(context, stream);
        }
        let now_ns = sys::now_ns();
        if !is_ready || !record(pair.start.load(Ordering::Relaxed), stream) {
            pair.state
                .store(if is_ready { IDLE } else { EMPTY }, Ordering::Release);
            return None;
        }
        pair.card.store(u32::from(launch.card), Ordering::Relaxed);
        pair.learns
            .store(u32::from(launch.learns), Ordering::Relaxed);
        pair.kind.store(launch.kind.number(), Ordering::Relaxed);
        pair.charged_ns.store(launch.charged_ns, Ordering::Relaxed);
        pair.launched_ns.store(now_ns, Ordering::Relaxed);
        pair.started_us.store(0, Ordering::Relaxed);
        pair.recorded_ns.store(sys::now_ns(), Ordering::Relaxed);
        Some(Started(usize::try_from(number % RING).ok()?))
    }

    fn try_lock(&self) -> Option<Lock<'_>> {
        self.lock
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Lock(&self.lock))
    }

    /// Gives the context a clock, or a new one.
    fn set_clock(&self, context: u64, stream: CUstream) {
        let Some(_lock) = self.try_lock() else { return };
        // SAFETY: under the lock.
        let clocks = unsafe { &mut *self.clocks.get() };
        let now = sys::now_us();
        let known = clocks
            .iter()
            .position(|clock| clock.context == context)
            .or_else(|| clocks.iter().position(|clock| clock.context == 0));
        let Some(clock) = known.and_then(|index| clocks.get_mut(index)) else {
            return;
        };
        if clock.context == context && now.saturating_sub(clock.set_us) < CLOCK_LIFE_US {
            return;
        }
        if clock.context == 0 {
            clock.event = create().unwrap_or(0);
        }
        if clock.event != 0 && record(clock.event, stream) {
            clock.context = context;
            clock.set_us = now;
            clock.timeline = Timeline::new();
        }
    }

    /// How much of a sample of that length no other sample covers. The caller holds the lock.
    fn new_part(&self, pair: &Pair, ns: u64) -> u64 {
        if !self.is_mixed() {
            return ns;
        }
        let context = pair.context.load(Ordering::Relaxed);
        // SAFETY: under the lock.
        let clocks = unsafe { &mut *self.clocks.get() };
        let Some(clock) = clocks.iter_mut().find(|clock| clock.context == context) else {
            return ns;
        };
        let Some(since) = elapsed_ns(clock.event, pair.start.load(Ordering::Relaxed)) else {
            return ns;
        };
        let start = CLOCK_START_NS.saturating_add(since).max(0).unsigned_abs();
        clock.timeline.add(start, start.saturating_add(ns))
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
        let clocks = unsafe { &mut *self.clocks.get() };
        for clock in clocks.iter_mut().filter(|clock| clock.context != 0) {
            if ends(clock.context) {
                destroy(clock.event);
                clock.context = 0;
                clock.event = 0;
            }
        }
    }
}

struct Lock<'a>(&'a AtomicU32);

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Pair {
    fn create(&self, context: u64) -> bool {
        let (Some(start), Some(end)) = (create(), create()) else {
            return false;
        };
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.context.store(context, Ordering::Relaxed);
        true
    }

    fn destroy(&self) {
        destroy(self.start.load(Ordering::Relaxed));
        destroy(self.end.load(Ordering::Relaxed));
    }
}

/// What a launch took whose events are `measured_ns` apart, of which `gap_ns` are probably and `slack_ns` at most the
/// host's own time. Where that is a large part, what is known counts as far as the bounds allow: a thread that was
/// interrupted between two calls says nothing about the card.
fn likely_ns(cost: Cost, measured_ns: u64, gap_ns: u64, slack_ns: u64) -> u64 {
    let probable = measured_ns.saturating_sub(gap_ns);
    if cost.samples() == 0 || slack_ns <= measured_ns / 4 {
        return probable;
    }
    cost.ns()
        .max(measured_ns.saturating_sub(slack_ns))
        .min(measured_ns)
}

/// The share's own part of time that events measured.
fn own_part(card: Card, ns: u64) -> u64 {
    let parts = first(card).map_or(contention::ALL, crate::share::Share::own_parts);
    if parts == contention::ALL {
        return ns;
    }
    // In two steps, so that hours do not overflow.
    const ALL: u64 = contention::ALL as u64;
    let parts = u64::from(parts);
    (ns / ALL)
        .saturating_mul(parts)
        .saturating_add((ns % ALL).saturating_mul(parts) / ALL)
}
