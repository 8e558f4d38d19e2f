//! Detection of violations from NVML's process list and the regions.

use drava_dra_driver::agent::node::nvml_observer::INTERVAL;
use drava_dra_driver::agent::policy::detection::{
    CONFIRMATIONS, GpuProcess, HEALTHY, RegionProblem, RegionView, ShareView, SuspectedViolation,
    Unenforced, ViolationChange, ViolationKind, ViolationTracker, check, detect, most_excess_bytes,
    tolerance,
};
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::region::SlotIndex;
use drava_vgpu_abi::snapshot::ProcessUsage;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn owner(pid: u32) -> Owner {
    Owner {
        pid,
        start_time: 1000 + u64::from(pid),
        pid_namespace: 42,
    }
}

fn counted(pid: u32, used_bytes: u64) -> ProcessUsage {
    ProcessUsage {
        slot: SlotIndex::new(pid as usize).unwrap(),
        owner: owner(pid),
        generation: 1,
        used_bytes,
        peak_bytes: used_bytes,
        driver_bytes: 528 * MIB,
        exported_bytes: 0,
        denied: 0,
        gpu_time_us: 0,
        throttled_us: 0,
        launches: 0,
        long_kernels: 0,
        longest_kernel_us: 0,
    }
}

fn share(id: u32, limit_bytes: u64, processes: &[ProcessUsage]) -> ShareView<u32> {
    let total_bytes = processes.iter().map(|process| process.used_bytes).sum();
    ShareView {
        id,
        limit_bytes: Some(limit_bytes),
        estimate_bytes: 0,
        region: Ok(RegionView {
            total_bytes,
            processes: processes.to_vec(),
            ..RegionView::default()
        }),
        without_library: Unenforced::All,
    }
}

fn process(pid: u32, used_bytes: u64, shares: &[u32]) -> GpuProcess<u32> {
    GpuProcess {
        pid: 100_000 + pid,
        name: "python".to_owned(),
        owner: owner(pid),
        used_bytes: Some(used_bytes),
        shares: shares.to_vec(),
        elsewhere: None,
    }
}

fn kinds(shares: &[ShareView<u32>], processes: &[GpuProcess<u32>]) -> Vec<(u32, ViolationKind)> {
    detect("GPU-0", shares, processes)
        .iter()
        .map(|(id, suspicion)| (*id, suspicion.kind()))
        .collect()
}

#[test]
fn tolerates_use_within_limit_and_slack() {
    let shares = [share(1, GIB, &[counted(1, GIB)])];
    for used in [0, GIB, GIB + tolerance(0)] {
        assert_eq!(kinds(&shares, &[process(1, used, &[1])]), []);
    }
    assert_eq!(
        kinds(&shares, &[process(1, GIB + tolerance(0) + 1, &[1])]),
        [(1, ViolationKind::OverLimit)]
    );
}

#[test]
fn tolerates_driver_memory_of_processes_that_count_themselves() {
    const CONTEXT: u64 = 512 * MIB;
    let full = |processes: &[ProcessUsage]| ShareView {
        estimate_bytes: CONTEXT,
        ..share(1, 4 * GIB, processes)
    };
    let excess = most_excess_bytes(CONTEXT);
    let one = [full(&[counted(1, 4 * GIB)])];
    assert_eq!(kinds(&one, &[process(1, 4 * GIB + excess, &[1])]), []);
    let more = [process(1, 4 * GIB + excess + 1, &[1])];
    assert_eq!(kinds(&one, &more), [(1, ViolationKind::OverLimit)]);
    // Each of two processes may grow, whichever holds the memory.
    let two = [full(&[counted(1, 2 * GIB), counted(2, 2 * GIB)])];
    let both = |used: u64| [process(1, used, &[1]), process(2, 2 * GIB, &[1])];
    assert_eq!(kinds(&two, &both(2 * GIB + 2 * excess)), []);
    assert_eq!(kinds(&two, &both(2 * GIB + 2 * excess + 1)).len(), 1);
    // A process without a slot has no driver memory to account for.
    let hidden = [process(1, 4 * GIB, &[1]), process(2, GIB, &[1])];
    let found = kinds(&[full(&[])], &hidden);
    assert!(found.contains(&(1, ViolationKind::OverLimit)), "{found:?}");
}

