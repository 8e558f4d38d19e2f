//! The protocol that keeps a share exact while processes take, return and die.
//!
//! Per share there is one **total**; per process a slot with **used** and **in flight**. Everyone may read all
//! of it, a process writes the total and its own slot, and a slot whose owner is dead is cleared by whoever
//! holds its lock.
//!
//! ```text
//! reserve x:  in flight += x │ total += x if it stays within the limit │ used += x │ in flight −= x
//! release x:  in flight += x │ used −= x                              │ total −= x │ in flight −= x
//! rebuild:    mark the total │ sum used + in flight of all slots │ if the mark is still there, lower the total to the sum
//! ```
//!
//! Invariants, whatever dies after whichever step:
//! - **The total is never less than what live processes hold.** A change of the total clears the mark, so a
//!   rebuild that raced with one is thrown away; a change whose step on the total is still to come is counted
//!   by `in flight`. Only a death can leave the total too high, and a rebuild precedes every refusal.
//! - **The total never exceeds the limit**, not even for a moment, since only a reservation's compare-and-swap
//!   raises it. There are no refusals that a neighbour's rolled-back attempt caused.
//! - Nobody waits for anybody: a process that is stopped between two steps delays no other.
//!
//! The proof by enumeration is `tests/schedules.rs` and `tests/loom.rs`; `tests/ledger.rs` adds a death after each step.

use crate::atomic::Word;
use crate::region::{Header, Slot, SlotIndex};

/// Low bits of the total word that hold bytes; the rest hold the mark of a rebuild.
const BYTES_BITS: u32 = 48;

/// Highest number of bytes that a share can count, 256 TiB − 1.
pub const MAX_BYTES: u64 = (1 << BYTES_BITS) - 1;

/// How often a refusal is reconsidered because others were changing the total meanwhile.
const MAX_REBUILDS: u32 = 256;

const STATE_OWNED: u64 = 1;
const STATE_ORPHANED: u64 = 2;
const STATE_MASK: u64 = 0xff;
const GENERATION_SHIFT: u32 = 8;

/// A share's region as its users see it: one header and the slots.
pub struct Region<'a, A> {
    header: &'a Header<A>,
    slots: &'a [Slot<A>],
}

impl<A> Clone for Region<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Region<'_, A> {}

/// An allocation that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitExceeded;

/// How a rebuild ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rebuild {
    /// The total is the sum of the slots.
    Exact,
    /// Others were changing the total; it may still be too high.
    Contended,
}

/// Who owns a slot; for people and the node agent, not for the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process ID in the owner's own PID namespace.
    pub pid: u32,
    /// Clock ticks since boot.
    pub start_time: u64,
    /// Inode of the PID namespace.
    pub pid_namespace: u64,
}

impl<'a, A: Word> Region<'a, A> {
    /// A region made of `header` and `slots`.
    #[must_use]
    pub fn new(header: &'a Header<A>, slots: &'a [Slot<A>]) -> Self {
        Self { header, slots }
    }

