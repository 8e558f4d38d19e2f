//! Allocation of a GPU's time to shares.

use drava_dra_driver::agent::policy::allotment::{
    Allotment, Borrowing, Demand, GPU, ShareDemand, allot, floor,
};
use drava_vgpu_abi::{Cores, Priority};
use proptest::prelude::*;

const PERCENT: i64 = GPU / 100;

fn tenant(cores: u32, borrowing: Borrowing, priority: i32, demand: Demand) -> ShareDemand {
    ShareDemand {
        cores: Cores::new(cores).unwrap(),
        borrowing,
        priority: Priority::new(priority).unwrap(),
        demand,
    }
}

fn balance(cores: u32, demand: Demand) -> ShareDemand {
    tenant(cores, Borrowing::Allowed, 0, demand)
}

fn fixed(cores: u32, demand: Demand) -> ShareDemand {
    tenant(cores, Borrowing::Denied, 0, demand)
}

/// Returns the allocated parts in tenths of a percent.
fn parts(tenants: &[ShareDemand]) -> Vec<i64> {
    allot(tenants)
        .iter()
        .map(|a| (a.part + PERCENT / 20) / (PERCENT / 10))
        .collect()
}

#[test]
fn divides_gpu_time_by_demand_and_priority() {
    use Demand::{All, Idle, UpTo};
    let low = |cores, demand| tenant(cores, Borrowing::Allowed, -10, demand);
    let cases: &[(&str, &[ShareDemand], &[i64])] = &[
        ("alone", &[balance(30, All)], &[1000]),
        ("alone, fixed", &[fixed(30, All)], &[300]),
        (
            "guarantees that fill the GPU",
            &[balance(30, All), balance(70, All)],
            &[300, 700],
        ),
        (
            "idle time by weight",
            &[balance(20, All), balance(40, All), balance(40, Idle)],
            &[333, 667, 0],
        ),
        (
            "idle time with a fixed share",
            &[fixed(20, All), balance(40, All), balance(40, Idle)],
            &[200, 800, 0],
        ),
        (
            "one share below its guarantee",
            &[balance(50, UpTo(20 * PERCENT)), balance(50, All)],
            &[200, 800],
        ),
        (
            "no demand for idle time",
            &[
                balance(50, UpTo(20 * PERCENT)),
                balance(50, UpTo(60 * PERCENT)),
            ],
            &[200, 600],
        ),
        (
            "best effort gets the remaining time",
            &[fixed(60, All), balance(0, All)],
            &[600, 400],
        ),
        (
            "two best-effort shares",
            &[fixed(60, All), balance(0, All), balance(0, All)],
            &[600, 200, 200],
        ),
        (
            "best effort with a fully allocated GPU",
            &[balance(40, All), balance(60, All), balance(0, All)],
            &[396, 594, 10],
        ),
        (
            "idle time by priority",
            &[balance(30, All), low(30, All)],
            &[700, 300],
        ),
        (
            "idle time left by the higher priority",
            &[balance(30, UpTo(50 * PERCENT)), low(30, All)],
            &[500, 500],
        ),
        (
            "low priority without a guarantee",
            &[balance(30, All), low(0, All)],
            &[990, 10],
        ),
        ("no shares", &[], &[]),
    ];
    for (name, tenants, expected) in cases {
        assert_eq!(parts(tenants), *expected, "{name}");
    }
}

#[test]
fn lets_idle_share_start_without_delay() {
    let rates = |tenants: &[ShareDemand]| -> Vec<i64> {
        allot(tenants).iter().map(|a| a.rate / PERCENT).collect()
    };
    assert_eq!(
        rates(&[balance(30, Demand::Idle), balance(30, Demand::Idle)]),
        [100, 100]
    );
    assert_eq!(
        rates(&[balance(30, Demand::Idle), balance(70, Demand::All)]),
        [30, 100]
    );
    assert_eq!(
        rates(&[fixed(30, Demand::Idle), balance(0, Demand::Idle)]),
        [30, 100]
    );
    assert_eq!(
        rates(&[balance(0, Demand::Idle), balance(70, Demand::All)]),
        [1, 100]
    );
}

fn any_tenants() -> impl Strategy<Value = Vec<ShareDemand>> {
    let demand = prop_oneof![
        Just(Demand::Idle),
        Just(Demand::All),
        (0..=GPU).prop_map(Demand::UpTo),
    ];
    let borrowing = prop_oneof![Just(Borrowing::Allowed), Just(Borrowing::Denied)];
    let tenant =
        (0u32..=100, borrowing, -100i32..=100, demand).prop_map(|(c, s, p, d)| tenant(c, s, p, d));
    proptest::collection::vec(tenant, 0..12).prop_map(|mut tenants| {
        // Prepare rejects guarantees above 100% of a GPU.
        let mut unallocated = 100;
        for tenant in &mut tenants {
            let cores = tenant.cores.percent().min(unallocated);
            unallocated -= cores;
            tenant.cores = Cores::new(cores).unwrap();
        }
        tenants
    })
}

proptest! {
    #[test]
    fn allocates_all_gpu_time_exactly_once(tenants in any_tenants()) {
        let allotted = allot(&tenants);
        let sum: i64 = allotted.iter().map(|a| a.part).sum();
        prop_assert!(sum <= GPU);
        let is_saturated = tenants.iter().any(|t| t.borrowing == Borrowing::Allowed && t.demand == Demand::All);
        if is_saturated {
            // Rounding loses less than one part per share and percent.
            prop_assert!(sum > GPU - 2000, "{sum} of {GPU}");
        }
    }

    #[test]
    fn keeps_guarantees_and_floors_for_any_shares(tenants in any_tenants()) {
        let best_effort = tenants.iter().filter(|t| t.cores.percent() == 0 && t.demand != Demand::Idle).count();
        let lost = 2 * PERCENT;
        for (tenant, Allotment { part, rate }) in tenants.iter().zip(allot(&tenants)) {
            let guarantee = i64::from(tenant.cores.percent()) * PERCENT;
            let wanted = match tenant.demand {
                Demand::Idle => 0,
                Demand::UpTo(wanted) => wanted,
                Demand::All => GPU,
            };
            // The floors of shares without a guarantee take at most two percent of the GPU, in proportion.
            prop_assert!(part >= guarantee.min(wanted) - guarantee.min(wanted) * lost / GPU - 1);
            prop_assert!(rate >= part && rate >= guarantee.min(GPU));
            prop_assert!(part <= wanted.max(0));
            if tenant.borrowing == Borrowing::Denied && guarantee > 0 {
                prop_assert!(part <= guarantee && rate <= guarantee.max(floor(best_effort)));
            }
            if guarantee == 0 && wanted > 0 {
                prop_assert!(part >= floor(best_effort).min(wanted));
            }
        }
    }

    #[test]
    fn lends_idle_time_to_highest_priority_first(tenants in any_tenants()) {
        let allotted = allot(&tenants);
        let takes_all = |t: &&ShareDemand| t.borrowing == Borrowing::Allowed && t.demand == Demand::All;
        let Some(highest) = tenants.iter().filter(takes_all).map(|t| t.priority).max() else { return Ok(()) };
        for (low, part) in tenants.iter().zip(&allotted).filter(|(t, _)| t.priority < highest) {
            let guarantee = i64::from(low.cores.percent()) * PERCENT;
            // Rounding loses less than the sum of the weights.
            prop_assert!(part.part <= guarantee.max(PERCENT) + 2000);
        }
    }
}
