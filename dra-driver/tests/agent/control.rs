//! What the controller and the prediction of contention remember, by single steps.

use drava_dra_driver::agent::contention::{ALL, Active, Contention, Work};
use drava_dra_driver::agent::control::{Controller, Measured, Step, Terms, Turn};
use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

const STEP_US: u64 = 100_000;
const SECOND_US: u64 = 1_000_000;

fn wants_all(id: u32, cores: u32) -> Step<u32> {
    let terms = Terms {
        cores: Cores::new(cores).unwrap(),
        policy: ComputePolicy::Balance,
        priority: Priority::DEFAULT,
    };
    let measured = Measured {
        used_us: STEP_US * u64::from(cores) / 100,
        launches: STEP_US * u64::from(cores) / 100 / 1_000,
        waited: true,
        launch_us: 1_000,
        rests: false,
    };
    (id, terms, measured)
}

/// Rate of the first share after a step.
fn rate(controller: &mut Controller<u32>, shares: &[Step<u32>]) -> u32 {
    controller.step(STEP_US, shares)[0].1.rate_us_per_s
}

#[test]
fn halves_lag_on_active_set_change() {
    let mut controller = Controller::default();
    let two = [wants_all(1, 30), wants_all(2, 30)];
    let three = [two[0], two[1], wants_all(3, 30)];
    for _ in 0..3 {
        for _ in 0..10 {
            rate(&mut controller, &two);
        }
        // NVML has seen less of the first one, on a card that was not full.
        controller.observe(SECOND_US, SECOND_US * 9 / 10, &[(1, 400_000), (2, 500_000)]);
    }
    let owed = rate(&mut controller, &two) - 500_000;
    assert!(owed > 20_000, "{owed}");
    // A third of the card is its part now.
    let left = rate(&mut controller, &three) - 333_333;
    assert!((owed / 2).abs_diff(left) < owed / 10, "{owed} {left}");
}

/// Rates of two with 30 and 60 percent after a while in which NVML saw so much of them in each second, on a full card.
fn beside(policy: ComputePolicy, seen: [u64; 2]) -> [u32; 2] {
    let mut controller = Controller::default();
    let mut shares = [wants_all(1, 30), wants_all(2, 60)];
    shares.iter_mut().for_each(|share| share.1.policy = policy);
    let mut told = Vec::new();
    for _ in 0..10 {
        for _ in 0..10 {
            told = controller.step(STEP_US, &shares);
        }
        let busy_us = SECOND_US * 99 / 100;
        controller.observe(SECOND_US, busy_us, &[(1, seen[0]), (2, seen[1])]);
    }
    [0, 1].map(|index| told[index].1.rate_us_per_s)
}

#[test]
fn throttles_no_share_for_nvml_rounding_surplus() {
    use ComputePolicy::{Balance, Fixed};
    // A third and two thirds of the card are theirs, and samples in whole percents say a little more.
    let rates = beside(Balance, [337_000, 674_000]);
    assert!(rates[0] >= 333_000 && rates[1] >= 666_000, "{rates:?}");
    // What one of them had too much is still the other one's.
    let rates = beside(Balance, [363_333, 646_666]);
    assert!(rates[0] < 320_000, "{rates:?}");
    // And where a part of the card is somebody else's, too much is too much.
    let rates = beside(Fixed, [320_000, 630_000]);
    assert!(rates[0] < 280_000 && rates[1] < 570_000, "{rates:?}");
}

fn active(id: u32, part: u64, charged_us: u64) -> Active<u32> {
    Active {
        id,
        part,
        work: Work::Launches(10_000),
        charged_us,
        launches: charged_us / 10_000,
        is_at_work: true,
    }
}

#[test]
fn halves_correction_on_active_set_change() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    for _ in 0..10 {
        contention.step(STEP_US, &two);
    }
    let predicted = contention.step(STEP_US, &two)[0];
    for _ in 0..5 {
        for _ in 0..10 {
            contention.step(STEP_US, &two);
        }
        // NVML saw a quarter less of the first than it was charged.
        let charged = 10 * 20_000;
        contention.observe(SECOND_US, &[(1, charged * 3 / 4), (2, charged)]);
    }
    let learned = contention.step(STEP_US, &two)[0];
    assert!(learned < predicted * 95 / 100, "{learned} of {predicted}");
    let three = [two[0], two[1], active(3, 1, 0)];
    let half = contention.step(STEP_US, &three)[0];
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
    let mut told = Vec::new();
    // For less than a second, as its events say.
    for step in 0..8 {
        told = contention.step(STEP_US, &both);
        if step > 3 {
            let own = |index: usize| 20_000 * told[index] / ALL;
            contention.observe(STEP_US, &[(1, own(0)), (2, own(1))]);
        }
    }
    let stopped = Active {
        charged_us: 0,
        is_at_work: false,
        ..both[1]
    };
    for _ in 0..3 {
        contention.step(STEP_US, &[both[0], stopped]);
        contention.observe(STEP_US, &[(1, 10_000), (2, 20_000)]);
    }
    let again = contention.step(STEP_US, &both)[1];
    assert!(again <= told[1], "{again} instead of {}", told[1]);
}

