//! The operating system without its allocator: system calls, lists of fixed size, paths, locks, log lines.

pub(crate) mod elements;
pub(crate) mod guard;
#[cfg(feature = "kill-points")]
pub(crate) mod kill_points;
pub(crate) mod log;
pub(crate) mod path;
pub(crate) mod sys;
pub(crate) mod temporary_list;
