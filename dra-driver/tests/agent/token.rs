//! The token ring of a GPU, in virtual time.

use std::collections::BTreeMap;

use drava_dra_driver::agent::policy::token::{
    AHEAD_US, Change, EndedSlice, LONGEST_US, SHORTEST_US, TokenCandidate, TokenRing,
};
use drava_vgpu_abi::bucket::TokenSlice;
use proptest::prelude::*;
use simulator_machine::kernel::engine::Timing;

use crate::simulated_gpu::{H200, NO_SWITCHES, SimulatedGpu};
use crate::workload::Workload;

/// Demand of a share over time.
#[derive(Clone, Debug)]
struct DemandPattern {
    cores: u32,
    /// Wants time while `(now / period) % 2 == 0`, or always without a period.
    period_us: Option<u64>,
}

impl DemandPattern {
    fn wants(&self, now_us: u64) -> bool {
        self.period_us
            .is_none_or(|period| (now_us / period).is_multiple_of(2))
    }
}

const POLL_US: u64 = 5_000;

/// Returns the token time of each share, the time in which a share waited for an unheld token, and the slices.
fn simulate_ring(
    tenants: &[DemandPattern],
    duration_us: u64,
) -> (Vec<u64>, u64, Vec<(usize, u64)>) {
    const TICK_US: u64 = 1_000;
    let mut ring = TokenRing::default();
    let mut slices_by_share: BTreeMap<usize, TokenSlice> = BTreeMap::new();
    let (mut held, mut wasted) = (vec![0; tenants.len()], 0);
    let mut slices = Vec::new();
    let mut is_wanted = false;
    for now_us in (0..duration_us / TICK_US).map(|tick| tick * TICK_US) {
        let candidates: Vec<_> = tenants
            .iter()
            .enumerate()
            .map(|(id, tenant)| TokenCandidate {
                id,
                cores: tenant.cores,
                wants: tenant.wants(now_us),
                yields: false,
            })
            .collect();
        let is_poll = now_us.is_multiple_of(POLL_US);
        let changes = is_poll.then(|| ring.poll(now_us, &candidates));
        for change in changes.into_iter().flatten() {
            match change {
                Change::Grant(id, slice) => {
                    let before = slices_by_share.insert(id, slice);
                    // An extension starts at the end of the same slice.
                    let end_us = before.filter(|before| before.from_us == slice.from_us);
                    slices.push((
                        id,
                        slice.until_us - end_us.map_or(slice.from_us, |b| b.until_us.max(now_us)),
                    ));
                }
                Change::Revoke(id) => {
                    slices_by_share.remove(&id);
                }
            }
        }
        slices_by_share.retain(|_, slice| slice.until_us > now_us);
        let mut holders = slices_by_share
            .iter()
            .filter(|(_, slice)| slice.from_us <= now_us);
        let holder = holders.next().map(|(id, _)| *id);
        assert!(
            holders.next().is_none(),
            "the token is held twice at {now_us}: {slices_by_share:?}"
        );
        if is_poll {
            assert_eq!(ring.holder(), holder, "{now_us}: {slices_by_share:?}");
        }
        // New demand is detected on the next poll.
        is_wanted &= tenants.iter().any(|tenant| tenant.wants(now_us));
        is_wanted |= is_poll && tenants.iter().any(|tenant| tenant.wants(now_us));
        match holder {
            Some(id) => held[id] += TICK_US,
            None if is_wanted => wasted += TICK_US,
            None => {}
        }
    }
    (held, wasted, slices)
}

fn always(cores: u32) -> DemandPattern {
    DemandPattern {
        cores,
        period_us: None,
    }
}

