//! Tests of the modules that need no system calls: the maps of charges, and the views of shared files.
//!
//! Their sources are compiled into this test with an allocator in place of system calls, so that they also run under
//! Miri (`cargo xtask test --only miri`).

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

/// As in the library, from its sources.
#[path = "."]
mod accounts {
    #[path = "../../src/accounts/blocks.rs"]
    pub(crate) mod blocks;
    #[path = "../../src/accounts/cache_charge.rs"]
    pub(crate) mod cache_charge;
    #[path = "../../src/accounts/charge_map.rs"]
    pub(crate) mod charge_map;
    #[path = "../../src/accounts/image.rs"]
    pub(crate) mod image;
    #[path = "../../src/accounts/pool_free_space.rs"]
    pub(crate) mod pool_free_space;
    #[path = "../../src/accounts/shared_chunks.rs"]
    pub(crate) mod shared_chunks;
}

/// As in the library, from its sources, but for what calls the system.
#[path = "."]
mod limits {
    #[path = "../../src/limits/imports.rs"]
    pub(crate) mod imports;

    /// The identity of the process that takes slots.
    pub(crate) mod identity {
        use drava_vgpu_abi::ledger::Owner;

        pub(crate) fn own() -> Owner {
            Owner {
                pid: 7,
                start_time: 70,
                pid_namespace: 700,
            }
        }
    }
}

/// As in the library, from its sources, but for what calls the system.
#[path = "."]
mod system {
    #[path = "../../src/system/elements.rs"]
    pub(crate) mod elements;
    #[path = "../../src/system/guard.rs"]
    pub(crate) mod guard;
    #[expect(dead_code, reason = "names in a directory are the system's")]
    #[path = "../../src/system/path.rs"]
    pub(crate) mod path;
    #[path = "sys.rs"]
    pub(crate) mod sys;
    #[path = "../../src/system/temporary_list.rs"]
    pub(crate) mod temporary_list;

    /// Stands in for the library's log on standard error.
    pub(crate) mod log {
        pub(crate) fn line(arguments: std::fmt::Arguments<'_>) {
            println!("{arguments}");
        }
    }
}

#[path = "../../src/meter/contexts.rs"]
mod contexts;
#[path = "../../src/meter/costs.rs"]
mod costs;
#[path = "../../src/meter/counted_time.rs"]
mod counted_time;
#[path = "../../src/limits/environment/variables.rs"]
mod environment;
#[path = "../../src/meter/lease.rs"]
mod lease;

mod cache_charges;
mod charge_maps;
mod charges;
mod context_records;
mod counted_times;
mod formats;
mod free_space;
mod images;
mod launch_costs;
mod sampling;
mod share;
mod shared_gate;
mod temporary_lists;
mod variables;
