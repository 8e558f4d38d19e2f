//! Small allocations: many of them share one block of GPU memory, and the GPU loses whole blocks.
//!
//! libcuda does not report its blocks. It aligns them to their size in the address space, as all GPU memory, so the
//! address identifies the block. Only after an allocation is it known whether the allocation opened a block.
//!
//! Each context has its own blocks, and managed memory has other blocks than plain memory: a [`BlockClass`]. Free
//! space in a block is known if all its allocations are known, which is not the case while one of them is being
//! freed.
//!
//! Invariant: a block is charged as a whole, from its first allocation to its last.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::charge_map::{Charge, ChargeMap, record};
use crate::guard::Guard;
use crate::shares::MAX_SHARES;

/// Size of a block.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Largest request that shares a block.
pub(crate) const LARGEST_SMALL: u64 = BLOCK / 2;
/// Granularity of small requests.
const STEP: u64 = 512;

/// Number of blocks searched for a hole, those with the most free bytes first.
const CANDIDATES: usize = 8;
const STEPS: usize = 4096;
const _: () = assert!(STEPS as u64 * STEP == BLOCK);

/// The blocks in which an allocation may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockClass {
    pub(crate) card: u8,
    pub(crate) context: u64,
    pub(crate) is_managed: bool,
}

impl BlockClass {
    /// Returns the class as [`Block::class`].
    fn key(self) -> u64 {
        (self.context << 1) | u64::from(self.is_managed)
    }
}

record! {
    /// A block with small allocations.
    Block {
        used_bytes,
        /// Index of the GPU's first share.
        card,
        /// [`BlockClass::key`].
        class,
    }
}

/// The blocks of this process. All zeroes is none.
pub(crate) struct Blocks {
    guard: AtomicU32,
    /// By block number.
    blocks: ChargeMap<Block>,
    /// Free bytes in all blocks of a GPU, by the GPU's index.
    free_bytes: [AtomicU64; MAX_SHARES],
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
    /// Returns whether some block of the GPU may have a hole of `bytes`.
    pub(crate) fn may_have_hole(&self, card: u8, bytes: u64) -> bool {
        self.free_bytes
            .get(usize::from(card))
            .is_some_and(|free_bytes| free_bytes.load(Ordering::Relaxed) >= bytes)
    }

    /// Finds a hole of `bytes`, adds them to its block, and returns the block's number: the block stays charged
    /// whatever is freed meanwhile. `charges` is all linear memory of the process.
    ///
    /// The caller is exclusive in a [`crate::guard::SharedGate`], so no allocation is in flight; a free may be.
    pub(crate) fn reserve_hole(
        &self,
        charges: &ChargeMap<Charge>,
        class: BlockClass,
        bytes: u64,
    ) -> Option<u64> {
        let mut maps = self.candidates(class, bytes);
        charges.for_each(|address, charge| {
            if let Some(map) = maps.iter_mut().find(|map| map.number == number(address))
                && is_small(charge.bytes)
            {
                map.mark(address, charge.bytes);
            }
        });
        let _guard = Guard::acquire(&self.guard);
        maps.iter()
            .filter(|map| map.is_complete() && map.has_hole(bytes))
            .find_map(|map| {
                let before = self.add_bytes(map.number, bytes)?;
                self.change_free_bytes(before.card, 0, bytes);
                Some(map.number)
            })
    }

    /// Returns the blocks of `class` with the most free bytes; their holes are not known yet.
    fn candidates(&self, class: BlockClass, bytes: u64) -> [BlockMap; CANDIDATES] {
        let mut maps = [BlockMap::EMPTY; CANDIDATES];
        self.blocks.for_each(|number, block| {
            let is_likely = (block.card, block.class) == (class.card, class.key())
                && BLOCK.saturating_sub(block.used_bytes) >= bytes;
            if is_likely
                && let Some(fullest) = maps.iter_mut().max_by_key(|map| map.used_bytes)
                && fullest.used_bytes > block.used_bytes
            {
                fullest.number = number;
                fullest.used_bytes = block.used_bytes;
            }
        });
        maps
    }

    /// Records the address of an allocation for which `reserve_hole` returned block `reserved`. Returns whether the
    /// allocation opened another block, to be charged, and whether the reserved block is empty, to be released.
    pub(crate) fn settle(
        &self,
        class: BlockClass,
        reserved: u64,
        address: u64,
        bytes: u64,
    ) -> (bool, bool) {
        if reserved == number(address) {
            return (false, false);
        }
        let is_opened = self.add(class, address, bytes);
        let is_closed = self.remove(class.card, reserved.saturating_mul(BLOCK), bytes);
        (is_opened, is_closed)
    }

