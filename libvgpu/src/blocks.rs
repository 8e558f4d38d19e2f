//! Small allocations: many of them share one block of the card's memory, and what the card loses is the block.
//!
//! The driver says nothing about its blocks. It aligns them to their size in the address space, as it does all
//! memory of the card, so a block is known by its address; whether an allocation opens a new one is known only
//! when it is made.
//!
//! Invariant: a block is charged from its first allocation to its last, and as a whole.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::held::{Held, HeldMap};
use crate::process::{MAX_SHARES, Process};

/// What the driver takes from the card at once.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Largest request that shares a block with others.
pub(crate) const LARGEST_SMALL: u64 = BLOCK / 2;
/// Small requests take multiples of this.
const STEP: u64 = 512;

/// The blocks that this process has something in. All zeroes is none.
pub(crate) struct Blocks {
    /// By number; `bytes` is what is in use of it.
    blocks: HeldMap,
    /// Bytes that are not in use, of all blocks of a card, by the card's index.
    room: [AtomicU64; MAX_SHARES],
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
    /// Whether some block of the card may have room for so much.
    pub(crate) fn may_have_room(&self, card: u8, bytes: u64) -> bool {
        self.room
            .get(usize::from(card))
            .is_some_and(|room| room.load(Ordering::Relaxed) >= bytes)
    }

    /// Notes a small allocation. `true` if it opened a block, which is to be charged.
    pub(crate) fn add(&self, process: &Process, card: u8, address: u64, bytes: u64) -> bool {
        let _guard = process.guard();
        let number = number(address);
        let before = self.blocks.remove(number);
        let used = before.map_or(0, |block| block.bytes);
        let block = Held {
            bytes: used.saturating_add(bytes),
            card,
            context: 0,
        };
        self.blocks.insert(number, block);
        if before.is_none() {
            self.change_room(card, BLOCK, bytes);
        } else {
            self.change_room(card, 0, bytes);
        }
        before.is_none()
    }

    /// Forgets a small allocation. `true` if its block is closed, whose charge is to be returned.
    pub(crate) fn remove(&self, process: &Process, card: u8, address: u64, bytes: u64) -> bool {
        let _guard = process.guard();
        let number = number(address);
        let Some(before) = self.blocks.remove(number) else {
            return false;
        };
        let block = Held {
            bytes: before.bytes.saturating_sub(bytes),
            ..before
        };
        if block.bytes != 0 {
            self.blocks.insert(number, block);
            self.change_room(card, bytes, 0);
            return false;
        }
        self.change_room(card, bytes, BLOCK);
        true
    }

    fn change_room(&self, card: u8, more: u64, less: u64) {
        if let Some(room) = self.room.get(usize::from(card)) {
            room.fetch_add(more.wrapping_sub(less), Ordering::Relaxed);
        }
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
