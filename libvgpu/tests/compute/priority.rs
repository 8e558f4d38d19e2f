//! Yielding to shares of higher priority, and the busy time that a share reports.

use std::time::{Duration, Instant, UNIX_EPOCH};

use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::page::{lent, notify, window, yield_until};

use crate::{now_us, time_of, wait_until};
use gpu_tenants::{Share, Tenant, TestBed, share};

/// A tenant that may use the whole GPU.
fn unthrottled(test_bed: &TestBed) -> (Share, Tenant) {
    let share = test_bed
        .share("share", &share(ComputePolicy::Balance, 100).unwrap())
        .unwrap();
    let tenant = test_bed.tenant(Some(&share), "dlsym").unwrap();
    (share, tenant)
}

#[test]
fn launches_nothing_while_yielding() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    tenant.ok("start kernel ns=2000000 depth=4").unwrap();
    let keeps_launching = |tenant: &mut Tenant, why: &str| {
        let enough = tenant.launched().unwrap() + 20;
        wait_until(|| tenant.launched().unwrap() > enough, || why.to_owned());
    };
    keeps_launching(&mut tenant, "no launch");
    let mut seen = 0;
    while seen < 5 {
        let until_us = now_us() + 90_000;
        share.write(&[yield_until(until_us)]).unwrap();
        std::thread::sleep(Duration::from_millis(25));
        let before = tenant.launched().unwrap();
        std::thread::sleep(Duration::from_millis(40));
        let launched = tenant.launched().unwrap() - before;
        // On a loaded host the answer can arrive after the deadline.
        if now_us() < until_us {
            assert!(launched <= 1, "{launched} launches");
            seen += 1;
        }
    }
    keeps_launching(&mut tenant, "no launch after the yield");
    // An implausible deadline does not stop launches either.
    share.write(&[yield_until(u64::MAX)]).unwrap();
    keeps_launching(&mut tenant, "a damaged value stops launches");
}

#[test]
fn admits_starved_launch_after_timeout() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    tenant.ok("once 1000").unwrap();
    tenant.ok("start kernel ns=2000000 depth=4").unwrap();
    let timeouts = || share.usage().unwrap().0.admission_timeouts;
    wait_until(
        || {
            share.write(&[yield_until(now_us() + 90_000)]).unwrap();
            timeouts() > 1
        },
        || "a launch is never admitted".into(),
    );
    tenant.ok("stop").unwrap();
}

/// Returns the time that two consecutive launches of kernels of `ns` take.
fn time_of_two(tenant: &mut Tenant, ns: u64) -> Duration {
    tenant.ok(&format!("once {ns}")).unwrap();
    let begun = Instant::now();
    for _ in 0..2 {
        tenant.ok(&format!("queue {ns}")).unwrap();
    }
    begun.elapsed()
}

#[test]
fn queues_one_long_kernel_within_window() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    let ns = 40_000_000;
    let length = Duration::from_nanos(ns);
    // Lets the library learn the kernel's duration.
    for _ in 0..4 {
        tenant.ok(&format!("once {ns}")).unwrap();
    }
    wait_until(
        || time_of_two(&mut tenant, ns) < length / 2,
        || "each launch waits for the previous one".into(),
    );
    share.write(&[window(250)]).unwrap();
    for _ in 0..5 {
        let took = time_of_two(&mut tenant, ns);
        assert!(took >= length, "{took:?}");
    }
    share.write(&[window(0)]).unwrap();
    wait_until(
        || time_of_two(&mut tenant, ns) < length / 2,
        || "the window still applies".into(),
    );
}

#[test]
fn keeps_gpu_busy_within_window_and_preserves_captures() {
    const TURNS: u32 = 3;
    const TURN: Duration = Duration::from_millis(100);
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    // Short kernels and long ones, in one stream and in several.
    for (kernels, depth) in [
        ("ns=100000", 16),
        ("ns=2000000", 8),
        ("ns=100000,2000000 streams=4", 16),
    ] {
        // In turn with a program that awaits each kernel: both then depend on the host alike, one round trip per kernel.
        let mut got = [0.0; 2];
        for _ in 0..TURNS {
            for (got, (depth, us)) in got.iter_mut().zip([(0, 0), (depth, 250)]) {
                share.write(&[window(us)]).unwrap();
                let load = format!("start kernel {kernels} depth={depth}");
                tenant.ok(&load).unwrap();
                *got += test_bed.percents(&[&tenant], TURN / 2, TURN).unwrap()[0];
                tenant.ok("stop").unwrap();
            }
        }
        // If each launch slept instead, 5 ms at a time, kernels of 2 ms would get two sevenths of the GPU.
        assert!(got[1] >= got[0] / 2.0, "{kernels}: {got:.0?}");
    }
    tenant.ok("start kernel ns=400000 plain=1").unwrap();
    tenant.ok("capture 5 20").unwrap();
    tenant.ok("stop").unwrap();
}

