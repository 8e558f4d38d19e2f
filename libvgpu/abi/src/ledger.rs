//! The protocol that keeps a share's memory usage exact while processes allocate, free and die.
//!
//! A share has one **total**; each process has a slot with **used** and **in flight**. Every process may read all
//! words; a process writes the total and its own slot, and the process that holds the lock of a dead owner's slot
//! clears that slot.
//!
//! ```text
//! reserve x:  in flight += x │ total += x if it stays within the limit │ used += x │ in flight −= x
//! release x:  in flight += x │ used −= x                              │ total −= x │ in flight −= x
//! rebuild:    mark the total │ sum used + in flight of all slots │ if the mark is still there, lower the total to the sum
//! ```
//!
//! Invariants, whichever process dies after whichever step:
//! - **The total is never less than the usage of live processes.** A change of the total clears the mark, which
//!   invalidates a concurrent rebuild; `in flight` covers a change whose step on the total is still to come. Only a
//!   death can leave the total too high, and a rebuild precedes every denial.
//! - **The total never exceeds the limit**, not even for a moment: only the compare-and-swap of a reservation
//!   raises it. A rolled-back reservation of another process denies nothing.
//! - No process waits for another: a process that is stopped between two steps delays no other.
//!
//! `tests/schedules.rs` and `tests/loom.rs` enumerate the interleavings; `tests/ledger.rs` adds a death after each
//! step.

use crate::atomic::Word;
use crate::region::{Header, Slot, SlotIndex};

/// Low bits of the total word that hold bytes; the others hold the mark of a rebuild.
const BYTES_BITS: u32 = 48;

/// Largest number of bytes that a share can count, 256 TiB − 1.
pub const MAX_BYTES: u64 = (1 << BYTES_BITS) - 1;

/// Number of rebuilds before a denial while other processes change the total.
const MAX_REBUILDS: u32 = 256;

const STATE_OWNED: u64 = 1;
const STATE_ORPHANED: u64 = 2;
const STATE_MASK: u64 = 0xff;
const GENERATION_SHIFT: u32 = 8;

/// A share's region: one header and the slots.
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

/// Denial: the allocation would exceed the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitExceeded;

/// Result of a rebuild.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rebuild {
    /// The total is the sum of the slots.
    Exact,
    /// Other processes changed the total; it may still be too high.
    Contended,
}

/// The owner of a slot, for people and the node agent; the protocol ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process ID in the owner's own PID namespace.
    pub pid: u32,
    /// Start time, clock ticks since boot.
    pub start_time: u64,
    /// Inode of the PID namespace.
    pub pid_namespace: u64,
}

impl<'a, A: Word> Region<'a, A> {
    /// Returns a region made of `header` and `slots`.
    #[must_use]
    pub fn new(header: &'a Header<A>, slots: &'a [Slot<A>]) -> Self {
        Self { header, slots }
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &'a Header<A> {
        self.header
    }

