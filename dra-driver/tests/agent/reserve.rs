//! GPU memory that libcuda allocates for itself: the correction of its estimate, and the agent with programs that exceed
//! the estimate.

mod driver_growth;
mod local_memory;

use std::time::Instant;

use drava_dra_driver::agent::Agent;
use drava_dra_driver::agent::policy::detection::{
    EXCESS_FACTOR, GpuProcess, RegionView, ShareView, Unenforced,
};
use drava_dra_driver::agent::policy::reserve::{
    Correction, FALLS_AFTER, ProcessMemory, RESERVE_FACTOR, Reserve, SCANS, process_memory,
};
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::region::SlotIndex;
use drava_vgpu_abi::snapshot::ProcessUsage;
use serde_json::json;

use crate::balance::pseudo_random;
use crate::escape::Escape;
use crate::measurements::report;
use crate::node::{GIB, MIB, TestNode, eventually};

const ESTIMATE: u64 = 528 * MIB;

/// Memory of a context on the GPUs of the simulated machine.
const CONTEXT_BYTES: u64 = 545_259_520;

fn owner(pid: u32) -> Owner {
    Owner {
        pid,
        start_time: 1,
        pid_namespace: 1,
    }
}

/// Returns a process with one context, this memory of libcuda, and requests at their peak.
fn process_at_peak(pid: u32, driver_bytes: u64, requested_bytes: u64) -> ProcessMemory {
    ProcessMemory {
        owner: owner(pid),
        held_bytes: driver_bytes + requested_bytes,
        requested_bytes,
        most_requested_bytes: requested_bytes,
        charged_bytes: ESTIMATE,
    }
}

fn correction(reserve_bytes: u64, excess_bytes: u64) -> Correction {
    Correction {
        reserve_bytes,
        excess_bytes,
        surplus_bytes: 0,
    }
}

#[test]
fn keeps_estimate_without_excess() {
    let mut reserve = Reserve::default();
    assert_eq!(reserve.update(ESTIMATE, &[]), correction(ESTIMATE, 0));
    for driver in [0, 400 * MIB, ESTIMATE] {
        let seen = reserve.update(ESTIMATE, &[process_at_peak(1, driver, GIB)]);
        assert_eq!(seen, correction(ESTIMATE, 0), "{driver}");
    }
}

#[test]
fn follows_measured_process_until_exit() {
    let mut reserve = Reserve::default();
    let above = process_at_peak(1, ESTIMATE + 40 * MIB, GIB);
    let below = process_at_peak(2, ESTIMATE - 40 * MIB, GIB);
    // A process below the estimate does not offset a process above: it may still need its memory.
    let both = reserve.update(ESTIMATE, &[above, below]);
    assert_eq!(both, correction(ESTIMATE + 40 * MIB, 40 * MIB));
    for scan in 1..FALLS_AFTER {
        let corrected = reserve.update(ESTIMATE, &[below]);
        assert_eq!(corrected, correction(ESTIMATE + 40 * MIB, 0), "scan {scan}");
    }
    assert_eq!(reserve.update(ESTIMATE, &[below]), correction(ESTIMATE, 0));
}

#[test]
fn lowers_reserve_only_after_enough_scans() {
    let mut reserve = Reserve::default();
    let more = |pid, more: u64| process_at_peak(pid, ESTIMATE + more * MIB, GIB);
    reserve.update(ESTIMATE, &[more(1, 100), more(2, 30)]);
    for _ in 0..3 {
        for _ in 1..FALLS_AFTER {
            let reserved = reserve.update(ESTIMATE, &[more(2, 30)]).reserve_bytes;
            assert_eq!(reserved, ESTIMATE + 100 * MIB);
        }
        // A new process above the estimate restarts the count.
        reserve.update(ESTIMATE, &[more(3, 100), more(2, 30)]);
    }
    for _ in 0..FALLS_AFTER {
        reserve.update(ESTIMATE, &[more(2, 30)]);
    }
    for _ in 0..3 * FALLS_AFTER {
        let held = reserve.update(ESTIMATE, &[more(2, 30)]);
        assert_eq!(held, correction(ESTIMATE + 30 * MIB, 30 * MIB));
    }
}

