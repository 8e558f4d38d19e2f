//! Durations derived from two events around a launch, for any interruption of the host and any previous work of the
//! GPU.

use drava_vgpu_abi::cost::Cost;
use drava_vgpu_abi::recording::Recording;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;

/// Time of the host for each call, of the GPU to start queued work, and of the kernel.
const CALL: u64 = 2 * US;
const REACH: u64 = 5 * US;
const KERNEL: u64 = 3 * MS;

/// Where the host is interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum StallPoint {
    Nowhere,
    BeforeQueueingFirst,
    BeforeQueryingFirst,
    BeforeLaunch,
    BeforeQueueingSecond,
    BeforeQueryingSecond,
    BeforeReadingClock,
}

const STALL_POINTS: [StallPoint; 7] = [
    StallPoint::Nowhere,
    StallPoint::BeforeQueueingFirst,
    StallPoint::BeforeQueryingFirst,
    StallPoint::BeforeLaunch,
    StallPoint::BeforeQueueingSecond,
    StallPoint::BeforeQueryingSecond,
    StallPoint::BeforeReadingClock,
];

/// The recording of a kernel, and the time between its events. The GPU is busy with other work for `busy`; the host is
/// interrupted for `stall` at a given point.
fn record(kernel: u64, busy: u64, point: StallPoint, stall: u64) -> (Recording, u64) {
    let mut now = 1_000 * MS;
    let busy = now + busy;
    let pass = |now: &mut u64, at: StallPoint| {
        *now += CALL + if at == point { stall } else { 0 };
        *now
    };
    let begun_ns = now;
    let first_queued = pass(&mut now, StallPoint::BeforeQueueingFirst);
    let first_at = (first_queued + REACH).max(busy);
    let was_reached = first_at <= pass(&mut now, StallPoint::BeforeQueryingFirst);
    let called_ns = pass(&mut now, StallPoint::BeforeReadingClock);
    let launched = pass(&mut now, StallPoint::BeforeLaunch);
    let over_at = first_at.max(launched + REACH) + kernel;
    let returned_ns = now;
    let second_queued = pass(&mut now, StallPoint::BeforeQueueingSecond);
    let second_at = over_at.max(second_queued + REACH);
    let queried = pass(&mut now, StallPoint::BeforeQueryingSecond);
    let recording = Recording {
        begun_ns,
        called_ns,
        returned_ns,
        ended_ns: now,
        was_reached,
        is_reached: first_at <= queried,
        is_over: second_at <= queried,
    };
    (recording, second_at - first_at)
}

fn known(ns: u64) -> Cost {
    (0..20).fold(Cost::UNKNOWN, |cost, _| cost.learn(ns))
}

#[test]
fn keeps_duration_when_host_is_interrupted() {
    for stall in [MS, 20 * MS, 100 * MS, 1_000 * MS] {
        for busy in [0, MS, 15 * MS, 60 * MS, 400 * MS] {
            for point in STALL_POINTS {
                let (recording, measured) = record(KERNEL, busy, point, stall);
                let sample = recording.sample(measured);
                let ns = known(KERNEL).estimate_ns(sample).unwrap();
                // One step above the minimum, with call times as without an interruption. Previous work of the GPU
                // counts as an interruption if it is detected late and was shorter than the kernel.
                let before = match point {
                    StallPoint::BeforeQueryingFirst if busy < KERNEL => busy,
                    _ => 0,
                };
                let least = (KERNEL * 3 / 4).min(KERNEL - before) - 10 * CALL;
                assert!(
                    (least..=KERNEL + 10 * CALL + REACH).contains(&ns),
                    "{ns} for {KERNEL}: {stall} {point:?}, busy for {busy}: {recording:?} {sample:?}"
                );
            }
        }
    }
}

#[test]
fn learns_no_unknown_duration_from_interruption() {
    for stall in [20 * MS, 1_000 * MS] {
        for point in STALL_POINTS {
            let (recording, measured) = record(KERNEL, 0, point, stall);
            let ns = Cost::UNKNOWN.estimate_ns(recording.sample(measured));
            let most = KERNEL + 10 * CALL + REACH;
            assert!(ns.is_none_or(|ns| ns <= most), "{ns:?}: {stall} {point:?}");
        }
    }
}

#[test]
fn charges_long_launch_despite_slow_calls() {
    // The kind is known to be short; the measured launch is not.
    for kernel in [30 * MS, 300 * MS] {
        for busy in [0, MS, 400 * MS] {
            for point in STALL_POINTS {
                for stall in [0, 100 * US, MS, 5 * MS] {
                    let (recording, measured) = record(kernel, busy, point, stall);
                    let ns = known(KERNEL)
                        .estimate_ns(recording.sample(measured))
                        .unwrap();
                    // Reduced at most by the interruption, which may explain the difference.
                    let least = kernel - stall.min(kernel / 4) - REACH - 10 * CALL;
                    assert!(
                        ns >= least,
                        "{ns} for {kernel}: {stall} {point:?}, busy for {busy}"
                    );
                }
            }
        }
    }
}

#[test]
fn measures_exactly_without_host_interruption() {
    for kernel in [20 * US, 300 * US, 3 * MS] {
        // For any previous work of the GPU.
        for busy in [0, 10 * US, MS, 60 * MS] {
            let (recording, measured) = record(kernel, busy, StallPoint::Nowhere, 0);
            let ns = Cost::UNKNOWN
                .estimate_ns(recording.sample(measured))
                .unwrap();
            assert!(
                ns.abs_diff(kernel) <= 2 * CALL + REACH,
                "{ns} for {kernel}, busy for {busy}"
            );
        }
    }
}

#[test]
fn measures_queued_launch_exactly() {
    // A known short kind: with a GPU that is busy for longer than the host is interrupted, and with an idle GPU on
    // which the launch outlasts the interruption after it.
    for point in STALL_POINTS {
        let (recording, measured) = record(30 * MS, 400 * MS, point, 100 * MS);
        let ns = known(KERNEL)
            .estimate_ns(recording.sample(measured))
            .unwrap();
        assert_eq!(ns, 30 * MS, "{point:?}");
    }
    for point in [
        StallPoint::BeforeQueueingSecond,
        StallPoint::BeforeQueryingSecond,
    ] {
        let (recording, measured) = record(30 * MS, 0, point, 20 * MS);
        let ns = known(KERNEL)
            .estimate_ns(recording.sample(measured))
            .unwrap();
        assert!(ns.abs_diff(30 * MS) <= 2 * CALL + REACH, "{ns}: {point:?}");
    }
}

#[test]
fn excludes_wait_before_late_second_event() {
    let (recording, measured) = record(2 * US, 0, StallPoint::BeforeQueryingSecond, 100 * US);
    assert!(recording.is_over && measured > 6 * US, "{recording:?}");
    let ns = known(2 * US)
        .estimate_ns(recording.sample(measured))
        .unwrap();
    assert!(ns <= 2 * US, "{ns}");
}
