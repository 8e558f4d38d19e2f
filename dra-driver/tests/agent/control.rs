//! What the controller and the prediction of contention remember, by single steps.

use drava_dra_driver::agent::contention::{ALL, Active, Contention};
use drava_dra_driver::agent::control::{Controller, Measured, Step, Terms};
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
        waited: true,
    };
    (id, terms, measured)
}

/// Rate of the first share after a step.
fn rate(controller: &mut Controller<u32>, shares: &[Step<u32>]) -> u32 {
    controller.step(STEP_US, shares)[0].1.rate_us_per_s
}

#[test]
fn what_is_owed_fades_when_the_company_changes() {
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

fn active(id: u32, part: u64, charged_us: u64) -> Active<u32> {
    Active {
        id,
        part,
        charged_us,
    }
}

#[test]
fn what_was_learned_beside_others_is_half_forgotten() {
    let mut contention = Contention::default();
    let two = [active(1, ALL / 5, 20_000), active(2, ALL / 5, 20_000)];
    for _ in 0..10 {
        contention.step(&two);
    }
    let predicted = contention.step(&two)[0];
    for _ in 0..5 {
        for _ in 0..10 {
            contention.step(&two);
        }
        // NVML saw a quarter less of the first than it was charged.
        let charged = 10 * 20_000;
        contention.observe(&[(1, charged * 3 / 4), (2, charged)]);
    }
    let learned = contention.step(&two)[0];
    assert!(learned < predicted * 95 / 100, "{learned} of {predicted}");
    let three = [two[0], two[1], active(3, 1, 0)];
    let half = contention.step(&three)[0];
    let middle = u64::midpoint(learned, predicted);
    assert!(
        half.abs_diff(middle) < (predicted - learned) / 4,
        "{learned} {half} {predicted}"
    );
}
