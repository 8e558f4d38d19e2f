//! The words of a page outside its records, which the node agent changes one by one.

use super::{IDENTITY_OFFSET, IDENTITY_SIZE, PageWrite, write_word};
use crate::contention::OwnTime;

/// Offset of the word that [`own_time`] writes, an aligned little-endian `u64`.
///
/// Which part of the time measured by events is the share's own ([`OwnTime`]); the rest is time slices of other shares. A
/// reader that knows parts only takes any other word for the whole time.
pub const OWN_TIME_OFFSET: usize = 32;

/// Offset of the word that [`yield_until`] writes, an aligned little-endian `u64`.
///
/// Until that time, in microseconds of `CLOCK_MONOTONIC`, the share makes no launches: a share of higher priority
/// is busy. A yield expires by itself, so a crashed agent stalls no share; see [`crate::bucket::yields_for_us`].
pub const YIELD_UNTIL_OFFSET: usize = 48;

/// Offset of the word that [`window`] writes, an aligned little-endian `u64`.
///
/// GPU time that a process of the share may have in flight, microseconds: about the time that a share of higher
/// priority waits for the GPU. One launch may always be in flight. 0 is no bound.
pub const WINDOW_OFFSET: usize = 56;

/// Offset of the word that [`notify`] writes, an aligned little-endian `u64`.
///
/// Unless it is 0, the share estimates in [`crate::region::Header::busy_until_us`] when its work ends, and notifies
/// the node agent when work starts: it sets the timestamps of its region's file, which inotify reports.
pub const NOTIFY_OFFSET: usize = 216;

/// Offset of the word that [`lent`] writes, an aligned little-endian `u64`.
///
/// Unless it is 0, the share is idle and other shares use its guarantee. Its first launch notifies the node agent
/// as at [`NOTIFY_OFFSET`], which reclaims the lent time at once; see [`crate::bucket::resumes_demand`].
pub const LENT_OFFSET: usize = 224;

/// Offset of the word that [`suspended`] writes, an aligned little-endian `u64`.
///
/// Unless it is 0, a process of the share that is not yet on the GPU waits before it creates a context. A process charges a
/// context first and reads the word then; the node driver reads the charges after the word was written. So one of both sees
/// the other. Processes that are on the GPU are locked by the node driver, by libcuda's own means: a call that libcuda may block
/// copies the word to [`crate::region::Header::demanded`] before. Each suspension has another word, so an earlier demand is not
/// taken for one of this suspension.
pub const SUSPENDED_OFFSET: usize = 232;

const _: () = {
    assert!(OWN_TIME_OFFSET.is_multiple_of(8));
    assert!(YIELD_UNTIL_OFFSET.is_multiple_of(8));
    assert!(WINDOW_OFFSET.is_multiple_of(8));
    assert!(WINDOW_OFFSET + 8 <= IDENTITY_OFFSET);
    assert!(NOTIFY_OFFSET.is_multiple_of(8));
    assert!(IDENTITY_OFFSET + IDENTITY_SIZE <= NOTIFY_OFFSET);
    assert!(NOTIFY_OFFSET + 8 == LENT_OFFSET);
    assert!(LENT_OFFSET + 8 == SUSPENDED_OFFSET);
};

/// Returns the write that sets which part of the time that the share's events measure is its own.
#[must_use]
pub fn own_time(own: OwnTime) -> PageWrite {
    write_word(OWN_TIME_OFFSET, own.word())
}

/// Returns the write that makes a share yield until `until_us` of `CLOCK_MONOTONIC`; 0 ends the yield.
#[must_use]
pub fn yield_until(until_us: u64) -> PageWrite {
    write_word(YIELD_UNTIL_OFFSET, until_us)
}

/// Returns the write that bounds the share's work in flight, microseconds of GPU time; 0 is no bound.
#[must_use]
pub fn window(us: u32) -> PageWrite {
    write_word(WINDOW_OFFSET, u64::from(us))
}

/// Returns the write that sets whether a share notifies the agent.
#[must_use]
pub fn notify(notify: bool) -> PageWrite {
    write_word(NOTIFY_OFFSET, u64::from(notify))
}

/// Returns the write that sets whether the time of an idle share is lent to others.
#[must_use]
pub fn lent(lent: bool) -> PageWrite {
    write_word(LENT_OFFSET, u64::from(lent))
}

/// Returns the write that makes processes wait that are not yet on the GPU. `suspension` identifies the suspension; 0 ends the wait.
#[must_use]
pub fn suspended(suspension: u64) -> PageWrite {
    write_word(SUSPENDED_OFFSET, suspension)
}
