//! Cost of a launch: the GPU time of launches of its kind, learned from samples.
//!
//! A kind is a function with about the same grid, a graph, or a fill or copy of about the same size
//! ([`LaunchKind`]). Its [`Cost`] is a moving average: on average the charge equals the use even if launches of a
//! kind vary. Expensive kinds are sampled at each launch, where the price of two events is negligible, and the
//! charge is corrected to the measurement. Cheap kinds are sampled once in [`SAMPLING_INTERVAL`] launches.
//!
//! Overlapping work of several streams counts once: [`Timeline`] returns the part of an interval that is new.

/// Average number of launches per sample, for a cheap kind of known cost.
pub const SAMPLING_INTERVAL: u32 = 64;

/// Number of samples up to which a kind is sampled at each launch.
const MIN_SAMPLES: u8 = 3;

/// Window of the moving average, samples.
const AVERAGE_WINDOW: u64 = 16;

/// Cost from which a kind is sampled at each launch, nanoseconds: two events cost 1% of it.
const ALWAYS_SAMPLED_NS: u64 = 300_000;

/// Charge for a launch of unknown kind, nanoseconds. Two milliseconds, so that few launches of a kernel that takes
/// seconds are in flight before the first is measured.
pub const FIRST_GUESS_NS: u64 = 2_000_000;

/// Longest running time that is believed of a launch whose kind never ran long, nanoseconds. A launch may wait for
/// a later one, and a debugger or `SIGSTOP` may have stopped the GPU or the host meanwhile; both would otherwise
/// become minutes of debt.
pub const MAX_BELIEVED_NS: u64 = 1_000_000_000;

/// Weight of a cost that is never measured.
const UNMEASURABLE: u8 = u8::MAX;

/// How many times its kind's mean a launch may run to be believed beyond [`MAX_BELIEVED_NS`], if the mean is uncertain.
const MAX_BELIEVED_FACTOR: u64 = 8;

/// Largest deviation of a uniform kind, in 1/32 of the mean.
const MAX_UNIFORM_DEVIATION: u8 = 8;

/// A host that takes longer between two calls was interrupted, nanoseconds.
pub(crate) const INTERRUPTED_NS: u64 = 500_000;

/// A part smaller than one in this many is negligible.
const NEGLIGIBLE_PART: u64 = 4;

const NS_BITS: u32 = 40;
const MAX_COST_NS: u64 = (1 << NS_BITS) - 1;

/// The known cost of a kind, in one word.
///
/// ```text
/// bits 0–39 mean cost in nanoseconds │ 40–47 samples, up to 255 │ 48–55 mean deviation, 1/32 of the cost │ 56–63 weight
/// ```
///
/// A weight of 255 marks a cost that is never measured: the time of such a launch is not GPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cost(u64);

impl Cost {
    /// No sample.
    pub const UNKNOWN: Self = Self(0);

    /// Decodes the word of [`Cost::word`].
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns a cost that is never measured.
    #[must_use]
    pub fn unmeasurable(ns: u64) -> Self {
        Self(ns.min(MAX_COST_NS) | u64::from(UNMEASURABLE) << 56)
    }

    /// Returns whether launches of this kind are never measured.
    #[must_use]
    pub const fn is_unmeasurable(self) -> bool {
        let [.., weight] = self.0.to_le_bytes();
        weight == UNMEASURABLE
    }

    /// Returns the encoded word.
    #[must_use]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Returns an estimate that replaces [`FIRST_GUESS_NS`] until the first sample.
    #[must_use]
    pub fn guess(ns: u64) -> Self {
        Self(ns.min(MAX_COST_NS))
    }

    /// Returns the charge for the next launch, nanoseconds.
    #[must_use]
    #[inline]
    pub const fn ns(self) -> u64 {
        if self.0 == 0 {
            FIRST_GUESS_NS
        } else {
            self.0 & MAX_COST_NS
        }
    }

    /// Returns the charge before the launch, nanoseconds. The rest of a longer launch is charged when it ends: a
    /// launch that it waits for is not delayed without end.
    #[must_use]
    #[inline]
    pub const fn advance_ns(self) -> u64 {
        let ns = self.ns();
        if ns < MAX_BELIEVED_NS {
            ns
        } else {
            MAX_BELIEVED_NS
        }
    }

