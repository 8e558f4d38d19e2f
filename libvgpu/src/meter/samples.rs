//! Samples: pairs of events around some launches.
//!
//! A sample is charged like any launch; when its end is reached, the charge is corrected to the measured time. A launch
//! that runs longer than its charge is charged while it runs, at each poll.
//!
//! If several streams are in use, single samples do not show what overlapped. Then launches are sampled in runs of
//! [`RUN`], and each counts with the time that no other launch of the run covers.
//!
//! Events measure the GPU's work only if all of it was queued before the GPU began; otherwise they also measure the time
//! of the host between two calls. So each event is queried when it has been recorded, and the host's clock is read
//! between the calls ([`Recording`](drava_vgpu_abi::recording::Recording)). The known cost of the kind decides what
//! remains ambiguous ([`Cost::estimate_ns`]).
//!
//! The measured time of a short launch contains the time of an event itself, which is measured by a third event and
//! subtracted.
//!
//! Pairs are in a ring, are reused, and belong to a context. No launch waits here: without the ring's lock a thread does
//! not poll, and a launch without a free pair is not sampled.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::bucket::LONG_KERNEL_US;
use drava_vgpu_abi::cost::{Cost, LaunchKind, SAMPLING_INTERVAL};

use super::Meter;
use super::admission::{first, own_time};
use super::events::{create, destroy, elapsed_ns, query, record};
use super::lease::Lease;
use crate::driver_api::cuda::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUstream};
use crate::driver_api::device::current_context;
use crate::limits::gpu::Gpu;
use crate::limits::share::Share;
use crate::system::guard::Guard;
use crate::system::sys;

mod clocks;
mod pair;
mod running;

use clocks::Clocks;
use pair::{BUSY, EMPTY, IDLE, PENDING, Pair};

/// Samples in flight.
const PAIRS: usize = 128;
const RING: u64 = PAIRS as u64;
/// Samples queried in one poll.
const POLLED_SAMPLES: usize = 8;
/// Interval between polls by launches that need none.
const POLL_INTERVAL_US: u64 = 200;
/// Launches for which the time of an event matters, nanoseconds.
const SHORT_LAUNCH_NS: u64 = 200_000;
/// Longest believed time of an event, nanoseconds.
const MAX_EVENT_NS: u64 = 50_000;
/// Launches of a run, which are sampled together.
const RUN: u32 = 48;
/// Launches at the beginning of a run, which overlap with unsampled launches.
const RUN_EDGE: u32 = 8;
/// Number of samples in one stream after which the process counts as using one stream.
const STREAM_MEMORY: u32 = 64;

/// The samples of a process. All zeroes is none.
pub(crate) struct Samples {
    pairs: [Pair; PAIRS],
    /// The next pair to use, and the oldest that may be in flight; both only rise.
    head: AtomicU64,
    tail: AtomicU64,
    /// Time of the last poll.
    polled_us: AtomicU64,
    /// Time of an event on its stream, nanoseconds; 0 if unknown.
    event_ns: AtomicU64,
    last_stream: AtomicU64,
    /// Above 0 if several streams are in use.
    mixed: AtomicU32,
    /// Held by a thread that polls or uses the clocks; no event is recorded meanwhile.
    lock: AtomicU32,
    clocks: UnsafeCell<Clocks>,
}

// SAFETY: the clocks are accessed under the lock only; the other fields are atomics.
unsafe impl Sync for Samples {}

/// A sample whose launch is in progress.
#[derive(Clone, Copy)]
pub(super) struct Started(usize);

impl Meter {
    /// Records the first event before a launch that is sampled.
    pub(super) fn start_sample(
        &self,
        gpu: Gpu,
        kind: LaunchKind,
        stream: CUstream,
        lease: &Lease,
        charged_ns: u64,
    ) -> Option<Started> {
        let cost = self.costs.get(kind);
        let weight = cost.weight();
        let run = self.captures.step_run();
        let is_sampled_always = weight.is_none_or(|weight| weight >= SAMPLING_INTERVAL);
        let in_runs = self.samples.is_mixed() && !is_sampled_always;
        let spread = if in_runs { u64::from(RUN) } else { 1 };
        let is_due = (lease.is_due(weight, spread) || run != 0) && !cost.is_unmeasurable();
        if !is_due && !Self::follows_launches(gpu) {
            return None;
        }
        if is_due && in_runs && run == 0 {
            self.captures.begin_run(RUN.saturating_sub(1));
        }
        let is_at_edge = in_runs && (run == 0 || run > RUN.saturating_sub(RUN_EDGE));
        let context = current_context()?;
        self.captures
            .outside(|| {
                let launch = Launch {
                    gpu: gpu.index(),
                    kind,
                    charged_ns,
                    is_measured: is_due,
                    learns: is_due && !is_at_edge,
                };
                self.samples.start(context, stream, &launch)
            })
            .flatten()
    }

