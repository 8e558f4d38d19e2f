//! `libvgpu.so` keeps tenants to their shares of a card's time; the simulated card says what they got.
//!
//! Shares are compared with what the card counted in its own time, while tenants keep their queues filled. A loaded
//! host can keep a tenant from that, so a share must be reached in one of several stretches; exceeded it must be in
//! none.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod multiple_gpus;
mod priority;
mod several_shares;
mod single_share;

use std::time::{Duration, Instant};

use gpu_tenants::{Tenant, TestBed, library};

const SETTLE: Duration = Duration::from_millis(400);
const MEASURE: Duration = Duration::from_millis(1500);

/// A share may be missed by so many percent of the card.
const BELOW: f64 = 3.0;
/// The same upwards: what was saved, over [`MEASURE`], and a kernel at either end.
const ABOVE: f64 = 4.0;

/// Stretches in which shares may come right. Not more: what is right in one of many is not right.
const STRETCHES: usize = 12;

/// A machine with `libvgpu.so` as it is shipped.
fn test_bed() -> TestBed {
    TestBed::new(library::shipped().unwrap()).unwrap()
}

/// Waits until each tenant gets its percentage, and makes sure that none gets more.
fn await_percents(test_bed: &TestBed, tenants: &[&Tenant], expected: &[f64]) {
    let mut seen = Vec::new();
    for round in 0..STRETCHES {
        let settle = if round == 0 { SETTLE } else { Duration::ZERO };
        let got = test_bed.percents(tenants, settle, MEASURE).unwrap();
        let pairs = || got.iter().zip(expected);
        let none_above = pairs().all(|(got, expected)| *got <= expected + ABOVE);
        assert!(none_above, "{got:.1?} instead of {expected:?}");
        if pairs().all(|(got, expected)| *got >= expected - BELOW) {
            return;
        }
        seen.push(got);
    }
    panic!("{seen:.1?} instead of {expected:?}");
}

/// `CLOCK_MONOTONIC`, microseconds.
fn now_us() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one `struct timespec`.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(result, 0);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000 + u64::try_from(now.tv_nsec).unwrap() / 1_000
}

/// Waits for a condition that another process brings about.
fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{}", otherwise());
        std::thread::sleep(Duration::from_millis(5));
    }
}
