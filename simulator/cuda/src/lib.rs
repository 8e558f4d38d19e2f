//! `libcuda.so.1` over the simulated machine: the CUDA driver API of driver 580 (CUDA 13.0).
//!
//! A process becomes a client of the daemon at `cuInit`. The daemon owns physical memory, contexts
//! and kernel time; this library owns addresses, small allocations and handles, like the user-mode
//! driver on hardware.
//!
//! Kernels compute nothing; their name sets their duration, see [`launch`]. Copied bytes are kept
//! and can be read back by every process that shares them.
//!
//! All modules share [`State`].
//!
//! | Module | Content |
//! |---|---|
//! | [`abi`], [`types`], [`error`] | the C ABI |
//! | [`driver`] | devices, and the connection to the daemon |
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
mod export_table;
mod external;
mod fill;
mod graph;
mod green;
mod handles;
mod heap;
mod host;
mod image;
mod ipc;
mod launch;
mod library;
mod linker;
mod lookup;
mod managed;
mod memory;
mod module;
mod mps;
mod multicast;
mod operation;
mod pointer;
mod pool;
mod stream;
mod stream_memory;
mod types;
mod unlisted;
mod virtual_memory;

use std::collections::BTreeMap;

use array::Arrays;
use capture::Captures;
use context::{Context, PrimaryContext};
use event::Events;
use external::ExternalMemories;
use graph::Graphs;
use green::GreenContexts;
use handles::Handles;
use host::HostFunctions;
use ipc::IpcMappings;
use library::Libraries;
use linker::Links;
use memory::AddressSpace;
use module::Modules;
use multicast::Multicast;
use pool::Pools;
use stream::Streams;
use types::CUcontext;
use virtual_memory::{Handle, VirtualMemory};

/// All handles and addresses of this process. Each module adds functions for its own tables.
#[derive(Debug)]
struct State {
    handles: Handles,
    contexts: BTreeMap<CUcontext, Context>,
    /// One per device.
    primaries: Vec<PrimaryContext>,
    addresses: AddressSpace,
    /// Whether the daemon knows of managed memory.
    uses_managed: bool,
    streams: Streams,
    events: Events,
    modules: Modules,
    libraries: Libraries,
    links: Links,
    arrays: Arrays,
    pools: Pools,
    virtual_memory: VirtualMemory,
    opened: IpcMappings,
    captures: Captures,
    /// Whether unsafe calls leave captures valid.
    tolerates_unsafe_calls: bool,
    graphs: Graphs,
    host_functions: HostFunctions,
    greens: GreenContexts,
    multicasts: BTreeMap<Handle, Multicast>,
    externals: ExternalMemories,
}

impl State {
    fn new(devices: usize) -> Self {
        Self {
            handles: Handles::default(),
            contexts: BTreeMap::new(),
            primaries: (0..devices).map(|_| PrimaryContext::default()).collect(),
            addresses: AddressSpace::default(),
            uses_managed: false,
            streams: Streams::default(),
            events: Events::default(),
            modules: Modules::default(),
            libraries: Libraries::default(),
            links: Links::default(),
            arrays: Arrays::default(),
            pools: Pools::default(),
            virtual_memory: VirtualMemory::default(),
            opened: IpcMappings::default(),
            captures: Captures::default(),
            tolerates_unsafe_calls: false,
            graphs: Graphs::default(),
            host_functions: HostFunctions::default(),
            greens: GreenContexts::default(),
            multicasts: BTreeMap::new(),
            externals: ExternalMemories::default(),
        }
    }
}
