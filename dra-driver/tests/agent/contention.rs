//! The contention estimate, tick by tick.

use drava_dra_driver::agent::policy::contention::{ALL, Active, Contention, Workload};

const STEP_US: u64 = 100_000;
const SECOND_US: u64 = 1_000_000;

fn active(id: u32, part: u64, charged_us: u64) -> Active<u32> {
    Active {
        id,
        part,
        workload: Workload::Launches(10_000),
        charged_us,
        launches: charged_us / 10_000,
        is_working: true,
    }
}

#[test]
fn halves_correction_on_active_set_change() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    for _ in 0..10 {
        contention.update(STEP_US, &two);
    }
    let predicted = contention.update(STEP_US, &two)[0];
    for _ in 0..5 {
        for _ in 0..10 {
            contention.update(STEP_US, &two);
        }
        // NVML reports a quarter less of the first share than the share was charged.
        let charged = 10 * 20_000;
        contention.observe(SECOND_US, &[(1, charged * 3 / 4), (2, charged)]);
    }
    let learned = contention.update(STEP_US, &two)[0];
    assert!(learned < predicted * 95 / 100, "{learned} of {predicted}");
    let three = [two[0], two[1], active(3, 1, 0)];
    let half = contention.update(STEP_US, &three)[0];
    let middle = u64::midpoint(learned, predicted);
    assert!(
        half.abs_diff(middle) < (predicted - learned) / 4,
        "{learned} {half} {predicted}"
    );
}

#[test]
fn ignores_late_samples_of_stopped_share() {
    let mut contention = Contention::default();
    let both = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    let mut decisions = Vec::new();
    // Active for less than 1 s by its events.
    for step in 0..8 {
        decisions = contention.update(STEP_US, &both);
        if step > 3 {
            let own = |index: usize| 20_000 * decisions[index] / ALL;
            contention.observe(STEP_US, &[(1, own(0)), (2, own(1))]);
        }
    }
    let stopped = Active {
        charged_us: 0,
        is_working: false,
        ..both[1]
    };
    for _ in 0..3 {
        contention.update(STEP_US, &[both[0], stopped]);
        contention.observe(STEP_US, &[(1, 10_000), (2, 20_000)]);
    }
    let again = contention.update(STEP_US, &both)[1];
    assert!(again <= decisions[1], "{again} instead of {}", decisions[1]);
}

/// Reports for some seconds a quarter less of the first share than it was charged.
fn learn_correction(contention: &mut Contention<u32>, shares: &[Active<u32>]) {
    for _ in 0..5 {
        for _ in 0..10 {
            contention.update(STEP_US, shares);
        }
        let charged = |share: &Active<u32>| 10 * share.charged_us;
        let seen: Vec<_> = shares.iter().map(|s| (s.id, charged(s))).collect();
        let less = (seen[0].0, seen[0].1 * 3 / 4);
        contention.observe(SECOND_US, &[&[less], &seen[1..]].concat());
    }
}

#[test]
fn keeps_correction_while_one_share_pauses() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    learn_correction(&mut contention, &two);
    let learned = contention.update(STEP_US, &two);
    for _ in 0..20 {
        let alone = contention.update(STEP_US, &two[..1]);
        assert_eq!(alone, [ALL], "a share alone is not corrected");
        contention.observe(SECOND_US, &[(1, 200_000)]);
    }
    let again = contention.update(STEP_US, &two);
    assert!(
        again[0].abs_diff(learned[0]) < ALL / 50,
        "{learned:?} {again:?}"
    );
}

#[test]
fn ignores_samples_older_than_active_set() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    contention.update(STEP_US, &two[..1]);
    let decisions = contention.update(STEP_US, &two);
    // Samples of the first share alone, 1/6 s each.
    for _ in 0..2 {
        contention.observe(SECOND_US / 6, &[(1, SECOND_US / 6)]);
        assert_eq!(contention.update(STEP_US, &two), decisions);
    }
    contention.observe(SECOND_US / 6, &[(1, SECOND_US / 6), (2, 1)]);
    assert_ne!(contention.update(STEP_US, &two), decisions);
}

/// Returns the own time of a share with a third of the GPU and of a share that saturates the rest.
fn own_time_with_saturating_share(workload: Workload) -> [u64; 2] {
    let mut contention = Contention::default();
    let (part, rest) = (ALL / 3, ALL - ALL / 3);
    let filled = match workload {
        Workload::TokenSlices(us) => Workload::TokenSlices(us),
        Workload::Saturating | Workload::Launches(_) => Workload::Saturating,
    };
    let shares = [(1, part, workload), (2, rest, filled)].map(|(id, part, workload)| Active {
        id,
        part,
        workload,
        charged_us: 0,
        launches: 0,
        is_working: true,
    });
    let own = contention.update(STEP_US, &shares);
    [own[0], own[1]]
}

