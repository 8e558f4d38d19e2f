//! What each object of the program is charged, so that its end returns as much.

pub(crate) mod blocks;
pub(crate) mod cache_charge;
pub(crate) mod charge_map;
pub(crate) mod image;
pub(crate) mod pool_free_space;
pub(crate) mod records;
pub(crate) mod shared_chunks;
