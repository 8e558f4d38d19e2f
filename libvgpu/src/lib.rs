//! `libvgpu.so`: intercepts the calls of a program to the NVIDIA libraries and enforces the limits of its share.
//!
//! | Question | Module |
//! |---|---|
//! | How does a call get here? | [`entry`] (`dlsym`), [`hooks::lookup`] (`cuGetProcAddress`), [`wiring`] (exported names) |
//! | What does a hook do? | [`hooks`] |
//! | What are the limits of this process? | [`process`], [`limits`] (limits pages, variables, the shares and their GPUs) |
//! | Which limit applies to a call? | [`current`] |
//! | What does the process use? | [`limits::share`] (shared with other processes), [`accounts`] (of its own objects) |
//! | How is GPU time limited? | [`meter`] |
//! | Where are the original functions? | [`driver_api`] |
//! | What does the operating system give? | [`system`] |
//!
//! Modules depend on each other in one direction: `system` → `driver_api` → `accounts` → `limits` → `meter` → `process` →
//! `current` → `hooks` → `wiring` → `entry`.
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

mod accounts;
mod current;
mod driver_api;
mod entry;
mod hooks;
mod limits;
mod meter;
mod process;
mod system;
mod wiring;

/// Unreachable: no code here panics. If it did, the program would abort without unwinding through foreign frames.
#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: does not return and accesses no memory.
    unsafe { libc::abort() }
}