/// Two shares, of which the second does nothing.
fn lent() -> (Controller<u32>, [Step<u32>; 2]) {
    let mut controller = Controller::default();
    let mut idle = wants_all(2, 70);
    (idle.2.used_us, idle.2.waited) = (0, false);
    let shares = [wants_all(1, 30), idle];
    for _ in 0..10 {
        controller.step(STEP_US, &shares);
    }
    (controller, shares)
}

fn terms(shares: &[Step<u32>; 2]) -> [(u32, Terms); 2] {
    shares.map(|(id, terms, _)| (id, terms))
}

#[test]
fn reclaims_and_relends_time_between_ticks() {
    let (mut controller, shares) = lent();
    let terms = terms(&shares);
    let rates = |controller: &mut Controller<u32>, turned: &[(u32, Turn)]| {
        let told = controller.turn(&terms, turned);
        (
            told[0].1.rate_us_per_s,
            told[1].1.rate_us_per_s,
            told[1].1.is_lent,
        )
    };
    assert_eq!(rates(&mut controller, &[]), (1_000_000, 700_000, true));
    let (borrower, owner, is_lent) = rates(&mut controller, &[(2, Turn::Wakes)]);
    assert_eq!((borrower, is_lent), (300_000, false));
    assert!(owner >= 700_000, "{owner}");
    // Whatever becomes of others, it wants more until it is measured.
    assert_eq!(rates(&mut controller, &[]).0, 300_000);
    let (borrower, _, is_lent) = rates(&mut controller, &[(2, Turn::Rests)]);
    assert!(borrower >= 980_000 && is_lent, "{borrower} {is_lent}");
    // What it used before it came to rest makes it want nothing now.
    let mut rested = shares;
    (rested[1].2.used_us, rested[1].2.rests) = (20_000, true);
    let told = controller.step(STEP_US, &rested);
    assert!(
        told[0].1.rate_us_per_s >= 980_000 && told[1].1.is_lent,
        "{told:?}"
    );
}

#[test]
fn leaves_measurements_unchanged_between_ticks() {
    let ((mut one, shares), (mut other, _)) = (lent(), lent());
    for _ in 0..30 {
        for _ in 0..50 {
            other.turn(&terms(&shares), &[]);
        }
        let told = [&mut one, &mut other].map(|controller| {
            controller.observe(STEP_US, STEP_US, &[(1, 25_000), (2, 0)]);
            controller.step(STEP_US, &shares)
        });
        assert_eq!(told[0], told[1]);
    }
}

