//! The debt bucket, with tables, random input and a crash after each step.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{
    BURST_US, Bucket, Grant, InDebt, LEASE_US, MAX_SLEEP_US, MAX_YIELD_US, NOTIFY_AHEAD_US,
    yields_for_us,
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

#[test]
fn derives_grant_from_page() {
    use ComputePolicy::{Balance, Fixed, None as Unmetered};
    let table = [
        (Unmetered, 30, Some(1), Grant::Free),
        (Balance, 30, None, Grant::Rate(300_000)),
        (Balance, 30, Some(450_000), Grant::Rate(450_000)),
        (Balance, 30, Some(1_000_000), Grant::Free),
        (Balance, 30, Some(0), Grant::Rate(0)),
        (Balance, 0, None, Grant::Free),
        (Balance, 0, Some(50_000), Grant::Rate(50_000)),
        (Fixed, 100, None, Grant::Free),
        (Fixed, 99, None, Grant::Rate(990_000)),
        (Fixed, 30, None, Grant::Rate(300_000)),
    ];
    for (policy, cores, rate, expected) in table {
        let found = Grant::of(&limits(policy, cores, rate));
        assert_eq!(found, expected, "{policy:?} {cores} {rate:?}");
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
fn keeps_no_credit_with_whole_gpu() {
    let header = header();
    let bucket = Bucket::new(&header);
    bucket.repay(5_000);
    bucket.refill(Grant::Free, 1_000_000);
    bucket.refill(Grant::Free, 1_000_001);
    assert_eq!(bucket.credit_us(), 0);
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
        for grant in [Grant::Rate(rate), Grant::Free] {
            bucket.refill(grant, now);
            let _ = bucket.take(grant, need, 1, LEASE_US);
            bucket.charge(need);
            bucket.repay(need);
        }
    }
}
