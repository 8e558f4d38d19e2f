//! The shares that a process has, and where its limits come from.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::share::Share;

/// Shares that one process can have.
pub(crate) const MAX_SHARES: usize = 64;

/// Where limits come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LimitsSource {
    /// There are none.
    None,
    /// Limits pages.
    Pages,
    /// Limits pages, at least one of which cannot be read: every card without a share is refused.
    UnreadablePages,
    /// The environment.
    Environment,
    /// The environment, but a variable cannot be understood: every card is refused.
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

    /// The one of that number.
    pub(crate) fn of(number: u32) -> Self {
        let index = usize::try_from(number).unwrap_or(0);
        Self::ALL.get(index).copied().unwrap_or(Self::None)
    }
}

/// The shares of a process. All zeroes is none.
pub(crate) struct Shares {
    count: AtomicU32,
    entries: [Share; MAX_SHARES],
}

impl Shares {
    /// Those that are in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Share> {
        let count = self.count.load(Ordering::Acquire);
        self.entries
            .iter()
            .take(usize::try_from(count).unwrap_or(0))
    }

    /// A place that is not in use yet; [`Shares::publish`] makes it so. The caller holds the process's guard or is the
    /// thread that looks first.
    pub(crate) fn next(&self) -> Option<&Share> {
        let count = self.count.load(Ordering::Relaxed);
        self.entries.get(usize::try_from(count).ok()?)
    }

    /// Puts the share of [`Shares::next`] to use.
    pub(crate) fn publish(&self) {
        self.count.fetch_add(1, Ordering::Release);
    }
}
