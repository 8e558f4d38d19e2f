//! The controller, tick by tick.

use drava_dra_driver::agent::policy::control::{
    ActivityChange, Controller, Entitlement, Measured, MeasuredShare,
};
use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

const STEP_US: u64 = 100_000;

fn saturated(id: u32, cores: u32) -> MeasuredShare<u32> {
    let terms = Entitlement {
        cores: Cores::new(cores).unwrap(),
        policy: ComputePolicy::Balance,
        priority: Priority::DEFAULT,
    };
    let measured = Measured {
        used_us: STEP_US * u64::from(cores) / 100,
        has_waited: true,
        launch_us: 1_000,
        is_idle: false,
    };
    (id, terms, measured)
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
    // Its guarantee, less its part of the time of switches between contexts.
    assert_eq!((borrower, is_lent), (273_333, false));
    assert!(owner >= 700_000, "{owner}");
    // The owner is saturated until it is measured.
    assert_eq!(rates(&mut controller, &[]).0, 273_333);
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
        let decisions = [&mut one, &mut other].map(|controller| controller.tick(STEP_US, &shares));
        assert_eq!(decisions[0], decisions[1]);
    }
}

/// Kernels of several lengths make the use of single ticks uneven.
#[test]
fn lends_nothing_of_uneven_use() {
    let mut controller = Controller::default();
    let mut rates = Vec::new();
    for percent in [115, 66, 92, 38, 86, 47, 49, 35, 88, 66].repeat(5) {
        let mut filling = saturated(2, 70);
        // At the highest rate it does not wait.
        (filling.2.used_us, filling.2.has_waited) = (STEP_US * percent / 100, false);
        let decisions = controller.tick(STEP_US, &[saturated(1, 30), filling]);
        rates.push(decisions[0].1.rate_us_per_s);
    }
    let mean = rates.iter().sum::<u32>() / u32::try_from(rates.len()).unwrap();
    assert!(mean <= 310_000, "{mean}: {rates:?}");
}

#[test]
fn lends_what_share_no_longer_uses() {
    let mut controller = Controller::default();
    let rate = |controller: &mut Controller<u32>, percent: u64| {
        let mut other = saturated(2, 70);
        (other.2.used_us, other.2.has_waited) = (STEP_US * percent / 100, false);
        controller.tick(STEP_US, &[saturated(1, 30), other])[0]
            .1
            .rate_us_per_s
    };
    for _ in 0..10 {
        rate(&mut controller, 70);
    }
    let rates: Vec<u32> = (0..20).map(|_| rate(&mut controller, 20)).collect();
    assert!(rates[0] < 450_000, "{rates:?}");
    assert!(rates[10..].iter().all(|rate| *rate > 700_000), "{rates:?}");
    // What it uses again, it gets back at once.
    assert!(rate(&mut controller, 60) < 350_000);
}

/// Two shares that always have work get half of the GPU each while none waits for its limit. The larger one uses less than
/// its guarantee then, and demands it all the same.
#[test]
fn lends_nothing_of_share_limited_by_others() {
    let (mut small, mut large) = (saturated(1, 42), saturated(2, 58));
    let mut controller = Controller::default();
    controller.tick(STEP_US, &[small, large]);
    for measured in [&mut small.2, &mut large.2] {
        (measured.used_us, measured.has_waited) = (STEP_US * 45 / 100, false);
    }
    let mut rate = 0;
    for _ in 0..20 {
        rate = controller.tick(STEP_US, &[small, large])[0].1.rate_us_per_s;
    }
    assert!(rate <= 420_000, "{rate}");
    // It gets that time, needs no more, and lends the rest.
    (small.2.used_us, small.2.has_waited) = (STEP_US * 42 / 100, true);
    large.2.used_us = STEP_US * 20 / 100;
    for _ in 0..40 {
        rate = controller.tick(STEP_US, &[small, large])[0].1.rate_us_per_s;
    }
    assert!(rate >= 700_000, "{rate}");
}
