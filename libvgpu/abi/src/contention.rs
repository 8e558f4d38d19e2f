//! Taking neighbours' time slices out of what a share's events measure.
//!
//! Contexts of different processes run by turns. An event pair round a kernel that was interrupted measures the
//! neighbours' turns too, and no share can tell from inside. The node agent can, and says in the page for each share how
//! much of what its events measure is its own, in parts of [`ALL_PPM`].

/// The figure for [`crate::own_time`] when everything measured is a share's own.
pub const ALL_PPM: u32 = 1_000_000;