/// Learns for some seconds that the first one has a quarter less than it was charged.
fn learn(contention: &mut Contention<u32>, shares: &[Active<u32>]) {
    for _ in 0..5 {
        for _ in 0..10 {
            contention.step(STEP_US, shares);
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
    learn(&mut contention, &two);
    let learned = contention.step(STEP_US, &two);
    for _ in 0..20 {
        let alone = contention.step(STEP_US, &two[..1]);
        assert_eq!(alone, [ALL], "all that it measures is its own");
        contention.observe(SECOND_US, &[(1, 200_000)]);
    }
    let again = contention.step(STEP_US, &two);
    assert!(
        again[0].abs_diff(learned[0]) < ALL / 50,
        "{learned:?} {again:?}"
    );
}

#[test]
fn ignores_samples_older_than_active_set() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    contention.step(STEP_US, &two[..1]);
    let told = contention.step(STEP_US, &two);
    // One sixth of a second each, as the first one had it when it was alone.
    for _ in 0..2 {
        contention.observe(SECOND_US / 6, &[(1, SECOND_US / 6)]);
        assert_eq!(contention.step(STEP_US, &two), told);
    }
    contention.observe(SECOND_US / 6, &[(1, SECOND_US / 6), (2, 1)]);
    assert_ne!(contention.step(STEP_US, &two), told);
}

/// What is said to be their own of a share with a third of the card and of one that fills the rest.
fn beside_a_full_queue(work: Work) -> [u64; 2] {
    let mut contention = Contention::default();
    let (part, rest) = (ALL / 3, ALL - ALL / 3);
    let filled = match work {
        Work::Turns(us) => Work::Turns(us),
        Work::Always | Work::Launches(_) => Work::Always,
    };
    let shares = [(1, part, work), (2, rest, filled)].map(|(id, part, work)| Active {
        id,
        part,
        work,
        charged_us: 0,
        launches: 0,
        is_at_work: true,
    });
    let own = contention.step(STEP_US, &shares);
    [own[0], own[1]]
}

#[test]
fn predicts_no_interruption_within_time_slice() {
    let near = |found: u64, due: u64| found.abs_diff(due) < ALL / 20;
    let [own, rest] = beside_a_full_queue(Work::Launches(500));
    assert!(near(own, ALL) && near(rest, 2 * ALL / 3), "{own} {rest}");
    // Half of the time that a long one is under way is the other one's.
    let [own, rest] = beside_a_full_queue(Work::Launches(100_000));
    assert!(
        near(own, ALL / 2) && near(rest, 2 * ALL / 3),
        "{own} {rest}"
    );
    let [own, _] = beside_a_full_queue(Work::Launches(4_000));
    assert!((ALL / 2..ALL * 3 / 4).contains(&own), "{own}");
}

#[test]
fn predicts_no_interruption_between_token_shares() {
    assert_eq!(beside_a_full_queue(Work::Turns(20_000)), [ALL, ALL]);
}

#[test]
fn keeps_stable_estimate_for_rare_long_kernels() {
    // A kernel of half a second each five seconds, beside one that fills the rest.
    let mut contention = Contention::default();
    let share = |id, part, work, charged_us| Active {
        id,
        part,
        work,
        charged_us,
        launches: charged_us / 10_000,
        is_at_work: true,
    };
    let mut told = Vec::new();
    for step in 0..600_u64 {
        // Both run in the first second of five, each for half of it.
        let is_met = step % 50 < 10;
        let charged = if step % 50 == 0 { 500_000 } else { 0 };
        let long = share(1, ALL / 10, Work::Launches(500_000), charged);
        let filled = share(2, ALL * 9 / 10, Work::Always, STEP_US * 9 / 10);
        told = contention.step(STEP_US, &[long, filled]);
        if step % 2 == 1 {
            let seen = if is_met {
                [STEP_US; 2]
            } else {
                [0, 2 * STEP_US]
            };
            contention.observe(2 * STEP_US, &[(1, seen[0]), (2, seen[1])]);
        }
        if step > 300 {
            let off = told[1].abs_diff(ALL * 9 / 10);
            assert!(off < ALL / 20, "step {step}: {told:?}");
        }
    }
    assert!(!told.is_empty());
}

/// A share that is held back by its part.
fn short(id: u32, part: u64, launches: u64, charged_us: u64) -> Active<u32> {
    Active {
        id,
        part,
        work: Work::Launches(1_000),
        charged_us,
        launches,
        is_at_work: true,
    }
}

/// One with a queue that is never empty: its events measure all of the time.
fn filled(id: u32, part: u64, launches: u64, charged_us: u64) -> Active<u32> {
    Active {
        work: Work::Always,
        ..short(id, part, launches, charged_us)
    }
}

/// Steps in which NVML is not heard of a company.
const UNHEARD: usize = 4;

/// Beside one with launches of 1 ms, which was alone and has what it leaves of the card, comes one with 30 % that has launches
/// of 1 ms, too, and measures 1.5 ms. What is said to be its own after each step.
fn newcomer(contention: &mut Contention<u32>, id: u32, is_full: bool, steps: usize) -> Vec<u64> {
    let alone = filled(1, ALL * 7 / 10, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.step(STEP_US, &[alone])));
    let mut own = ALL;
    let step = |_| {
        // What it may be charged is what it is, whatever that is in launches.
        let launches = 30_000 * ALL / (1_500 * own);
        let mut resident = filled(1, ALL * 7 / 10, 100 - launches, STEP_US * 7 / 10);
        if !is_full {
            resident.work = Work::Launches(1_000);
        }
        let newcomer = short(id, ALL * 3 / 10, launches, 30_000);
        own = contention.step(STEP_US, &[resident, newcomer])[1];
        own
    };
    (0..steps).map(step).collect()
}

#[test]
fn estimates_new_share_from_launches_on_full_gpu() {
    let told = newcomer(&mut Contention::default(), 2, true, UNHEARD);
    let own = told[UNHEARD - 1];
    assert!(own.abs_diff(ALL * 2 / 3) < ALL / 20, "{told:?}");
    // What nobody uses was nobody's.
    let told = newcomer(&mut Contention::default(), 2, false, UNHEARD);
    assert_eq!(told, [ALL; UNHEARD]);
}

