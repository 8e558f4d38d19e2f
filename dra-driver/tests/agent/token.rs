//! Turns on a card, in virtual time.

use std::collections::BTreeMap;

use drava_dra_driver::agent::token::{Change, Contender, LONGEST_US, Ring, SHORTEST_US};
use proptest::prelude::*;

/// A tenant that wants time in some stretches.
#[derive(Clone, Debug)]
struct Wanting {
    cores: u32,
    /// Wants while `(now / period) % 2 == 0`; always without one.
    period_us: Option<u64>,
}

impl Wanting {
    fn wants(&self, now_us: u64) -> bool {
        self.period_us
            .is_none_or(|period| (now_us / period).is_multiple_of(2))
    }
}

const LOOK_US: u64 = 5_000;

/// What each tenant held while it wanted time, and for how long somebody waited while nobody held the token.
fn play(tenants: &[Wanting], duration_us: u64) -> (Vec<u64>, u64, Vec<(usize, u64)>) {
    let mut ring = Ring::default();
    let mut until: BTreeMap<usize, u64> = BTreeMap::new();
    let (mut held, mut wasted) = (vec![0; tenants.len()], 0);
    let mut slices = Vec::new();
    for now_us in (0..duration_us / LOOK_US).map(|look| look * LOOK_US) {
        let contenders: Vec<_> = tenants
            .iter()
            .enumerate()
            .map(|(id, tenant)| Contender {
                id,
                cores: tenant.cores,
                wants: tenant.wants(now_us),
            })
            .collect();
        for change in ring.look(now_us, &contenders) {
            match change {
                Change::Grant(id, until_us) => {
                    if ring.holder() == Some(id) && !until.contains_key(&id) {
                        slices.push((id, until_us - now_us));
                    }
                    until.insert(id, until_us);
                }
                Change::Revoke(id) => {
                    until.remove(&id);
                }
            }
        }
        until.retain(|_, until_us| *until_us > now_us);
        assert!(
            until.len() <= 1,
            "the token is held twice at {now_us}: {until:?}"
        );
        match until.keys().next() {
            Some(id) => held[*id] += LOOK_US,
            None if tenants.iter().any(|tenant| tenant.wants(now_us)) => wasted += LOOK_US,
            None => {}
        }
    }
    (held, wasted, slices)
}

fn always(cores: u32) -> Wanting {
    Wanting {
        cores,
        period_us: None,
    }
}

#[test]
fn turns_follow_the_cores() {
    let second = 1_000_000;
    for cores in [
        &[50, 50][..],
        &[30, 70],
        &[10, 90],
        &[1, 99],
        &[20, 30, 50],
        &[5; 8],
        &[0, 100],
        &[100],
    ] {
        let tenants: Vec<_> = cores.iter().map(|cores| always(*cores)).collect();
        let (held, wasted, slices) = play(&tenants, 60 * second);
        assert_eq!(wasted, 0, "{cores:?}");
        let weights: f64 = cores.iter().map(|cores| f64::from(*cores.max(&1))).sum();
        for (held, cores) in held.iter().zip(cores) {
            let (part, due) = (
                *held as f64 / (60 * second) as f64,
                f64::from(*cores.max(&1)) / weights,
            );
            assert!((part - due).abs() < 0.01, "{cores} of {weights}: {part}");
        }
        assert!(
            slices
                .iter()
                .all(|(_, us)| (SHORTEST_US..=LONGEST_US).contains(us)),
            "{slices:?}"
        );
    }
}

#[test]
fn time_that_one_does_not_want_goes_to_the_others() {
    let tenants = [
        always(50),
        Wanting {
            cores: 50,
            period_us: Some(1_000_000),
        },
    ];
    let (held, wasted, _) = play(&tenants, 60_000_000);
    assert_eq!(wasted, 0);
    assert!(held[0].abs_diff(45_000_000) < 1_000_000, "{held:?}");
}

#[test]
fn one_that_dies_loses_the_token_with_the_next_look() {
    let mut ring = Ring::default();
    let wants = |id| Contender {
        id,
        cores: 50,
        wants: true,
    };
    assert_eq!(
        ring.look(0, &[wants(1), wants(2)]),
        [Change::Grant(1, LONGEST_US)]
    );
    assert_eq!(
        ring.look(5_000, &[wants(2)]),
        [Change::Revoke(1), Change::Grant(2, 5_000 + LONGEST_US)]
    );
    assert_eq!(ring.look(10_000, &[]), [Change::Revoke(2)]);
    assert_eq!(ring.look(15_000, &[]), []);
}

#[test]
fn who_wanted_nothing_for_a_while_owes_nothing() {
    let contenders = |wants: [bool; 2]| {
        [(1, wants[0]), (2, wants[1])].map(|(id, wants)| Contender {
            id,
            cores: 50,
            wants,
        })
    };
    let mut ring = Ring::default();
    ring.look(0, &contenders([true, true]));
    // Its slice lasted four times as long as it should have.
    let both = contenders([true, true]);
    assert!(
        ring.look(4 * LONGEST_US, &both)
            .contains(&Change::Revoke(1))
    );
    ring.look(4 * LONGEST_US + LOOK_US, &contenders([false, true]));
    ring.look(6 * LONGEST_US, &both);
    assert_eq!(ring.holder(), Some(1), "its debt is forgotten");
}

#[test]
fn one_that_is_alone_is_never_without_it_and_owes_nothing_later() {
    let mut ring = Ring::default();
    let alone = [Contender {
        id: 1,
        cores: 10,
        wants: true,
    }];
    let mut until_us = 0;
    for now_us in (0..5_000_000).step_by(5_000) {
        for change in ring.look(now_us, &alone) {
            match change {
                Change::Grant(_, until) => until_us = until,
                Change::Revoke(_) => panic!("revoked at {now_us}"),
            }
        }
        assert!(
            until_us > now_us + 5_000 || now_us == 0,
            "{now_us}: {until_us}"
        );
    }
    // It gets its turn again within a few rounds.
    let both = [
        alone[0],
        Contender {
            id: 2,
            cores: 90,
            wants: true,
        },
    ];
    let back = (5_000_000..7_000_000).step_by(5_000).filter(|now_us| {
        ring.look(*now_us, &both);
        ring.holder() == Some(1)
    });
    let back = back.count();
    // A tenth of 400 looks, less what it may owe.
    assert!((30..=42).contains(&back), "{back}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whoever_wants_time_gets_its_turn_and_none_is_wasted(
        tenants in proptest::collection::vec((0u32..=100, proptest::option::of(20_000u64..2_000_000)), 1..9)
    ) {
        let tenants: Vec<_> = tenants.into_iter().map(|(cores, period_us)| Wanting { cores, period_us }).collect();
        let (held, wasted, slices) = play(&tenants, 30_000_000);
        prop_assert_eq!(wasted, 0);
        for (id, tenant) in tenants.iter().enumerate() {
            if tenant.period_us.is_none() {
                prop_assert!(held[id] > 0, "tenant {} starved", id);
            }
        }
        prop_assert!(slices.iter().all(|(_, us)| *us <= LONGEST_US));
    }
}
