//! The debt bucket, with tables, random input and a crash after each step.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{
    BURST_US, Bucket, Grant, InDebt, LEASE_US, MAX_SLEEP_US, MAX_YIELD_US, NOTIFY_AHEAD_US,
    NextLaunch, TOKEN_ABANDONED_US, TOKEN_BURST_US, TokenSlice, yields_for_us,
};
use drava_vgpu_abi::region::Header;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use proptest::prelude::*;

fn limits(policy: ComputePolicy, cores: u32, rate: Option<u32>) -> Limits {
    Limits {
        cores: Cores::new(cores).unwrap(),
        compute_policy: policy,
        rate_us_per_s: rate,
        ..Limits::memory(0)
    }
}

const NO_TOKEN: Grant = Grant::NoToken { from_us: 0 };

#[test]
fn announces_token_slice_before_it_begins() {
    let token = limits(ComputePolicy::Token, 30, None);
    let turn = TokenSlice {
        from_us: 10_000_000,
        until_us: 10_030_000,
    };
    let at = |now_us| Grant::of(&token, turn, now_us);
    let waiting = Grant::NoToken {
        from_us: turn.from_us,
    };
    assert_eq!(at(9_997_000), waiting);
    assert_eq!(at(9_997_000).starts_in_us(9_997_000), Some(3_000));
    for now_us in [turn.from_us, turn.until_us - 1] {
        let until_us = turn.until_us;
        assert_eq!(at(now_us), Grant::Token { until_us });
        assert_eq!(at(now_us).starts_in_us(now_us), None);
    }
    assert_eq!(at(turn.until_us), waiting);
    assert_eq!(waiting.starts_in_us(turn.until_us), None, "unknown");
}

#[test]
fn derives_grant_from_page() {
    use ComputePolicy::{Balance, Fixed, None as Unmetered, Token};
    let now = 10_000_000;
    let soon = now + 20_000;
    let table = [
        (Unmetered, 30, Some(1), 0, Grant::Free),
        (Balance, 30, None, 0, Grant::Rate(300_000)),
        (Balance, 30, Some(450_000), 0, Grant::Rate(450_000)),
        (Balance, 30, Some(1_000_000), 0, Grant::Free),
        (Balance, 30, Some(0), 0, Grant::Rate(0)),
        (Balance, 0, None, 0, Grant::Free),
        (Balance, 0, Some(50_000), 0, Grant::Rate(50_000)),
        (Fixed, 100, None, 0, Grant::Free),
        (Fixed, 99, None, 0, Grant::Rate(990_000)),
        (Fixed, 30, None, soon, Grant::Rate(300_000)),
        (Token, 30, None, soon, Grant::Token { until_us: soon }),
        (Token, 30, None, now, NO_TOKEN),
        (Token, 30, Some(1_000_000), now, NO_TOKEN),
        (Token, 30, None, 0, Grant::Rate(300_000)),
        (Token, 0, None, 0, Grant::Free),
        (Token, 30, None, now - TOKEN_ABANDONED_US, NO_TOKEN),
        (
            Token,
            30,
            None,
            now - TOKEN_ABANDONED_US - 1,
            Grant::Rate(300_000),
        ),
        // Torn or damaged.
        (Token, 30, None, now + 5_000_000, Grant::Rate(300_000)),
        (Token, 30, None, u64::MAX, Grant::Rate(300_000)),
    ];
    for (policy, cores, rate, token, expected) in table {
        let turn = TokenSlice {
            from_us: 0,
            until_us: token,
        };
        let found = Grant::of(&limits(policy, cores, rate), turn, now);
        assert_eq!(found, expected, "{policy:?} {cores} {rate:?} {token}");
    }
}

#[test]
fn yields_until_deadline_and_ignores_damaged_values() {
    let now = 10_000_000;
    for (until, expected) in [
        (0, None),
        (now - 1, None),
        (now, None),
        (now + 1, Some(1)),
        (now + MAX_YIELD_US, Some(MAX_YIELD_US)),
        (now + MAX_YIELD_US + 1, None),
        (u64::MAX, None),
    ] {
        assert_eq!(yields_for_us(until, now), expected, "{until}");
    }
}