#[test]
fn predicts_no_interruption_within_time_slice() {
    let near = |found: u64, due: u64| found.abs_diff(due) < ALL / 20;
    let [own, rest] = own_time_with_saturating_share(Workload::Launches(500));
    assert!(near(own, ALL) && near(rest, 2 * ALL / 3), "{own} {rest}");
    // Half of the time of a long kernel belongs to the other share.
    let [own, rest] = own_time_with_saturating_share(Workload::Launches(100_000));
    assert!(
        near(own, ALL / 2) && near(rest, 2 * ALL / 3),
        "{own} {rest}"
    );
    let [own, _] = own_time_with_saturating_share(Workload::Launches(4_000));
    assert!((ALL / 2..ALL * 3 / 4).contains(&own), "{own}");
}

#[test]
fn predicts_no_interruption_between_token_shares() {
    assert_eq!(
        own_time_with_saturating_share(Workload::TokenSlices(20_000)),
        [ALL, ALL]
    );
}

#[test]
fn keeps_stable_estimate_for_rare_long_kernels() {
    // A kernel of 500 ms every 5 s, alongside a share that saturates the rest.
    let mut contention = Contention::default();
    let share = |id, part, workload, charged_us| Active {
        id,
        part,
        workload,
        charged_us,
        launches: charged_us / 10_000,
        is_working: true,
    };
    let mut decisions = Vec::new();
    for step in 0..600_u64 {
        // Both run in the first second of five, each for half of it.
        let is_shared = step % 50 < 10;
        let charged = if step % 50 == 0 { 500_000 } else { 0 };
        let long = share(1, ALL / 10, Workload::Launches(500_000), charged);
        let saturating = share(2, ALL * 9 / 10, Workload::Saturating, STEP_US * 9 / 10);
        decisions = contention.update(STEP_US, &[long, saturating]);
        if step % 2 == 1 {
            let seen = if is_shared {
                [STEP_US; 2]
            } else {
                [0, 2 * STEP_US]
            };
            contention.observe(2 * STEP_US, &[(1, seen[0]), (2, seen[1])]);
        }
        if step > 300 {
            let off = decisions[1].abs_diff(ALL * 9 / 10);
            assert!(off < ALL / 20, "step {step}: {decisions:?}");
        }
    }
    assert!(!decisions.is_empty());
}

/// Returns a share that is throttled to its part.
fn throttled(id: u32, part: u64, launches: u64, charged_us: u64) -> Active<u32> {
    Active {
        id,
        part,
        workload: Workload::Launches(1_000),
        charged_us,
        launches,
        is_working: true,
    }
}

/// Returns a share whose queue is never empty, so its events measure the wall-clock time.
fn saturating(id: u32, part: u64, launches: u64, charged_us: u64) -> Active<u32> {
    Active {
        workload: Workload::Saturating,
        ..throttled(id, part, launches, charged_us)
    }
}

/// Ticks without a sample of the active set.
const TICKS_WITHOUT_SAMPLE: usize = 4;

/// Starts a share of 30% alongside a resident share with the rest. Both launch kernels of 1 ms; the new share measures
/// 1.5 ms. Returns the own time of the new share after each tick.
fn start_new_share(
    contention: &mut Contention<u32>,
    id: u32,
    is_full: bool,
    steps: usize,
) -> Vec<u64> {
    let alone = saturating(1, ALL * 7 / 10, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.update(STEP_US, &[alone])));
    let mut own = ALL;
    let step = |_| {
        // The charge is constant, so the number of launches depends on the own time.
        let launches = 30_000 * ALL / (1_500 * own);
        let mut resident = saturating(1, ALL * 7 / 10, 100 - launches, STEP_US * 7 / 10);
        if !is_full {
            resident.workload = Workload::Launches(1_000);
        }
        let new_share = throttled(id, ALL * 3 / 10, launches, 30_000);
        own = contention.update(STEP_US, &[resident, new_share])[1];
        own
    };
    (0..steps).map(step).collect()
}

#[test]
fn estimates_new_share_from_launches_on_full_gpu() {
    let decisions = start_new_share(&mut Contention::default(), 2, true, TICKS_WITHOUT_SAMPLE);
    let own = decisions[TICKS_WITHOUT_SAMPLE - 1];
    assert!(own.abs_diff(ALL * 2 / 3) < ALL / 20, "{decisions:?}");
    // Without a full GPU, idle time explains the difference.
    let decisions = start_new_share(&mut Contention::default(), 2, false, TICKS_WITHOUT_SAMPLE);
    assert_eq!(decisions, [ALL; TICKS_WITHOUT_SAMPLE]);
}