    /// Returns the slots that were ever in use. The header's number is bounded by the actual slots.
    #[must_use]
    pub fn slots(&self) -> &'a [Slot<A>] {
        let in_use = usize::try_from(self.header.slots_in_use.load()).unwrap_or(usize::MAX);
        self.slots.get(..in_use).unwrap_or(self.slots)
    }

    /// Returns the slot at `index`.
    #[must_use]
    pub fn slot(&self, index: SlotIndex) -> Option<&'a Slot<A>> {
        self.slots.get(index.get())
    }

    /// Returns the bytes used by all processes. Includes the usage of dead processes until a rebuild.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        bytes_of(self.header.total.load())
    }

    /// Returns whether the slot is free, according to its state.
    #[must_use]
    pub fn is_free(&self, index: SlotIndex) -> bool {
        !matches!(self.state(index), Some(STATE_OWNED | STATE_ORPHANED))
    }

    /// Returns whether the slot has an owner, according to its state.
    #[must_use]
    pub fn is_in_use(&self, index: SlotIndex) -> bool {
        self.state(index) == Some(STATE_OWNED)
    }

    /// Returns whether [`Region::reclaim_slot`] kept part of a dead process's usage in the slot.
    #[must_use]
    pub fn is_orphaned(&self, index: SlotIndex) -> bool {
        self.state(index) == Some(STATE_ORPHANED)
    }

    fn state(&self, index: SlotIndex) -> Option<u64> {
        self.slot(index).map(|slot| slot.state.load() & STATE_MASK)
    }

    /// Takes a slot for `owner`, clears the usage of a dead owner, and returns the new generation. The caller holds
    /// the slot's lock.
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

    /// Returns whether the slot still has the owner of that generation.
    #[must_use]
    pub fn is_owned(&self, index: SlotIndex, generation: u64) -> bool {
        self.slot(index)
            .is_some_and(|slot| slot.state.load() == (generation << GENERATION_SHIFT) | STATE_OWNED)
    }

    /// Empties a slot and marks it free. The caller holds the slot's lock, so the owner is dead or the caller.
    ///
    /// The total keeps the slot's usage until the next [`Region::rebuild`].
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

    /// Clears the usage of a dead process, except for exported memory that may still be open in other processes.
    /// The caller holds the slot's lock.
    ///
    /// Memory outlives its process while another process has it open. The region does not say whose memory a
    /// process has open. So the slot keeps as many bytes as all live processes have open without a charge, at most
    /// the exported bytes of the dead process: the slot is *orphaned*. Each reclaim checks it again and frees it
    /// when nothing is open any more. A process that opens memory records that before it reads the exported bytes
    /// ([`Region::exported_bytes`]): either it finds that it must pay, or this function finds its record.
    pub fn reclaim_slot(&self, index: SlotIndex) {
        let Some(slot) = self.slot(index) else { return };
        let state = slot.state.load();
        let used = slot.used_bytes.load();
        // An orphaned slot contains only exported bytes.
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
        // A process that read the previous value may have opened memory since.
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

    /// Returns the bytes that other processes have open without a charge, minus the bytes kept for that in orphaned
    /// slots before this one.
    ///
    /// Only in slots before this one: two processes may reclaim two slots at the same time, and if each counted on
    /// the other slot, neither would stay charged. The next reclaim of the later slot removes an excess.
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
                // During a reclaim one of the two words has the final value already.
                let stays = slot.used_bytes.load().min(slot.exported_bytes.load());
                orphaned = orphaned.saturating_add(stays);
            }
        }
        open.saturating_sub(orphaned)
    }

    /// Returns the bytes that the share's processes have exported, according to their slots.
    #[must_use]
    pub fn exported_bytes(&self) -> u64 {
        self.slots()
            .iter()
            .map(|slot| slot.exported_bytes.load())
            .fold(0, u64::saturating_add)
    }

    /// Returns the bytes that the share's processes have open without a charge, according to their slots.
    #[must_use]
    pub fn opened_bytes(&self) -> u64 {
        self.slots()
            .iter()
            .map(|slot| slot.opened_bytes.load())
            .fold(0, u64::saturating_add)
    }

    /// Returns the bytes charged for contexts, according to the slots. Includes those of dead processes until their slots
    /// are reclaimed.
    #[must_use]
    pub fn driver_bytes(&self) -> u64 {
        self.slots()
            .iter()
            .map(|slot| slot.driver_bytes.load())
            .fold(0, u64::saturating_add)
    }

    /// Reserves `bytes` for the slot's owner.
    ///
    /// # Errors
    /// [`LimitExceeded`] if the share would exceed `limit_bytes`; then nothing is reserved.
    pub fn reserve(
        &self,
        index: SlotIndex,
        bytes: u64,
        limit_bytes: u64,
    ) -> Result<(), LimitExceeded> {
        let slot = self.slot(index).ok_or(LimitExceeded)?;
        let limit_bytes = limit_bytes.min(MAX_BYTES);
        // A denial changes no word that others could see.
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

    /// Reserves up to `bytes`, as much as fits, and returns the amount.
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

    /// Reserves `bytes` whatever the limit: for memory that is allocated already.
    pub fn charge(&self, index: SlotIndex, bytes: u64) {
        let room = MAX_BYTES.saturating_sub(self.total_bytes());
        // Cannot fail below the counter's maximum; at the maximum all requests are denied.
        let _ = self.reserve(index, bytes.min(room), MAX_BYTES);
    }

    /// Releases up to `bytes` of the slot's usage and returns the amount.
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

    /// Reserves `bytes` for the owner of slot `me`; rebuilds the total before it denies.
    ///
    /// # Errors
    /// [`LimitExceeded`] if the share would exceed `limit_bytes`; then nothing is reserved.
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

    /// Lowers the total to the sum of the slots, which frees the bytes of dead processes.
    ///
    /// `me` is the caller's own slot. A process runs one rebuild at a time.
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

    /// Returns the usage in all slots and whether nothing was in flight. If the total does not change meanwhile,
    /// the sum is at least the usage of live processes: `in flight` before or after `used` covers a change between
    /// its steps, or the change has not reached the total yet.
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

/// Subtracts up to `bytes`, not below zero, and returns the amount.
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
