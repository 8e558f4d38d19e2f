//! The command line: options, and the removal of what drava left in the cluster.

pub mod options;
pub mod uninstall;
