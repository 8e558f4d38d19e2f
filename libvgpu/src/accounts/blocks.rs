//! Small allocations: many of them share one block of GPU memory, and the GPU loses whole blocks.
//!
//! libcuda does not report its blocks. It aligns them to their size in the address space, as all GPU memory, so the
//! address identifies the block. Only after an allocation is it known whether the allocation opened a block, so it needs
//! room for one, even if a block has a hole.
//!
//! Invariant: a block is charged as a whole, from its first allocation to its last.

use core::sync::atomic::AtomicU32;

use crate::accounts::charge_map::{ChargeMap, Record};
use crate::system::guard::Guard;

/// Size of a block.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Largest request that shares a block.
pub(crate) const LARGEST_SMALL: u64 = BLOCK / 2;
/// Granularity of small requests.
const STEP: u64 = 512;

/// The number of allocations in a block.
#[derive(Clone, Copy)]
struct Allocations(u64);

impl Record for Allocations {
    fn to_words(self) -> [u64; 2] {
        [self.0, 0]
    }

    fn from_words([count, _]: [u64; 2]) -> Self {
        Self(count)
    }
}

/// The blocks of this process. All zeroes is none.
pub(crate) struct Blocks {
    guard: AtomicU32,
    /// By block number.
    blocks: ChargeMap<Allocations>,
}

/// Returns the size of a request of linear memory in its block, or in GPU memory if it exceeds a block.
pub(crate) fn rounded(bytes: u64) -> u64 {
    let step = if bytes > LARGEST_SMALL { BLOCK } else { STEP };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// Returns whether a request of this size shares a block.
pub(crate) fn is_small(rounded_bytes: u64) -> bool {
    rounded_bytes <= LARGEST_SMALL
}

impl Blocks {
    /// Records a small allocation. Returns `true` if it opened a block, to be charged.
    pub(crate) fn add(&self, address: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let more = |before: &Allocations| Some(Allocations(before.0.saturating_add(1)));
        let is_new = self.blocks.change(number(address), more).is_none();
        if is_new {
            self.blocks.insert(number(address), Allocations(1));
        }
        is_new
    }

    /// Removes a small allocation. Returns `true` if its block is empty, to be released.
    pub(crate) fn remove(&self, address: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let fewer = |before: &Allocations| {
            let count = before.0.saturating_sub(1);
            (count != 0).then_some(Allocations(count))
        };
        let before = self.blocks.change(number(address), fewer);
        before.is_some_and(|before| before.0 <= 1)
    }
}

fn number(address: u64) -> u64 {
    address.checked_div(BLOCK).unwrap_or(0)
}
