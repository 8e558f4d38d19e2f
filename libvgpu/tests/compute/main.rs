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

use std::time::Duration;

use gpu_tenants::{Tenant, TestBed, library};
use measurement::{Due, Measurement};
use simulator_machine::testing::poll;

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
    u64::try_from(time_of(libc::CLOCK_MONOTONIC).as_micros()).unwrap()
}

/// Returns the time of a clock.
fn time_of(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one `struct timespec`.
    let result = unsafe { libc::clock_gettime(clock, &raw mut now) };
    assert_eq!(result, 0);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap(),
        u32::try_from(now.tv_nsec).unwrap(),
    )
}

/// Waits for a condition that another process fulfills.
fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let holds = poll(|| Ok(condition().then_some(())));
    assert!(holds.is_ok(), "{}", otherwise());
}
