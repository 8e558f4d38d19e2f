//! No launch waits without end, and no pause becomes minutes of debt.

mod flags;
mod full_streams;
mod patience;
mod stops;

use std::time::{Duration, Instant};

use drava_vgpu_abi::ComputePolicy;
use gpu_tenants::{Share, Tenant, TestBed, share};

use crate::measurement::Due;

/// A share of 20% waits five seconds for each second of GPU time; the rest is for a loaded host.
const PERCENT: u32 = 20;
const LONGEST: Duration = Duration::from_secs(15);
/// A kernel that does not end before the test.
const ENDLESS_NS: u64 = 40_000_000_000;

/// Adds a share of this part of the GPU's time, and a program that uses it.
fn tenant_of_share(test_bed: &TestBed, percent: u32) -> (Share, Tenant) {
    let limits = share(ComputePolicy::Fixed, percent).unwrap();
    let share = test_bed.share("share", &limits).unwrap();
    let tenant = test_bed.tenant(Some(&share), "dlsym").unwrap();
    (share, tenant)
}

/// The first kernel may wait for the later launches, so they must be made while it runs.
#[test]
fn admits_launches_while_kernel_of_share_runs_on() {
    let test_bed = crate::test_bed();
    let (share, mut first) = tenant_of_share(&test_bed, PERCENT);
    let mut second = test_bed.tenant(Some(&share), "dlsym").unwrap();
    first.ok(&format!("queue {ENDLESS_NS}")).unwrap();
    let begun = Instant::now();
    // More than the saved credit, of kinds that are not known to be so long.
    for blocks in (1..20).map(|kind| kind * 100) {
        for tenant in [&mut first, &mut second] {
            tenant.send(&format!("queue 1000000 {blocks}")).unwrap();
        }
        for tenant in [&mut first, &mut second] {
            assert_eq!(tenant.receive().unwrap().split(' ').next(), Some("0"));
        }
    }
    let waited = begun.elapsed();
    assert!(waited < LONGEST, "{waited:?}");
}

/// As if a debugger had stopped the GPU for seconds during a short kernel.
#[test]
fn charges_interrupted_launch_at_most_a_second() {
    const INTERRUPTED_NS: u64 = 6_000_000_000;
    let test_bed = crate::test_bed();
    let (_share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    for _ in 0..10 {
        tenant.ok("once 5000000").unwrap();
    }
    tenant.ok(&format!("once {INTERRUPTED_NS}")).unwrap();
    let begun = Instant::now();
    for _ in 0..3 {
        tenant.ok("once 5000000").unwrap();
    }
    let waited = begun.elapsed();
    assert!(waited < LONGEST, "{waited:?}");
}

/// During the host function the GPU is idle.
#[test]
fn charges_graph_with_host_function_for_its_kernels() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    tenant.ok("hostgraph 200 10").unwrap();
    // A request for GPU time collects the results of completed launches.
    for _ in 0..4 {
        tenant.ok("once 1000000").unwrap();
    }
    let counted = share.counted().unwrap();
    assert!(counted < Duration::from_millis(500), "{counted:?} of 14 ms");
}

/// Such a graph is never measured, and only one of its ten kernels is known.
#[test]
fn charges_unknown_kernels_of_graph_as_known_ones() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, 90);
    for _ in 0..20 {
        tenant.ok("once 1000000").unwrap();
    }
    let before = share.counted().unwrap();
    tenant.ok("hostgraph 0 20 9").unwrap();
    for _ in 0..4 {
        tenant.ok("once 1000000").unwrap();
    }
    let counted = share.counted().unwrap() - before;
    assert!(
        counted > Duration::from_millis(150),
        "{counted:?} of 204 ms"
    );
}

/// Other functions than the hooked ones begin captures, too. The graph is not launched, so nothing is charged; an
/// event in the capture would not measure anything.
#[test]
fn charges_no_launch_in_unknown_capture() {
    const LAUNCHES: u64 = 20;
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, 90);
    let nodes = tenant.ok(&format!("hiddencapture {LAUNCHES}")).unwrap();
    assert_eq!(nodes, [LAUNCHES]);
    // A request for GPU time reports what was charged before.
    for _ in 0..4 {
        tenant.ok("once 1000000").unwrap();
    }
    let counted = share.counted().unwrap();
    assert!(counted < Duration::from_millis(20), "{counted:?} of 4 ms");
}

/// No launch waits during a capture, so a capture that is never ended would lift the limit.
#[test]
fn ends_capture_with_its_context() {
    let test_bed = crate::test_bed();
    let (_share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    tenant.ok("lostcapture").unwrap();
    tenant.ok("start kernel ns=2000000 depth=8").unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(PERCENT, 2.0));
}
