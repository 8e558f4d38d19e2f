//! `libvgpu.so`: intercepts the calls of a program to the NVIDIA libraries and enforces the limits of its share.
//!
//! | Question | Module |
//! |---|---|
//! | How does a call get here? | [`entry`] (`dlsym`), [`hooks::lookup`] (`cuGetProcAddress`), [`wiring`] (exported names) |
//! | What does a hook do? | [`hooks`] |
//! | What are the limits of this process? | [`process`], [`shares`], [`discovery`] (limits pages), [`environment`] (variables) |
//! | Which limit applies to a call? | [`current`], [`gpu`] |
//! | What does the process use? | [`share`] (shared with other processes), [`charge_map`], [`blocks`], [`image`], [`cache_charge`], [`pool_free_space`] and [`imports`] (its own) |
//! | How is GPU time limited? | [`meter`] |
//! | Where are the original functions? | [`functions`], [`driver`] |
//!
//! Modules depend on each other in one direction: `sys` → `driver`, `functions` → `share` → `gpu` → maps of charges,
//! `meter` → `process` → `current` → `hooks` → `wiring` → `entry`.
//!
//! Invariants:
//! - Loading the library does nothing: no constructor, thread, signal or file. The first lookup of a CUDA or NVML
//!   name finds the limits; a program without such a lookup is unaffected.
//! - No panic, no allocator, no lock that outlives a process. If a limit cannot be enforced, the limits page
//!   decides (deny or allow), and one line on standard error reports it.
//! - Only hooked names are exported. A function outside the table is the original one.
//!
//! The library does not load other libraries on the program's behalf, and does not change what CUDA reports about
//! multiprocessors, occupancy, peer access, virtual memory management or handle types.
//!
//! The product is built with `cargo build -p libvgpu --profile preload`, where `panic = "abort"` makes the crate
//! `no_std`. Other profiles unwind, which needs `std`; they exist for checks and lints.

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
mod charge_map;
mod cuda;
mod current;
mod device;
mod discovery;
mod driver;
mod elements;
mod entry;
mod environment;
mod functions;
mod gpu;
mod guard;
mod hook;
mod hooks;
mod identity;
mod image;
mod imports;
#[cfg(feature = "kill-points")]
mod kill_points;
mod log;
mod meter;
mod nvml;
mod path;
mod pool_free_space;
mod process;
mod records;
mod share;
mod shared_chunks;
mod shares;
mod sys;
mod temporary_list;
mod wiring;

/// Unreachable: no code here panics. If it did, the program would abort without unwinding through foreign frames.
#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: does not return and accesses no memory.
    unsafe { libc::abort() }
}
