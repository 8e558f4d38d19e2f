//! The agent with `libvgpu.so` on a simulated machine. The ledger and clock of the machine are the reference.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt as _, symlink};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use drava_api::config::Enforcement;
use drava_dra_driver::agent::policy::detection::{
    RegionProblem, SuspectedViolation, Unenforced, ViolationChange, ViolationKind,
};
use drava_dra_driver::agent::{Config, FindingKind};
use drava_vgpu_abi::bucket::LONG_KERNEL_US;
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits, REGION_SIZE};
use simulator_machine::control;
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::GpuIndex;

use crate::node::{GIB, MIB, TestNode, eventually};
use gpu_tenants::Tenant;

/// Returns the limits of a share with 4 GiB.
fn share_limits(percent: u32, policy: ComputePolicy) -> Limits {
    Limits {
        cores: Cores::new(percent).unwrap(),
        compute_policy: policy,
        ..Limits::memory(4 * GIB)
    }
}

/// Starts a process that always has 16 kernels of `ns` in flight.
fn start_kernels(node: &TestNode, number: u32, ns: u64) -> Tenant {
    let mut tenant = node.tenant(number);
    tenant
        .ok(&format!("start kernel ns={ns} depth=16"))
        .unwrap();
    tenant
}

/// Waits until the processes get these percentages of the GPU for 2 s. A loaded host can delay that.
fn await_percents(node: &TestNode, tenants: &[&Tenant], due: &[f64], points: f64) {
    let mut seen = Vec::new();
    for _ in 0..20 {
        let got = node.percents(tenants, Duration::ZERO, Duration::from_secs(2));
        if got
            .iter()
            .zip(due)
            .all(|(got, due)| (got - due).abs() <= points)
        {
            return;
        }
        seen.push(got);
    }
    panic!("{seen:.1?} instead of {due:?}");
}

/// Waits until the process gets more than `percent`.
fn await_more_than(node: &TestNode, tenant: &Tenant, percent: f64) {
    let mut seen = Vec::new();
    for _ in 0..20 {
        let got = node.percents(&[tenant], Duration::ZERO, Duration::from_secs(1));
        if got.iter().all(|got| *got > percent) {
            return;
        }
        seen.push(got);
    }
    panic!("{seen:.1?} instead of more than {percent}");
}

fn is_confirmed(finding: &drava_dra_driver::agent::Finding, kind: ViolationKind) -> bool {
    matches!(&finding.kind, FindingKind::Violation(ViolationChange::Confirmed(suspicion)) if suspicion.kind() == kind)
}

#[test]
fn keeps_balance_shares_and_reclaims_lent_time() {
    let node = TestNode::new();
    node.prepare(1, &share_limits(30, ComputePolicy::Balance));
    node.prepare(2, &share_limits(70, ComputePolicy::Balance));
    let _agent = node.agent();
    let first = start_kernels(&node, 1, 2_000_000);
    await_more_than(&node, &first, 45.0);
    let mut second = start_kernels(&node, 2, 2_000_000);
    await_percents(&node, &[&first, &second], &[30.0, 70.0], 4.0);
    second.ok("stop").unwrap();
    await_more_than(&node, &first, 45.0);
}

/// The larger share launches 300 ms of work at once and waits for all of it.
#[test]
fn keeps_share_of_program_that_waits_for_batches() {
    let node = TestNode::new();
    node.prepare(1, &share_limits(30, ComputePolicy::Balance));
    node.prepare(2, &share_limits(70, ComputePolicy::Balance));
    let _agent = node.agent();
    let first = start_kernels(&node, 1, 1_000_000);
    let mut second = node.tenant(2);
    second
        .ok("start kernel ns=1000000 depth=400 burst=300 idle=0")
        .unwrap();
    // Both lose their part of the time of switches.
    await_percents(&node, &[&first, &second], &[27.3, 65.0], 4.0);
}

#[test]
fn follows_claims_across_agent_restart() {
    let node = TestNode::new();
    node.prepare(1, &share_limits(30, ComputePolicy::Fixed));
    let agent = node.agent();
    eventually("a rate for the first", || node.page(1).rate_us_per_s);
    node.prepare(2, &share_limits(40, ComputePolicy::Fixed));
    eventually("a rate for the second", || node.page(2).rate_us_per_s);
    let tenant = start_kernels(&node, 1, 1_000_000);
    await_percents(&node, &[&tenant], &[30.0], 3.0);
    node.unprepare(2);
    drop(agent);
    // No process is killed, and the last rate holds.
    let rates = node.rates(&[1]);
    await_percents(&node, &[&tenant], &[30.0], 4.0);
    assert_eq!(node.rates(&[1]), rates);
    // The correction for a share that has ended since then.
    node.set_own_time(1, OwnTime::Part(500_000));
    let _agent = node.agent();
    node.prepare(3, &share_limits(20, ComputePolicy::Fixed));
    eventually("a rate for the third", || node.page(3).rate_us_per_s);
    await_percents(&node, &[&tenant], &[30.0], 3.0);
    assert_eq!(node.own_time_word(1), OwnTime::ALL.word());
    assert_eq!(node.findings.lock().unwrap().as_slice(), []);
}

