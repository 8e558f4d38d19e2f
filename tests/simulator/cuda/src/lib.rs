//! `libcuda.so.1` over the simulated machine: the CUDA driver API of driver 580 (CUDA 13.0).
//!
//! A process becomes a client of the daemon at `cuInit`. The daemon owns physical memory, contexts
//! and kernel time; this library owns addresses, small allocations and handles, like the user-mode
//! driver on hardware.
//!
//! Kernels compute nothing; their name sets their duration, see [`launch`]. Copied bytes are kept
//! and can be read back by every process that shares them.
//!
//! | Module | Content |
//! |---|---|
//! | [`abi`], [`types`], [`error`] | the C ABI |
//! | [`driver`] | the state of this process |
//! | [`operation`] | operations of streams and graphs |
//! | [`lookup`] | `cuGetProcAddress` |
//! | all others | one group of `cuda.h` each |
#![allow(non_snake_case, reason = "names of the C API")]

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
mod error_names;
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