#[test]
fn divides_slices_by_cores() {
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
        let (held, wasted, slices) = simulate_ring(&tenants, 60 * second);
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
fn gives_unwanted_time_to_other_shares() {
    let tenants = [
        always(50),
        DemandPattern {
            cores: 50,
            period_us: Some(1_000_000),
        },
    ];
    let (held, wasted, _) = simulate_ring(&tenants, 60_000_000);
    assert_eq!(wasted, 0);
    assert!(held[0].abs_diff(45_000_000) < 1_000_000, "{held:?}");
}

#[test]
fn revokes_token_of_dead_share_on_next_poll() {
    let mut ring = TokenRing::default();
    let wants = |id| TokenCandidate {
        id,
        cores: 50,
        wants: true,
        yields: false,
    };
    let slice = |from_us, until_us| TokenSlice { from_us, until_us };
    assert_eq!(
        ring.poll(0, &[wants(1), wants(2)]),
        [Change::Grant(1, slice(0, LONGEST_US))]
    );
    // The second share is alone now, with more than half of the slice left.
    assert_eq!(
        ring.poll(5_000, &[wants(2)]),
        [
            Change::Revoke(1),
            Change::Grant(2, slice(5_000, 5_000 + LONGEST_US))
        ]
    );
    assert_eq!(ring.poll(10_000, &[]), [Change::Revoke(2)]);
    assert_eq!(ring.poll(15_000, &[]), []);
}

/// Returns two shares of 50%. The first has the token, and the second has the announced next slice.
fn ring_with_announced_slice() -> (TokenRing<u32>, [TokenCandidate<u32>; 2], TokenSlice) {
    let both = [1, 2].map(|id| TokenCandidate {
        id,
        cores: 50,
        wants: true,
        yields: false,
    });
    let mut ring = TokenRing::default();
    ring.poll(0, &both);
    let next = TokenSlice {
        from_us: LONGEST_US,
        until_us: 2 * LONGEST_US,
    };
    assert_eq!(ring.poll(LONGEST_US - AHEAD_US - 1, &both), []);
    let changes = ring.poll(LONGEST_US - AHEAD_US, &both);
    assert_eq!(changes, [Change::Grant(2, next)]);
    assert_eq!((ring.holder(), ring.has_slice(2)), (Some(1), true));
    (ring, both, next)
}

#[test]
fn announces_next_slice_before_current_one_ends() {
    let (mut ring, both, next) = ring_with_announced_slice();
    assert_eq!(ring.poll(next.from_us - 1, &both), []);
    assert_eq!(ring.holder(), Some(1));
    // Also with a late poll.
    assert_eq!(ring.poll(next.from_us + 7_000, &both), []);
    assert_eq!(ring.holder(), Some(2));
}

#[test]
fn starts_next_slice_early_when_holder_goes_idle() {
    let (mut ring, both, next) = ring_with_announced_slice();
    let now_us = next.from_us - 5_000;
    let changes = ring.poll(now_us, &both[1..]);
    let slice = TokenSlice {
        from_us: now_us,
        until_us: now_us + LONGEST_US,
    };
    assert_eq!(changes, [Change::Revoke(1), Change::Grant(2, slice)]);
    assert_eq!(ring.holder(), Some(2));
}

#[test]
fn revokes_unwanted_slice_before_it_starts() {
    let (mut ring, both, next) = ring_with_announced_slice();
    let changes = ring.poll(next.from_us - 5_000, &both[..1]);
    let longer = TokenSlice {
        from_us: 0,
        until_us: next.from_us - 5_000 + LONGEST_US,
    };
    assert_eq!(changes, [Change::Revoke(2), Change::Grant(1, longer)]);
    assert!(!ring.has_slice(2));
}

#[test]
fn accumulates_no_slice_credit_while_idle() {
    let candidates = |wants: [bool; 3]| {
        [(1, 20), (2, 72), (3, 8)]
            .into_iter()
            .zip(wants)
            .map(|((id, cores), wants)| TokenCandidate {
                id,
                cores,
                wants,
                yields: false,
            })
            .collect::<Vec<_>>()
    };
    // Share 3 gets 8 ms per round, less than a slice, and its first slice in the second round.
    let first_turn = |gone_at: Option<u64>| {
        let mut ring = TokenRing::default();
        let mut polls = (0..2_000_000).step_by(5_000);
        polls.find(|now_us| {
            ring.poll(*now_us, &candidates([true, true, gone_at != Some(*now_us)]));
            ring.holder() == Some(3)
        })
    };
    let at_once = first_turn(None).unwrap();
    let later = first_turn(Some(at_once - 50_000)).unwrap();
    assert!(later >= at_once + 50_000, "{at_once} {later}");
}

#[test]
fn renews_token_of_single_share_without_debt() {
    let mut ring = TokenRing::default();
    let alone = [TokenCandidate {
        id: 1,
        cores: 10,
        wants: true,
        yields: false,
    }];
    let mut until_us = 0;
    for now_us in (0..5_000_000).step_by(5_000) {
        for change in ring.poll(now_us, &alone) {
            match change {
                Change::Grant(_, slice) => until_us = slice.until_us,
                Change::Revoke(_) => panic!("revoked at {now_us}"),
            }
        }
        assert!(
            until_us > now_us + 5_000 || now_us == 0,
            "{now_us}: {until_us}"
        );
    }
    // The share gets the token again within a few rounds.
    let both = [
        alone[0],
        TokenCandidate {
            id: 2,
            cores: 90,
            wants: true,
            yields: false,
        },
    ];
    let back = (5_000_000..7_000_000).step_by(5_000).filter(|now_us| {
        ring.poll(*now_us, &both);
        ring.holder() == Some(1)
    });
    let back = back.count();
    // A tenth of 400 polls, and the rest of the slice that it had alone: 25 to 50 ms.
    assert!((43..=52).contains(&back), "{back}");
}

/// Runs two or three shares, each with cores and kernel length, and returns the percentage of the GPU of each.
fn run_shares(timing: Timing, loads: &[(u32, u64)]) -> Vec<f64> {
    let tenants: Vec<_> = loads
        .iter()
        .map(|(cores, kernel_us)| Workload::token(*cores, *kernel_us))
        .collect();
    let mut gpu = SimulatedGpu::of(timing, &tenants);
    gpu.run(2.0);
    // One kernel more or less is a small part of the time.
    let longest_us = loads.iter().map(|(_, kernel_us)| *kernel_us).max().unwrap();
    gpu.run((longest_us as f64 * 3e-3).max(60.0))
}

/// Errors in points of the time that the shares got together. On an H200, switches between contexts take a part that no
/// share is charged, so that the mean overrun seems shorter.
const TOLERANCES: [(Timing, f64); 2] = [(NO_SWITCHES, 1.0), (H200, 2.0)];

fn assert_divided_by_cores(loads: &[(u32, u64)]) {
    for (hardware, tolerance) in TOLERANCES {
        let got = run_shares(hardware, loads);
        let sum: f64 = got.iter().sum();
        for (used, (cores, _)) in got.iter().zip(loads) {
            let error = (used / sum).mul_add(100.0, -f64::from(*cores)).abs();
            assert!(error <= tolerance, "{got:.1?}: {loads:?}, {hardware:?}");
        }
    }
}

#[test]
fn deducts_overrun_from_next_slices() {
    for (cores, other) in [(10, 90), (30, 70), (50, 50)] {
        for (kernel_us, others_us) in [
            (100, 100),
            (1_000, 1_000),
            (5_000, 1_000),
            (500, 20_000),
            (20_000, 1_000),
            // Two kernels in flight, both in the time of another share's overrun, take twice as long.
            (20_000, 20_000),
            (80_000, 1_000),
        ] {
            assert_divided_by_cores(&[(cores, kernel_us), (other, others_us)]);
        }
    }
    assert_divided_by_cores(&[(20, 30_000), (30, 2_000), (50, 500)]);
}

/// Polls the ring in the range `us`. `used_us` returns the use of each ended slice. Returns the total length of the first
/// share's slices.
fn run_ring(
    ring: &mut TokenRing<u32>,
    us: std::ops::Range<u64>,
    candidates: &[TokenCandidate<u32>],
    used_us: impl Fn(EndedSlice<u32>) -> u64,
) -> u64 {
    let mut held_us = 0;
    for now_us in us.step_by(5_000) {
        ring.poll(now_us, candidates);
        for ended in ring.ended() {
            ring.account_slice(ended, used_us(ended));
            held_us += if ended.id == 1 { ended.held_us } else { 0 };
        }
    }
    held_us
}

#[test]
fn compensates_slice_shortened_by_overrun() {
    let both = [1, 2].map(|id| TokenCandidate {
        id,
        cores: 50,
        wants: true,
        yields: false,
    });
    // The second share overruns each slice by 20 ms into the first share's slice, and both run in turn until then.
    let used_us = |ended: EndedSlice<u32>| match ended.id {
        1 => ended.held_us,
        _ => ended.held_us + 40_000,
    };
    let held_us = run_ring(&mut TokenRing::default(), 0..10_000_000, &both, used_us);
    // The slices of the first share are longer by the lost time.
    let turns = 10_000_000 / (LONGEST_US + LONGEST_US / 2);
    assert!(held_us > 5_000_000 + turns * 10_000, "{held_us}");
    // Unused time without an overrun is not compensated.
    let used_us = |ended: EndedSlice<u32>| match ended.id {
        1 => ended.held_us - 20_000.min(ended.held_us),
        _ => ended.held_us,
    };
    let held_us = run_ring(&mut TokenRing::default(), 0..10_000_000, &both, used_us);
    assert!(held_us.abs_diff(5_000_000) < 200_000, "{held_us}");
}

#[test]
fn keeps_overrun_debt_over_short_pause() {
    let candidates = |wants| {
        [(1, wants), (2, true), (3, true)].map(|(id, wants)| TokenCandidate {
            id,
            cores: 33,
            wants,
            yields: false,
        })
    };
    let held_after_pause = |overrun_us: u64, pause_us: u64| {
        let mut ring = TokenRing::default();
        let mut now_us = 0;
        // The first slice belongs to share 1, which overruns it.
        while ring.holder().is_none_or(|holder| holder == 1) {
            ring.poll(now_us, &candidates(true));
            now_us += 5_000;
        }
        for ended in ring.ended() {
            ring.account_slice(ended, 0);
            ring.account_slice(
                EndedSlice {
                    held_us: 0,
                    ..ended
                },
                overrun_us,
            );
        }
        let exact = |ended: EndedSlice<u32>| ended.held_us;
        let back_us = now_us + pause_us;
        run_ring(&mut ring, now_us..back_us, &candidates(false), exact);
        run_ring(
            &mut ring,
            back_us..back_us + 1_000_000,
            &candidates(true),
            exact,
        )
    };
    let paid_us = held_after_pause(0, 20_000) - held_after_pause(400_000, 20_000);
    assert!(paid_us > 100_000, "{paid_us}");
    // In 1 s its share is 333 ms, which is more than its debt, half of the overrun.
    let paid_us = held_after_pause(0, 1_000_000).abs_diff(held_after_pause(400_000, 1_000_000));
    assert!(paid_us < 20_000, "{paid_us}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn grants_token_to_all_active_shares_without_gaps(
        tenants in proptest::collection::vec((0u32..=100, proptest::option::of(20_000u64..2_000_000)), 1..9)
    ) {
        let tenants: Vec<_> = tenants.into_iter().map(|(cores, period_us)| DemandPattern { cores, period_us }).collect();
        let (held, wasted, slices) = simulate_ring(&tenants, 30_000_000);
        prop_assert_eq!(wasted, 0);
        for (id, tenant) in tenants.iter().enumerate() {
            if tenant.period_us.is_none() {
                prop_assert!(held[id] > 0, "tenant {} starved", id);
            }
        }
        prop_assert!(slices.iter().all(|(_, us)| *us <= LONGEST_US), "{:?}", slices);
    }
}

/// A kernel that overruns its slice is measured with the slices of the next share. Switches between contexts, up to 3% of the
/// time of a share, are charged, too.
#[test]
fn charges_shares_for_their_use() {
    for (cores, kernels) in [
        (30, [1_000, 1_000]),
        (30, [20_000, 20_000]),
        (10, [20_000, 1_000]),
        (30, [300, 12_000]),
        (10, [8_000, 20_000]),
    ] {
        let loads = [
            Workload::token(cores, kernels[0]),
            Workload::token(100 - cores, kernels[1]),
        ];
        let mut gpu = SimulatedGpu::new(&loads);
        gpu.run(3.0);
        let charged = gpu.run_charged(10.0);
        let used = gpu.run(10.0);
        for (charged, used) in charged.iter().zip(&used) {
            let is_near = (used - 0.1..used + 3.0).contains(charged);
            assert!(is_near, "{cores}%, {kernels:?}: {charged:.1} for {used:.1}");
        }
    }
}