    /// Records the second event after the launch.
    pub(super) fn end_sample(&self, sample: Started, stream: CUstream, is_launched: bool) {
        let Some(pair) = self.samples.pairs.get(sample.0) else {
            return;
        };
        pair.returned_ns.store(sys::now_ns(), Ordering::Relaxed);
        let is_recorded = is_launched
            && self.captures.outside(|| {
                let is_recorded = record(pair.end.load(Ordering::Relaxed), stream);
                if pair.is_measured.load(Ordering::Relaxed) == 0 {
                    return is_recorded;
                }
                // Queued while the GPU is busy, so that no host time is between the two events.
                let has_after = self.measures_events(pair) && !is_reached(&pair.start);
                if has_after {
                    record(pair.after.load(Ordering::Relaxed), stream);
                }
                pair.has_after
                    .store(u32::from(has_after), Ordering::Relaxed);
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

    /// Returns whether the sample also measures the time of an event: for short launches, whose measured time contains
    /// much of it.
    fn measures_events(&self, pair: &Pair) -> bool {
        let kind = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed));
        kind.is_some_and(|kind| self.costs.get(kind).ns() < SHORT_LAUNCH_NS)
    }

    /// Corrects the charges of samples that have ended.
    pub(super) fn poll(&self, gpu: Gpu, now: u64) {
        if self.samples.tail.load(Ordering::Relaxed) == self.samples.head.load(Ordering::Relaxed) {
            return;
        }
        self.captures.outside(|| {
            let Some(_lock) = self.samples.try_lock() else {
                return;
            };
            self.poll_locked(gpu, now);
        });
    }

    fn poll_locked(&self, gpu: Gpu, now: u64) {
        self.samples.polled_us.store(now, Ordering::Relaxed);
        let head = self.samples.head.load(Ordering::Acquire);
        let oldest = self
            .samples
            .tail
            .load(Ordering::Relaxed)
            .max(head.saturating_sub(RING));
        let mut tail = oldest;
        let mut is_oldest = true;
        let mut polled = 0usize;
        for number in oldest..head {
            let Some(pair) = self.samples.at(number) else {
                break;
            };
            let state = pair.state.load(Ordering::Acquire);
            if state == PENDING {
                polled = polled.saturating_add(1);
                self.poll_sample(gpu, pair, now);
            }
            let is_over = matches!(pair.state.load(Ordering::Acquire), IDLE | EMPTY);
            is_oldest &= is_over;
            if is_oldest {
                tail = number.wrapping_add(1);
            }
            if polled == POLLED_SAMPLES {
                break;
            }
        }
        self.samples.tail.store(tail, Ordering::Relaxed);
    }

    /// Polls a sample of any GPU of the process of `gpu`.
    fn poll_sample(&self, gpu: Gpu, pair: &Pair, now: u64) {
        let index = u8::try_from(pair.gpu.load(Ordering::Relaxed)).ok();
        let Some(gpu) = index.and_then(|index| gpu.other(index)) else {
            pair.state.store(IDLE, Ordering::Release);
            return;
        };
        match query(pair.end.load(Ordering::Relaxed)) {
            CUDA_SUCCESS => {
                let end = pair.end.load(Ordering::Relaxed);
                if pair.is_measured.load(Ordering::Relaxed) != 0
                    && let Some(ns) = elapsed_ns(pair.start.load(Ordering::Relaxed), end)
                {
                    let measured_ns = ns.unsigned_abs();
                    if pair.has_after.load(Ordering::Relaxed) != 0
                        && let Some(ns) = elapsed_ns(end, pair.after.load(Ordering::Relaxed))
                    {
                        self.samples.learn_event_time(ns.unsigned_abs());
                    }
                    let event_ns = self.samples.event_time_within(measured_ns);
                    self.finish(gpu, pair, measured_ns.saturating_sub(event_ns));
                }
                pair.state.store(IDLE, Ordering::Release);
            }
            CUDA_ERROR_NOT_READY if pair.is_measured.load(Ordering::Relaxed) == 0 => {}
            CUDA_ERROR_NOT_READY => self.charge_running(gpu, pair, now),
            // The events ended with their context.
            _ => pair.state.store(EMPTY, Ordering::Release),
        }
    }

    /// Corrects the charge of a sample that has ended, and learns from it.
    fn finish(&self, gpu: Gpu, pair: &Pair, measured_ns: u64) {
        let kind = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed));
        let cost = kind.map_or(Cost::UNKNOWN, |kind| self.costs.get(kind));
        let sample = pair.recording().sample(measured_ns);
        let Some(taken_ns) = cost.estimate_ns(sample) else {
            return;
        };
        let own_time = own_time(gpu);
        if let Some(share) = first(gpu) {
            let us = own_time.of_ns(taken_ns) / 1_000;
            share.record_kernel(us, us >= LONG_KERNEL_US);
        }
        let ns = cost.believed_ns(taken_ns);
        let new_ns = self.samples.new_part_ns(pair, ns);
        let own = own_time.of_launch(new_ns, cost);
        self.settle(gpu, pair.charged_ns.load(Ordering::Relaxed), own.ns);
        let Some(kind) = kind else { return };
        if ns < taken_ns && cost.is_settled() {
            self.mark_stale(kind);
        } else if own.is_evidence && pair.learns.load(Ordering::Relaxed) != 0 {
            self.costs
                .change(kind, |cost| cost.learn_from(sample, own.ns));
            if gpu.shares().any(Share::notifies_agent) {
                self.durations
                    .change(kind, |duration| duration.learn_from(sample, new_ns));
            }
        }
    }

    /// Corrects a charge of `from` nanoseconds to `to`.
    fn settle(&self, gpu: Gpu, from: u64, to: u64) {
        let difference = to.cast_signed().saturating_sub(from.cast_signed());
        self.correct_ns(gpu, difference);
        let us = difference.unsigned_abs() / 1_000;
        if us == 0 {
            return;
        }
        if let Some(bucket) = first(gpu).and_then(Share::bucket) {
            if difference > 0 {
                bucket.charge(us);
            } else {
                bucket.repay(us);
            }
        }
    }
}