#[test]
fn attributes_longer_launches_to_contention() {
    // Beyond twice what they did it is not the others' turns.
    for (measured_us, due) in [(1_500, ALL * 2 / 3), (5_000, ALL / 2)] {
        let mut contention = Contention::default();
        let resident = |launches, charged_us| short(1, ALL * 3 / 10, launches, charged_us);
        for _ in 0..10 {
            contention.step(STEP_US, &[resident(30, 30_000)]);
        }
        // Who pauses is known for what it did.
        for _ in 0..100 {
            contention.step(STEP_US, &[resident(0, 0)]);
        }
        let mut own = ALL;
        for step in 0..UNHEARD {
            let launches = 60_000 * ALL / (measured_us * own);
            let charged_us = launches * measured_us * own / ALL;
            let newcomer = filled(2, ALL * 7 / 10, 50, STEP_US * 7 / 10);
            own = contention.step(STEP_US, &[resident(launches, charged_us), newcomer])[0];
            assert!(step > 0 || own == ALL, "the first one is half of before");
            // What is decided between two steps is decided from what is known.
            let between = contention.step(0, &[resident(0, 0), filled(2, ALL * 7 / 10, 0, 0)]);
            assert_eq!(between[0], own);
        }
        assert!(own.abs_diff(due) < ALL / 20, "{measured_us}: {own}");
    }
}

#[test]
fn ignores_small_changes_in_launch_count() {
    let mut contention = Contention::default();
    let resident = |launches| short(1, ALL * 3 / 10, launches, 30_000);
    let newcomer = filled(2, ALL * 7 / 10, 50, STEP_US * 7 / 10);
    for _ in 0..10 {
        contention.step(STEP_US, &[resident(3)]);
    }
    contention.step(STEP_US, &[resident(3), newcomer]);
    let own = contention.step(STEP_US, &[resident(2), newcomer])[0];
    assert!(own > ALL * 85 / 100, "{own}");
}

#[test]
fn estimates_nothing_from_two_unknown_shares() {
    let mut contention = Contention::default();
    let both = [
        filled(1, ALL * 7 / 10, 60, STEP_US * 7 / 10),
        short(2, ALL * 3 / 10, 30, 30_000),
    ];
    for _ in 0..UNHEARD {
        assert_eq!(contention.step(STEP_US, &both)[1], ALL);
    }
    // Nor does it help that something is known of a third one.
    let mut contention = Contention::default();
    let known = filled(1, ALL / 2, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.step(STEP_US, &[known])));
    let known = filled(1, ALL / 2, 80, STEP_US / 2);
    let others = [2, 3].map(|id| short(id, ALL / 4, 25, 25_000));
    for _ in 0..UNHEARD {
        let told = contention.step(STEP_US, &[known, others[0], others[1]]);
        assert_eq!(told[1..], [ALL; 2]);
    }
}

#[test]
fn estimates_nothing_from_idle_new_share() {
    let mut contention = Contention::default();
    let alone = filled(1, ALL * 7 / 10, 100, STEP_US);
    (0..10).for_each(|_| drop(contention.step(STEP_US, &[alone])));
    let resting = Active {
        is_at_work: false,
        ..short(2, ALL * 3 / 10, 0, 0)
    };
    for _ in 0..2 {
        let slower = filled(1, ALL * 7 / 10, 60, STEP_US);
        contention.step(STEP_US, &[slower, resting]);
    }
    let resident = filled(1, ALL * 7 / 10, 80, STEP_US * 7 / 10);
    let newcomer = short(2, ALL * 3 / 10, 20, 30_000);
    let own = contention.step(STEP_US, &[resident, newcomer])[1];
    assert!(own < ALL * 3 / 4, "{own}");
}

#[test]
fn prefers_nvml_samples_to_launch_estimate() {
    let mut contention = Contention::default();
    let mut own = *newcomer(&mut contention, 2, true, UNHEARD).last().unwrap();
    let concluded = own;
    let resident = filled(1, ALL * 7 / 10, 80, STEP_US * 7 / 10);
    let new = short(2, ALL * 3 / 10, 30, 30_000);
    // All that it measured was its own.
    for _ in 0..UNHEARD * 2 {
        let measured_us = 30_000 * ALL / own;
        let seen = [(1, STEP_US - measured_us), (2, measured_us)];
        contention.observe(STEP_US, &seen);
        own = contention.step(STEP_US, &[resident, new])[1];
    }
    let missing = ALL - own;
    assert!(missing * 3 < ALL - concluded, "{concluded} {own}");
}

#[test]
fn forgets_launch_estimate_without_nvml_samples() {
    let mut contention = Contention::default();
    // Never the same two one after the other, and NVML is never heard.
    let told: Vec<u64> = (0..12)
        .map(|round| newcomer(&mut contention, 2 + round % 2, true, UNHEARD)[UNHEARD - 1])
        .collect();
    assert!(told[0] < ALL * 3 / 4, "{told:?}");
    // Half of what was believed is forgotten each time, and nothing comes in its place.
    assert!(told[11] > ALL * 9 / 10, "{told:?}");
}
