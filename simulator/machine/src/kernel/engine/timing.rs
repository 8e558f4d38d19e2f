//! Timing of a GPU.

use crate::protocol::Nanos;

/// What takes time on a GPU besides kernels and copies. The default adds nothing, with slices of 2 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Mean time slice of a context while another one waits.
    pub slice: Nanos,
    /// Largest deviation of a slice from the mean, percent.
    pub slice_deviation_percent: u32,
    /// Time of a switch between contexts, in which nothing runs.
    pub context_switch: Nanos,
    /// Time of an event on its stream.
    pub event: Nanos,
    /// Whether contexts record events also in the slices of others.
    pub records_out_of_slice: bool,
}

impl Timing {
    /// Returns even slices of this length.
    #[must_use]
    pub const fn slices_of(slice: Nanos) -> Self {
        Self {
            slice,
            slice_deviation_percent: 0,
            context_switch: 0,
            event: 0,
            records_out_of_slice: false,
        }
    }

    /// Returns the length of a slice by its number, the same in each run.
    pub(super) fn slice_of(&self, number: u64) -> Nanos {
        let deviation = u64::from(self.slice_deviation_percent.min(99));
        // Mixes the bits of the number (SplitMix64).
        let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let percent = 100 - deviation + (mixed ^ (mixed >> 31)) % (2 * deviation + 1);
        (self.slice / 100 * percent + self.slice % 100 * percent / 100).max(1)
    }
}
