//! Priority arbitration in virtual time, and the rate limit of notifications.

use drava_dra_driver::agent::policy::priority::{
    AHEAD_US, GAP_US, MAX_DEFICIT_US, PriorityArbiter, ShareState,
};
use drava_dra_driver::agent::policy::rate_limiter::{BURST, REFILL_US, RateLimiter};
use drava_vgpu_abi::Priority;
use proptest::prelude::*;

const SECOND_US: u64 = 1_000_000;
const BEGIN_US: u64 = 1000 * SECOND_US;

fn share(id: u32, priority: i32, kept_percent: u32, busy_until_us: u64) -> ShareState<u32> {
    ShareState {
        id,
        priority: Priority::new(priority).unwrap(),
        guarantee: i64::from(kept_percent) * 10_000,
        busy_until_us,
    }
}

#[test]
fn yields_to_higher_priority_until_work_ends() {
    let mut arbiter = PriorityArbiter::default();
    let now = BEGIN_US;
    let poll = |arbiter: &mut PriorityArbiter<u32>, now, until| {
        let all = [
            share(1, 100, 50, until),
            share(2, 100, 1, 0),
            share(3, 0, 1, 0),
            share(4, -100, 1, 0),
        ];
        arbiter
            .poll(now, &all)
            .into_iter()
            .map(|(_, us)| us)
            .collect::<Vec<_>>()
    };
    assert_eq!(poll(&mut arbiter, now, 0), [0; 4]);
    assert_eq!(arbiter.next_us(), u64::MAX, "polls without any work");
    // The work may have started late, so a quarter of its length is added, 1 ms at most.
    let until = now + 2_000;
    let yields = poll(&mut arbiter, now, until);
    assert_eq!(yields, [0, 0, until + 500, until + 500]);
    assert!(arbiter.yields(3, now) && !arbiter.yields(2, now));
    // Polled before the end, at the end, and when the work is certainly over.
    let mut polls = Vec::new();
    while arbiter.next_us() < u64::MAX {
        let now = arbiter.next_us();
        polls.push(now - until.min(now));
        poll(&mut arbiter, now, until);
    }
    assert!(polls.len() <= 6, "{polls:?}");
    assert!(!arbiter.yields(3, until + 500));
    // More work extends the yield, up to the limit that bounds the effect of an agent crash.
    poll(&mut arbiter, now + 5_000, now + 10_000);
    let yields = poll(&mut arbiter, now + 9_500, now + 20_000);
    assert_eq!(yields[2], now + 21_000);
    let yields = poll(&mut arbiter, now + 19_500, u64::MAX);
    assert_eq!(yields[2], now + 19_500 + AHEAD_US);
    // A removed share is dropped, busy or not.
    assert_eq!(arbiter.poll(now + 19_600, &[share(3, 0, 1, 0)]), [(3, 0)]);
}

/// Polls a high-priority share that is busy until `busy_us` and a best-effort share, until `until_us`. Returns how long the
/// best-effort share yielded, µs.
fn poll_until(
    arbiter: &mut PriorityArbiter<u32>,
    now_us: &mut u64,
    busy_us: u64,
    until_us: u64,
) -> u64 {
    let mut yielded_us = 0;
    while *now_us < until_us {
        let all = [share(1, 100, 50, busy_us), share(2, 0, 1, 0)];
        let yields = arbiter.poll(*now_us, &all)[1].1;
        let next_us = arbiter.next_us().min(until_us);
        yielded_us += yields.clamp(*now_us, next_us) - *now_us;
        *now_us = next_us;
    }
    yielded_us
}

#[test]
fn extends_yield_for_work_that_started_late() {
    let mut arbiter = PriorityArbiter::default();
    let (start_us, mut now_us) = (BEGIN_US, BEGIN_US);
    let until_us = start_us + 4_000;
    poll_until(&mut arbiter, &mut now_us, until_us, until_us + 1);
    assert!(arbiter.yields(2, until_us + 900));
    poll_until(&mut arbiter, &mut now_us, until_us, until_us + 1_100);
    assert!(!arbiter.yields(2, until_us + 1_000));
}