    /// The share's own words.
    #[must_use]
    pub fn header(&self) -> &'a Header<A> {
        self.header
    }

    /// The slots that were ever in use. What the header claims is bounded by what there is.
    #[must_use]
    pub fn slots(&self) -> &'a [Slot<A>] {
        let in_use = usize::try_from(self.header.slots_in_use.load()).unwrap_or(usize::MAX);
        self.slots.get(..in_use).unwrap_or(self.slots)
    }

    /// The slot of that index.
    #[must_use]
    pub fn slot(&self, index: SlotIndex) -> Option<&'a Slot<A>> {
        self.slots.get(index.get())
    }

    /// Bytes taken by all processes. Too high by what dead processes had, until a rebuild.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        bytes_of(self.header.total.load())
    }

    /// Whether the slot is free, to the best of what its state says.
    #[must_use]
    pub fn is_free(&self, index: SlotIndex) -> bool {
        !matches!(self.state(index), Some(STATE_OWNED | STATE_ORPHANED))
    }

    /// Whether the slot is some process's, to the best of what its state says.
    #[must_use]
    pub fn is_in_use(&self, index: SlotIndex) -> bool {
        self.state(index) == Some(STATE_OWNED)
    }

    /// Whether the slot is what [`Region::reclaim_slot`] left of a dead process.
    #[must_use]
    pub fn is_orphaned(&self, index: SlotIndex) -> bool {
        self.state(index) == Some(STATE_ORPHANED)
    }

    fn state(&self, index: SlotIndex) -> Option<u64> {
        self.slot(index).map(|slot| slot.state.load() & STATE_MASK)
    }

    /// Takes possession of a slot and returns its new generation. The caller holds the slot's lock.
    ///
    /// Whatever a dead owner left is cleared first.
    pub fn acquire_slot(&self, index: SlotIndex, owner: Owner) -> Option<u64> {
        let slot = self.slot(index)?;
        self.clear(index);
        raise(&self.header.slots_in_use, index.get() as u64 + 1);
        slot.pid.store(u64::from(owner.pid));
        slot.start_time.store(owner.start_time);
        slot.pid_namespace.store(owner.pid_namespace);
        let generation = (slot.state.load() >> GENERATION_SHIFT).wrapping_add(1);
        slot.state
            .store((generation << GENERATION_SHIFT) | STATE_OWNED);
        Some(generation)
    }

    /// Whether the slot is owned in that generation, that is: whether nobody took it from its owner.
    #[must_use]
    pub fn is_owned(&self, index: SlotIndex, generation: u64) -> bool {
        self.slot(index)
            .is_some_and(|slot| slot.state.load() == (generation << GENERATION_SHIFT) | STATE_OWNED)
    }

    /// Empties a slot and marks it free. The caller holds the slot's lock, so the owner is dead or the caller.
    ///
    /// The total keeps what was in the slot until the next [`Region::rebuild`].
    pub fn clear(&self, index: SlotIndex) {
        let Some(slot) = self.slot(index) else { return };
        let state = slot.state.load();
        slot.used_bytes.store(0);
        slot.in_flight_bytes.store(0);
        slot.driver_bytes.store(0);
        slot.peak_bytes.store(0);
        slot.exported_bytes.store(0);
        slot.opened_bytes.store(0);
        slot.denied.store(0);
        slot.gpu_time_us.store(0);
        slot.throttled_us.store(0);
        slot.launches.store(0);
        slot.long_kernels.store(0);
        slot.longest_kernel_us.store(0);
        slot.state.store(state & !STATE_MASK);
        if state & STATE_MASK == STATE_OWNED {
            self.header.reclaimed.fetch_add(1);
        }
    }

    /// Takes away what a dead process held, but for memory that it had made available to others and that may still
    /// be open there. The caller holds the slot's lock.
    ///
    /// The memory of a process lives on with those who have opened it. Nobody can say whose memory a process has
    /// open, so as much of it stays in the slot as all the living have open without paying for it, and no more than
    /// the dead had made available. It is looked at again with every look for dead processes, and gone when nobody
    /// has anything open any more. Whoever opens memory notes that before it looks at what is available
    /// ([`Region::exported_bytes`]); so either it finds that it has to pay, or it is found here.
    pub fn reclaim_slot(&self, index: SlotIndex) {
        let Some(slot) = self.slot(index) else { return };
        let state = slot.state.load();
        let used = slot.used_bytes.load();
        // What was left behind once was in full, whatever was written since.
        let most = if state & STATE_MASK == STATE_ORPHANED {
            used
        } else {
            used.min(slot.exported_bytes.load())
        };
        if most == 0 {
            return self.clear(index);
        }
        slot.state.store((state & !STATE_MASK) | STATE_ORPHANED);
        let mut left = most.min(self.opened_by_others(index));
        slot.exported_bytes.store(left);
        // Opened by somebody who had seen what was available until now.
        let since = most.min(self.opened_by_others(index));
        if since > left {
            left = since;
            slot.exported_bytes.store(left);
        }
        if left == 0 {
            return self.clear(index);
        }
        slot.used_bytes.store(left);
        slot.in_flight_bytes.store(0);
        slot.driver_bytes.store(0);
        slot.opened_bytes.store(0);
        if state & STATE_MASK == STATE_OWNED {
            self.header.reclaimed.fetch_add(1);
        }
    }

    /// What others have open without paying for it, less what is left behind for that in slots before this one.
    ///
    /// Only in those, since two may be looked at by two at the same time: if each counted on the other's, neither
    /// would stay charged. What is too much for a moment is gone with the next look at the later one.
    fn opened_by_others(&self, index: SlotIndex) -> u64 {
        let others = (0..self.slots().len())
            .filter_map(SlotIndex::new)
            .filter(|other| *other != index);
        let (mut open, mut orphaned) = (0u64, 0u64);
        for other in others {
            let Some(slot) = self.slot(other) else {
                continue;
            };
            if !self.is_orphaned(other) {
                open = open.saturating_add(slot.opened_bytes.load());
            } else if other < index {
                // While it is being looked at, what stays is written to one before the other.
                let stays = slot.used_bytes.load().min(slot.exported_bytes.load());
                orphaned = orphaned.saturating_add(stays);
            }
        }
        open.saturating_sub(orphaned)
    }

    /// Bytes that the processes of the share have made available to others, as far as their slots say.
    #[must_use]
    pub fn exported_bytes(&self) -> u64 {
        self.slots()
            .iter()
            .map(|slot| slot.exported_bytes.load())
            .fold(0, u64::saturating_add)
    }

    /// Takes `bytes` for the slot's owner.
    ///
    /// # Errors
    /// [`LimitExceeded`] if the share would exceed `limit_bytes`; nothing is taken then.
    pub fn reserve(
        &self,
        index: SlotIndex,
        bytes: u64,
        limit_bytes: u64,
    ) -> Result<(), LimitExceeded> {
        let slot = self.slot(index).ok_or(LimitExceeded)?;
        let limit_bytes = limit_bytes.min(MAX_BYTES);
        // A refusal needs no step that others could see.
        if self.total_bytes().saturating_add(bytes) > limit_bytes {
            return Err(LimitExceeded);
        }
        slot.in_flight_bytes.fetch_add(bytes);
        let outcome = self.raise_total(bytes, limit_bytes);
        if let Ok(total) = outcome {
            let used = slot.used_bytes.fetch_add(bytes).wrapping_add(bytes);
            raise(&slot.peak_bytes, used);
            raise(&self.header.peak_bytes, total);
        }
        slot.in_flight_bytes.fetch_sub(bytes);
        outcome.map(|_| ())
    }

    /// Takes up to `bytes`, as much as there is room for, and returns how much.
    pub fn reserve_up_to(&self, index: SlotIndex, bytes: u64, limit_bytes: u64) -> u64 {
        loop {
            let room = limit_bytes
                .min(MAX_BYTES)
                .saturating_sub(self.total_bytes());
            let part = bytes.min(room);
            if part == 0 || self.reserve(index, part, limit_bytes).is_ok() {
                return part;
            }
        }
    }

    /// Takes `bytes` whatever the limit: for memory that the driver has given already.
    pub fn charge(&self, index: SlotIndex, bytes: u64) {
        let room = MAX_BYTES.saturating_sub(self.total_bytes());
        // Cannot fail below the counter's own end; beyond it the counter saturates and refuses everything.
        let _ = self.reserve(index, bytes.min(room), MAX_BYTES);
    }

    /// Returns up to `bytes` of what the slot's owner holds and says how much that was.
    pub fn release(&self, index: SlotIndex, bytes: u64) -> u64 {
        let Some(slot) = self.slot(index) else {
            return 0;
        };
        slot.in_flight_bytes.fetch_add(bytes);
        let taken = lower(&slot.used_bytes, bytes);
        self.lower_total(taken);
        slot.in_flight_bytes.fetch_sub(bytes);
        taken
    }

    /// Takes `bytes` for the slot's owner; before it refuses, it makes sure by rebuilds that the bytes are
    /// really not there. `me` is the caller's own slot, see [`Region::rebuild`].
    ///
    /// # Errors
    /// [`LimitExceeded`] if the share would exceed `limit_bytes`; nothing is taken then.
    pub fn reserve_or_rebuild(
        &self,
        me: SlotIndex,
        bytes: u64,
        limit_bytes: u64,
    ) -> Result<(), LimitExceeded> {
        for _ in 0..MAX_REBUILDS {
            if self.reserve(me, bytes, limit_bytes).is_ok() {
                return Ok(());
            }
            match self.rebuild(me) {
                Rebuild::Exact => return self.reserve(me, bytes, limit_bytes),
                Rebuild::Contended => core::hint::spin_loop(),
            }
        }
        Err(LimitExceeded)
    }

    /// Lowers the total to what the slots say, so that bytes of dead processes are available again.
    ///
    /// `me` names the caller's own slot. A process runs one rebuild at a time.
    pub fn rebuild(&self, me: SlotIndex) -> Rebuild {
        let total = &self.header.total;
        let seen = total.load();
        let marked = pack(bytes_of(seen), me.rebuild_mark());
        if total.compare_exchange(seen, marked).is_err() {
            return Rebuild::Contended;
        }
        let (sum, is_exact) = self.sum();
        if sum < bytes_of(seen) {
            if total.compare_exchange(marked, pack(sum, 0)).is_err() {
                return Rebuild::Contended;
            }
            self.header.epoch.fetch_add(1);
        }
        if is_exact {
            Rebuild::Exact
        } else {
            Rebuild::Contended
        }
    }

    /// What the slots hold and whether nothing was under way. If the total does not change meanwhile, the sum is
    /// at least what live processes hold: a change that is between its steps is found in `in flight` before or
    /// after `used`, or has not reached the total yet.
    fn sum(&self) -> (u64, bool) {
        let mut sum = 0u64;
        let mut is_exact = true;
        for slot in self.slots() {
            let before = slot.in_flight_bytes.load();
            let used = slot.used_bytes.load();
            let after = slot.in_flight_bytes.load();
            is_exact &= before == 0 && after == 0;
            sum = sum
                .saturating_add(used)
                .saturating_add(before)
                .saturating_add(after);
        }
        (sum.min(MAX_BYTES), is_exact)
    }

    fn raise_total(&self, bytes: u64, limit_bytes: u64) -> Result<u64, LimitExceeded> {
        let total = &self.header.total;
        let mut seen = total.load();
        loop {
            let raised = bytes_of(seen).saturating_add(bytes);
            if raised > limit_bytes {
                return Err(LimitExceeded);
            }
            match total.compare_exchange(seen, pack(raised, 0)) {
                Ok(_) => return Ok(raised),
                Err(found) => seen = found,
            }
        }
    }

    fn lower_total(&self, bytes: u64) {
        let total = &self.header.total;
        let mut seen = total.load();
        while let Err(found) =
            total.compare_exchange(seen, pack(bytes_of(seen).saturating_sub(bytes), 0))
        {
            seen = found;
        }
    }
}

const fn bytes_of(total: u64) -> u64 {
    total & MAX_BYTES
}

fn pack(bytes: u64, mark: u16) -> u64 {
    (u64::from(mark) << BYTES_BITS) | (bytes & MAX_BYTES)
}

/// Subtracts up to `bytes` without going below zero and returns how much.
fn lower<A: Word>(word: &A, bytes: u64) -> u64 {
    let mut seen = word.load();
    loop {
        let taken = seen.min(bytes);
        match word.compare_exchange(seen, seen.saturating_sub(taken)) {
            Ok(_) => return taken,
            Err(found) => seen = found,
        }
    }
}

/// Raises a high-water mark.
fn raise<A: Word>(word: &A, value: u64) {
    let mut seen = word.load();
    while seen < value {
        match word.compare_exchange(seen, value) {
            Ok(_) => return,
            Err(found) => seen = found,
        }
    }
}