    /// Returns the believed part of a launch that took `ns`: up to [`MAX_BELIEVED_NS`] more than the mean of a settled
    /// kind; otherwise 8 times the mean, at least [`MAX_BELIEVED_NS`]. If a launch of a settled kind is not wholly
    /// believed, the kind is sampled again ([`Cost::marked_stale`]): one interruption costs a second.
    #[must_use]
    pub fn believed_ns(self, ns: u64) -> u64 {
        let longest = match (self.samples(), self.is_settled()) {
            (0, _) => MAX_BELIEVED_NS,
            (_, true) => self.ns().saturating_add(MAX_BELIEVED_NS),
            (_, false) => MAX_BELIEVED_NS.max(self.ns().saturating_mul(MAX_BELIEVED_FACTOR)),
        };
        ns.min(longest)
    }

    /// Returns whether the next launch is expected to take about the mean.
    #[must_use]
    pub const fn is_settled(self) -> bool {
        self.samples() > MIN_SAMPLES && !self.is_variable()
    }

    /// Returns the number of samples, up to 255.
    #[must_use]
    pub const fn samples(self) -> u8 {
        let [_, _, _, _, _, samples, _, _] = self.0.to_le_bytes();
        samples
    }

    /// Returns the mean deviation, in 1/32 of the mean.
    #[must_use]
    pub const fn deviation(self) -> u8 {
        let [_, _, _, _, _, _, deviation, _] = self.0.to_le_bytes();
        deviation
    }

    /// Returns whether launches of this kind vary too much for the mean to predict one.
    #[must_use]
    pub const fn is_variable(self) -> bool {
        self.deviation() > MAX_UNIFORM_DEVIATION
    }

    /// Returns the weight of a launch towards the next sample, of [`SAMPLING_INTERVAL`]; `None` if each launch is
    /// sampled.
    #[must_use]
    #[inline]
    pub const fn weight(self) -> Option<u32> {
        let [_, _, _, _, _, _, _, weight] = self.0.to_le_bytes();
        match weight {
            0 => None,
            UNMEASURABLE => Some(1),
            weight => Some(weight as u32),
        }
    }

    /// Returns whether the cost is known, and so low that only some launches of uniform kinds are sampled.
    #[must_use]
    pub const fn is_cheap(self) -> bool {
        self.samples() > MIN_SAMPLES && self.ns() < ALWAYS_SAMPLED_NS
    }

    /// Adds a launch that took `sample_ns`.
    #[must_use]
    pub fn learn(self, sample_ns: u64) -> Self {
        self.moved(sample_ns, Evidence::Exact)
    }

    /// Adds a launch that took `ns` according to `sample`. A sample that only bounds the duration does not change
    /// the deviation.
    #[must_use]
    pub fn learn_from(self, sample: Sample, ns: u64) -> Self {
        let evidence = sample.evidence();
        // Launches that vary are charged the upper bound, which teaches nothing about the mean. If only bounds are
        // seen, the deviation decays: it was measured by chance.
        if evidence == Evidence::Bounds
            && !sample.is_late()
            && self.deviation() > MAX_UNIFORM_DEVIATION
        {
            let deviation = self.deviation() - self.deviation() / 8;
            return Self::of(self.0 & MAX_COST_NS, self.samples(), deviation);
        }
        self.moved(ns, evidence)
    }

    fn moved(self, sample_ns: u64, evidence: Evidence) -> Self {
        let sample_ns = sample_ns.min(MAX_COST_NS);
        let samples = self.samples();
        if samples == 0 {
            return Self::of(sample_ns, 1, 0);
        }
        let mean = self.0 & MAX_COST_NS;
        let memory = u64::from(samples).min(AVERAGE_WINDOW - 1) + 1;
        let moved = (mean * (memory - 1) + sample_ns + memory / 2) / memory;
        let off = match evidence {
            Evidence::Exact => (sample_ns.abs_diff(mean) * 32)
                .checked_div(mean.max(1))
                .unwrap_or(0)
                .min(255),
            Evidence::Bounds => u64::from(self.deviation()),
        };
        let deviation = (u64::from(self.deviation()) * (memory - 1) + off + memory / 2) / memory;
        Self::of(
            moved,
            samples.saturating_add(1),
            u8::try_from(deviation).unwrap_or(u8::MAX),
        )
    }

