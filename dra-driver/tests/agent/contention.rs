//! The contention estimate.

use drava_dra_driver::agent::policy::contention::{ALL, Active, Workload, estimate};
use drava_vgpu_abi::contention::OwnTime;

/// Returns the mean own times, parts per million.
fn own_times(active: &[Active]) -> Vec<u64> {
    let contention = estimate(active).into_iter();
    contention
        .map(|contention| contention.mean_own_ppm)
        .collect()
}

/// Returns the own time of a share with a third of the GPU and of a share that saturates the rest.
fn own_time_with_saturating_share(workload: Workload) -> [u64; 2] {
    let (part, rest) = (ALL / 3, ALL - ALL / 3);
    let shares = [(part, workload), (rest, Workload::Saturating)];
    let own = own_times(&shares.map(|(part, workload)| Active { part, workload }));
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
fn attributes_all_time_to_single_share() {
    for workload in [Workload::Saturating, Workload::Launches(100_000)] {
        let part = ALL / 3;
        assert_eq!(own_times(&[Active { part, workload }]), [ALL]);
    }
}

#[test]
fn divides_time_of_many_saturating_shares() {
    for count in [2, 5, 15, 17, 40] {
        let share = Active {
            part: ALL / count,
            workload: Workload::Saturating,
        };
        let shares = vec![share; usize::try_from(count).unwrap()];
        for own in own_times(&shares) {
            // Nothing runs during the switches.
            let part = ALL / count;
            assert!((part * 9 / 10..=part).contains(&own), "{count}: {own}");
        }
    }
}

/// Tenants report the duration of their launches.
#[test]
fn bounds_reported_durations() {
    for us in [0, 1, u64::MAX] {
        let [own, _] = own_time_with_saturating_share(Workload::Launches(us));
        assert!((ALL / 3..=ALL).contains(&own), "{us}: {own}");
    }
}

/// On three shares of 500 µs beside each other: a share that is due 20% has its launches in its slices, one that is due 40% has
/// more work per round than fits into one.
#[test]
fn predicts_interruption_of_share_with_backlog() {
    let share = |percent, workload| Active {
        part: ALL * percent / 100,
        workload,
    };
    let own = own_times(&[
        share(40, Workload::Launches(500)),
        share(20, Workload::Launches(500)),
        share(40, Workload::Saturating),
    ]);
    assert_eq!(own[1], ALL);
    assert!((ALL / 3..ALL * 3 / 4).contains(&own[0]), "{own:?}");
    assert!(own[2].abs_diff(ALL * 2 / 5) < ALL / 20, "{own:?}");
}

/// Beside a share that always has work, libvgpu recognizes each interruption of launches that fit into a slice.
#[test]
fn states_duration_of_interruptions_beside_saturating_share() {
    let beside = |workload, others: &[Workload]| {
        let share = |workload| Active {
            part: ALL / 4,
            workload,
        };
        let active: Vec<_> = std::iter::once(&workload)
            .chain(others)
            .copied()
            .map(share)
            .collect();
        estimate(&active)[0].own_time
    };
    use Workload::{Launches, Saturating};
    // A slice of the other and two switches, as measured on an H200.
    assert_eq!(
        beside(Launches(500), &[Saturating]),
        OwnTime::Interrupted(2_450)
    );
    assert_eq!(
        beside(Launches(500), &[Saturating; 2]),
        OwnTime::Interrupted(4_700)
    );
    for (workload, others) in [
        (Launches(5_000), &[Saturating][..]),
        (Launches(500), &[Launches(500)]),
        (Launches(500), &[]),
    ] {
        assert!(
            matches!(beside(workload, others), OwnTime::Part(_)),
            "{workload:?} {others:?}"
        );
    }
    assert_eq!(beside(Saturating, &[]), OwnTime::ALL);
    let own = beside(Saturating, &[Saturating]);
    assert!(matches!(own, OwnTime::Saturating(_)), "{own:?}");
}

#[test]
fn estimates_time_of_switches() {
    let switching = |parts: &[u64], workload| {
        let share = |part: &u64| Active {
            part: ALL * part / 100,
            workload,
        };
        let contention = estimate(&parts.iter().map(share).collect::<Vec<_>>());
        contention
            .iter()
            .map(|of| of.switching_ppm * 100 / ALL)
            .max()
            .unwrap()
    };
    assert_eq!(switching(&[50, 50], Workload::Saturating), 8);
    assert_eq!(switching(&[33; 3], Workload::Saturating), 8);
    assert_eq!(switching(&[100], Workload::Saturating), 0);
    assert!(switching(&[1, 2], Workload::Launches(100)) <= 2);
}
