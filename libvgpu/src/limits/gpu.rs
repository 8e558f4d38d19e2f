//! A GPU as the process may use it: all shares with its UUID together.

use drava_vgpu_abi::DeviceUuid;
use drava_vgpu_abi::ledger::LimitExceeded;

use crate::limits::imports::Imports;
use crate::limits::share::{Headroom, Share};
use crate::limits::shares::{MAX_SHARES, Shares};
use crate::system::sys;

/// A limited GPU.
#[derive(Clone, Copy)]
pub(crate) struct Gpu {
    shares: &'static Shares,
    /// Index of its first share. Small, so that a GPU is passed in registers.
    first_share: u8,
}

/// Memory limit and use of a GPU for this process.
#[derive(Clone, Copy)]
pub(crate) struct Amount {
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
}

impl Amount {
    pub(crate) fn free_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

impl Gpu {
    /// Returns the GPU with this UUID, if it has a share.
    pub(crate) fn of(shares: &'static Shares, uuid: DeviceUuid) -> Option<Self> {
        let first = shares.iter().position(|share| share.uuid() == uuid)?;
        Some(Self {
            shares,
            first_share: u8::try_from(first).ok()?,
        })
    }

    /// Returns the GPU with that [`Gpu::index`].
    pub(crate) fn at(shares: &'static Shares, index: u8) -> Option<Self> {
        shares.iter().nth(usize::from(index))?;
        Some(Self {
            shares,
            first_share: index,
        })
    }

    /// Returns another GPU of the process by its [`Gpu::index`].
    pub(crate) fn other(self, index: u8) -> Option<Self> {
        Self::at(self.shares, index)
    }

    /// Returns a small number that identifies the GPU.
    pub(crate) fn index(self) -> u8 {
        self.first_share
    }

    pub(crate) fn shares(self) -> impl Iterator<Item = &'static Share> {
        let mut others = self.shares.iter().skip(usize::from(self.first_share));
        let first = others.next();
        let is_same = move |share: &&Share| first.is_some_and(|first| first.uuid() == share.uuid());
        first.into_iter().chain(others.filter(is_same))
    }

    /// Returns whether GPU memory is limited. Limits of shares add up, so one unlimited share lifts the limit.
    pub(crate) fn is_memory_limited(self) -> bool {
        self.shares().all(Share::is_memory_limited)
    }

    /// Returns whether GPU time is metered. Limits of shares add up, so one unmetered share lifts the limit.
    pub(crate) fn is_metered(self) -> bool {
        self.shares().all(Share::is_metered)
    }

    /// Returns whether a process that is not yet on the GPU waits. A process with several shares of a GPU cannot tell whose
    /// memory a context takes, so it waits for all of them.
    pub(crate) fn is_suspended(self) -> bool {
        self.shares().any(Share::is_suspended)
    }

    /// Returns limit and use.
    pub(crate) fn amount(self) -> Amount {
        let _guard = self.shares.guard();
        let mut amount = Amount {
            limit_bytes: 0,
            used_bytes: 0,
        };
        self.reclaim();
        for share in self.shares() {
            amount.limit_bytes = amount.limit_bytes.saturating_add(share.limit_bytes());
            amount.used_bytes = amount.used_bytes.saturating_add(share.used_bytes());
        }
        amount
    }

    /// Returns whether plain allocations beyond the limit become managed memory.
    pub(crate) fn spills(self) -> bool {
        self.shares().any(Share::spills)
    }

    /// Returns the estimated memory of libcuda per context; `None` if no limits page has an estimate.
    pub(crate) fn driver_reserve_bytes(self) -> Option<u64> {
        self.shares().filter_map(Share::driver_reserve_bytes).max()
    }

    /// Reserves `bytes`, from one share if possible, else from several.
    pub(crate) fn reserve(self, bytes: u64) -> Result<(), LimitExceeded> {
        if !self.certainly_lacks(bytes)
            && (self.try_reserve(bytes) || self.reserve_after_reclaim(bytes))
        {
            Ok(())
        } else {
            Err(LimitExceeded)
        }
    }

    /// Counts a denied allocation.
    pub(crate) fn count_denied(self) {
        if let Some(share) = self.shares().next() {
            share.count_denied();
        }
    }

    /// Returns whether `bytes` are unavailable even after a reclaim. Memory that live processes free is available
    /// at once.
    #[inline]
    pub(crate) fn certainly_lacks(self, bytes: u64) -> bool {
        let headroom = self.headroom();
        headroom.bytes < bytes && sys::now_ns() < headroom.valid_until_ns
    }

    #[inline]
    pub(super) fn headroom(self) -> Headroom {
        let none = Headroom {
            bytes: 0,
            valid_until_ns: u64::MAX,
        };
        self.shares()
            .map(Share::headroom)
            .fold(none, Headroom::with)
    }

    /// Reclaims memory of dead processes and retries.
    #[cold]
    fn reserve_after_reclaim(self, bytes: u64) -> bool {
        let _guard = self.shares.guard();
        self.reclaim();
        self.shares().any(|share| share.reserve_or_rebuild(bytes)) || self.reserve_parts(bytes)
    }

    /// Reclaims memory of dead processes and charges this process for the part that it has open. The caller holds
    /// the process's guard.
    fn reclaim(self) {
        for share in self.shares() {
            share.reclaim();
        }
        if let Some(imports) = self.imports() {
            let missing = imports.missing_bytes(self.exported_bytes());
            if missing != 0 {
                self.charge(missing);
                imports.add_charged(missing);
                self.publish(imports);
            }
        }
    }

