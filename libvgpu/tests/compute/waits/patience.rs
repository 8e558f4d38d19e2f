//! A kernel that runs on may wait for a later launch of its share, which is therefore admitted.

use std::time::{Duration, Instant};

use drava_vgpu_abi::ComputePolicy;
use gpu_tenants::share;

use super::{LONGEST, PERCENT, tenant_of_share};

/// A kernel that does not end before the test.
const ENDLESS_NS: u64 = 400_000_000_000;

/// The believed second of the running kernel takes a share of 1% a hundred seconds to repay.
const REPAID: Duration = Duration::from_secs(100);

#[test]
fn admits_launch_at_one_percent_while_kernel_runs_on() {
    for policy in [ComputePolicy::Fixed, ComputePolicy::Balance] {
        let test_bed = crate::test_bed();
        let limits = share(policy, 1).unwrap();
        let share = test_bed.share("share", &limits).unwrap();
        let mut tenant = test_bed.tenant(Some(&share), "dlsym").unwrap();
        tenant.ok(&format!("queue {ENDLESS_NS}")).unwrap();
        let begun = Instant::now();
        for blocks in [100, 200, 300] {
            tenant.ok(&format!("queue 1000000 {blocks}")).unwrap();
        }
        let waited = begun.elapsed();
        assert!(waited < REPAID / 2, "{policy:?}: {waited:?}");
    }
}

/// Running kernels of several streams are charged a second together, which another process of the share waits for: it
/// does not know whether they run on.
#[test]
fn charges_running_kernels_of_streams_once() {
    const STREAMS: u32 = 8;
    let test_bed = crate::test_bed();
    let (share, mut first) = tenant_of_share(&test_bed, PERCENT);
    let mut second = test_bed.tenant(Some(&share), "dlsym").unwrap();
    first
        .ok(&format!(
            "start kernel ns={ENDLESS_NS} streams={STREAMS} depth={STREAMS} blocks=1"
        ))
        .unwrap();
    crate::wait_until(
        || first.launched().unwrap() == u64::from(STREAMS),
        || "the streams have no kernels".to_owned(),
    );
    // Launches of the first process, which learns how long its kernels run.
    for blocks in (1..5).map(|kind| kind * 100) {
        first.ok(&format!("queue 1000000 {blocks}")).unwrap();
    }
    let begun = Instant::now();
    second.ok("queue 1000000").unwrap();
    let waited = begun.elapsed();
    assert!(waited < LONGEST, "{waited:?}");
}

/// A kernel whose kind is known to run long is no reason: otherwise a share would exceed its part with long kernels.
#[test]
fn throttles_known_long_kernels() {
    const LONG_NS: u64 = 1_500_000_000;
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, 50);
    for _ in 0..3 {
        tenant.ok(&format!("once {LONG_NS}")).unwrap();
    }
    let timeouts = || share.usage().unwrap().0.admission_timeouts;
    let before = timeouts();
    for _ in 0..4 {
        tenant.ok(&format!("queue {LONG_NS}")).unwrap();
    }
    assert_eq!(timeouts(), before);
}
