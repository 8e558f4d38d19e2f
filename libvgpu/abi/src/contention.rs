//! Correction of a share's measurements for time slices of co-located shares.
//!
//! Contexts of different processes are time-sliced. An event pair around an interrupted launch also measures the slices of
//! other processes. What others do is known to the node agent alone, so it states in the limits page how to correct:
//!
//! | [`OwnTime`] | For shares | Rule |
//! |---|---|---|
//! | `Part` | beside others that do not always have work | each launch counts with a mean part of its measured time |
//! | `Interrupted` | beside one that always has work | a launch within one time slice is never interrupted, and a longer measured time contains the slices of others a whole number of times |
//! | `Saturating` | that always have work, so that others limit them | as `Part`; but few launches of a cheap kind are measured and fewer interrupted ones, so that these say nothing about the rest |

use crate::cost::Cost;

/// All measured time, in parts per million.
pub const ALL_PPM: u32 = 1_000_000;

/// Time slice of a context while others have work, µs: NVIDIA's default, as measured on an H200.
pub const SLICE_US: u32 = 2_050;

const NS_PER_US: u64 = 1_000;
const SLICE_NS: u64 = SLICE_US as u64 * NS_PER_US;

/// What remains of an interrupted launch below one part in this many of an interruption is mostly error.
const ERROR: u64 = 8;

/// Shortest interruption by another context, nanoseconds: some work and two switches.
const SHORTEST_INTERRUPTION_NS: u64 = 600_000;

/// Longest interruption that is accepted, µs; more is damage.
const MAX_INTERRUPTION_US: u32 = 1_000_000;

/// Upper half of the word of [`OwnTime::Saturating`].
const SATURATING: u32 = u32::MAX;

/// Which part of the time that a share's events measure is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnTime {
    /// This part, parts per million.
    Part(u32),
    /// All but interruptions of this mean duration between two slices, µs.
    Interrupted(u32),
    /// This part, parts per million, of a share that always has work.
    Saturating(u32),
}

/// The own time of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLaunch {
    /// Nanoseconds.
    pub ns: u64,
    /// Whether it says something about other launches of its kind.
    pub is_evidence: bool,
}

impl OwnTime {
    /// All of it.
    pub const ALL: Self = Self::Part(ALL_PPM);

    /// Returns the word of the limits page.
    ///
    /// ```text
    /// bits 0–31 part in parts per million │ 32–63 interruption in µs; 0 for a part, all ones if saturating
    /// ```
    #[must_use]
    pub const fn word(self) -> u64 {
        match self {
            Self::Part(ppm) => ppm as u64,
            Self::Interrupted(us) => (us as u64) << 32,
            Self::Saturating(ppm) => (SATURATING as u64) << 32 | ppm as u64,
        }
    }

    /// Decodes [`OwnTime::word`]. Zero and damaged words are [`OwnTime::ALL`].
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        let part = u32::from_le_bytes([a, b, c, d]);
        let interruption_us = u32::from_le_bytes([e, f, g, h]);
        match (part, interruption_us) {
            (1..ALL_PPM, 0) => Self::Part(part),
            (1..=ALL_PPM, SATURATING) => Self::Saturating(part),
            (0, 1..=MAX_INTERRUPTION_US) => Self::Interrupted(interruption_us),
            _ => Self::ALL,
        }
    }

    /// Returns the share's own part of a measured time, nanoseconds.
    #[must_use]
    pub fn of_ns(self, measured_ns: u64) -> u64 {
        match self {
            Self::Part(ppm) | Self::Saturating(ppm) => {
                // In two steps, so that hours do not overflow.
                let (all, ppm) = (u64::from(ALL_PPM), u64::from(ppm));
                (measured_ns / all)
                    .saturating_mul(ppm)
                    .saturating_add((measured_ns % all).saturating_mul(ppm) / all)
            }
            Self::Interrupted(_) if measured_ns <= SLICE_NS => measured_ns,
            Self::Interrupted(us) => {
                let interruption_ns = u64::from(us) * NS_PER_US;
                // One per slice and interruption; exact if an interruption lasts longer than a slice.
                let round_ns = SLICE_NS + interruption_ns;
                let count = measured_ns.saturating_add(round_ns / 2) / round_ns;
                measured_ns.saturating_sub(count.max(1).saturating_mul(interruption_ns))
            }
        }
    }

    /// Returns the own time of a launch of a kind with this cost that took `measured_ns`.
    #[must_use]
    pub fn of_launch(self, measured_ns: u64, kind: Cost) -> OwnLaunch {
        let (ns, is_evidence) = match self {
            Self::Interrupted(us) if measured_ns > SLICE_NS => {
                let own_ns = self.of_ns(measured_ns);
                let error_ns = u64::from(us) * NS_PER_US / ERROR;
                match (own_ns >= error_ns, kind.samples()) {
                    (false, 1..) => (kind.ns().min(error_ns), false),
                    (is_known, _) => (own_ns, is_known),
                }
            }
            Self::Saturating(_) if kind.is_cheap() => {
                let is_interrupted = measured_ns > kind.ns() + SHORTEST_INTERRUPTION_NS;
                match is_interrupted {
                    true => (kind.ns(), false),
                    false => (measured_ns, true),
                }
            }
            Self::Part(_) | Self::Interrupted(_) | Self::Saturating(_) => {
                (self.of_ns(measured_ns), true)
            }
        };
        OwnLaunch { ns, is_evidence }
    }
}
