//! The contract between the node driver and the interposer `libvgpu.so`: file names, the limits page, the usage
//! region, and the arithmetic that keeps a share exact.
//!
//! | Question | Module |
//! |---|---|
//! | Where are the files? | [`paths`] |
//! | What may this share use? | [`page`] (bytes), [`limits`] (meaning), [`id`] (claim, share and GPU) |
//! | How is GPU time granted, charged and repaid? | [`bucket`] (protocol), [`cost`] (cost of a launch), [`recording`] (meaning of its events), [`contention`] (correction for co-located shares) |
//! | What does the share use now? | [`region`] (layout), [`ledger`] (protocol), [`snapshot`] (reading from outside) |
//!
//! The crate is `no_std`, has no dependencies and no `unsafe`: its users map the memory. The node driver maps
//! nothing; it writes the page and reads the region as ordinary files.

#![no_std]
#![forbid(unsafe_code)]

pub mod atomic;
pub mod bucket;
pub mod contention;
pub mod cost;
pub mod id;
pub mod ledger;
pub mod limits;
pub mod page;
pub mod paths;
pub mod recording;
pub mod region;
pub mod snapshot;

pub use id::{DeviceUuid, IdText};
pub use limits::{BrokenRegion, ComputePolicy, Cores, Limits, LimitsSpec, MemoryPolicy, Priority};
pub use page::{LimitsPage, PAGE_SIZE, PageError, PageWrite, decode, encode, own_time, update};
pub use region::REGION_SIZE;