#[test]
fn reports_expected_end_when_notifying() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    let busy_until = || share.usage().unwrap().0.busy_until_us;
    let ns = 60_000_000;
    for _ in 0..4 {
        tenant.ok(&format!("once {ns}")).unwrap();
    }
    assert_eq!(busy_until(), 0, "no end without a request");
    // Only a notification reads the file, so its access time is the time of the last notification.
    let last_notified = || {
        std::fs::metadata(share.region())
            .unwrap()
            .accessed()
            .unwrap()
    };
    let previous = last_notified();
    // Otherwise a notification would have the same access time.
    wait_until(
        || UNIX_EPOCH + time_of(libc::CLOCK_REALTIME_COARSE) > previous,
        || "the clock of access times stands still".to_owned(),
    );
    // A different grid, so its duration does not count for the long kernel.
    tenant.ok("once 1000 64").unwrap();
    assert_eq!(last_notified(), previous);
    share.write(&[notify(true)]).unwrap();
    let begun = now_us();
    tenant.ok(&format!("queue {ns}")).unwrap();
    assert!(last_notified() > previous, "the agent is not notified");
    tenant.ok(&format!("queue {ns}")).unwrap();
    let (until, launched) = (busy_until(), now_us());
    // The duration was learned on a loaded host.
    let length = ns / 1_000 * 2;
    assert!(until >= begun + length * 9 / 10, "{begun} {until}");
    assert!(until <= launched + length * 2, "{launched} {until}");
    // Each of many short launches is reported, although one lease covers several.
    let ns = 200_000;
    let load = format!("start kernel ns={ns} depth=16 blocks=128");
    tenant.ok(&load).unwrap();
    // The library learns their duration.
    let enough = tenant.launched().unwrap() + 64;
    wait_until(
        || tenant.launched().unwrap() > enough,
        || "too few launches".to_owned(),
    );
    tenant.ok("stop").unwrap();
    let is_reported = |tenant: &mut Tenant| {
        let before = busy_until();
        tenant.ok(&format!("queue {ns} 128")).unwrap();
        busy_until() != before
    };
    let reported = (0..40).filter(|_| is_reported(&mut tenant)).count();
    assert!(reported > 30, "{reported} of 40 launches are reported");
}

#[test]
fn notifies_agent_on_first_launch_after_pause() {
    // Longer than the granularity of access times and than the pause that counts as idle.
    const PAUSE: Duration = Duration::from_millis(30);
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    let last_notified = || {
        std::fs::metadata(share.region())
            .unwrap()
            .accessed()
            .unwrap()
    };
    let is_notified = |tenant: &mut Tenant| {
        std::thread::sleep(PAUSE);
        let previous = last_notified();
        tenant.ok("queue 5000000").unwrap();
        last_notified() > previous
    };
    tenant.ok("once 5000000").unwrap();
    for _ in 0..5 {
        assert!(!is_notified(&mut tenant), "no other share uses the time");
    }
    share.write(&[lent(true)]).unwrap();
    for _ in 0..5 {
        assert!(is_notified(&mut tenant), "the agent is not notified");
    }
    // A share that keeps launching does not notify again, unless the host delays it.
    tenant.ok("start kernel ns=2000000 depth=4").unwrap();
    wait_until(
        || {
            let (before, previous) = (tenant.launched().unwrap(), last_notified());
            std::thread::sleep(PAUSE);
            tenant.launched().unwrap() > before + 5 && last_notified() == previous
        },
        || "every launch notifies".into(),
    );
    tenant.ok("stop").unwrap();
    share.write(&[lent(false)]).unwrap();
    assert!(!is_notified(&mut tenant), "the time is not lent any more");
}

#[test]
fn reports_wall_clock_duration_whatever_its_own_time() {
    let test_bed = crate::test_bed();
    let (share, mut tenant) = unthrottled(&test_bed);
    share.write(&[notify(true)]).unwrap();
    let ns = 60_000_000;
    let length_us = ns / 1_000;
    // The own-time fraction applies to the current active set, which changes.
    for (learned, current) in [(500_000, 1_000_000), (1_000_000, 500_000)] {
        share.set_own_time(learned).unwrap();
        for _ in 0..16 {
            tenant.ok(&format!("once {ns}")).unwrap();
        }
        share.set_own_time(current).unwrap();
        let begun = now_us();
        tenant.ok(&format!("queue {ns}")).unwrap();
        let (until, launched) = (share.usage().unwrap().0.busy_until_us, now_us());
        assert!(
            until >= begun + length_us * 9 / 10,
            "{} µs of {length_us}",
            until - begun
        );
        assert!(
            until <= launched + length_us * 3 / 2,
            "{} µs of {length_us}",
            until - launched
        );
        tenant.ok(&format!("once {ns}")).unwrap();
    }
}