/// Checks requests of ten kernels of 500 µs, 200 µs apart. Kernel `late` waits 1 ms for a kernel of another share.
fn check_multi_kernel_requests(late: u32) {
    let mut arbiter = PriorityArbiter::default();
    let mut now_us = BEGIN_US;
    for request in 0..40 {
        let idle_us = now_us + 20_000;
        poll_until(&mut arbiter, &mut now_us, 0, idle_us);
        let (mut end_us, mut until_us) = (now_us, now_us);
        let start_us = now_us;
        for kernel in 0..10 {
            let is_yielding = arbiter.yields(2, now_us);
            // The agent learns of the request with its first kernel.
            let is_unknown = kernel == 0 || (request, kernel) == (0, 1);
            assert!(
                is_yielding || is_unknown,
                "{kernel}: {} µs",
                now_us - start_us
            );
            until_us = until_us.max(now_us) + 500;
            end_us = end_us.max(now_us) + 500 + if kernel == late { 1_000 } else { 0 };
            poll_until(&mut arbiter, &mut now_us, until_us, end_us + 200);
        }
        // No kernel of another share delayed the last kernel.
        let over_us = until_us + GAP_US;
        poll_until(&mut arbiter, &mut now_us, until_us, over_us + 1);
        assert!(
            !arbiter.yields(2, now_us),
            "yields after the end of the request"
        );
    }
}

#[test]
fn yields_between_kernels_of_one_request() {
    check_multi_kernel_requests(0);
}

#[test]
fn tolerates_delay_of_second_kernel_in_request() {
    check_multi_kernel_requests(1);
}

#[test]
fn holds_off_only_after_multi_kernel_requests() {
    let mut arbiter = PriorityArbiter::default();
    let mut now_us = BEGIN_US;
    // One multi-kernel request first.
    for _ in 0..2 {
        let until_us = now_us + 500;
        poll_until(&mut arbiter, &mut now_us, until_us, until_us + 300);
    }
    let mut yielded_us = 0;
    for request in 0..100 {
        let until_us = now_us + 4_000;
        let next_us = until_us + 20_000;
        let us = poll_until(&mut arbiter, &mut now_us, until_us, next_us);
        yielded_us += if request < 10 { 0 } else { us };
    }
    assert_eq!(yielded_us, 90 * 5_000);
}

#[test]
fn bounds_hold_off_after_repeated_short_work() {
    const MAX_SAVED_US: u64 = 20_000;
    for pause_us in [300, 700, 1_400] {
        let mut arbiter = PriorityArbiter::default();
        let mut now_us = BEGIN_US;
        // A long idle time before saves nothing.
        for _ in 0..100 {
            let idle_us = now_us + 100_000;
            poll_until(&mut arbiter, &mut now_us, 0, idle_us);
        }
        let (start_us, mut yielded_us, mut worked_us) = (now_us, 0, 0);
        while now_us < start_us + SECOND_US {
            let (until_us, next_us) = (now_us + 50, now_us + pause_us);
            yielded_us += poll_until(&mut arbiter, &mut now_us, until_us, next_us);
            // The work, with the allowance for a late start.
            worked_us += 50 + 50 + 50 / 4 + 1;
        }
        let most_us = worked_us + SECOND_US / 10 + MAX_SAVED_US;
        assert!(
            yielded_us <= most_us,
            "{pause_us}: {yielded_us} of {most_us}"
        );
        assert!(yielded_us > worked_us, "{pause_us}: no hold-off");
    }
}

