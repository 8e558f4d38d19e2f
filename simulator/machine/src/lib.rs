//! A simulated machine with NVIDIA GPUs, shared by processes.
//!
//! One daemon (`simulator-machine serve`) simulates the kernel driver. A process that loads
//! `libcuda.so.1` or `libnvidia-ml.so.1` from the driver root connects to the daemon's socket. The
//! connection stands for open device files: forked children inherit it, and the daemon frees its
//! resources when the last holder closes it, by exit or `kill -9`.
//!
//! | Module | Content |
//! |---|---|
//! | [`description`] | the machine file: GPUs, their properties, MIG tables |
//! | [`root`] | the driver root: libraries, device nodes, sockets |
//! | [`protocol`], [`wire`], [`client`] | messages between libraries and the daemon |
//! | [`channel`] | shared memory for submissions and completions |
//! | [`kernel`] | state and decisions of the GPUs; no I/O, no clock |
//! | [`fabric_manager`] | the program that makes the GPUs on NVSwitches ready |
//! | [`mps`] | programs and clients of the multi-process service |
//! | [`server`] | sockets and time around [`kernel`] |
//! | [`testing`] | machines for tests |
//!
//! Kernels take time and compute nothing. Only bytes that a program copies are kept.

pub mod channel;
pub mod client;
pub mod control;
pub mod description;
pub mod fabric_manager;
pub mod kernel;
pub mod mps;
pub mod protocol;
pub mod root;
pub mod server;
pub mod testing;
pub mod wire;
