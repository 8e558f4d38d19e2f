//! The shares of a process, and the source of its limits.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::limits::imports::Imports;
use crate::limits::share::Share;
use crate::system::guard::Guard;

/// Largest number of shares of a process.
pub(crate) const MAX_SHARES: usize = 64;

/// Source of the limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LimitsSource {
    /// None.
    None,
    /// Limits pages.
    Pages,
    /// Limits pages, at least one of them unreadable: every GPU without a share is denied.
    UnreadablePages,
    /// The environment.
    Environment,
    /// The environment, with an invalid variable: every GPU is denied.
    InvalidEnvironment,
}

impl LimitsSource {
    const ALL: [Self; 5] = [
        Self::None,
        Self::Pages,
        Self::UnreadablePages,
        Self::Environment,
        Self::InvalidEnvironment,
    ];

    /// Decodes a number.
    pub(crate) fn of(number: u32) -> Self {
        let index = usize::try_from(number).unwrap_or(0);
        Self::ALL.get(index).copied().unwrap_or(Self::None)
    }
}

/// The shares of a process. All zeroes is none.
pub(crate) struct Shares {
    guard: AtomicU32,
    count: AtomicU32,
    entries: [Share; MAX_SHARES],
    /// Memory of other processes that this one has open, by the index of the GPU's first share.
    pub(crate) imports: [Imports; MAX_SHARES],
}

impl Shares {
    /// Locks reclaim, rebuild, attaching shares and reference counts against other threads. Held briefly, never
    /// while libcuda is called.
    pub(crate) fn guard(&self) -> Guard<'_> {
        Guard::acquire(&self.guard)
    }

    /// Returns the published shares.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Share> {
        let count = self.count.load(Ordering::Acquire);
        self.entries
            .iter()
            .take(usize::try_from(count).unwrap_or(0))
    }

    /// Returns an unused share; [`Shares::publish`] publishes it. The caller holds the process's guard or
    /// initializes the process.
    pub(crate) fn next(&self) -> Option<&Share> {
        let count = self.count.load(Ordering::Relaxed);
        self.entries.get(usize::try_from(count).ok()?)
    }

    /// Publishes the share of [`Shares::next`].
    pub(crate) fn publish(&self) {
        self.count.fetch_add(1, Ordering::Release);
    }
}
