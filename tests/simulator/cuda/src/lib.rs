//! `libcuda.so.1` over the simulated machine: the CUDA driver API of driver 580 (CUDA 13.0).
//!
//! A process becomes a client of the machine at `cuInit`. Physical memory, contexts and the time
//! that kernels take are the daemon's; addresses, small allocations and handles are this library's,
//! as they are the user-mode driver's on hardware.
//!
//! Kernels compute nothing. A function named `spin` takes as long as its first parameter says, in
//! nanoseconds; one named `noop` takes no time; every other one takes
//! [`launch::DEFAULT_KERNEL_NANOS`]. Bytes that the host copies to a card are kept and can be read
//! back by any process that shares them.
//!
//! | Module | What it is |
//! |---|---|
//! | [`abi`], [`types`], [`error`] | the border to C |
//! | [`driver`] | the state of this process |
//! | [`operation`] | what can be put on a stream, at once, by a graph, or into one |
//! | [`lookup`] | `cuGetProcAddress`: every entry point by name, version and stream flavour |
//! | the others | one group of `cuda.h` each |
#![allow(non_snake_case, reason = "the names are the C library's")]

mod abi;
mod array;
mod attributes;
mod capture;
mod checkpoint;
mod context;
mod copy;
mod device;
mod driver;
mod enumerate;
mod error;
mod event;
mod external;
mod fill;
mod graph;
mod green;
mod heap;
mod host;
mod ipc;
mod launch;
mod library;
mod lookup;
mod managed;
mod memory;
mod module;
mod multicast;
mod operation;
mod pointer;
mod pool;
mod stream;
mod stream_memory;
mod types;
mod unlisted;
mod virtual_memory;
