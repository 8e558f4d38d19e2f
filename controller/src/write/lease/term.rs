//! Term of a leader.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::operate::clock::Clock;

/// Uninterrupted time for which this replica holds the lease. A term that has ended never becomes valid again, so what was
/// decided in it is not written in a later one.
#[derive(Debug)]
pub struct Term {
    clock: Clock,
    /// End of validity; `None` after the end of the term.
    valid_until: Mutex<Option<Duration>>,
    revoked: CancellationToken,
}

impl Term {
    /// Creates a term that is valid until `valid_until` on `clock`.
    #[must_use]
    pub fn new(clock: Clock, valid_until: Duration) -> Self {
        Self {
            clock,
            valid_until: Mutex::new(Some(valid_until)),
            revoked: CancellationToken::new(),
        }
    }

    /// Returns whether a request of the leader may be sent now.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.remaining().is_some()
    }

    /// Waits for the end of the term.
    pub async fn ended(&self) {
        while let Some(remaining) = self.remaining() {
            tokio::select! {
                () = tokio::time::sleep(remaining) => {}
                () = self.revoked.cancelled() => {}
            }
        }
    }

    /// Extends the term. Returns false if it has ended.
    pub(super) fn extend(&self, valid_until: Duration) -> bool {
        let mut current = self.lock();
        self.end_if_due(&mut current);
        if current.is_some() {
            *current = current.max(Some(valid_until));
        }
        current.is_some()
    }

    /// Ends the term.
    pub(super) fn revoke(&self) {
        *self.lock() = None;
        self.revoked.cancel();
    }

    fn remaining(&self) -> Option<Duration> {
        let mut current = self.lock();
        self.end_if_due(&mut current);
        current.map(|until| until.saturating_sub(self.clock.now()))
    }

    fn end_if_due(&self, current: &mut Option<Duration>) {
        if current.is_some_and(|until| self.clock.now() >= until) {
            *current = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Duration>> {
        self.valid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
