//! `libnvidia-ml.so.1` over the simulated machine.
//!
//! Imitates the library of driver 580 (NVML 13). Types come from bindings generated from `nvml.h`.
//! Each file implements one group of the header; [`unsupported`] exports every other name, which
//! answers `NVML_ERROR_NOT_SUPPORTED`, because some clients refuse to start when a symbol is
//! missing.
//!
//! Invariants: nothing happens at load time; a call before `nvmlInit` answers
//! `NVML_ERROR_UNINITIALIZED`; pointers are only followed after a null check; no call panics.
#![allow(
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are the C library's"
)]

mod abi;
mod accounting;
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
mod mig;
mod processes;
mod samples;
mod sensors;
mod system;
mod topology;
mod unsupported;
