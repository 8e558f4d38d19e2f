//! The bucket of shares that borrow idle time, and of shares that reclaim it.

use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{Bucket, Grant, IDLE_US, MAX_QUEUED_US, MAX_SLEEP_US, resumes_demand};
use drava_vgpu_abi::region::Header;

fn header() -> Header {
    Header::from_words(|| AtomicU64::new(0))
}

/// A borrower that had the whole GPU keeps no credit when the owner reclaims its time. A borrower of a part keeps at
/// most the credit of its current rate.
#[test]
fn accumulates_no_credit_while_unthrottled() {
    for (before, least) in [(Grant::Free, 0), (Grant::Rate(900_000), 15_000)] {
        let header = header();
        let bucket = Bucket::new(&header);
        let mut now = 5_000_000;
        for _ in 0..1_000 {
            now += 1_000;
            bucket.refill(before, now);
        }
        now += 10;
        bucket.refill(Grant::Rate(300_000), now);
        assert!(
            (least..=least + 3).contains(&bucket.credit_us()),
            "{before:?}"
        );
        // An idle share then has its burst, as any other share.
        bucket.refill(Grant::Rate(300_000), now + 100_000);
        assert_eq!(bucket.credit_us(), 15_000);
    }
    // Its debt is repaid at the rate of the whole GPU.
    let header = header();
    let bucket = Bucket::new(&header);
    bucket.refill(Grant::Free, 5_000_000);
    bucket.charge(10_000);
    bucket.refill(Grant::Free, 5_004_000);
    assert_eq!(bucket.credit_us(), -6_000);
}

#[test]
fn records_demand_and_reclaims_lent_time_after_pause() {
    let header = header();
    let bucket = Bucket::new(&header);
    assert_eq!(bucket.record_demand(7_000_000), 0);
    assert_eq!(bucket.record_demand(7_000_100), 7_000_000);
    assert_eq!(Word::load(&header.last_demand_us), 7_000_100);
    let now = 10_000_000;
    for (last_demand_us, expected) in [
        (0, true),
        (now - IDLE_US, true),
        (now - IDLE_US + 1, false),
        (now - MAX_SLEEP_US, false),
        (now, false),
        (now + MAX_SLEEP_US, false),
        (u64::MAX, true),
    ] {
        assert_eq!(
            resumes_demand(last_demand_us, now),
            expected,
            "{last_demand_us}"
        );
    }
}

#[test]
fn counts_queued_work_of_free_share_as_debt() {
    let header = header();
    let bucket = Bucket::new(&header);
    let start = 1_000_000;
    bucket.refill(Grant::Free, start);
    for _ in 0..3 {
        bucket.enqueue(100_000);
    }
    assert_eq!(bucket.credit_us(), -300_000);
    // The GPU has done a part of it.
    bucket.refill(Grant::Free, start + 200_000);
    assert_eq!(bucket.credit_us(), -100_000);
    bucket.refill(Grant::Free, start + 900_000);
    assert_eq!(bucket.credit_us(), 0);
    // A share that is limited later waits for a bounded time.
    for _ in 0..100 {
        bucket.enqueue(300_000);
    }
    assert!(
        bucket.credit_us() <= -MAX_QUEUED_US,
        "{}",
        bucket.credit_us()
    );
    assert!(
        bucket.credit_us() > -2 * MAX_QUEUED_US,
        "{}",
        bucket.credit_us()
    );
}
