//! What the node driver and the interposer `libvgpu.so` agree on: file names, the limits page, the
//! usage region, and the arithmetic that keeps a share exact.
//!
//! | Question | Module |
//! |---|---|
//! | Where are the files? | [`paths`] |
//! | What may this share use? | [`page`] (bytes), [`limits`] (meaning), [`id`] (whose it is) |
//! | How is GPU time granted, charged and repaid? | [`bucket`] (protocol), [`cost`] (what a launch costs), [`recording`] (what events say of one), [`contention`] (what neighbours took) |
//! | What does it use now? | [`region`] (layout), [`ledger`] (protocol), [`snapshot`] (reading it from outside) |
//!
//! The crate is `no_std`, has no dependencies and contains no `unsafe`: mapping memory is the business
//! of its users. The node driver needs no mapping at all, it writes the page and reads the region as
//! ordinary files.

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
pub use page::{
    LimitsPage, PAGE_SIZE, PageError, PageWrite, decode, encode, own_time, retire, token,
    token_slice, update,
};
pub use region::REGION_SIZE;
