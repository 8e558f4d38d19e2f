//! The node: its files, mounts, locks and processes, and the options of this program.

pub mod artifacts;
pub mod claim;
pub mod files;
pub mod gpu_users;
pub mod layout;
pub mod limits_page;
pub mod lock;
pub mod mounts;
pub mod options;
pub mod process;
pub mod selinux;
pub mod tmpfs;