/// Runs `busy` high-priority shares that always report work. Returns the percentage of the GPU that each share of `below`
/// gets, and its longest time without the GPU, µs.
fn run_busy_shares(busy: u32, below: &[(i32, u32)], duration_us: u64) -> Vec<(f64, u64)> {
    const TICK_US: u64 = 500;
    let mut arbiter = PriorityArbiter::default();
    let mut had = vec![(0u64, 0u64, 0u64); below.len()];
    let ids = |index: usize| u32::try_from(index).unwrap() + 100;
    for now in (BEGIN_US..BEGIN_US + duration_us).step_by(500) {
        let mut all: Vec<_> = (0..busy).map(|id| share(id, 50, 10, u64::MAX)).collect();
        let below = below.iter().enumerate();
        all.extend(below.map(|(index, (priority, kept))| share(ids(index), *priority, *kept, 0)));
        let yields = arbiter.poll(now, &all);
        for (index, (had, pause, longest)) in had.iter_mut().enumerate() {
            let (_, until) = yields.iter().find(|(id, _)| *id == ids(index)).unwrap();
            if *until > now {
                *pause += TICK_US;
                *longest = (*longest).max(*pause);
            } else {
                // The GPU divides time evenly.
                *had += TICK_US / u64::from(1 + busy);
                *pause = 0;
            }
        }
    }
    let percent = |us: u64| 100.0 * us as f64 / duration_us as f64;
    had.into_iter()
        .map(|(had, _, longest)| (percent(had), longest))
        .collect()
}

#[test]
fn keeps_guarantees_under_constant_busy_claims() {
    for busy in [1, 2] {
        for kept in [1, 10, 20, 30] {
            let (percent, longest) = run_busy_shares(busy, &[(0, kept)], 30 * SECOND_US)[0];
            assert!(
                percent >= f64::from(kept) - 0.2,
                "{kept} of {busy}: {percent}"
            );
            // No more than the guarantee, because the other shares have priority.
            assert!(
                percent <= f64::from(kept) + 1.0,
                "{kept} of {busy}: {percent}"
            );
            let most = 2 * MAX_DEFICIT_US * 100 / u64::from(kept) + 1_000;
            assert!(longest <= most, "{kept} of {busy}: {longest} µs without");
        }
    }
}

#[test]
fn does_not_yield_to_equal_priority() {
    let mut arbiter = PriorityArbiter::default();
    for now in (BEGIN_US..BEGIN_US + SECOND_US).step_by(1_000) {
        let all = [1, 2, 3].map(|id| share(id, 7, 1, now + 900));
        assert!(arbiter.poll(now, &all).iter().all(|(_, until)| *until == 0));
    }
}

#[test]
fn rate_limits_notifications_of_one_share() {
    let mut limiter = RateLimiter::default();
    let mut accepted = 0u64;
    for now in (BEGIN_US..BEGIN_US + 10 * SECOND_US).step_by(10) {
        if limiter.next_us(now) <= now {
            limiter.accept(now);
            accepted += 1;
        }
    }
    let most = u64::from(BURST) + 10 * SECOND_US / REFILL_US + 1;
    assert!(
        (most - 3..=most).contains(&accepted),
        "{accepted} of {most}"
    );
    // After a pause, the full burst is accepted again.
    let rested = BEGIN_US + 20 * SECOND_US;
    for call in 0..u64::from(BURST) {
        assert_eq!(limiter.next_us(rested + call), rested + call);
        limiter.accept(rested + call);
    }
    assert!(limiter.next_us(rested + 100) > rested + 100);
    // Notifications below the limit are all accepted.
    for request in 0..10_000 {
        let now = rested + SECOND_US + request * REFILL_US;
        assert_eq!(limiter.next_us(now), now, "{request}");
        limiter.accept(now);
    }
}

proptest! {
    #[test]
    fn bounds_yield_for_any_reported_values(
        steps in proptest::collection::vec((0u64..200_000, any::<[u64; 3]>()), 1..60),
        priorities in any::<[i8; 3]>(),
    ) {
        let mut arbiter = PriorityArbiter::default();
        let mut now = BEGIN_US;
        for (step, busy) in steps {
            now += step;
            let all: Vec<_> = (0u32..).zip(priorities.into_iter().zip(busy)).map(|(id, (priority, busy))| {
                share(id, i32::from(priority).clamp(-100, 100), 10, busy)
            }).collect();
            let yields = arbiter.poll(now, &all);
            prop_assert_eq!(yields.len(), 3);
            for (_, until) in &yields {
                prop_assert!(*until <= now + AHEAD_US);
            }
            let highest = all.iter().map(|share| share.priority).max();
            for (share, (_, until)) in all.iter().zip(&yields) {
                prop_assert!(Some(share.priority) < highest || *until == 0);
            }
            prop_assert!(arbiter.next_us() > now);
        }
    }
}
