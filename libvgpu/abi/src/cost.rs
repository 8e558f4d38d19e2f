//! What a launch costs: the GPU time that launches of its kind took, learned from samples.
//!
//! A kind is a function with about the same grid, a graph, or a fill or copy of about the same size ([`LaunchKind`]). Its
//! [`Cost`] is a moving average, so that on average as much is charged as is used even if launches of one kind
//! differ. Expensive kinds are sampled at every launch, where the price of two events does not show, and then what
//! was charged is corrected to what was measured; cheap ones are sampled once in [`SAMPLING_INTERVAL`] launches.
//!
//! Work of streams that overlap counts once: [`Timeline`] says how much of an interval is new.

/// A cheap kind of known cost is sampled once in so many launches, on average.
pub const SAMPLING_INTERVAL: u32 = 64;

/// Up to so many samples a kind is unknown and sampled at each launch.
const MIN_SAMPLES: u8 = 3;

/// The moving average forgets at this pace.
const AVERAGE_WINDOW: u64 = 16;

/// From this cost on a kind is sampled at each launch, nanoseconds: two events cost 1 % of it.
const ALWAYS_SAMPLED_NS: u64 = 300_000;

/// What a launch is charged of whose kind nothing is known, nanoseconds. Two milliseconds, so that not many
/// launches of a kernel that turns out to take seconds are under way before the first is measured.
pub const FIRST_GUESS_NS: u64 = 2_000_000;

/// Launches of a kind are alike whose deviation is at most this, in 1/32 of the mean.
const MAX_UNIFORM_DEVIATION: u8 = 8;

/// A host that takes so long between two calls was interrupted, nanoseconds.
pub(crate) const INTERRUPTED_NS: u64 = 500_000;

/// What takes at most one part in so many of what a launch does makes no difference.
const NEGLIGIBLE_PART: u64 = 4;

const NS_BITS: u32 = 40;
const MAX_COST_NS: u64 = (1 << NS_BITS) - 1;

/// What is known of a kind, in one word.
///
/// ```text
/// bits 0–39 mean cost in nanoseconds │ 40–47 samples, up to 255 │ 48–55 mean deviation, 1/32 of the cost │ 56–63 weight
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cost(u64);

impl Cost {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self(0);

    /// From the word that [`Cost::word`] gave.
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// As a word.
    #[must_use]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// A guess, to begin with instead of [`FIRST_GUESS_NS`]; the first sample replaces it.
    #[must_use]
    pub fn guess(ns: u64) -> Self {
        Self(ns.min(MAX_COST_NS))
    }

    /// What the next launch is charged, nanoseconds.
    #[must_use]
    #[inline]
    pub const fn ns(self) -> u64 {
        if self.0 == 0 {
            FIRST_GUESS_NS
        } else {
            self.0 & MAX_COST_NS
        }
    }

    /// How many samples it rests on, up to 255.
    #[must_use]
    pub const fn samples(self) -> u8 {
        let [_, _, _, _, _, samples, _, _] = self.0.to_le_bytes();
        samples
    }

    /// How far launches are from the mean, in 1/32 of it.
    #[must_use]
    pub const fn deviation(self) -> u8 {
        let [_, _, _, _, _, _, deviation, _] = self.0.to_le_bytes();
        deviation
    }

    /// Whether launches of this kind are so different that the mean says little about one of them.
    #[must_use]
    pub const fn is_variable(self) -> bool {
        self.deviation() > MAX_UNIFORM_DEVIATION
    }

    /// How much a launch counts towards the next sample, of [`SAMPLING_INTERVAL`]; `None` if each must be sampled.
    #[must_use]
    #[inline]
    pub const fn weight(self) -> Option<u32> {
        let [_, _, _, _, _, _, _, weight] = self.0.to_le_bytes();
        if weight == 0 {
            None
        } else {
            Some(weight as u32)
        }
    }

    /// With one more launch, which took so long.
    #[must_use]
    pub fn learn(self, sample_ns: u64) -> Self {
        self.moved(sample_ns, Evidence::Exact)
    }

