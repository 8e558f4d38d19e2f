//! Small allocations: many of them share one block of the card's memory, and what the card loses is the block.
//!
//! The driver says nothing about its blocks. It aligns them to their size in the address space, as it does all
//! memory of the card, so a block is known by its address; whether an allocation opens a new one is known only
//! when it is made.
//!
//! Each context has blocks of its own, and managed memory others than plain memory: a [`BlockClass`]. What is free in a block
//! is what nothing that is held lies in, if all of that is known: while something is being freed, it is not.
//!
//! Invariant: a block is charged from its first allocation to its last, and as a whole.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::charge_map::{Charge, ChargeMap};
use crate::guard::Guard;
use crate::shares::MAX_SHARES;

/// What the driver takes from the card at once.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Largest request that shares a block with others.
pub(crate) const LARGEST_SMALL: u64 = BLOCK / 2;
/// Small requests take multiples of this.
const STEP: u64 = 512;

/// Blocks that are looked through for a hole, those with most free_bytes first.
const CANDIDATES: usize = 8;
const STEPS: usize = 4096;
const _: () = assert!(STEPS as u64 * STEP == BLOCK);

/// Which blocks an allocation may lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockClass {
    pub(crate) card: u8,
    pub(crate) context: u64,
    pub(crate) is_managed: bool,
}

impl BlockClass {
    /// As [`Charge::context`] of a block.
    fn key(self) -> u64 {
        (self.context << 1) | u64::from(self.is_managed)
    }
}

/// The blocks that this process has something in. All zeroes is none.
pub(crate) struct Blocks {
    guard: AtomicU32,
    /// By number; `bytes` is what is in use of it, `context` its [`BlockClass`].
    blocks: ChargeMap,
    /// Bytes that are not in use, of all blocks of a card, by the card's index.
    free_bytes: [AtomicU64; MAX_SHARES],
}

/// What a request of linear memory takes of its block, or of the card if it is too large for one.
pub(crate) fn rounded(bytes: u64) -> u64 {
    let step = if bytes > LARGEST_SMALL { BLOCK } else { STEP };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// Whether such a request shares a block with others.
pub(crate) fn is_small(rounded_bytes: u64) -> bool {
    rounded_bytes <= LARGEST_SMALL
}

impl Blocks {
    /// Whether some block of the card may have free_bytes for so much.
    pub(crate) fn may_have_hole(&self, card: u8, bytes: u64) -> bool {
        self.free_bytes
            .get(usize::from(card))
            .is_some_and(|free_bytes| free_bytes.load(Ordering::Relaxed) >= bytes)
    }

    /// Finds a hole for so many bytes, and notes them as allocated in its block, whose number is returned: so the block
    /// stays charged whatever is freed meanwhile. `held` is all linear memory of the process.
    ///
    /// The caller is alone in a [`crate::guard::SharedGate`], so nothing is being allocated; but something may be being freed.
    pub(crate) fn reserve_hole(
        &self,
        held: &ChargeMap,
        class: BlockClass,
        bytes: u64,
    ) -> Option<u64> {
        let mut maps = self.candidates(class, bytes);
        held.for_each(|address, held| {
            if let Some(map) = maps.iter_mut().find(|map| map.number == number(address))
                && is_small(held.bytes)
            {
                map.mark(address, held.bytes);
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

    /// The blocks of that class which have most free_bytes, as they are before their holes are known.
    fn candidates(&self, class: BlockClass, bytes: u64) -> [BlockMap; CANDIDATES] {
        let mut maps = [BlockMap::EMPTY; CANDIDATES];
        self.blocks.for_each(|number, block| {
            let is_likely = (block.card, block.context) == (class.card, class.key())
                && BLOCK.saturating_sub(block.bytes) >= bytes;
            if is_likely
                && let Some(fullest) = maps.iter_mut().max_by_key(|map| map.used_bytes)
                && fullest.used_bytes > block.bytes
            {
                fullest.number = number;
                fullest.used_bytes = block.bytes;
            }
        });
        maps
    }

    /// Notes where an allocation lies for which a hole of the block `reserved` was. Says whether it opened another block,
    /// which is to be charged, and whether the reserved one is closed, whose charge is to be returned.
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

    /// Notes a small allocation. `true` if it opened a block, which is to be charged.
    pub(crate) fn add(&self, class: BlockClass, address: u64, bytes: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let number = number(address);
        if let Some(before) = self.add_bytes(number, bytes) {
            self.change_free_bytes(before.card, 0, bytes);
            return false;
        }
        let block = Charge {
            bytes,
            card: class.card,
            context: class.key(),
        };
        self.blocks.insert(number, block);
        self.change_free_bytes(class.card, BLOCK, bytes);
        true
    }

    /// Puts more into a block, if there is such a block, and returns what it was. The caller holds the guard.
    fn add_bytes(&self, number: u64, bytes: u64) -> Option<Charge> {
        self.blocks.change(number, |before| {
            Some(Charge {
                bytes: before.bytes.saturating_add(bytes),
                ..*before
            })
        })
    }

    /// Forgets a small allocation. `true` if its block is closed, whose charge is to be returned.
    pub(crate) fn remove(&self, card: u8, address: u64, bytes: u64) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let before = self.blocks.change(number(address), |before| {
            let bytes = before.bytes.saturating_sub(bytes);
            Some(Charge { bytes, ..*before }).filter(|block| block.bytes != 0)
        });
        let Some(before) = before else {
            return false;
        };
        let is_closed = before.bytes <= bytes;
        self.change_free_bytes(card, bytes, if is_closed { BLOCK } else { 0 });
        is_closed
    }

    fn change_free_bytes(&self, card: u8, more: u64, less: u64) {
        if let Some(free_bytes) = self.free_bytes.get(usize::from(card)) {
            free_bytes.fetch_add(more.wrapping_sub(less), Ordering::Relaxed);
        }
    }
}

/// What lies where in a block.
#[derive(Clone, Copy)]
struct BlockMap {
    number: u64,
    /// As counted when the map was begun.
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

    /// Whether all that is counted is marked. What is being freed is still counted, but not held any more.
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

/// Small arrays, which share blocks too but have no address that would say which.
///
/// They are counted as if each took a power of two, so that any driver packs them into no more blocks than that, and
/// what was charged stays so until the last one is gone: holes that were left do not return a block to the card.
pub(crate) struct SmallArrays {
    count: AtomicU64,
    bytes: AtomicU64,
    charged_bytes: AtomicU64,
}

impl SmallArrays {
    /// Whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Adds one and returns how much more is to be charged. The caller holds the process's guard.
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

    /// Takes one away and returns how much is not to be charged any more. The caller holds the process's guard.
    pub(crate) fn remove(&self, bytes: u64) -> u64 {
        self.bytes.fetch_sub(packed(bytes), Ordering::Relaxed);
        if self.count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.charged_bytes.swap(0, Ordering::Relaxed)
        } else {
            0
        }
    }

    /// Takes one away that was not charged after all: `bytes` with the charge of `more` that it would have needed.
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
