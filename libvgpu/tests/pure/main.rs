//! Tests of the modules that need no system calls: the maps of charges, and the views of shared files.
//!
//! Their sources are compiled into this test with an allocator in place of system calls, so that they also run under
//! Miri (`cargo xtask test --only miri`).

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

#[path = "../../src/blocks.rs"]
mod blocks;
#[path = "../../src/cache_charge.rs"]
mod cache_charge;
#[path = "../../src/charge_map.rs"]
mod charge_map;
#[path = "../../src/meter/contexts.rs"]
mod contexts;
#[path = "../../src/meter/costs.rs"]
mod costs;
#[path = "../../src/meter/counted_time.rs"]
mod counted_time;
#[path = "../../src/elements.rs"]
mod elements;
#[path = "../../src/environment/variables.rs"]
mod environment;
#[path = "../../src/guard.rs"]
mod guard;
#[path = "../../src/image.rs"]
mod image;
#[path = "../../src/imports.rs"]
mod imports;
#[path = "../../src/meter/lease.rs"]
mod lease;
#[expect(dead_code, reason = "names in a directory are the system's")]
#[path = "../../src/path.rs"]
mod path;
#[path = "../../src/pool_free_space.rs"]
mod pool_free_space;
#[path = "../../src/shared_chunks.rs"]
mod shared_chunks;
#[path = "../../src/temporary_list.rs"]
mod temporary_list;

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
mod sys;
mod temporary_lists;
mod variables;

/// The identity of the process that takes slots.
mod identity {
    use drava_vgpu_abi::ledger::Owner;

    pub(crate) fn own() -> Owner {
        Owner {
            pid: 7,
            start_time: 70,
            pid_namespace: 700,
        }
    }
}

/// Stands in for the library's log on standard error.
mod log {
    pub(crate) fn line(arguments: std::fmt::Arguments<'_>) {
        println!("{arguments}");
    }
}
