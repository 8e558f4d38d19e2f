//! The contention estimate.

use drava_dra_driver::agent::policy::contention::{ALL, Active, Workload, own_times};

/// Returns the own time of a share with a third of the GPU and of a share that saturates the rest.
fn own_time_with_saturating_share(workload: Workload) -> [u64; 2] {
    let (part, rest) = (ALL / 3, ALL - ALL / 3);
    let filled = match workload {
        Workload::TokenSlices(us) => Workload::TokenSlices(us),
        Workload::Saturating | Workload::Launches(_) => Workload::Saturating,
    };
    let shares = [(part, workload), (rest, filled)];
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
fn predicts_no_interruption_between_token_shares() {
    assert_eq!(
        own_time_with_saturating_share(Workload::TokenSlices(20_000)),
        [ALL, ALL]
    );
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
            assert!(own.abs_diff(ALL / count) < ALL / 50, "{count}: {own}");
        }
    }
}

/// Tenants report the duration of their launches.
#[test]
fn bounds_reported_durations() {
    for us in [0, 1, u64::MAX] {
        for workload in [Workload::Launches(us), Workload::TokenSlices(us)] {
            let [own, _] = own_time_with_saturating_share(workload);
            assert!((ALL / 3..=ALL).contains(&own), "{workload:?}: {own}");
        }
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
    assert!((ALL * 2 / 5..ALL * 3 / 4).contains(&own[0]), "{own:?}");
    assert!(own[2].abs_diff(ALL * 2 / 5) < ALL / 20, "{own:?}");
}