    /// Marks the cost as possibly outdated: the mean stays, the next launches are sampled.
    #[must_use]
    pub fn marked_stale(self) -> Self {
        if self.samples() == 0 {
            return self;
        }
        Self::of(self.0 & MAX_COST_NS, 1, self.deviation())
    }

    /// Returns the cost with half as many samples: the mean stays, the next samples move it more.
    #[must_use]
    pub fn aged(self) -> Self {
        if self.samples() == 0 {
            return self;
        }
        Self::of(self.0 & MAX_COST_NS, self.samples() / 2, self.deviation())
    }

    /// Returns the duration of a launch from its events, nanoseconds; `None` if the events say nothing. A busy host
    /// delays an idle GPU, so the events may include idle time.
    ///
    /// | Known kind | Ran on after the second event | Ended before it |
    /// |---|---|---|
    /// | unknown | the lower bound | the upper bound, if the host was not interrupted |
    /// | uniform | the mean, within the bounds | the mean, at most the upper bound |
    /// | variable | the upper bound | the mean, or a short launch |
    ///
    /// libcuda may submit a launch at any time of its call, usually late in it, and a slow host makes the call
    /// long. The mean of a uniform kind therefore moves towards the lower bound a little with each sample, so an
    /// overestimate does not persist.
    #[must_use]
    pub fn estimate_ns(self, sample: Sample) -> Option<u64> {
        let (least, most) = sample.bounds();
        if !sample.is_late() {
            return Some(match self.samples() {
                0 => least,
                _ if self.deviation() <= MAX_UNIFORM_DEVIATION => {
                    self.nearer(least).min(most).max(least)
                }
                _ => most,
            });
        }
        // The launch ended before the second event was queued, so only the upper bound is known.
        match (self.samples(), sample.late_ns >= INTERRUPTED_NS) {
            (0, false) => Some(most),
            (0, true) => None,
            // Of a variable kind this was a short launch: a long one would not have ended.
            (_, true)
                if self.deviation() > MAX_UNIFORM_DEVIATION
                    && most < self.ns().saturating_mul(2) =>
            {
                Some(most.saturating_sub(sample.late_ns))
            }
            (_, _) if self.deviation() <= MAX_UNIFORM_DEVIATION => {
                Some(self.nearer(least).min(most))
            }
            (_, _) => Some(self.ns().min(most)),
        }
    }

    /// Returns the known cost, moved towards `least` by a step so small that the kind stays uniform.
    fn nearer(self, least: u64) -> u64 {
        let ns = self.ns();
        ns.min(least.max(ns - ns / 4))
    }

    fn of(ns: u64, samples: u8, deviation: u8) -> Self {
        let seldom = u64::from(SAMPLING_INTERVAL);
        let weight = if samples <= MIN_SAMPLES {
            0
        } else {
            // A deviation as large as the mean doubles the sampling.
            let often = 1 + u64::from(deviation) / 32;
            (ns * seldom * often / ALWAYS_SAMPLED_NS).clamp(1, seldom)
        };
        Self(
            ns.min(MAX_COST_NS)
                | u64::from(samples) << 40
                | u64::from(deviation) << 48
                | weight << 56,
        )
    }
}

/// Measurement by two events around a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time between the events, nanoseconds.
    pub measured_ns: u64,
    /// Time that the GPU waited for the launch after the first event, nanoseconds.
    pub gap_ns: u64,
    /// Duration of the launching call, nanoseconds; 0 if the GPU was busy with earlier work until it returned.
    pub call_ns: u64,
    /// Longest time that the GPU waited for the second event after the launch, nanoseconds; 0 if the launch still
    /// ran when the event was queued.
    pub late_ns: u64,
}

/// What a sample proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    /// The duration of the launch.
    Exact,
    /// A lower or an upper bound of the duration.
    Bounds,
}

impl Sample {
    /// Returns the lower bound, which holds if the sample is not late, and the upper bound, nanoseconds. A call
    /// much shorter than the launch is ignored.
    fn bounds(self) -> (u64, u64) {
        let most = self.measured_ns.saturating_sub(self.gap_ns);
        let least = match self.call_ns > most / NEGLIGIBLE_PART {
            true => most.saturating_sub(self.call_ns),
            false => most,
        };
        (least, most)
    }

    fn is_late(self) -> bool {
        let (_, most) = self.bounds();
        self.late_ns > most / NEGLIGIBLE_PART
    }