/// Idle processes have contexts, which are charged, and allow no further memory to another process.
#[test]
fn bounds_driver_memory_of_all_processes_of_share() {
    const CONTEXT: u64 = 512 * MIB;
    let limit = 8 * GIB;
    let slots: Vec<_> = (1..=12).map(|pid| counted(pid, CONTEXT)).collect();
    let shares = [ShareView {
        estimate_bytes: CONTEXT,
        ..share(1, limit, &slots)
    }];
    let processes = |hidden: u64| -> Vec<_> {
        let idle = (2..=12).map(|pid| process(pid, CONTEXT, &[1]));
        idle.chain([process(1, hidden, &[1])]).collect()
    };
    let most = 2 * limit - 11 * CONTEXT;
    assert_eq!(kinds(&shares, &processes(most)), []);
    assert_eq!(
        kinds(&shares, &processes(most + 1)),
        [(1, ViolationKind::OverLimit)]
    );
    // A single process is tolerated in a small share, too.
    let small = [ShareView {
        estimate_bytes: CONTEXT,
        ..share(1, GIB, &slots)
    }];
    let excess = most_excess_bytes(CONTEXT);
    assert_eq!(kinds(&small, &[process(1, GIB + excess, &[1])]), []);
}

#[test]
fn trusts_nvml_memory_over_region() {
    // The tenant reports no usage.
    let shares = [share(1, GIB, &[counted(1, 0)])];
    assert_eq!(
        kinds(&shares, &[process(1, 3 * GIB, &[1])]),
        [(1, ViolationKind::OverLimit)]
    );
    // A region that reports too much is no violation.
    let shares = [share(1, GIB, &[counted(1, 9 * GIB)])];
    assert_eq!(kinds(&shares, &[process(1, GIB, &[1])]), []);
}

#[test]
fn sums_memory_of_all_processes_of_share() {
    let shares = [
        share(1, GIB, &[counted(1, 0), counted(2, 0)]),
        share(2, GIB, &[counted(3, GIB)]),
    ];
    let processes = [
        process(1, 700 * MIB, &[1]),
        process(2, 700 * MIB, &[1]),
        process(3, GIB, &[2]),
    ];
    assert_eq!(kinds(&shares, &processes), [(1, ViolationKind::OverLimit)]);
}

#[test]
fn checks_shares_of_one_process_together() {
    let shares = [
        share(1, GIB, &[counted(1, GIB)]),
        share(2, GIB, &[counted(1, GIB)]),
        share(3, GIB, &[]),
    ];
    assert_eq!(kinds(&shares, &[process(1, 2 * GIB, &[1, 2])]), []);
    assert_eq!(kinds(&shares, &[process(1, 3 * GIB, &[1, 2])]).len(), 1);
}

#[test]
fn reports_process_without_slot() {
    let shares = [share(1, GIB, &[counted(1, 0)])];
    assert_eq!(
        kinds(&shares, &[process(2, MIB, &[1])]),
        [(1, ViolationKind::NotCounted)]
    );
    // A matching PID is not enough: the slot may belong to a dead process or be forged.
    let mut other_start = process(1, MIB, &[1]);
    other_start.owner.start_time += 1;
    assert_eq!(
        kinds(&shares, &[other_start]),
        [(1, ViolationKind::NotCounted)]
    );
    // A process without a share is ignored.
    assert_eq!(kinds(&shares, &[process(2, 50 * GIB, &[])]), []);
}

/// Where the NVIDIA driver limits the memory, only GPU time can lack its limit.
#[test]
fn says_what_is_not_enforced_without_library() {
    for unenforced in [Unenforced::All, Unenforced::GpuTime, Unenforced::Nothing] {
        let shares = [ShareView {
            without_library: unenforced,
            ..share(1, GIB, &[])
        }];
        let found = detect("GPU-0", &shares, &[process(2, MIB, &[1])]);
        let violation = SuspectedViolation::NotCounted {
            pid: 100_002,
            name: "python".to_owned(),
            unenforced,
        };
        let expected = (unenforced != Unenforced::Nothing).then_some((1, violation));
        assert_eq!(found, Vec::from_iter(expected));
    }
}

#[test]
fn reports_use_of_other_gpu_for_share_of_container() {
    let mut stranger = process(2, MIB, &[]);
    stranger.elsewhere = Some(9);
    let found = detect("GPU-0", &[share(1, GIB, &[])], &[stranger]);
    let violation = SuspectedViolation::OtherGpu {
        pid: 100_002,
        name: "python".to_owned(),
        gpu: "GPU-0".to_owned(),
    };
    assert_eq!(found, [(9, violation)]);
}