#[test]
fn controls_running_processes_across_agent_kill() {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    node.prepare(1, &share_limits(30, ComputePolicy::Balance));
    node.prepare(2, &share_limits(70, ComputePolicy::Balance));
    let (first, second) = (
        start_kernels(&node, 1, 2_000_000),
        start_kernels(&node, 2, 2_000_000),
    );
    assert_eq!(node.rates(&[1, 2]).into_values().flatten().count(), 0);
    let both = [&first, &second];
    let agent = node.agent_process();
    await_percents(&node, &both, &[30.0, 70.0], 4.0);
    // A killed agent cleans nothing up; the last rates hold.
    drop(agent);
    let rates = node.rates(&[1, 2]);
    assert_eq!(rates.values().flatten().count(), 2);
    await_percents(&node, &both, &[30.0, 70.0], 8.0);
    assert_eq!(node.rates(&[1, 2]), rates);
    let since = Instant::now();
    let _agent = node.agent();
    await_percents(&node, &both, &[30.0, 70.0], 4.0);
    // A new agent kills no process at first. By now it would have done so.
    while since.elapsed() < Duration::from_secs(12) {
        node.percents(&both, Duration::ZERO, Duration::from_secs(1));
    }
    for tenant in both {
        assert!(std::path::Path::new(&format!("/proc/{}/task", tenant.pid())).exists());
    }
    assert_eq!(node.findings.lock().unwrap().as_slice(), []);
}

#[test]
fn reports_grown_region_and_keeps_its_limit() {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(2 * GIB));
    let _agent = node.agent();
    let mut process = node.escape(1, "cuMemAlloc_v2", GIB, true);
    let region = OpenOptions::new().write(true).open(node.region(1)).unwrap();
    region.set_len(1 << 20).unwrap();
    node.await_finding("the damaged region", |finding| {
        is_confirmed(finding, ViolationKind::Region)
    });
    assert_ne!(process.send(&format!("take {}", GIB + MIB)), 0);
    assert_eq!(process.send(&format!("take {}", GIB / 2)), 0);
    assert_ne!(process.send(&format!("take {GIB}")), 0);
    assert_eq!(process.send("free"), 0);
    region.set_len(REGION_SIZE as u64).unwrap();
    node.await_finding("the repaired region", |finding| {
        finding.kind == FindingKind::Violation(ViolationChange::Cleared(ViolationKind::Region))
    });
    assert_eq!(process.send(&format!("take {GIB}")), 0);
}

#[test]
fn reports_memory_from_unknown_function_once() {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(2 * GIB));
    node.prepare(2, &Limits::memory(2 * GIB));
    let _agent = node.agent();
    let honest = node.escape(2, "cuMemAlloc_v2", GIB, true);
    let greedy = node.escape(1, "cuMemAllocUnlisted", 3 * GIB, true);
    let found = node.await_finding("use over the limit", |finding| {
        is_confirmed(finding, ViolationKind::OverLimit)
    });
    assert_eq!(
        (found.claim.as_str(), &found.share),
        ("claim-1", &TestNode::share_id(1))
    );
    let FindingKind::Violation(ViolationChange::Confirmed(SuspectedViolation::OverLimit {
        used_bytes,
        limit_bytes,
        pids,
    })) = found.kind
    else {
        panic!("{found:?}");
    };
    assert!((used_bytes, limit_bytes) > (3 * GIB, 0) && limit_bytes == 2 * GIB);
    assert_eq!(pids, [greedy.pid()]);
    drop(greedy);
    node.await_finding("use within the limit", |finding| {
        finding.kind == FindingKind::Violation(ViolationChange::Cleared(ViolationKind::OverLimit))
    });
    assert_eq!(
        node.findings.lock().unwrap().len(),
        2,
        "{:?}",
        node.findings
    );
    drop(honest);
}

