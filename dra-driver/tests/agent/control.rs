//! The controller, tick by tick.

use drava_dra_driver::agent::policy::control::{
    ActivityChange, Controller, Entitlement, Measured, MeasuredShare,
};
use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

const STEP_US: u64 = 100_000;
const SECOND_US: u64 = 1_000_000;

fn saturated(id: u32, cores: u32) -> MeasuredShare<u32> {
    let terms = Entitlement {
        cores: Cores::new(cores).unwrap(),
        policy: ComputePolicy::Balance,
        priority: Priority::DEFAULT,
    };
    let measured = Measured {
        used_us: STEP_US * u64::from(cores) / 100,
        launches: STEP_US * u64::from(cores) / 100 / 1_000,
        has_waited: true,
        launch_us: 1_000,
        is_idle: false,
    };
    (id, terms, measured)
}

/// Returns the rate of the first share after a tick.
fn rate(controller: &mut Controller<u32>, shares: &[MeasuredShare<u32>]) -> u32 {
    controller.tick(STEP_US, shares)[0].1.rate_us_per_s
}

#[test]
fn halves_lag_on_active_set_change() {
    let mut controller = Controller::default();
    let two = [saturated(1, 30), saturated(2, 30)];
    let three = [two[0], two[1], saturated(3, 30)];
    for _ in 0..3 {
        for _ in 0..10 {
            rate(&mut controller, &two);
        }
        // NVML reports less for the first share, on a GPU with idle time.
        controller.observe(SECOND_US, SECOND_US * 9 / 10, &[(1, 400_000), (2, 500_000)]);
    }
    let lag = rate(&mut controller, &two) - 500_000;
    assert!(lag > 20_000, "{lag}");
    // Its share is now a third of the GPU.
    let remaining = rate(&mut controller, &three) - 333_333;
    assert!(
        (lag / 2).abs_diff(remaining) < lag / 10,
        "{lag} {remaining}"
    );
}

/// Returns the rates of two shares with 30% and 60% after seconds in which NVML saw `seen` µs of each on a full GPU.
fn rates_after_samples(policy: ComputePolicy, seen: [u64; 2]) -> [u32; 2] {
    let mut controller = Controller::default();
    let mut shares = [saturated(1, 30), saturated(2, 60)];
    shares.iter_mut().for_each(|share| share.1.policy = policy);
    let mut decisions = Vec::new();
    for _ in 0..10 {
        for _ in 0..10 {
            decisions = controller.tick(STEP_US, &shares);
        }
        let busy_us = SECOND_US * 99 / 100;
        controller.observe(SECOND_US, busy_us, &[(1, seen[0]), (2, seen[1])]);
    }
    [0, 1].map(|index| decisions[index].1.rate_us_per_s)
}

#[test]
fn throttles_no_share_for_nvml_rounding_surplus() {
    use ComputePolicy::{Balance, Fixed};
    // The shares own a third and two thirds of the GPU; samples in whole percents report slightly more.
    let rates = rates_after_samples(Balance, [337_000, 674_000]);
    assert!(rates[0] >= 333_000 && rates[1] >= 666_000, "{rates:?}");
    // A surplus of one share is a deficit of the other.
    let rates = rates_after_samples(Balance, [363_333, 646_666]);
    assert!(rates[0] < 320_000, "{rates:?}");
    // On a GPU that is not fully allocated, any surplus counts.
    let rates = rates_after_samples(Fixed, [320_000, 630_000]);
    assert!(rates[0] < 280_000 && rates[1] < 570_000, "{rates:?}");
}

/// Returns two shares, of which the second is idle.
fn shares_with_lent_time() -> (Controller<u32>, [MeasuredShare<u32>; 2]) {
    let mut controller = Controller::default();
    let mut idle = saturated(2, 70);
    (idle.2.used_us, idle.2.has_waited) = (0, false);
    let shares = [saturated(1, 30), idle];
    for _ in 0..10 {
        controller.tick(STEP_US, &shares);
    }
    (controller, shares)
}

fn terms(shares: &[MeasuredShare<u32>; 2]) -> [(u32, Entitlement); 2] {
    shares.map(|(id, terms, _)| (id, terms))
}

#[test]
fn reclaims_and_relends_time_between_ticks() {
    let (mut controller, shares) = shares_with_lent_time();
    let terms = terms(&shares);
    let rates = |controller: &mut Controller<u32>, turned: &[(u32, ActivityChange)]| {
        let decisions = controller.on_activity_change(&terms, turned);
        (
            decisions[0].1.rate_us_per_s,
            decisions[1].1.rate_us_per_s,
            decisions[1].1.is_lent,
        )
    };
    assert_eq!(rates(&mut controller, &[]), (1_000_000, 700_000, true));
    let (borrower, owner, is_lent) = rates(&mut controller, &[(2, ActivityChange::Resumed)]);
    assert_eq!((borrower, is_lent), (300_000, false));
    assert!(owner >= 700_000, "{owner}");
    // The owner is saturated until it is measured.
    assert_eq!(rates(&mut controller, &[]).0, 300_000);
    let (borrower, _, is_lent) = rates(&mut controller, &[(2, ActivityChange::Idle)]);
    assert!(borrower >= 980_000 && is_lent, "{borrower} {is_lent}");
    // Usage before it went idle creates no demand.
    let mut idle = shares;
    (idle[1].2.used_us, idle[1].2.is_idle) = (20_000, true);
    let decisions = controller.tick(STEP_US, &idle);
    assert!(
        decisions[0].1.rate_us_per_s >= 980_000 && decisions[1].1.is_lent,
        "{decisions:?}"
    );
}

#[test]
fn leaves_measurements_unchanged_between_ticks() {
    let ((mut one, shares), (mut other, _)) = (shares_with_lent_time(), shares_with_lent_time());
    for _ in 0..30 {
        for _ in 0..50 {
            other.on_activity_change(&terms(&shares), &[]);
        }
        let decisions = [&mut one, &mut other].map(|controller| {
            controller.observe(STEP_US, STEP_US, &[(1, 25_000), (2, 0)]);
            controller.tick(STEP_US, &shares)
        });
        assert_eq!(decisions[0], decisions[1]);
    }
}