/// The processes that a surplus was measured in end at any time, also while no agent runs.
#[test]
fn withdraws_surplus_when_agent_ends() {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(GIB));
    let mut agent = Agent::new(node.config());
    agent.poll(1_000_000);
    node.change_page(1, |limits| limits.driver_surplus_bytes = 100 * MIB);
    agent.end();
    assert_eq!(node.page(1).driver_surplus_bytes, 0);
    assert_eq!(node.page(1).memory_limit_bytes, Some(GIB));
}

/// A context that starts after a larger one is charged as much, and no longer than until it has shown what it needs.
#[test]
fn returns_charge_that_context_does_not_need() {
    let mut reserve = Reserve::default();
    let larger = process_at_peak(1, ESTIMATE + 400 * MIB, GIB);
    reserve.update(ESTIMATE, &[larger]);
    for (driver_bytes, surplus_bytes) in [(ESTIMATE + 100 * MIB, 300 * MIB), (0, 400 * MIB)] {
        let pid = u32::try_from(driver_bytes / MIB).unwrap() + 2;
        let mut next = process_at_peak(pid, driver_bytes, GIB);
        next.charged_bytes = ESTIMATE + 400 * MIB;
        for scan in 1..SCANS {
            let seen = reserve.update(ESTIMATE, &[larger, next]);
            assert_eq!(seen.surplus_bytes, 0, "scan {scan}");
        }
        // The excess of the larger one is as large as the surplus, or larger.
        let both = reserve.update(ESTIMATE, &[larger, next]);
        assert_eq!(both.excess_bytes, 400 * MIB - surplus_bytes);
        let alone = reserve.update(ESTIMATE, &[next]);
        assert_eq!(
            (alone.excess_bytes, alone.surplus_bytes),
            (0, surplus_bytes)
        );
        // Its memory grows after all.
        next.held_bytes = ESTIMATE + 350 * MIB + GIB;
        let grown = reserve.update(ESTIMATE, &[next]);
        assert_eq!(grown.surplus_bytes, 50 * MIB);
        reserve.update(ESTIMATE, &[larger]);
    }
}

#[test]
fn divides_driver_memory_among_contexts() {
    let mut reserve = Reserve::default();
    let mut three = process_at_peak(1, 3 * (ESTIMATE + 10 * MIB), GIB);
    three.charged_bytes = 3 * ESTIMATE;
    let seen = reserve.update(ESTIMATE, &[three]);
    assert_eq!(seen, correction(ESTIMATE + 10 * MIB, 30 * MIB));
}

#[test]
fn caps_driver_memory_correction() {
    let mut reserve = Reserve::default();
    let seen = reserve.update(ESTIMATE, &[process_at_peak(1, 60 * GIB, GIB)]);
    let most = correction(ESTIMATE * RESERVE_FACTOR, ESTIMATE * EXCESS_FACTOR);
    assert_eq!(seen, most);
    // Without an estimate there is no correction.
    let mut reserve = Reserve::default();
    assert_eq!(
        reserve.update(0, &[process_at_peak(1, GIB, GIB)]),
        correction(0, 0)
    );
    let mut noise = process_at_peak(1, 0, 0);
    (noise.held_bytes, noise.charged_bytes) = (u64::MAX, u64::MAX);
    Reserve::default().update(u64::MAX, &[noise, noise]);
}

