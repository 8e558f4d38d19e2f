//! Memory sizes that programs see.

use drava_vgpu_abi::Limits;

use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, MIB};

fn unsigned(numbers: &[i64]) -> Vec<u64> {
    numbers
        .iter()
        .map(|number| number.cast_unsigned())
        .collect()
}

#[test]
fn reports_total_and_free_of_share() {
    let container = Container::with_memory(8 * GIB);
    let mut process = container.process();
    process.alloc(3 * GIB);
    assert_eq!(process.memory_info(), (5 * GIB, 8 * GIB));
    assert_eq!(unsigned(&process.ok("total 0")), [8 * GIB]);
    assert_eq!(
        unsigned(&process.ok("nvml 0 1")),
        [8 * GIB, 5 * GIB, 3 * GIB]
    );
    assert_eq!(
        unsigned(&process.ok("nvml 0 2")),
        [8 * GIB, 5 * GIB, 3 * GIB, 0]
    );
    // The other GPU is reported unchanged.
    assert!(unsigned(&process.ok("total 1"))[0] > 70 * GIB);
    assert!(unsigned(&process.ok("nvml 1 2"))[0] > 70 * GIB);
}

#[test]
fn reports_share_to_program_using_only_nvml() {
    let container = Container::with_memory(8 * GIB);
    container.process().alloc(GIB);
    let mut viewer = container.start("dlsym");
    assert_eq!(unsigned(&viewer.ok("nvml 0 2"))[0], 8 * GIB);
}

#[test]
fn caps_free_memory_at_physical_free_memory() {
    let container = Container::with_memory(40 * GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(60 * GIB);
    let mut process = container.process();
    let (free, total) = process.memory_info();
    assert_eq!(total, 40 * GIB);
    assert!(free < 20 * GIB, "{free}");
    assert_eq!(unsigned(&process.ok("nvml 0 1"))[1], free);
}

#[test]
fn charges_contexts_the_reserve_of_the_page() {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(2 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    assert_eq!(process.memory_info().0, 2 * GIB - CONTEXT_BYTES);
    let second = process.ok("context 0")[0];
    assert_eq!(process.memory_info().0, 2 * GIB - 2 * CONTEXT_BYTES);
    assert_eq!(container.ledger_bytes(), 2 * CONTEXT_BYTES);
    process.ok(&format!("destroy {second}"));
    assert_eq!(process.memory_info().0, 2 * GIB - CONTEXT_BYTES);
    let third = process.ok("context 0 4")[0];
    assert_eq!(process.memory_info().0, 2 * GIB - 2 * CONTEXT_BYTES);
    process.ok(&format!("destroy {third}"));
    let rest = process.memory_info().0 / (2 * MIB) * (2 * MIB);
    process.alloc(rest);
    let mut other = container.start("dlsym");
    other.denied("init 0");
    process.ok("releaseprimary 0");
    other.init(0);
    assert_eq!(other.memory_info().0, 2 * GIB - CONTEXT_BYTES);
    // Retained again, it is the same context.
    other.init(0);
    assert_eq!(other.memory_info().0, 2 * GIB - CONTEXT_BYTES);
    // The region shows the agent the driver's part.
    let driver_bytes: Vec<u64> = container
        .processes_of("share")
        .iter()
        .map(|process| process.driver_bytes)
        .collect();
    assert_eq!(driver_bytes, [0, CONTEXT_BYTES]);
}
