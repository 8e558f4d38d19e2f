//! Several tenants, and tenants that start, exit and are killed.

use std::time::Duration;

use drava_vgpu_abi::contention::{OwnTime, SLICE_US};
use drava_vgpu_abi::{ComputePolicy, Limits, own_time};

use crate::SETTLE;
use crate::measurement::{Due, LENGTH, Measurement, await_parts};
use gpu_tenants::{Share, Tenant, TestBed, library, share};

/// Kernels so long that the share's debt determines the next launch, not the host: at 40% each takes 112 ms to repay,
/// and 50 ms more of credit can be saved. A loaded host schedules a tenant every 100 ms. With kernels of 3 ms a tenant
/// would lose half of its share then, because it can save at most 50 ms of credit.
const LONG_KERNELS: &str = "kernel ns=45000000 depth=3";
const LONG_KERNEL_MS: f64 = 45.0;

/// Time between two corrections of own-time fractions.
const CORRECTION: Duration = Duration::from_millis(100);

/// Starts a tenant of the share with a load.
fn tenant(test_bed: &TestBed, share: &Share, load: &str) -> Tenant {
    let mut tenant = test_bed.tenant(Some(share), "dlsym").unwrap();
    tenant.ok(&format!("start {load}")).unwrap();
    tenant
}

fn fixed(test_bed: &TestBed, name: &str, percent: u32) -> Share {
    let limits = share(ComputePolicy::Fixed, percent).unwrap();
    test_bed.share(name, &limits).unwrap()
}

/// A GPU that loses no time to switches between contexts, so that shares of the whole GPU fit.
fn without_switches() -> TestBed {
    let machine = simulator_machine::description::H100X2;
    let usual = "contextSwitchMicroseconds: 200\n";
    assert!(machine.contains(usual));
    let machine = machine.replace(usual, "contextSwitchMicroseconds: 0\n");
    TestBed::with_machine(library::shipped().unwrap(), &machine).unwrap()
}

/// Checks that each tenant gets its share while all run concurrently, and never more. A tenant has a share, the longest
/// kernel of its load, ms, and a load.
fn assert_shares(test_bed: &TestBed, tenants: &[(u32, f64, &str)]) {
    let mut shares = Vec::new();
    let mut running = Vec::new();
    for (index, (percent, _, load)) in tenants.iter().enumerate() {
        let share = fixed(test_bed, &format!("share-{index}"), *percent);
        running.push(tenant(test_bed, &share, load));
        shares.push(share);
    }
    let shares: Vec<&Share> = shares.iter().collect();
    let running: Vec<&Tenant> = running.iter().collect();
    let due = tenants
        .iter()
        .map(|(percent, kernel_ms, _)| Due::new(*percent, *kernel_ms).corrected(CORRECTION));
    let due: Vec<Due> = due.collect();
    await_parts(&due, |attempt| {
        let settle = SETTLE * if attempt == 0 { 4 } else { 1 };
        let length = LENGTH + CORRECTION;
        std::thread::scope(|scope| {
            let corrections =
                scope.spawn(|| test_bed.percents_corrected(&running, &shares, settle, length));
            std::thread::sleep(settle);
            let measured = Measurement::of(test_bed, &running);
            corrections.join().unwrap().unwrap();
            measured
        })
    });
}

#[test]
fn enforces_30_and_70_percent() {
    let loads = ["kernel ns=1000000 depth=16", "kernel ns=3000000 depth=16"];
    let tenants = |more| [(30, 1.0, loads[0]), (more, 3.0, loads[1])];
    assert_shares(&without_switches(), &tenants(70));
    assert_shares(&crate::test_bed(), &tenants(55));
}

#[test]
fn enforces_10_and_90_percent() {
    let loads = ["kernel ns=20000000 depth=4", "kernel ns=2000000 depth=16"];
    let tenants = |more| [(10, 20.0, loads[0]), (more, 2.0, loads[1])];
    assert_shares(&without_switches(), &tenants(90));
    assert_shares(&crate::test_bed(), &tenants(80));
}

#[test]
fn enforces_four_shares_of_20_percent() {
    assert_shares(
        &crate::test_bed(),
        &[(20, 2.0, "kernel ns=2000000 depth=8"); 4],
    );
}

/// Beside a process that always has work, a third of the measured time of such a share are interruptions.
#[test]
fn charges_no_interruptions_of_short_kernels() {
    // A slice of the other process and two switches, as the node agent states it.
    let interruption_us = SLICE_US + 400;
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 35);
    share
        .write(&[own_time(OwnTime::Interrupted(interruption_us))])
        .unwrap();
    let _other = {
        let mut other = test_bed.tenant(None, "dlsym").unwrap();
        other.ok("start kernel ns=1000000 depth=16").unwrap();
        other
    };
    let tenant = tenant(&test_bed, &share, "kernel ns=400000 depth=16");
    crate::assert_part(&test_bed, &tenant, Due::new(35, 0.4));
}