    fn evidence(self) -> Evidence {
        let (least, most) = self.bounds();
        if least == most && !self.is_late() {
            Evidence::Exact
        } else {
            Evidence::Bounds
        }
    }
}

/// Identifies launches of equal cost. Not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchKind(u64);

impl LaunchKind {
    /// Returns the kind of a kernel (`CUfunction` or `CUkernel`) with its grid and its block.
    #[must_use]
    #[inline]
    pub fn kernel(function: u64, grid: [u32; 3], block: [u32; 3]) -> Self {
        let product = |sides: [u32; 3]| {
            let [x, y, z] = sides.map(u64::from);
            x.wrapping_mul(y).wrapping_mul(z)
        };
        Self::mixed(function, size_class(product(grid)) << 32 | product(block))
    }

    /// Returns the kind of an instantiated graph.
    #[must_use]
    pub fn graph(exec: u64) -> Self {
        Self::mixed(exec, 1 << 48)
    }

    /// Returns the kind of a fill of `bytes`.
    #[must_use]
    pub fn fill(bytes: u64) -> Self {
        Self::mixed(1, 2 << 48 | size_class(bytes))
    }

    /// Returns the kind of a copy of `bytes` within a GPU.
    #[must_use]
    pub fn copy(bytes: u64) -> Self {
        Self::mixed(1, 3 << 48 | size_class(bytes))
    }

    /// Decodes the number of [`LaunchKind::number`]; 0 is `None`.
    #[must_use]
    pub const fn of_number(number: u64) -> Option<Self> {
        if number == 0 {
            None
        } else {
            Some(Self(number))
        }
    }

    /// Returns a number that is not zero.
    #[must_use]
    #[inline]
    pub const fn number(self) -> u64 {
        self.0
    }

    #[inline]
    const fn mixed(handle: u64, shape: u64) -> Self {
        // Two odd constants: handles differ in their low bits, shapes in a few positions.
        let mixed = handle.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ shape.wrapping_mul(0xc2b2_ae3d_27d4_eb4f).rotate_left(32);
        Self(if mixed == 0 { 1 } else { mixed })
    }
}

/// Returns the size in quarters of an octave: sizes within 25% of each other are equal.
#[inline]
fn size_class(size: u64) -> u64 {
    let Some(octave) = size.checked_ilog2() else {
        return 0;
    };
    // The two bits after the leading one.
    let quarter = (size << size.leading_zeros()) >> (u64::BITS - 3);
    u64::from(octave) * 4 + 4 + (quarter & 3)
}

/// Number of intervals in a [`Timeline`].
const SPANS: usize = 32;

/// When a process's sampled work ran on a GPU: disjoint intervals, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    spans: [(u64, u64); SPANS],
    used: usize,
}

impl Timeline {
    /// Returns an empty timeline.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            spans: [(0, 0); SPANS],
            used: 0,
        }
    }

    /// Adds work that ran from `start` to `end`, nanoseconds, and returns the part that is new.
    ///
    /// Intervals may come in any order. An interval older than the last `SPANS` gaps counts in full.
    pub fn add(&mut self, start: u64, end: u64) -> u64 {
        if end <= start {
            return 0;
        }
        let mut kept = [(0, 0); SPANS + 1];
        let mut count = 0;
        let mut merged = (start, end);
        let mut old = 0;
        let mut push = |span: (u64, u64)| {
            if let Some(place) = kept.get_mut(count) {
                *place = span;
                count += 1;
            }
        };
        let mut is_placed = false;
        for &(from, to) in self.spans.iter().take(self.used) {
            if to < start {
                push((from, to));
            } else if from > end {
                if !is_placed {
                    push(merged);
                    is_placed = true;
                }
                push((from, to));
            } else {
                old += to.min(end).saturating_sub(from.max(start));
                merged = (merged.0.min(from), merged.1.max(to));
            }
        }
        if !is_placed {
            push(merged);
        }
        let skipped = count.saturating_sub(SPANS);
        let mut spans = [(0, 0); SPANS];
        for (place, span) in spans.iter_mut().zip(kept.iter().take(count).skip(skipped)) {
            *place = *span;
        }
        self.spans = spans;
        self.used = count - skipped;
        (end - start).saturating_sub(old)
    }
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new()
    }
}