/// Launches whose end was not observed yet.
#[derive(Clone, Copy, Default)]
pub(super) struct InFlight {
    pub(super) launches: usize,
    pub(super) ns: u64,
}

/// A launch to sample, or only to observe its end, which takes the second event alone.
struct Launch {
    gpu: u8,
    kind: LaunchKind,
    charged_ns: u64,
    /// Whether its measured time corrects its charge.
    is_measured: bool,
    /// Whether its kind learns from it.
    learns: bool,
}

impl Samples {
    /// Learns the time of an event. Mostly the shortest time counts: the GPU may do other work between two events.
    fn learn_event_time(&self, ns: u64) {
        let known = self.event_ns.load(Ordering::Relaxed);
        let learned = match known {
            0 => ns,
            known if ns < known => ns,
            known => known.saturating_add(known / 64).min(ns),
        };
        self.event_ns
            .store(learned.min(MAX_EVENT_NS), Ordering::Relaxed);
    }

    /// Returns the time of an event, which is part of the measured time of a launch, and so not longer.
    fn event_time_within(&self, measured_ns: u64) -> u64 {
        let known = self.event_ns.fetch_min(measured_ns, Ordering::Relaxed);
        known.min(measured_ns)
    }

    /// Returns whether the last poll is older than the interval.
    pub(super) fn is_poll_due(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.polled_us.load(Ordering::Relaxed)) >= POLL_INTERVAL_US
    }

    /// Returns the launches on a GPU whose end was not observed yet. Each counts at least `least_ns`, which stands for
    /// unobserved launches after it.
    pub(super) fn in_flight(&self, gpu: Gpu, least_ns: u64) -> InFlight {
        self.pending(gpu).fold(InFlight::default(), |sum, pair| {
            let charged_ns = pair.charged_ns.load(Ordering::Relaxed);
            InFlight {
                launches: sum.launches.saturating_add(1),
                ns: sum.ns.saturating_add(charged_ns.max(least_ns)),
            }
        })
    }

    fn pending(&self, gpu: Gpu) -> impl Iterator<Item = &Pair> {
        let head = self.head.load(Ordering::Acquire);
        let tail = self.tail.load(Ordering::Relaxed);
        let numbers = tail.max(head.saturating_sub(RING))..head;
        numbers
            .filter_map(|number| self.at(number))
            .filter(move |pair| {
                pair.state.load(Ordering::Acquire) == PENDING
                    && pair.gpu.load(Ordering::Relaxed) == u32::from(gpu.index())
            })
    }

    fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed) != 0
    }

    fn record_stream(&self, stream: CUstream) {
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
        if launch.is_measured {
            self.record_stream(stream);
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
        if is_ready && launch.is_measured && self.is_mixed() {
            self.set_clock(context, stream);
        }
        let begun_ns = sys::now_ns();
        let is_begun =
            is_ready && (!launch.is_measured || record(pair.start.load(Ordering::Relaxed), stream));
        if !is_begun {
            pair.state
                .store(if is_ready { IDLE } else { EMPTY }, Ordering::Release);
            return None;
        }
        pair.gpu.store(u32::from(launch.gpu), Ordering::Relaxed);
        pair.is_measured
            .store(u32::from(launch.is_measured), Ordering::Relaxed);
        pair.learns
            .store(u32::from(launch.learns), Ordering::Relaxed);
        pair.kind.store(launch.kind.number(), Ordering::Relaxed);
        pair.charged_ns.store(launch.charged_ns, Ordering::Relaxed);
        pair.begun_ns.store(begun_ns, Ordering::Relaxed);
        pair.started_us.store(0, Ordering::Relaxed);
        if !launch.is_measured {
            return Some(Started(usize::try_from(number % RING).ok()?));
        }
        let was_reached = is_reached(&pair.start);
        pair.was_reached
            .store(u32::from(was_reached), Ordering::Relaxed);
        pair.called_ns.store(sys::now_ns(), Ordering::Relaxed);
        Some(Started(usize::try_from(number % RING).ok()?))
    }

    fn try_lock(&self) -> Option<Guard<'_>> {
        Guard::try_acquire(&self.lock)
    }

    /// Sets the clock of the context if it has none, or an old one. Its event is recorded without the lock: the call
    /// blocks while the stream is full.
    fn set_clock(&self, context: u64, stream: CUstream) {
        let now = sys::now_us();
        let is_due = self.try_lock().is_some_and(|_lock| {
            // SAFETY: under the lock.
            unsafe { &*self.clocks.get() }.is_due(context, now)
        });
        let Some(event) = is_due.then(create).flatten() else {
            return;
        };
        let is_set = record(event, stream)
            && self.try_lock().is_some_and(|_lock| {
                // SAFETY: under the lock.
                unsafe { &mut *self.clocks.get() }.set(context, event, now)
            });
        if !is_set {
            destroy(event);
        }
    }

    /// Returns the part of a sample of `ns` that no other sample covers. The caller holds the lock.
    fn new_part_ns(&self, pair: &Pair, ns: u64) -> u64 {
        if !self.is_mixed() {
            return ns;
        }
        let context = pair.context.load(Ordering::Relaxed);
        let start = pair.start.load(Ordering::Relaxed);
        // SAFETY: under the lock.
        unsafe { &mut *self.clocks.get() }.new_part_ns(context, start, ns)
    }

    /// Destroys the events of contexts for which `ends` is true, before the contexts end.
    pub(super) fn forget(&self, ends: impl Fn(u64) -> bool) {
        let _lock = Guard::acquire(&self.lock);
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

/// Returns whether the GPU has reached an event, or the event is invalid.
fn is_reached(event: &AtomicU64) -> bool {
    query(event.load(Ordering::Relaxed)) != CUDA_ERROR_NOT_READY
}
