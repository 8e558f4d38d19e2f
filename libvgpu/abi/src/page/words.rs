//! The words of a page outside of its records, which the node agent changes one by one.

use super::{IDENTITY_OFFSET, IDENTITY_SIZE, PageWrite, write_word};
use crate::bucket::TokenSlice;

/// Offset of the word that [`token`] writes, an aligned little-endian `u64`.
///
/// A share whose policy is [`crate::ComputePolicy::Token`] launches only while `CLOCK_MONOTONIC`, in microseconds, is
/// below it, and not below the word at [`SLICE_START_OFFSET`]. 0 is no token. See [`crate::bucket::Grant`] for what happens when no
/// agent writes it.
pub const TOKEN_OFFSET: usize = 24;

/// Offset of the word that [`own_time`] writes, an aligned little-endian `u64`.
///
/// Parts per million of the time measured by events that is the share's own; the rest is time slices of
/// neighbours, which events cannot tell apart. 0, and anything above a million, is a million.
pub const OWN_TIME_OFFSET: usize = 32;

/// Offset of the word that says when a turn begins, an aligned little-endian `u64`. It is written before the word at
/// [`TOKEN_OFFSET`] and read after it, so that no turn begins with the end of another one.
pub const SLICE_START_OFFSET: usize = 40;

/// Offset of the word that [`yield_until`] writes, an aligned little-endian `u64`.
///
/// Until that moment, in microseconds of `CLOCK_MONOTONIC`, the share makes no launches: a share of higher priority is at
/// work. It ends by itself, so that an agent that dies stops nobody; see [`crate::bucket::yields_for_us`].
pub const YIELD_UNTIL_OFFSET: usize = 48;

/// Offset of the word that [`window`] writes, an aligned little-endian `u64`.
///
/// Microseconds of GPU time that a process of the share may have launched and not seen ended: about so long does a share
/// of higher priority wait for the card. One launch may always be under way. 0 is no bound.
pub const WINDOW_OFFSET: usize = 56;

/// Offset of the word that [`notify`] writes, an aligned little-endian `u64`.
///
/// Unless it is 0, the share says in [`crate::region::Header::busy_until_us`] for how long it will be at work, and calls
/// the node agent when that begins: it sets the times of its region's file to the present, of which inotify tells.
pub const NOTIFY_OFFSET: usize = 216;

/// Offset of the word that [`lent`] writes, an aligned little-endian `u64`.
///
/// Unless it is 0, the share is idle and others use what is guaranteed to it. Its first launch then calls the node agent, in
/// the same way as at [`NOTIFY_OFFSET`], so that they use less at once; see [`crate::bucket::resumes_demand`].
pub const LENT_OFFSET: usize = 224;

const _: () = {
    assert!(TOKEN_OFFSET.is_multiple_of(8));
    assert!(OWN_TIME_OFFSET.is_multiple_of(8));
    assert!(SLICE_START_OFFSET.is_multiple_of(8));
    assert!(YIELD_UNTIL_OFFSET.is_multiple_of(8));
    assert!(WINDOW_OFFSET.is_multiple_of(8));
    assert!(WINDOW_OFFSET + 8 <= IDENTITY_OFFSET);
    assert!(NOTIFY_OFFSET.is_multiple_of(8));
    assert!(IDENTITY_OFFSET + IDENTITY_SIZE <= NOTIFY_OFFSET);
    assert!(NOTIFY_OFFSET + 8 == LENT_OFFSET);
};

/// The writes, to be done in this order, that give a share in token mode its next turn, or a longer one.
#[must_use]
pub fn token_slice(slice: TokenSlice) -> [PageWrite; 2] {
    [
        write_word(SLICE_START_OFFSET, slice.from_us),
        token(slice.until_us),
    ]
}

/// The write that ends the turn of a share in token mode at `until_us` of `CLOCK_MONOTONIC`; 0 takes the token back.
#[must_use]
pub fn token(until_us: u64) -> PageWrite {
    write_word(TOKEN_OFFSET, until_us)
}

/// The write that tells a share how many parts per million of the time that its events measure are its own. See
/// [`crate::contention`] for where the figure comes from.
#[must_use]
pub fn own_time(parts_per_million: u32) -> PageWrite {
    write_word(OWN_TIME_OFFSET, u64::from(parts_per_million))
}

/// The write that lets a share make no launches until `until_us` of `CLOCK_MONOTONIC`; 0 lets it go on.
#[must_use]
pub fn yield_until(until_us: u64) -> PageWrite {
    write_word(YIELD_UNTIL_OFFSET, until_us)
}

/// The write that bounds what a share may have in the card's queues, microseconds of GPU time; 0 is no bound.
#[must_use]
pub fn window(us: u32) -> PageWrite {
    write_word(WINDOW_OFFSET, u64::from(us))
}

/// The write that says whether a share calls the agent.
#[must_use]
pub fn notify(notify: bool) -> PageWrite {
    write_word(NOTIFY_OFFSET, u64::from(notify))
}

/// The write that says whether others use the time of a share that is idle.
#[must_use]
pub fn lent(lent: bool) -> PageWrite {
    write_word(LENT_OFFSET, u64::from(lent))
}