#[test]
fn extends_busy_period_and_notifies_agent_of_its_start() {
    let header = header();
    let bucket = Bucket::new(&header);
    let until = || Word::load(&header.busy_until_us);
    let now = 10_000_000;
    assert!(
        bucket.extend_busy_until(5_000, now),
        "no work was in flight"
    );
    assert_eq!(until(), now + 5_000);
    assert!(
        !bucket.extend_busy_until(5_000, now + 100),
        "much work remains"
    );
    assert_eq!(until(), now + 10_000);
    let nearly_over = now + 10_000 - NOTIFY_AHEAD_US;
    assert!(!bucket.extend_busy_until(1, nearly_over));
    assert!(bucket.extend_busy_until(1, nearly_over + 3));
    assert_eq!(until(), now + 10_002);
    assert!(
        bucket.extend_busy_until(7, now + 20_000),
        "the share was idle"
    );
    assert_eq!(until(), now + 20_007);
    // A random value is not a busy period.
    Word::store(&header.busy_until_us, u64::MAX);
    assert!(bucket.extend_busy_until(7, now));
    assert_eq!(until(), now + 7);
    // No kernel duration leads to an implausible value.
    bucket.extend_busy_until(u64::MAX, now);
    let long = until();
    assert!(!bucket.extend_busy_until(0, now) && until() == long);
}

fn header() -> Header {
    Header::from_words(|| AtomicU64::new(0))
}

#[test]
fn repays_overdraft_before_next_launch() {
    let header = header();
    let bucket = Bucket::new(&header);
    let grant = Grant::Rate(250_000);
    let mut now = 5_000_000;
    bucket.refill(grant, now);
    assert_eq!(bucket.credit_us(), 12_500, "an idle share has its burst");
    assert_eq!(bucket.take(grant, 100_000, 1, LEASE_US), Ok(100_000));
    assert_eq!(bucket.credit_us(), -87_500);
    let debt = bucket.take(grant, 1, 1, LEASE_US);
    assert_eq!(
        debt,
        Err(InDebt {
            retry_after_us: MAX_SLEEP_US
        })
    );
    now += 350_000;
    bucket.refill(grant, now);
    assert_eq!(bucket.credit_us(), 0);
    assert_eq!(
        bucket.take(grant, 1, 1, LEASE_US),
        Err(InDebt {
            retry_after_us: 4_000
        })
    );
    now += 4;
    bucket.refill(grant, now);
    assert_eq!(bucket.take(grant, 1, 1, LEASE_US), Ok(1));
}

#[test]
fn waits_for_credit_of_several_short_launches() {
    let header = header();
    let bucket = Bucket::new(&header);
    for (rate, worth) in [(0, 1), (10_000, 50), (100_000, 500), (900_000, LEASE_US)] {
        assert_eq!(Grant::Rate(rate).resume_credit_us(), worth);
    }
    let grant = Grant::Rate(100_000);
    bucket.repay(499);
    assert!(
        bucket
            .take(grant, 5, grant.resume_credit_us(), LEASE_US)
            .is_err()
    );
    bucket.repay(1);
    assert_eq!(
        bucket.take(grant, 5, grant.resume_credit_us(), LEASE_US),
        Ok(500)
    );
}

#[test]
fn limits_lease_to_credit_and_lease_size() {
    let header = header();
    let bucket = Bucket::new(&header);
    let grant = Grant::Rate(100_000);
    bucket.repay(1_500);
    assert_eq!(bucket.take(grant, 10, 1, LEASE_US), Ok(LEASE_US));
    assert_eq!(bucket.take(grant, 10, 1, LEASE_US), Ok(500));
    assert!(bucket.take(grant, 10, 1, LEASE_US).is_err());
}

#[test]
fn accumulates_low_rate_over_many_refills() {
    let header = header();
    let bucket = Bucket::new(&header);
    let grant = Grant::Rate(1_000);
    bucket.refill(grant, 1_000_000);
    bucket.take(grant, LEASE_US, 1, LEASE_US).unwrap();
    let before = bucket.credit_us();
    for tick in 0..1_000_000u64 {
        bucket.refill(grant, 1_000_000 + tick);
    }
    assert_eq!(bucket.credit_us() - before, 999);
}

#[test]
fn tolerates_clock_skew_and_time_stamp_of_another_boot() {
    let header = header();
    let bucket = Bucket::new(&header);
    let grant = Grant::Rate(500_000);
    bucket.refill(grant, 10_000_000);
    bucket.take(grant, 100_000, 1, 1).unwrap();
    let before = bucket.credit_us();
    for _ in 0..100 {
        bucket.refill(grant, 10_000_100);
        bucket.refill(grant, 10_000_000);
    }
    assert_eq!(
        bucket.credit_us(),
        before + 50,
        "no interval is credited twice"
    );
    Word::store(&header.refilled_us, u64::MAX);
    bucket.refill(grant, 20_000_000);
    bucket.refill(grant, 20_000_100);
    assert_eq!(bucket.credit_us(), before + 100);
}

