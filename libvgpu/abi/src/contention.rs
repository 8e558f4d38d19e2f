//! Correction of a share's measurements for time slices of co-located shares.
//!
//! Contexts of different processes are time-sliced. An event pair around an interrupted kernel also measures the
//! slices of other processes, and a process cannot distinguish them. The node agent can: the limits page states for
//! each share its own part of the measured time, in parts of [`ALL_PPM`].

/// Value of [`crate::own_time`] if all measured time is the share's own.
pub const ALL_PPM: u32 = 1_000_000;
