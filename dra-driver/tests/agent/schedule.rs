//! What the agent does at which time.

use drava_dra_driver::agent::policy::schedule::{GpuState, GpuTasks, Schedule};

const TICK_US: u64 = 100_000;
const NOW_US: u64 = 1_000_000_000;

fn active() -> GpuState {
    GpuState {
        is_occupied: true,
        scanned_us: NOW_US,
        ..GpuState::default()
    }
}

/// Returns the number of ticks of a GPU in ten control periods.
fn ticks(gpu: &GpuState) -> usize {
    let mut schedule = Schedule::default();
    let periods = (0..10).map(|period| NOW_US + period * TICK_US);
    let ticks = periods.filter(|now_us| {
        let tasks = schedule.start(*now_us);
        assert!(tasks.tick);
        schedule.gpu_tasks(*now_us, tasks, gpu).tick
    });
    ticks.count()
}

#[test]
fn skips_ticks_of_quiet_gpu() {
    assert_eq!(ticks(&active()), 10);
    let quiet = GpuState {
        is_quiet: true,
        ..active()
    };
    assert_eq!(ticks(&quiet), 5);
    let empty = GpuState {
        is_occupied: false,
        ..quiet
    };
    assert_eq!(ticks(&empty), 0);
}

#[test]
fn does_nothing_between_ticks() {
    let mut schedule = Schedule::default();
    assert!(schedule.start(NOW_US).publish_metrics);
    let between = schedule.start(NOW_US + TICK_US - 1);
    assert!(!between.tick && !between.publish_metrics);
    let due = schedule.gpu_tasks(NOW_US + TICK_US - 1, between, &active());
    assert_eq!(due, GpuTasks::default());
    let next = schedule.start(NOW_US + TICK_US);
    assert!(next.tick && !next.publish_metrics);
}

#[test]
fn scans_gpu_without_nvml_observation() {
    let mut schedule = Schedule::default();
    let tasks = schedule.start(NOW_US);
    let of_age = |age_us| GpuState {
        scanned_us: NOW_US - age_us,
        ..active()
    };
    assert!(!schedule.gpu_tasks(NOW_US, tasks, &of_age(2_000_000)).scan);
    assert!(schedule.gpu_tasks(NOW_US, tasks, &of_age(2_000_001)).scan);
}

#[test]
fn wakes_for_earliest_poll_of_any_gpu() {
    let mut schedule = Schedule::default();
    schedule.start(NOW_US);
    let next = |has_notifications, gpus: &[GpuState]| {
        schedule.next_us(NOW_US, has_notifications, gpus.iter().copied()) - NOW_US
    };
    assert_eq!(next(true, &[active()]), TICK_US);
    assert_eq!(next(false, &[active()]), 20_000);
    let lent = GpuState {
        is_lent: true,
        ..active()
    };
    assert_eq!(next(true, &[active(), lent]), 20_000);
    let priority = GpuState {
        next_priority_poll_us: Some(NOW_US + 200),
        ..active()
    };
    assert_eq!(next(true, &[lent, priority]), 200);
}
