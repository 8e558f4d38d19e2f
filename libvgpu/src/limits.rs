//! The shares of the process: where their limits are found, and what they count.

pub(crate) mod discovery;
pub(crate) mod environment;
pub(crate) mod gpu;
pub(crate) mod identity;
pub(crate) mod imports;
pub(crate) mod lending;
pub(crate) mod share;
pub(crate) mod shares;
