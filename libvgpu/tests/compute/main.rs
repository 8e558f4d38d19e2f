//! Tests of GPU time limits against the simulated GPU.
//!
//! Measured shares are compared with the time that the simulated GPU counted while tenants keep their queues filled. No
//! stretch of a measurement may exceed the share, and the whole must reach it as far as the host lets a tenant launch.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod measurement;
mod multiple_gpus;
mod priority;
mod several_shares;
mod single_share;
mod waits;

use std::time::{Duration, Instant};

use gpu_tenants::{Tenant, TestBed, library};
use measurement::{Due, Measurement};

/// Time in which libvgpu learns the durations of a tenant's kernels.
const SETTLE: Duration = Duration::from_millis(400);

/// A machine with `libvgpu.so` as shipped.
fn test_bed() -> TestBed {
    TestBed::new(library::shipped().unwrap()).unwrap()
}

/// Checks that a tenant gets its part of the GPU, and no more in any stretch of the measurement.
fn assert_part(test_bed: &TestBed, tenant: &Tenant, due: Due) {
    std::thread::sleep(SETTLE);
    measurement::await_parts(&[due], |_| Measurement::of(test_bed, &[tenant]));
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

/// Waits for a condition that another process fulfills. The deadline only ends a test that hangs: a busy host takes long.
fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "{}", otherwise());
        std::thread::sleep(Duration::from_millis(5));
    }
}