#[test]
fn recovers_from_random_credit() {
    let header = header();
    Word::store(&header.credit_us, 0xeeee_eeee_eeee_eeee);
    Word::store(&header.refilled_us, 0xeeee_eeee_eeee_eeee);
    let bucket = Bucket::new(&header);
    bucket.refill(Grant::Rate(100_000), 1_000_000);
    bucket.refill(Grant::Rate(100_000), 2_000_000);
    assert!(bucket.take(Grant::Rate(100_000), 1, 1, 1).is_ok());
}

#[test]
fn keeps_no_credit_without_token_and_little_with_it() {
    let header = header();
    let bucket = Bucket::new(&header);
    let token = Grant::Token {
        until_us: 2_000_000,
    };
    bucket.refill(token, 1_000_000);
    assert_eq!(bucket.credit_us(), i64::try_from(TOKEN_BURST_US).unwrap());
    bucket.refill(NO_TOKEN, 1_000_001);
    assert_eq!(bucket.credit_us(), 0);
    assert!(bucket.take(NO_TOKEN, 1, 1, 1).is_err());
}

#[test]
fn repays_kernel_that_outlasts_token_slice() {
    let header = header();
    let bucket = Bucket::new(&header);
    let until_us = 2_000_000;
    bucket.refill(Grant::Token { until_us }, until_us - 1);
    let kernel_us = TOKEN_BURST_US + 20_000;
    assert!(
        bucket
            .take(Grant::Token { until_us }, kernel_us, 1, 1)
            .is_ok()
    );
    bucket.refill(NO_TOKEN, until_us - 1 + 15_000);
    assert_eq!(bucket.credit_us(), -5_000);
    let sleep = InDebt {
        retry_after_us: MAX_SLEEP_US,
    };
    assert_eq!(bucket.take(NO_TOKEN, 1, 1, 1), Err(sleep));
    bucket.refill(NO_TOKEN, until_us + 100_000);
    assert_eq!(bucket.credit_us(), 0, "no credit beyond the repaid debt");
    assert_eq!(bucket.take(NO_TOKEN, 1, 1, 1), Err(sleep));
}

#[test]
fn starts_announced_token_slice_with_full_burst() {
    let burst = i64::try_from(TOKEN_BURST_US).unwrap();
    for previous_refill_us in [1, 1_000, 4_000] {
        let header = header();
        let bucket = Bucket::new(&header);
        let from_us = 2_000_000;
        bucket.refill(Grant::NoToken { from_us }, 1_000_000);
        bucket.refill(Grant::NoToken { from_us }, from_us - previous_refill_us);
        let until_us = from_us + 10_000;
        bucket.refill(Grant::Token { until_us }, from_us);
        assert_eq!(bucket.credit_us(), burst, "{previous_refill_us}");
    }
}

#[test]
fn admits_launch_on_idle_gpu_in_own_token_slice() {
    let now_us = 2_000_000;
    let until_us = now_us + 10_000;
    let token = Grant::Token { until_us };
    let next = |in_flight, is_variable| NextLaunch {
        us: 4_000,
        is_variable,
        in_flight,
        in_flight_us: 4_000 * in_flight as u64,
    };
    let table = [
        (0, false, true),
        (0, true, true),
        // The charge predicts when the running launch completes, and the credit when to queue the next one.
        (1, false, false),
        (1, true, true),
        (2, true, false),
    ];
    for (in_flight, is_variable, may_overdraw) in table {
        let launch = next(in_flight, is_variable);
        assert_eq!(
            token.may_overdraw(launch, now_us),
            may_overdraw,
            "{launch:?}"
        );
        for other in [NO_TOKEN, Grant::Rate(500_000), Grant::Free] {
            assert!(!other.may_overdraw(launch, now_us), "{other:?} {launch:?}");
        }
    }
    // Behind a running launch, only a launch that is likely to end within the slice is admitted.
    assert!(token.may_overdraw(next(1, true), until_us - 8_000));
    assert!(!token.may_overdraw(next(1, true), until_us - 7_999));
    // On an idle GPU, a launch is admitted if at least half of it is likely to run within the slice.
    assert!(token.may_overdraw(next(0, false), until_us - 2_000));
    assert!(!token.may_overdraw(next(0, false), until_us - 1_999));
}

/// A word that kills its process, here by a panic, after a number of steps.
struct CrashingWord<'a>(AtomicU64, &'a Cell<u32>);

impl CrashingWord<'_> {
    fn step(&self) {
        let left = self.1.get();
        if left == 1 {
            std::panic::resume_unwind(Box::new("dead"));
        }
        self.1.set(left.saturating_sub(1));
    }
}