#[test]
fn divides_share_among_its_processes() {
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 30);
    let load = "kernel ns=4000000 depth=8";
    let tenants = [
        tenant(&test_bed, &share, load),
        tenant(&test_bed, &share, load),
    ];
    std::thread::sleep(SETTLE);
    let measured = Measurement::of(&test_bed, &[&tenants[0], &tenants[1]]).merged();
    measured.assert_no_excess(0, Due::new(30, 4.0));
    // Their kernels preempt each other, so each can seem to take twice its time.
    assert!(measured.percent(0) >= 15.0, "{:.1}", measured.percent(0));
}

#[test]
fn applies_changed_share_and_agent_rate() {
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 10);
    let tenant = tenant(&test_bed, &share, LONG_KERNELS);
    crate::assert_part(&test_bed, &tenant, Due::new(10, LONG_KERNEL_MS));
    let changed = gpu_tenants::share(ComputePolicy::Fixed, 60).unwrap();
    share.change(&changed).unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(60, LONG_KERNEL_MS));
    let granted = Limits {
        compute_policy: ComputePolicy::Balance,
        rate_us_per_s: Some(250_000),
        ..changed
    };
    share.change(&granted).unwrap();
    crate::wait_until(
        || share.usage().unwrap().0.credit_us <= 0,
        || "credit saved at the old rate is not spent".to_owned(),
    );
    crate::assert_part(&test_bed, &tenant, Due::new(25, LONG_KERNEL_MS));
}

#[test]
fn records_demand_only_while_launching() {
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 20);
    let mut tenant = tenant(&test_bed, &share, "kernel ns=2000000 depth=4");
    let demand = || share.usage().unwrap().0.last_demand_us;
    let before = demand();
    crate::wait_until(|| demand() > before, || "no demand is recorded".into());
    tenant.ok("stop").unwrap();
    let before = demand();
    // Many times as long as a launching process takes to record demand.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(demand(), before, "an idle share has no demand");
}

#[test]
fn leaves_debt_of_killed_process_with_its_share() {
    let test_bed = crate::test_bed();
    let (indebted, other) = (
        fixed(&test_bed, "indebted", 10),
        fixed(&test_bed, "other", 40),
    );
    let mut dying = test_bed.tenant(Some(&indebted), "dlsym").unwrap();
    dying.ok("once 300000000").unwrap();
    dying.ok("once 1000").unwrap();
    dying.kill().unwrap();
    let debt = indebted.usage().unwrap().0.credit_us;
    assert!(debt < -50_000, "{debt}");
    let tenant = tenant(&test_bed, &other, LONG_KERNELS);
    crate::assert_part(&test_bed, &tenant, Due::new(40, LONG_KERNEL_MS));
    // Time alone repays the debt.
    let mut successor = test_bed.tenant(Some(&indebted), "dlsym").unwrap();
    successor.ok("once 1000").unwrap();
}

#[test]
fn gives_share_of_killed_process_to_survivors() {
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 40);
    let (first, second) = (
        tenant(&test_bed, &share, LONG_KERNELS),
        tenant(&test_bed, &share, LONG_KERNELS),
    );
    let both = [first.pid(), second.pid()];
    crate::wait_until(
        || {
            let (used, _) = test_bed.used(&both).unwrap();
            used.iter().all(|used| *used > Duration::from_millis(50))
        },
        || "one of the tenants does not run".into(),
    );
    first.kill().unwrap();
    crate::assert_part(&test_bed, &second, Due::new(40, LONG_KERNEL_MS));
}

#[test]
fn preserves_captures_during_launches_of_other_thread() {
    let test_bed = crate::test_bed();
    let share = fixed(&test_bed, "share", 50);
    // The launching thread makes no event calls, which would invalidate the captures; all of its launches are sampled.
    let load = "kernel ns=400000 plain=1";
    let mut tenant = tenant(&test_bed, &share, load);
    let before = tenant.launched().unwrap();
    tenant.ok("capture 5 40").unwrap();
    let launched = tenant.launched().unwrap() - before;
    assert!(launched > 40, "{launched}");
    tenant.ok("stop").unwrap();
    // Sampling continues afterwards.
    tenant.ok(&format!("start {LONG_KERNELS}")).unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(50, LONG_KERNEL_MS));
}
