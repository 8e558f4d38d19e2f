//! `libvgpu.so`: stands between a program and the NVIDIA libraries, and keeps the program within its share.
//!
//! | Question | Module |
//! |---|---|
//! | How does a call get here? | [`entry`] (`dlsym`), [`hooks::lookup`] (`cuGetProcAddress`), [`table`] (exported names) |
//! | What happens to it? | [`hooks`] |
//! | What may this process use? | [`process`], [`shares`], [`discovery`] (limits pages), [`environment`] (variables) |
//! | What does it use? | [`card`], [`share`] (shared with others), [`charge_map`], [`blocks`], [`cache_charge`], [`pool_free_space`] and [`imports`] (its own) |
//! | How much of the card's time may it take? | [`meter`] |
//! | Whom does it stand in front of? | [`driver`] |
//!
//! Invariants:
//! - Loading the library does nothing: no constructor, no thread, no signal, no file. The first look-up of a
//!   CUDA or NVML name finds the limits; a program that never asks for one never notices.
//! - No panic, no allocator, no lock that another process could leave behind. What cannot be decided is decided
//!   by the limits page (refuse or let through), and said once on standard error.
//! - Only hooked names are exported. A function that is not in the table is the driver's own.
//!
//! What it does not do: it does not load libraries on the program's behalf, and never changes what the driver
//! says about multiprocessors, occupancy, peer access, virtual memory management or handle types.
//!
//! The product is built with `cargo build -p libvgpu --profile preload`, where `panic = "abort"` makes it
//! `no_std`. Other profiles unwind, which needs `std`; they exist so that checks and lints see the code.

#![cfg_attr(panic = "abort", no_std)]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "a preloaded library has no public items"
)]
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unreachable
)]

mod blocks;
mod cache_charge;
mod card;
mod charge_map;
mod cuda;
mod destroyed_pools;
mod discovery;
mod driver;
mod elements;
mod entry;
mod environment;
mod guard;
mod hooks;
mod identity;
mod imports;
#[cfg(feature = "kill-points")]
mod kill_points;
mod log;
mod meter;
mod nvml;
mod path;
mod pool_free_space;
mod process;
mod share;
mod shared_chunks;
mod shares;
mod sys;
mod table;

/// Never reached: nothing here panics. Were it, the program would end without unwinding through foreign frames.
#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: does not return and touches nothing.
    unsafe { libc::abort() }
}
