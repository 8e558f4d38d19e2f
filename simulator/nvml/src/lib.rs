//! `libnvidia-ml.so.1` over the simulated machine: NVML 13 of driver 580, with the memory limits of driver 615.
//!
//! Types come from bindings generated from `nvml.h`. Each file implements one group of the header;
//! [`unsupported`] exports all other names, which return `NVML_ERROR_NOT_SUPPORTED`, since some
//! clients need every symbol.
//!
//! Invariants: loading has no effect; calls before `nvmlInit` return `NVML_ERROR_UNINITIALIZED`;
//! pointers are checked for null; no call panics.
#![allow(non_snake_case, non_upper_case_globals, reason = "names of the C API")]

mod abi;
mod accounting;
mod compute_mode;
mod ecc;
mod error;
mod events;
mod fields;
mod gpm;
mod handle;
mod identity;
mod instances;
mod library;
mod memory;
mod memory_limits;
mod mig;
mod processes;
mod samples;
mod sensors;
mod system;
mod topology;
mod unsupported;
mod video;