/// A static program in a container whose memory the NVIDIA driver limits exceeds nothing, unless its GPU time has a limit.
#[test]
fn process_whose_memory_is_limited_by_driver_lacks_gpu_time_only() {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    node.limited_by_driver = true;
    node.prepare(1, &Limits::memory(2 * GIB));
    node.enforcement = Enforcement::Report;
    node.prepare(2, &share_limits(20, ComputePolicy::Fixed));
    let _agent = node.agent();
    let mut limited = node.escape(1, "cuMemAlloc_v2", MIB, false);
    let _unmetered = node.escape(2, "cuMemAlloc_v2", MIB, false);
    let found = node.await_finding("an uncounted process", |finding| {
        is_confirmed(finding, ViolationKind::NotCounted)
    });
    assert_eq!(found.claim.as_str(), "claim-2");
    let FindingKind::Violation(ViolationChange::Confirmed(violation)) = found.kind else {
        panic!("{found:?}");
    };
    assert!(
        matches!(
            violation,
            SuspectedViolation::NotCounted {
                unenforced: Unenforced::GpuTime,
                ..
            }
        ),
        "{violation:?}"
    );
    // It was scanned as often.
    assert!(
        limited.is_running(),
        "a process within its limits was killed"
    );
    let findings = node.findings.lock().unwrap();
    assert!(
        findings
            .iter()
            .all(|finding| finding.claim.as_str() == "claim-2"),
        "{findings:?}"
    );
}

#[test]
fn kills_process_without_libvgpu_only_if_required() {
    let mut node = TestNode::new();
    node.prepare(1, &Limits::memory(2 * GIB));
    node.enforcement = Enforcement::Required;
    node.prepare(2, &Limits::memory(2 * GIB));
    let _agent = node.agent();
    let mut reported = node.escape(1, "cuMemAlloc_v2", MIB, false);
    let mut killed = node.escape(2, "cuMemAlloc_v2", MIB, false);
    for (claim, pid) in [("claim-1", reported.pid()), ("claim-2", killed.pid())] {
        let found = node.await_finding("an uncounted process", |finding| {
            finding.claim.as_str() == claim && is_confirmed(finding, ViolationKind::NotCounted)
        });
        let FindingKind::Violation(ViolationChange::Confirmed(SuspectedViolation::NotCounted {
            pid: found,
            name,
            ..
        })) = found.kind
        else {
            panic!("{found:?}");
        };
        assert_eq!((found, name.as_str()), (pid, "escape"));
    }
    assert_eq!(killed.exit_signal(), Some(9));
    let found = node.await_finding("the kill", |finding| {
        matches!(finding.kind, FindingKind::Killed { .. })
    });
    assert_eq!(found.claim.as_str(), "claim-2");
    assert!(reported.is_running(), "reported process was killed");
}

/// A client that is killed with work in flight may disturb the others of its server.
#[test]
fn client_of_mps_is_ended_on_its_server_before_it_is_killed() {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    node.prepare(1, &Limits::memory(2 * GIB));
    node.is_spatial = true;
    node.prepare(2, &Limits::memory(2 * GIB));
    let (ended, ending) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let config = Config {
        terminate: Arc::new(move |gpu, pid| {
            ended.send((gpu.clone(), pid)).unwrap();
            let _ = released.lock().unwrap().recv();
        }),
        ..node.config()
    };
    let _agent = node.agent_with(config);
    let mut by_time = node.escape(1, "cuMemAlloc_v2", MIB, false);
    let mut client = node.escape(2, "cuMemAlloc_v2", MIB, false);
    let (_, pid) = eventually("an end on the server", || ending.try_recv().ok());
    assert_eq!(pid, client.pid());
    // The agent goes on meanwhile: the other one has no server, and is killed at once.
    assert_eq!(by_time.exit_signal(), Some(9));
    assert!(client.is_running(), "killed before its work had ended");
    release.send(()).unwrap();
    assert_eq!(client.exit_signal(), Some(9));
    assert!(ending.try_recv().is_err(), "each once");
}

