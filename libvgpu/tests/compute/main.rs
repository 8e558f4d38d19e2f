//! Tests of GPU time limits against the simulated GPU.
//!
//! Measured shares are compared with the time that the simulated GPU counted while tenants keep their queues filled. A
//! loaded host can delay a tenant, so one of several measurements must reach the share. No measurement may exceed it.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod multiple_gpus;
mod priority;
mod several_shares;
mod single_share;
mod waits;

use std::time::{Duration, Instant};

use gpu_tenants::{Tenant, TestBed, library};

const SETTLE: Duration = Duration::from_millis(400);
const MEASURE: Duration = Duration::from_millis(1500);

/// Tolerance below a share, percent of the GPU.
const BELOW: f64 = 3.0;
/// Tolerance above a share: saved credit over [`MEASURE`] and one kernel at either end.
const ABOVE: f64 = 4.0;

/// Measurements in which a share may be reached. More would accept a share that is reached by chance.
const ATTEMPTS: usize = 12;

/// A machine with `libvgpu.so` as shipped.
fn test_bed() -> TestBed {
    TestBed::new(library::shipped().unwrap()).unwrap()
}

/// Waits until each tenant gets its percentage; fails if one gets more.
fn await_percents(test_bed: &TestBed, tenants: &[&Tenant], expected: &[f64]) {
    let mut seen = Vec::new();
    for round in 0..ATTEMPTS {
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

/// Waits for a condition that another process fulfills.
fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{}", otherwise());
        std::thread::sleep(Duration::from_millis(5));
    }
}