    /// Records a small allocation. Returns `true` if it opened a block, to be charged.
    pub(crate) fn add(&self, class: BlockClass, address: u64, bytes: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let number = number(address);
        if let Some(before) = self.add_bytes(number, bytes) {
            self.change_free_bytes(before.card, 0, bytes);
            return false;
        }
        let block = Block {
            used_bytes: bytes,
            card: class.card,
            class: class.key(),
        };
        self.blocks.insert(number, block);
        self.change_free_bytes(class.card, BLOCK, bytes);
        true
    }

    /// Adds bytes to a known block and returns its previous record. The caller holds the guard.
    fn add_bytes(&self, number: u64, bytes: u64) -> Option<Block> {
        self.blocks.change(number, |before| {
            Some(Block {
                used_bytes: before.used_bytes.saturating_add(bytes),
                ..*before
            })
        })
    }

    /// Removes a small allocation. Returns `true` if its block is empty, to be released.
    pub(crate) fn remove(&self, card: u8, address: u64, bytes: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let before = self.blocks.change(number(address), |before| {
            let used_bytes = before.used_bytes.saturating_sub(bytes);
            Some(Block {
                used_bytes,
                ..*before
            })
            .filter(|block| block.used_bytes != 0)
        });
        let Some(before) = before else {
            return false;
        };
        let is_closed = before.used_bytes <= bytes;
        self.change_free_bytes(card, bytes, if is_closed { BLOCK } else { 0 });
        is_closed
    }

    fn change_free_bytes(&self, card: u8, more: u64, less: u64) {
        if let Some(free_bytes) = self.free_bytes.get(usize::from(card)) {
            free_bytes.fetch_add(more.wrapping_sub(less), Ordering::Relaxed);
        }
    }
}

/// Occupancy of a block.
#[derive(Clone, Copy)]
struct BlockMap {
    number: u64,
    /// Used bytes when the map was started.
    used_bytes: u64,
    marked_bytes: u64,
    /// One bit per step.
    steps: [u64; STEPS / 64],
}

impl BlockMap {
    const EMPTY: Self = Self {
        number: u64::MAX,
        used_bytes: u64::MAX,
        marked_bytes: 0,
        steps: [0; STEPS / 64],
    };

    fn mark(&mut self, address: u64, bytes: u64) {
        self.marked_bytes = self.marked_bytes.saturating_add(bytes);
        let first = address % BLOCK / STEP;
        for step in first..first.saturating_add(bytes.div_ceil(STEP)) {
            let (word, bit) = (step / 64, step % 64);
            if let Some(word) = usize::try_from(word)
                .ok()
                .and_then(|word| self.steps.get_mut(word))
            {
                *word |= 1 << bit;
            }
        }
    }

    /// Returns whether all counted bytes are marked. A free in flight is counted but not marked.
    fn is_complete(&self) -> bool {
        self.marked_bytes == self.used_bytes
    }

    fn has_hole(&self, bytes: u64) -> bool {
        let needed = bytes.div_ceil(STEP);
        let mut free = 0u64;
        let bits = self
            .steps
            .iter()
            .flat_map(|word| (0..64).map(move |bit| word >> bit & 1));
        for bit in bits {
            free = if bit == 0 { free.saturating_add(1) } else { 0 };
            if free >= needed {
                return true;
            }
        }
        false
    }
}

fn number(address: u64) -> u64 {
    address.checked_div(BLOCK).unwrap_or(0)
}

/// Small arrays, which share blocks but whose addresses are unknown.
///
/// Each counts as the next power of two, which no packing exceeds. The charge stays until the last array is
/// destroyed: holes return no block to the GPU.
pub(crate) struct SmallArrays {
    count: AtomicU64,
    bytes: AtomicU64,
    charged_bytes: AtomicU64,
}

impl SmallArrays {
    /// Returns whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Adds an array and returns the additional charge. The caller holds the process's guard.
    pub(crate) fn add(&self, bytes: u64) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed);
        let bytes = packed(bytes);
        let all = self
            .bytes
            .fetch_add(bytes, Ordering::Relaxed)
            .saturating_add(bytes);
        let needed = all.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
        let charged = self.charged_bytes.fetch_max(needed, Ordering::Relaxed);
        needed.saturating_sub(charged)
    }

    /// Removes an array and returns the charge to release. The caller holds the process's guard.
    pub(crate) fn remove(&self, bytes: u64) -> u64 {
        self.bytes.fetch_sub(packed(bytes), Ordering::Relaxed);
        if self.count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.charged_bytes.swap(0, Ordering::Relaxed)
        } else {
            0
        }
    }

    /// Removes an array of `bytes` that was not allocated, with its additional charge of `more`.
    pub(crate) fn undo(&self, bytes: u64, more: u64) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(packed(bytes), Ordering::Relaxed);
        self.charged_bytes.fetch_sub(more, Ordering::Relaxed);
    }
}

/// At most [`LARGEST_SMALL`], which is a power of two.
fn packed(bytes: u64) -> u64 {
    bytes.max(STEP).checked_next_power_of_two().unwrap_or(BLOCK)
}