#[test]
fn attributes_longer_launches_to_contention() {
    // Contention explains at most a factor of two.
    for (measured_us, due) in [(1_500, ALL * 2 / 3), (5_000, ALL / 2)] {
        let mut contention = Contention::default();
        let resident = |launches, charged_us| throttled(1, ALL * 3 / 10, launches, charged_us);
        for _ in 0..10 {
            contention.update(STEP_US, &[resident(30, 30_000)]);
        }
        // A pause does not discard the known cost.
        for _ in 0..100 {
            contention.update(STEP_US, &[resident(0, 0)]);
        }
        let mut own = ALL;
        for step in 0..TICKS_WITHOUT_SAMPLE {
            let launches = 60_000 * ALL / (measured_us * own);
            let charged_us = launches * measured_us * own / ALL;
            let new_share = saturating(2, ALL * 7 / 10, 50, STEP_US * 7 / 10);
            own = contention.update(STEP_US, &[resident(launches, charged_us), new_share])[0];
            assert!(
                step > 0 || own == ALL,
                "the first tick is half without contention"
            );
            // Decisions between ticks use the known estimate.
            let between =
                contention.update(0, &[resident(0, 0), saturating(2, ALL * 7 / 10, 0, 0)]);
            assert_eq!(between[0], own);
        }
        assert!(own.abs_diff(due) < ALL / 20, "{measured_us}: {own}");
    }
}

#[test]
fn ignores_small_changes_in_launch_count() {
    let mut contention = Contention::default();
    let resident = |launches| throttled(1, ALL * 3 / 10, launches, 30_000);
    let new_share = saturating(2, ALL * 7 / 10, 50, STEP_US * 7 / 10);
    for _ in 0..10 {
        contention.update(STEP_US, &[resident(3)]);
    }
    contention.update(STEP_US, &[resident(3), new_share]);
    let own = contention.update(STEP_US, &[resident(2), new_share])[0];
    assert!(own > ALL * 85 / 100, "{own}");
}

#[test]
fn estimates_nothing_from_two_unknown_shares() {
    let mut contention = Contention::default();
    let both = [
        saturating(1, ALL * 7 / 10, 60, STEP_US * 7 / 10),
        throttled(2, ALL * 3 / 10, 30, 30_000),
    ];
    for _ in 0..TICKS_WITHOUT_SAMPLE {
        assert_eq!(contention.update(STEP_US, &both)[1], ALL);
    }
    // A known third share does not change that.
    let mut contention = Contention::default();
    let known = saturating(1, ALL / 2, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.update(STEP_US, &[known])));
    let known = saturating(1, ALL / 2, 80, STEP_US / 2);
    let others = [2, 3].map(|id| throttled(id, ALL / 4, 25, 25_000));
    for _ in 0..TICKS_WITHOUT_SAMPLE {
        let decisions = contention.update(STEP_US, &[known, others[0], others[1]]);
        assert_eq!(decisions[1..], [ALL; 2]);
    }
}

#[test]
fn estimates_nothing_from_idle_new_share() {
    let mut contention = Contention::default();
    let alone = saturating(1, ALL * 7 / 10, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.update(STEP_US, &[alone])));
    let idle_share = Active {
        is_working: false,
        ..throttled(2, ALL * 3 / 10, 0, 0)
    };
    for _ in 0..2 {
        let slower = saturating(1, ALL * 7 / 10, 60, STEP_US);
        contention.update(STEP_US, &[slower, idle_share]);
    }
    let resident = saturating(1, ALL * 7 / 10, 80, STEP_US * 7 / 10);
    let new_share = throttled(2, ALL * 3 / 10, 20, 30_000);
    let own = contention.update(STEP_US, &[resident, new_share])[1];
    assert!(own < ALL * 3 / 4, "{own}");
}

#[test]
fn prefers_nvml_samples_to_launch_estimate() {
    let mut contention = Contention::default();
    let mut own = *start_new_share(&mut contention, 2, true, TICKS_WITHOUT_SAMPLE)
        .last()
        .unwrap();
    let concluded = own;
    let resident = saturating(1, ALL * 7 / 10, 80, STEP_US * 7 / 10);
    let new = throttled(2, ALL * 3 / 10, 30, 30_000);
    // NVML reports all measured time as its own.
    for _ in 0..TICKS_WITHOUT_SAMPLE * 2 {
        let measured_us = 30_000 * ALL / own;
        let seen = [(1, STEP_US - measured_us), (2, measured_us)];
        contention.observe(STEP_US, &seen);
        own = contention.update(STEP_US, &[resident, new])[1];
    }
    let missing = ALL - own;
    assert!(missing * 3 < ALL - concluded, "{concluded} {own}");
}

#[test]
fn forgets_launch_estimate_without_nvml_samples() {
    let mut contention = Contention::default();
    // Two shares start alternately, without any NVML sample.
    let decisions: Vec<u64> = (0..12)
        .map(|round| {
            start_new_share(&mut contention, 2 + round % 2, true, TICKS_WITHOUT_SAMPLE)
                [TICKS_WITHOUT_SAMPLE - 1]
        })
        .collect();
    assert!(decisions[0] < ALL * 3 / 4, "{decisions:?}");
    // Each change halves the estimate, and no sample replaces it.
    assert!(decisions[11] > ALL * 9 / 10, "{decisions:?}");
}