impl Word for CrashingWord<'_> {
    fn load(&self) -> u64 {
        Word::load(&self.0)
    }
    fn store(&self, value: u64) {
        Word::store(&self.0, value);
        self.step();
    }
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let result = Word::compare_exchange(&self.0, current, new);
        if result.is_ok() {
            self.step();
        }
        result
    }
    fn fetch_add(&self, value: u64) -> u64 {
        let found = Word::fetch_add(&self.0, value);
        self.step();
        found
    }
    fn fetch_sub(&self, value: u64) -> u64 {
        let found = Word::fetch_sub(&self.0, value);
        self.step();
        found
    }
}

#[test]
fn survives_crash_after_any_step() {
    let grant = Grant::Rate(200_000);
    for steps in 1..=4 {
        let left = Cell::new(0);
        let header = Header::from_words(|| CrashingWord(AtomicU64::new(0), &left));
        let bucket = Bucket::new(&header);
        bucket.refill(grant, 1_000_000);
        bucket.charge(5_000);
        left.set(steps);
        let dead = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            bucket.refill(grant, 1_010_000);
            bucket.take(grant, 20_000, 1, LEASE_US).unwrap();
        }));
        left.set(0);
        assert_eq!(dead.is_err(), steps <= 3, "{steps}");
        // Another process runs for a second: it gets the credit of one second and the saved credit, and no more.
        let mut granted = 0;
        for now in (1_010_000..=2_010_000).step_by(100) {
            bucket.refill(grant, now);
            granted += bucket.take(grant, 10, 1, LEASE_US).unwrap_or(0);
        }
        let most = 200_000 + 200_000 * BURST_US / 1_000_000 + LEASE_US;
        assert!(granted <= most, "{granted} after {steps} steps");
        assert!(
            granted >= 200_000 - 20_000 - LEASE_US,
            "{granted} after {steps} steps"
        );
    }
}

#[test]
fn loses_no_credit_to_refill_period() {
    for (rate, period) in [(372_164, 151), (300_000, 7), (900_001, 3), (10_007, 4_999)] {
        let header = header();
        let bucket = Bucket::new(&header);
        let grant = Grant::Rate(rate);
        bucket.refill(grant, 1_000_000);
        bucket.charge(1_000_000_000);
        let before = bucket.credit_us();
        let refills = 20_000_000 / period;
        for number in 1..=refills {
            bucket.refill(grant, 1_000_000 + number * period);
        }
        let earned = u64::from(rate) * refills * period / 1_000_000;
        let granted = (bucket.credit_us() - before).unsigned_abs();
        assert!(
            granted.abs_diff(earned) <= earned / 5_000 + 2,
            "{granted} of {earned}"
        );
    }
}

proptest! {
    #[test]
    fn grants_demand_exactly_its_rate_over_time(
        rate in 10_000..999_999u32,
        costs in prop::collection::vec(1..30_000u64, 1..50),
        refills in prop::collection::vec(1..4_000u64, 1..50),
    ) {
        let header = header();
        let bucket = Bucket::new(&header);
        let grant = Grant::Rate(rate);
        let start = 1_000_000;
        bucket.refill(grant, start);
        bucket.charge(u64::try_from(bucket.credit_us()).unwrap());
        let (mut now, mut granted) = (start, 0);
        let mut costs = costs.iter().cycle();
        let mut refills = refills.iter().cycle();
        let seconds = 5;
        while now < start + seconds * 1_000_000 {
            now += refills.next().unwrap();
            bucket.refill(grant, now);
            while let Ok(taken) = bucket.take(grant, *costs.next().unwrap(), 1, LEASE_US) {
                granted += taken;
            }
        }
        let earned = u64::from(rate) * (now - start) / 1_000_000;
        prop_assert!(granted <= earned + 30_000, "{granted} of {earned}");
        prop_assert!(granted + LEASE_US + 4_000 >= earned, "{granted} of {earned}");
    }

    #[test]
    fn never_panics_on_any_content(credit: u64, refilled: u64, now: u64, need: u64, rate: u32) {
        let header = header();
        Word::store(&header.credit_us, credit);
        Word::store(&header.refilled_us, refilled);
        let bucket = Bucket::new(&header);
        for grant in [Grant::Rate(rate), Grant::Free, NO_TOKEN, Grant::Token { until_us: now }] {
            bucket.refill(grant, now);
            let _ = bucket.take(grant, need, 1, LEASE_US);
            bucket.charge(need);
            bucket.repay(need);
        }
    }
}
