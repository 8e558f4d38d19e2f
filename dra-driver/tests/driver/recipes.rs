//! The numbers of `docs/recipes.md`, computed from the charge of a context.

use drava_api::names;
use drava_dra_driver::gpus::capacity::{MIB, driver_reserve_bytes};
use drava_nvml::{ComputeCapability, Gpu};

use crate::fixture::h100x2;

const PAGE: &str = include_str!("../../../docs/recipes.md");

/// Returns the charge of a context on a GPU with so many multiprocessors, MiB.
fn context_mib(multiprocessors: u32, (major, minor): (u32, u32)) -> u64 {
    let gpu = Gpu {
        multiprocessors: Some(multiprocessors),
        compute_capability: ComputeCapability { major, minor },
        ..h100x2().nvml.gpus.remove(0)
    };
    driver_reserve_bytes(&gpu) / MIB
}

#[test]
fn names_context_of_each_gpu() {
    for (name, multiprocessors, capability) in [
        ("T4", 40, (7, 5)),
        ("A30", 56, (8, 0)),
        ("A100", 108, (8, 0)),
        ("H100, H200", 132, (9, 0)),
        ("B200", 148, (10, 0)),
    ] {
        let context = context_mib(multiprocessors, capability);
        let row = format!("| {name} | {context} MiB |");
        assert!(PAGE.contains(&row), "{row}");
        for product in name.split(", ") {
            assert!(
                names::CONTEXT_MIB.contains(&(product, context)),
                "{product}"
            );
        }
    }
    let free = 4096 - context_mib(108, (8, 0));
    let sentence = format!("a share of 4 GiB of an A100 has 4096 MiB in total and {free} MiB free");
    assert!(PAGE.contains(&sentence), "{sentence}");
}

#[test]
fn computes_what_small_shares_leave() {
    let context = context_mib(132, (9, 0));
    for gib in [4, 8, 20] {
        let share = gib * 1024;
        let free = share - context;
        let each = (share - 2 * context) / 2;
        // Rounded down: vLLM compares with the free memory.
        let utilization = free * 100 / share;
        let left = free - share * 3 / 4;
        let row = format!("| `{gib}Gi` | {free} MiB | {each} MiB | 0.{utilization} | {left} MiB |");
        assert!(PAGE.contains(&row), "{row}");
    }
}