#[test]
fn reports_damaged_region_instead_of_its_processes() {
    let damaged = |region| ShareView {
        id: 1,
        limit_bytes: Some(GIB),
        estimate_bytes: 0,
        region: Err(region),
        without_library: Unenforced::All,
    };
    let problem = RegionProblem::Size {
        found: 10,
        expected: 266_240,
    };
    assert_eq!(
        kinds(&[damaged(problem)], &[process(1, MIB, &[1])]),
        [(1, ViolationKind::Region)]
    );
    let total = RegionView {
        total_bytes: 0,
        processes: vec![counted(1, 4 * GIB)],
        ..RegionView::default()
    };
    assert_eq!(
        check(total),
        Err(RegionProblem::Total {
            total_bytes: 0,
            held_bytes: 4 * GIB
        })
    );
    // Processes change the region while the agent reads it.
    assert!(
        check(RegionView {
            total_bytes: GIB,
            processes: vec![counted(1, GIB + MIB)],
            ..RegionView::default()
        })
        .is_ok()
    );
}

#[test]
fn reports_violation_once_until_cleared() {
    let mut tracker = ViolationTracker::default();
    let suspected = || {
        vec![(
            1,
            SuspectedViolation::NotCounted {
                pid: 7,
                name: "x".to_owned(),
                unenforced: Unenforced::All,
            },
        )]
    };
    for scan in 1..CONFIRMATIONS {
        assert_eq!(tracker.update(&[1], &suspected(), true), [], "scan {scan}");
    }
    assert!(!tracker.is_confirmed(1, ViolationKind::NotCounted));
    let changes = tracker.update(&[1], &suspected(), true);
    assert!(
        matches!(
            changes.as_slice(),
            [(
                1,
                ViolationChange::Confirmed(SuspectedViolation::NotCounted { pid: 7, .. })
            )]
        ),
        "{changes:?}"
    );
    assert!(tracker.is_confirmed(1, ViolationKind::NotCounted));
    for _ in 0..100 {
        assert_eq!(tracker.update(&[1], &suspected(), true), []);
    }
    for _ in 1..HEALTHY {
        assert_eq!(tracker.update(&[1], &[], true), []);
    }
    assert_eq!(
        tracker.update(&[1], &[], true),
        [(1, ViolationChange::Cleared(ViolationKind::NotCounted))]
    );
    assert_eq!(tracker.update(&[1], &[], true), []);
}

#[test]
fn keeps_violation_while_nvml_does_not_answer() {
    let mut tracker = ViolationTracker::default();
    let not_counted = SuspectedViolation::NotCounted {
        pid: 7,
        name: "x".to_owned(),
        unenforced: Unenforced::All,
    };
    let suspected = [
        (1, not_counted),
        (1, SuspectedViolation::Region(RegionProblem::Slots(9999))),
    ];
    for _ in 0..CONFIRMATIONS {
        tracker.update(&[1], &suspected, true);
    }
    let cleared: Vec<_> = (0..10 * HEALTHY)
        .flat_map(|_| tracker.update(&[1], &[], false))
        .collect();
    // Regions are read without NVML.
    assert_eq!(
        cleared,
        [(1, ViolationChange::Cleared(ViolationKind::Region))]
    );
    assert!(tracker.is_confirmed(1, ViolationKind::NotCounted));
    for _ in 1..HEALTHY {
        assert_eq!(tracker.update(&[1], &[], true), []);
    }
    assert_eq!(
        tracker.update(&[1], &[], true),
        [(1, ViolationChange::Cleared(ViolationKind::NotCounted))]
    );
}

#[test]
fn requires_new_confirmation_after_interruption() {
    let mut tracker = ViolationTracker::default();
    let suspected = || vec![(1, SuspectedViolation::Region(RegionProblem::Slots(9999)))];
    for _ in 0..CONFIRMATIONS {
        tracker.update(&[1], &suspected(), true);
    }
    assert!(tracker.is_confirmed(1, ViolationKind::Region));
    tracker.update(&[1], &[], true);
    tracker.update(&[1], &suspected(), true);
    // A single scan kills no process.
    assert!(!tracker.is_confirmed(1, ViolationKind::Region));
    // A removed share leaves no state for a new share with the same key.
    tracker.update(&[], &[], true);
    tracker.update(&[1], &suspected(), true);
    assert!(!tracker.is_confirmed(1, ViolationKind::Region));
    assert_eq!(tracker.update(&[1], &suspected(), true).len(), 1);
}

#[test]
fn confirms_violation_within_2_s() {
    let delay = INTERVAL * CONFIRMATIONS;
    assert!(delay < std::time::Duration::from_secs(2), "{delay:?}");
}

#[test]
fn ignores_single_suspicious_scan() {
    let mut tracker = ViolationTracker::default();
    for _ in 0..10 {
        let violation = SuspectedViolation::Region(RegionProblem::Slots(9999));
        assert_eq!(tracker.update(&[1], &[(1, violation)], true), []);
        assert_eq!(tracker.update(&[1], &[], true), []);
    }
}