#[test]
fn detects_any_damaged_region_without_affecting_others() {
    type Damage = fn(&std::path::Path);
    type Matches = fn(&RegionProblem) -> bool;
    let damages: [(&str, Damage, Matches); 6] = [
        (
            "truncated",
            |path| {
                OpenOptions::new()
                    .write(true)
                    .open(path)
                    .unwrap()
                    .set_len(100)
                    .unwrap()
            },
            |problem| matches!(problem, RegionProblem::Size { found: 100, .. }),
        ),
        (
            "grown",
            |path| {
                OpenOptions::new()
                    .write(true)
                    .open(path)
                    .unwrap()
                    .set_len(1 << 20)
                    .unwrap()
            },
            |problem| matches!(problem, RegionProblem::Size { .. }),
        ),
        (
            "noise",
            |path| fs::write(path, vec![0xee; REGION_SIZE]).unwrap(),
            |problem| matches!(problem, RegionProblem::Content(_)),
        ),
        (
            "noise after the magic",
            |path| {
                let region = OpenOptions::new().write(true).open(path).unwrap();
                region
                    .write_all_at(&vec![0xee; REGION_SIZE - 16], 16)
                    .unwrap();
            },
            |problem| matches!(problem, RegionProblem::Slots(_)),
        ),
        (
            "removed",
            |path| fs::remove_file(path).unwrap(),
            |problem| matches!(problem, RegionProblem::Unreadable(_)),
        ),
        (
            "replaced by a link",
            |path| {
                fs::remove_file(path).unwrap();
                symlink("/dev/zero", path).unwrap();
            },
            |problem| matches!(problem, RegionProblem::Unreadable(_)),
        ),
    ];
    let node = TestNode::new();
    for number in 1..=7 {
        node.prepare(number, &share_limits(10, ComputePolicy::Fixed));
    }
    let _agent = node.agent();
    eventually("rates", || node.page(7).rate_us_per_s);
    for (number, (_, damage, _)) in (1..).zip(&damages) {
        damage(&node.region(number));
    }
    for (number, (what, _, matches)) in (1..).zip(&damages) {
        node.await_finding(what, |finding| {
            let is_own = finding.share == TestNode::share_id(number);
            is_own && matches!(&finding.kind, FindingKind::Violation(ViolationChange::Confirmed(SuspectedViolation::Region(problem))) if matches(problem))
        });
    }
    let tenant = start_kernels(&node, 7, 1_000_000);
    await_percents(&node, &[&tenant], &[10.0], 3.0);
    assert!(
        node.findings
            .lock()
            .unwrap()
            .iter()
            .all(|finding| finding.share != TestNode::share_id(7))
    );
}

#[test]
fn scans_regions_while_nvml_hangs() {
    let node = TestNode::new();
    node.prepare(1, &share_limits(30, ComputePolicy::Fixed));
    node.prepare(2, &share_limits(30, ComputePolicy::Fixed));
    let _agent = node.agent();
    let tenant = start_kernels(&node, 1, 1_000_000);
    let hanging = Faults {
        delay: Duration::from_secs(600),
        ..Faults::default()
    };
    let start_hang = control::Command::Break {
        gpu: GpuIndex(0),
        faults: hanging,
    };
    let end_hang = control::Command::Break {
        gpu: GpuIndex(0),
        faults: Faults::default(),
    };
    eventually("a rate", || node.page(2).rate_us_per_s);
    node.test_bed.machine().control(&start_hang).unwrap();
    fs::write(node.region(2), "short").unwrap();
    node.await_finding("the damaged region", |finding| {
        is_confirmed(finding, ViolationKind::Region)
    });
    node.test_bed.machine().control(&end_hang).unwrap();
    drop(tenant);
}

#[test]
fn reports_long_kernel() {
    let node = TestNode::new();
    node.prepare(1, &share_limits(50, ComputePolicy::Fixed));
    let _agent = node.agent();
    eventually("a rate", || node.page(1).rate_us_per_s);
    let _tenant = start_kernels(&node, 1, 700_000_000);
    let found = node.await_finding("a long kernel", |finding| {
        matches!(finding.kind, FindingKind::LongKernel(_))
    });
    let FindingKind::LongKernel(us) = found.kind else {
        panic!("{found:?}")
    };
    assert!(us >= LONG_KERNEL_US, "{us}");
}

#[test]
fn ignores_mount_that_forges_another_share() {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    node.prepare(1, &Limits::memory(2 * GIB));
    node.prepare(2, &Limits::memory(2 * GIB));
    let mut victim = node.escape(1, "cuMemAlloc_v2", GIB, true);
    let greedy = node.escape(2, "cuMemAllocUnlisted", 3 * GIB, true);
    // As one group, both would have 4 GiB and use 4 GiB.
    node.forge_mount(greedy.pid(), 1);
    let _agent = node.agent();
    let found = node.await_finding("the kill", |finding| {
        matches!(finding.kind, FindingKind::Killed { .. })
    });
    let killed = FindingKind::Killed {
        pid: greedy.pid(),
        reason: ViolationKind::OverLimit,
    };
    assert_eq!((found.claim.as_str(), &found.kind), ("claim-2", &killed));
    assert!(victim.is_running(), "{:?}", node.findings);
}