#[test]
fn ignores_allocation_churn_in_driver_estimate() {
    for seed in 0..50 {
        let mut number = pseudo_random(seed);
        let mut reserve = Reserve::default();
        let most_requested_bytes = 6 * GIB;
        for _ in 0..500 {
            // NVML and the agent sample at different times.
            let (then, now) = (number(6 * GIB), number(6 * GIB));
            let process_memory = ProcessMemory {
                owner: owner(1),
                held_bytes: ESTIMATE - 20 * MIB + then,
                requested_bytes: now,
                most_requested_bytes,
                charged_bytes: ESTIMATE,
            };
            assert_eq!(
                reserve.update(ESTIMATE, &[process_memory]),
                correction(ESTIMATE, 0)
            );
        }
    }
}

#[test]
fn requires_more_scans_after_higher_peak() {
    let mut reserve = Reserve::default();
    let mut steady = process_at_peak(1, ESTIMATE + 40 * MIB, GIB);
    steady.most_requested_bytes = 3 * GIB;
    for _ in 1..SCANS {
        assert_eq!(reserve.update(ESTIMATE, &[steady]), correction(ESTIMATE, 0));
    }
    let more = correction(ESTIMATE + 40 * MIB, 40 * MIB);
    assert_eq!(reserve.update(ESTIMATE, &[steady]), more);
    // A scan between an allocation and a free changes nothing.
    for requested_bytes in [GIB + 500 * MIB, GIB, GIB - 30 * MIB] {
        let seen = ProcessMemory {
            requested_bytes,
            ..steady
        };
        assert_eq!(reserve.update(ESTIMATE, &[seen]), more, "{requested_bytes}");
    }
    // libcuda frees memory.
    steady.held_bytes -= 30 * MIB;
    let mut last = more;
    for _ in 0..SCANS {
        last = reserve.update(ESTIMATE, &[steady]);
    }
    assert_eq!(last, correction(ESTIMATE + 10 * MIB, 10 * MIB));
}

fn slot(pid: u32, used_bytes: u64, driver_bytes: u64) -> ProcessUsage {
    ProcessUsage {
        slot: SlotIndex::new(pid as usize).unwrap(),
        owner: owner(pid),
        generation: 1,
        used_bytes,
        peak_bytes: used_bytes,
        driver_bytes,
        exported_bytes: 0,
        denied: 0,
        gpu_time_us: 0,
        throttled_us: 0,
        launches: 0,
        long_kernels: 0,
        longest_kernel_us: 0,
    }
}

fn view(id: u32, slots: &[ProcessUsage]) -> ShareView<u32> {
    ShareView {
        id,
        limit_bytes: Some(8 * GIB),
        estimate_bytes: ESTIMATE,
        region: Ok(RegionView {
            total_bytes: 0,
            processes: slots.to_vec(),
            ..RegionView::default()
        }),
        without_library: Unenforced::All,
    }
}

fn process(pid: u32, used_bytes: Option<u64>, shares: &[u32]) -> GpuProcess<u32> {
    GpuProcess {
        pid,
        name: String::new(),
        owner: owner(pid),
        used_bytes,
        shares: shares.to_vec(),
        elsewhere: None,
    }
}

#[test]
fn lists_process_of_two_shares_once() {
    // Two shares of the GPU: share 8 is charged for the context, both are charged for requests.
    let mut second = slot(1, 3 * GIB, 0);
    second.peak_bytes = 4 * GIB;
    let views = [
        view(7, &[second]),
        view(8, &[slot(1, GIB + ESTIMATE, ESTIMATE)]),
    ];
    let processes = [process(1, Some(5 * GIB), &[7, 8])];
    assert_eq!(process_memory(7, &views, &processes), []);
    let expected = ProcessMemory {
        owner: owner(1),
        held_bytes: 5 * GIB,
        requested_bytes: 4 * GIB,
        most_requested_bytes: 5 * GIB,
        charged_bytes: ESTIMATE,
    };
    assert_eq!(process_memory(8, &views, &processes), [expected]);
}