    /// With one more launch, which was found to have taken `ns` by what the sample says. Where that was as much a guess as
    /// what was known before, it does not say how launches differ.
    #[must_use]
    pub fn learn_from(self, sample: Sample, ns: u64) -> Self {
        let evidence = sample.evidence();
        // The most that one of launches that differ can have taken is charged, and teaches nothing. Where nothing else is
        // seen, it was chance that some seemed to differ.
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

    /// What is known may not be true any more: the mean stays, the next launches are sampled.
    #[must_use]
    pub fn marked_stale(self) -> Self {
        if self.samples() == 0 {
            return self;
        }
        Self::of(self.0 & MAX_COST_NS, 1, self.deviation())
    }

    /// What a launch of this kind took by its events, in nanoseconds; `None` if that is anybody's guess. A host that is
    /// busy lets a card wait that is not.
    ///
    /// | Known | Ran on behind the second event | Was over before |
    /// |---|---|---|
    /// | nothing | the least that it can have taken | the most, if the host was not interrupted |
    /// | they are alike | that, as far as it is possible | that, if it is not more than the most |
    /// | they differ | the most | the mean, or little if it was a short one |
    ///
    /// The driver may hand a launch over at any time of its call, which is as long as the host is slow; most is left of it
    /// before that. So what is known of launches that are alike, and is possible, moves towards the least, a little with
    /// each: what was taken for too long once does not stay so.
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
        // It was over before the second event was queued, and so says only that it did not take longer than that.
        match (self.samples(), sample.late_ns >= INTERRUPTED_NS) {
            (0, false) => Some(most),
            (0, true) => None,
            // Of launches that differ it was a short one: a long one would not have been over.
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

    /// What is known, or if that is more than `least`, a step towards that: so small that launches stay alike by it.
    fn nearer(self, least: u64) -> u64 {
        let ns = self.ns();
        ns.min(least.max(ns - ns / 4))
    }

    fn of(ns: u64, samples: u8, deviation: u8) -> Self {
        let seldom = u64::from(SAMPLING_INTERVAL);
        let weight = if samples <= MIN_SAMPLES {
            0
        } else {
            // Twice as often where the deviation is as large as the mean, and so on.
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

/// What two events round a launch say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// From the first to the second, nanoseconds.
    pub measured_ns: u64,
    /// For how long the card waited for the launch after the first, nanoseconds.
    pub gap_ns: u64,
    /// How long the call that launched it took, nanoseconds; 0 if the card was busy with what was queued before until that
    /// had returned.
    pub call_ns: u64,
    /// For how long it waited at most for the second after the launch, nanoseconds; 0 if it still ran when that was
    /// queued.
    pub late_ns: u64,
}

/// What a sample is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    /// It says how long the launch took.
    Exact,
    /// It says how long that was at least or at most.
    Bounds,
}

impl Sample {
    /// How long the launch took at least, if it was not late, and at most, nanoseconds. A call that is much shorter than the
    /// launch makes no difference.
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

/// Which launches cost the same. Not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchKind(u64);

impl LaunchKind {
    /// A kernel (`CUfunction` or `CUkernel`), its grid and its block.
    #[must_use]
    #[inline]
    pub fn kernel(function: u64, grid: [u32; 3], block: [u32; 3]) -> Self {
        let product = |sides: [u32; 3]| {
            let [x, y, z] = sides.map(u64::from);
            x.wrapping_mul(y).wrapping_mul(z)
        };
        Self::mixed(function, size_class(product(grid)) << 32 | product(block))
    }

    /// An instantiated graph.
    #[must_use]
    pub fn graph(exec: u64) -> Self {
        Self::mixed(exec, 1 << 48)
    }

    /// A fill of so many bytes.
    #[must_use]
    pub fn fill(bytes: u64) -> Self {
        Self::mixed(1, 2 << 48 | size_class(bytes))
    }

    /// A copy of so many bytes within a card.
    #[must_use]
    pub fn copy(bytes: u64) -> Self {
        Self::mixed(1, 3 << 48 | size_class(bytes))
    }

    /// From the number that [`LaunchKind::number`] gave; 0 is none.
    #[must_use]
    pub const fn of_number(number: u64) -> Option<Self> {
        if number == 0 {
            None
        } else {
            Some(Self(number))
        }
    }

    /// As a number that is not zero.
    #[must_use]
    #[inline]
    pub const fn number(self) -> u64 {
        self.0
    }

    #[inline]
    const fn mixed(handle: u64, shape: u64) -> Self {
        // Two odd constants; handles differ in their low bits, shapes in a few places.
        let mixed = handle.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ shape.wrapping_mul(0xc2b2_ae3d_27d4_eb4f).rotate_left(32);
        Self(if mixed == 0 { 1 } else { mixed })
    }
}

/// Quarters of an octave: sizes within 25 % of each other are about the same.
#[inline]
fn size_class(size: u64) -> u64 {
    let Some(octave) = size.checked_ilog2() else {
        return 0;
    };
    // The two bits after the leading one.
    let quarter = (size << size.leading_zeros()) >> (u64::BITS - 3);
    u64::from(octave) * 4 + 4 + (quarter & 3)
}

/// Intervals remembered by a [`Timeline`].
const SPANS: usize = 32;

/// When a process's work was running on a card, as far as it was sampled: disjoint intervals, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    spans: [(u64, u64); SPANS],
    used: usize,
}

impl Timeline {
    /// Nothing has run.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            spans: [(0, 0); SPANS],
            used: 0,
        }
    }

    /// Notes that work ran from `start` to `end`, in nanoseconds, and says how much of that is new.
    ///
    /// Intervals may come in any order. What is older than the last `SPANS` gaps is taken for gone by: an interval
    /// from that time counts in full.
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
