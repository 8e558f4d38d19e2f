//! A simulated machine with NVIDIA GPUs, shared by processes.
//!
//! One daemon (`simulator-machine serve`) plays the kernel driver. A process that loads `libcuda.so.1`
//! or `libnvidia-ml.so.1` from the machine's driver root connects to the daemon's socket; that
//! connection stands for its open device files: forked children inherit it, and when the last
//! holder closes it, by exit or by `kill -9`, the daemon frees what was held through it.
//!
//! | Module | What it is |
//! |---|---|
//! | [`description`] | the machine file: cards, their figures, MIG tables |
//! | [`root`] | the driver root: where libraries, device nodes and sockets lie |
//! | [`protocol`], [`wire`], [`client`] | what a library asks the daemon, and how |
//! | [`channel`] | shared memory through which work is submitted and its completion seen |
//! | [`kernel`] | the state of the cards and every decision about it; no I/O, no clock |
//! | [`server`] | sockets and time around [`kernel`] |
//! | [`testing`] | starts a machine for a test and finds the libraries |
//!
//! It does not compute: kernels take time and do nothing, and only bytes that a program copies to
//! a card are kept.

pub mod channel;
pub mod client;
pub mod control;
pub mod description;
pub mod kernel;
pub mod protocol;
pub mod root;
pub mod server;
pub mod testing;
pub mod wire;
