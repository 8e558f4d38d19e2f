//! Processes that `SIGSTOP`, a debugger or the freezer of cgroups stops.

use std::time::{Duration, Instant};

use gpu_tenants::Tenant;

use super::{PERCENT, tenant_of_share};
use crate::wait_until;

/// The length of the stop is what the tests are about: it must be neither GPU time nor throttling.
const STOPPED: Duration = Duration::from_secs(3);

fn state(tenant: &Tenant) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", tenant.pid())).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.chars().next().unwrap()
}

fn signal(tenant: &Tenant, signal: i32) {
    let pid = i32::try_from(tenant.pid()).unwrap();
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Continues a process after it was stopped for [`STOPPED`], and returns how long it certainly was.
fn continue_later(tenant: &Tenant) -> Duration {
    wait_until(
        || state(tenant) == 'T',
        || "the process does not stop".to_owned(),
    );
    let begun = Instant::now();
    std::thread::sleep(STOPPED);
    let stopped = begun.elapsed();
    signal(tenant, libc::SIGCONT);
    stopped
}

/// The process stops between the two events of a sample, which therefore measure the stop.
#[test]
fn charges_launch_stopped_in_its_call_for_its_kernel() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    for _ in 0..10 {
        tenant.ok("once 5000000").unwrap();
    }
    let before = share.counted().unwrap();
    tenant.send("stoppedlaunch 5000000").unwrap();
    continue_later(&tenant);
    assert_eq!(tenant.receive().unwrap(), "0");
    // A request for GPU time collects the results of completed launches.
    for _ in 0..4 {
        tenant.ok("once 5000000").unwrap();
    }
    let counted = share.counted().unwrap() - before;
    // Five kernels of 5 ms; a believed second would be counted as a whole.
    assert!(counted < Duration::from_millis(500), "{counted:?}");
}

#[test]
fn counts_no_stop_as_throttled() {
    /// Longest counted time of one sleep of a waiting launch.
    const LONGEST_SLEEP: Duration = Duration::from_millis(10);
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    let throttled = || Duration::from_micros(share.usage().unwrap().1[0].throttled_us);
    let last_demand = || share.usage().unwrap().0.last_demand_us;
    tenant.ok("once 500000000").unwrap();
    let (before, begun) = (throttled(), Instant::now());
    let previous = last_demand();
    // Waits for two seconds until the debt is repaid.
    tenant.send("queue 1000000").unwrap();
    wait_until(
        || last_demand() != previous,
        || "the launch requests no time".to_owned(),
    );
    signal(&tenant, libc::SIGSTOP);
    let stopped = continue_later(&tenant);
    assert!(tenant.receive().unwrap().starts_with("0 "));
    let running = begun.elapsed() - stopped;
    let counted = throttled() - before;
    assert!(counted > Duration::ZERO, "the launch did not wait");
    assert!(
        counted <= running + LONGEST_SLEEP,
        "{counted:?} in {running:?}"
    );
}