#[test]
fn excludes_imported_memory_from_driver_memory() {
    let mut exporter = slot(1, 2 * GIB + ESTIMATE, ESTIMATE);
    exporter.exported_bytes = GIB;
    let views = [view(1, &[exporter, slot(2, ESTIMATE, ESTIMATE)])];
    let processes = [
        process(1, Some(2 * GIB + ESTIMATE), &[1]),
        process(2, Some(GIB + ESTIMATE), &[1]),
    ];
    let requested: Vec<u64> = process_memory(1, &views, &processes)
        .iter()
        .map(|process_memory| process_memory.requested_bytes)
        .collect();
    assert_eq!(requested, [2 * GIB, GIB]);
}

#[test]
fn lists_only_known_processes() {
    let views = [view(1, &[slot(1, GIB, 0)])];
    // Not listed, without a slot, without a value, of another share.
    assert_eq!(process_memory(1, &views, &[]), []);
    assert_eq!(
        process_memory(1, &views, &[process(2, Some(GIB), &[1])]),
        []
    );
    assert_eq!(process_memory(1, &views, &[process(1, None, &[1])]), []);
    assert_eq!(
        process_memory(1, &views, &[process(1, Some(GIB), &[2])]),
        []
    );
}

/// Allocates until the limit.
fn fill(process: &mut Escape) {
    for step in [256 * MIB, 2 * MIB] {
        while process.send(&format!("take {step}")) == 0 {}
    }
}

#[test]
fn denies_memory_until_driver_excess_is_repaid() {
    let estimate_error = 24 * MIB;
    let limit = 4 * GIB;
    let prepared = Limits {
        driver_reserve_bytes: CONTEXT_BYTES - estimate_error,
        ..Limits::memory(limit)
    };
    let node = TestNode::new();
    node.prepare(1, &prepared);
    let used_bytes = || node.test_bed.machine().gpu(0).unwrap().used_bytes;

    // The excess of the contexts is known before the share is full, so the limit holds. Both contexts start before the
    // agent: a later context would be charged the corrected estimate.
    let mut processes = [(); 2].map(|()| node.escape(1, "cuMemAlloc_v2", MIB, true));
    let _agent = node.agent();
    eventually("the excess of two contexts", || {
        (node.page(1).driver_excess_bytes >= 2 * estimate_error - 4 * MIB).then_some(())
    });
    assert!(node.page(1).driver_reserve_bytes >= CONTEXT_BYTES - 2 * MIB);
    let [first, _] = &mut processes;
    fill(first);
    let tolerance = 4 * MIB;
    assert!(
        (limit - tolerance..=limit).contains(&used_bytes()),
        "{}",
        used_bytes()
    );

    // libcuda exceeds the limit of a full share until the program frees as much.
    for _ in 0..24 {
        assert_eq!(first.send("module"), 0);
    }
    let start = Instant::now();
    let overshoot = used_bytes() - limit;
    assert!(overshoot > 40 * MIB, "{overshoot}");
    eventually("a denied allocation", || {
        assert_eq!(first.send("free"), 0);
        (first.send(&format!("take {}", 2 * MIB)) != 0).then_some(())
    });
    let seconds = start.elapsed().as_secs_f64();
    report(&json!({
        "figure": "driverGrowth", "contexts": 2, "estimateErrorBytes": estimate_error,
        "grownBytes": 48 * MIB, "overshootBytes": overshoot, "secondsUntilDenied": seconds,
    }));
    while used_bytes() > limit - tolerance {
        assert_eq!(first.send("free"), 0);
        if used_bytes() > limit {
            assert_ne!(
                first.send(&format!("take {}", 2 * MIB)),
                0,
                "{}",
                used_bytes()
            );
        }
    }
    // The excess is repaid: requests within the limit are granted again.
    while used_bytes() > limit - 64 * MIB {
        assert_eq!(first.send("free"), 0);
    }
    assert_eq!(first.send(&format!("take {}", 2 * MIB)), 0);

    drop(processes);
    let as_before = || (node.page(1) == prepared).then_some(());
    eventually("the page as prepared", as_before);
}