    fn imports(self) -> Option<&'static Imports> {
        self.shares.imports.get(usize::from(self.first_share))
    }

    fn exported_bytes(self) -> u64 {
        self.shares()
            .map(Share::exported_bytes)
            .fold(0, u64::saturating_add)
    }

    fn opened_bytes(self) -> u64 {
        self.shares()
            .map(Share::opened_bytes)
            .fold(0, u64::saturating_add)
    }

    /// Records that other processes may open `bytes` of this process's memory.
    pub(crate) fn export(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.add_exported_bytes(bytes);
        }
    }

    /// Reverts [`Gpu::export`].
    pub(crate) fn end_export(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.subtract_exported_bytes(bytes);
        }
    }

    /// Ends the export of `bytes` and releases their charge, except what processes of this share have open without
    /// a charge of their own.
    pub(crate) fn end_export_charged(self, bytes: u64) {
        let Some(imports) = self.imports() else {
            return;
        };
        let released = {
            let _guard = self.shares.guard();
            let spare = self.exported_bytes().saturating_sub(self.opened_bytes());
            let ended = spare.min(bytes);
            self.end_export(ended);
            // A process publishes what it opens before it reads the exported bytes; see `Gpu::import`.
            let short = self.opened_bytes().saturating_sub(self.exported_bytes());
            let restored = short.min(ended);
            self.export(restored);
            let released = ended.saturating_sub(restored);
            imports.leave_open(bytes.saturating_sub(released));
            released
        };
        self.release(released);
    }

    /// Releases what [`Gpu::end_export_charged`] left charged, as far as it was closed meanwhile. Returns whether
    /// there was any.
    pub(crate) fn release_left_open(self) -> bool {
        let left = self.imports().map_or(0, Imports::take_left_open);
        if left != 0 {
            self.end_export_charged(left);
        }
        left != 0
    }

    /// Opens memory of another process, with a charge if that process is not in this share.
    pub(crate) fn import(self, bytes: u64) -> Result<(), LimitExceeded> {
        let Some((imports, missing)) = self.open_import(bytes) else {
            return Err(LimitExceeded);
        };
        if missing == 0 {
            return Ok(());
        }
        let outcome = self.reserve(missing);
        let _guard = self.shares.guard();
        if outcome.is_err() {
            imports.undo_open(bytes, missing);
        }
        self.publish(imports);
        outcome
    }

    /// As [`Gpu::import`], of memory that is open already.
    pub(crate) fn import_existing(self, bytes: u64) {
        if let Some((imports, missing)) = self.open_import(bytes) {
            self.charge(missing);
            let _guard = self.shares.guard();
            self.publish(imports);
        }
    }

    /// Counts opened memory. Returns the bytes to charge, which are counted as charged.
    fn open_import(self, bytes: u64) -> Option<(&'static Imports, u64)> {
        let imports = self.imports()?;
        let _guard = self.shares.guard();
        imports.open(bytes);
        // Published before the exported bytes are read: see `Region::reclaim_slot`.
        self.publish(imports);
        let missing = imports.missing_bytes(self.exported_bytes());
        // Otherwise a concurrent reclaim would charge it as well.
        imports.add_charged(missing);
        Some((imports, missing))
    }

    /// Publishes what this process has open. The caller holds the process's guard.
    fn publish(self, imports: &Imports) {
        if let Some(share) = self.shares().next() {
            share.set_opened_bytes(imports.uncharged_bytes());
        }
    }

    /// Closes memory of another process and releases its charge.
    pub(crate) fn end_import(self, bytes: u64) {
        self.release(self.close_import(bytes));
    }

    /// Closes memory of another process and returns its charge, to be released.
    pub(crate) fn close_import(self, bytes: u64) -> u64 {
        let Some(imports) = self.imports() else {
            return 0;
        };
        let _guard = self.shares.guard();
        let surplus = imports.close(bytes);
        self.publish(imports);
        surplus
    }

    /// Reserves `bytes` if they are available without a reclaim.
    pub(crate) fn try_reserve(self, bytes: u64) -> bool {
        self.shares().any(|share| share.reserve(bytes))
    }

    fn reserve_parts(self, bytes: u64) -> bool {
        let mut parts = [0u64; MAX_SHARES];
        let mut missing = bytes;
        for (share, part) in self.shares().zip(&mut parts) {
            *part = share.reserve_up_to(missing);
            missing = missing.saturating_sub(*part);
        }
        if missing == 0 {
            return true;
        }
        for (share, part) in self.shares().zip(parts) {
            share.release(part);
        }
        false
    }

    /// Charges `bytes` that are allocated already.
    pub(crate) fn charge(self, bytes: u64) {
        if !self.try_reserve(bytes)
            && let Some(share) = self.shares().next()
        {
            share.charge(bytes);
        }
    }

    /// Releases `bytes` to the shares from which this process reserved them.
    pub(crate) fn release(self, bytes: u64) {
        let mut remaining = bytes;
        for share in self.shares() {
            if remaining == 0 {
                return;
            }
            remaining = remaining.saturating_sub(share.release(remaining));
        }
    }

    /// Records `bytes` of this process's usage as libcuda's own.
    pub(crate) fn add_driver_bytes(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.add_driver_bytes(bytes);
        }
    }

    /// Reverts [`Gpu::add_driver_bytes`].
    pub(crate) fn subtract_driver_bytes(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.subtract_driver_bytes(bytes);
        }
    }

    /// Corrects a reservation of `from` bytes to `to`, the real size.
    pub(crate) fn correct(self, from: u64, to: u64) {
        if to > from {
            self.charge(to.saturating_sub(from));
        } else {
            self.release(from.saturating_sub(to));
        }
    }
}
