//! Reconciliation of the node's claim files with the API server: a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_dra_driver::prepare::liveness::{Evidence, Liveness};
use drava_dra_driver::repair::reconcile::{self, Action, NodeState, Presence, RemovalReason};

use crate::fixture::claim_ref;

const GRACE: Duration = Duration::from_secs(600);

fn decide(found: &NodeState, presence: &[(u32, Presence)]) -> Vec<(u32, Action)> {
    decide_for(found, presence, Some(Liveness::Ended))
}

/// Decides for claims of this liveness; `None` if it was not determined.
fn decide_for(
    found: &NodeState,
    presence: &[(u32, Presence)],
    liveness: Option<Liveness>,
) -> Vec<(u32, Action)> {
    let liveness = liveness.into_iter().flat_map(|liveness| {
        let all = (1..=9).map(move |number| (claim_ref(number).uid, liveness.clone()));
        all.collect::<Vec<_>>()
    });
    let liveness = liveness.collect();
    let presence = presence
        .iter()
        .map(|(number, presence)| (claim_ref(*number).uid, presence.clone()))
        .collect();
    let actions: BTreeMap<_, _> = reconcile::decide(found, &presence, &liveness, GRACE);
    let number = |uid: &str| uid[24..].parse().unwrap();
    actions
        .into_iter()
        .map(|(uid, action)| (number(uid.as_str()), action))
        .collect()
}

fn recorded(number: u32) -> NodeState {
    NodeState {
        recorded: BTreeMap::from([(claim_ref(number).uid, claim_ref(number))]),
        ..NodeState::default()
    }
}

#[test]
fn removes_prepared_claim_only_after_grace_period() {
    let found = recorded(1);
    assert_eq!(
        decide(&found, &[(1, Presence::Allocated(claim_ref(1)))]),
        [(1, Action::Restore)]
    );
    assert_eq!(decide(&found, &[(1, Presence::Missing(GRACE / 2))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Missing(GRACE))]),
        [(1, Action::Remove(RemovalReason::Missing))]
    );
    assert_eq!(
        decide(&found, &[]),
        [],
        "removed a claim without an answer of the API server"
    );
}

#[test]
fn rebuilds_damaged_record_and_keeps_its_files() {
    let uid = claim_ref(1).uid;
    let found = NodeState {
        damaged: BTreeSet::from([uid.clone()]),
        residues: BTreeSet::from([uid]),
        ..NodeState::default()
    };
    assert_eq!(decide(&found, &[]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Missing(Duration::ZERO))]),
        []
    );
    assert_eq!(
        decide(&found, &[(1, Presence::Allocated(claim_ref(1)))]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn ignores_claim_with_record_of_another_build() {
    let uid = claim_ref(1).uid;
    let found = NodeState {
        unsupported: BTreeSet::from([uid.clone()]),
        residues: BTreeSet::from([uid.clone()]),
        mounted: BTreeSet::from([uid]),
        ..NodeState::default()
    };
    for presence in [
        Presence::Missing(GRACE * 100),
        Presence::Allocated(claim_ref(1)),
    ] {
        assert_eq!(decide(&found, &[(1, presence)]), []);
    }
}

#[test]
fn removes_files_without_record() {
    let mut found = recorded(1);
    found.residues = BTreeSet::from([claim_ref(1).uid, claim_ref(2).uid]);
    let missing = |number| (number, Presence::Missing(Duration::ZERO));
    let actions = decide(&found, &[missing(1), missing(2)]);
    assert_eq!(actions, [(2, Action::Remove(RemovalReason::NoRecord))]);
    assert_eq!(
        decide(&found, &[missing(1)]),
        [],
        "removed files without an answer of the API server"
    );
}

#[test]
fn rebuilds_lost_record_and_keeps_its_files() {
    let found = NodeState {
        residues: BTreeSet::from([claim_ref(1).uid]),
        ..NodeState::default()
    };
    assert_eq!(
        decide(&found, &[(1, Presence::Allocated(claim_ref(1)))]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn keeps_every_state_of_running_claim() {
    let damaged = NodeState {
        damaged: BTreeSet::from([claim_ref(1).uid]),
        ..NodeState::default()
    };
    let lost = NodeState {
        residues: BTreeSet::from([claim_ref(1).uid]),
        ..NodeState::default()
    };
    let states = [recorded(1), damaged, lost];
    let process = Evidence::Process {
        pid: 7,
        name: "python".to_owned(),
    };
    for state in &states {
        for liveness in [
            Some(Liveness::Running(Evidence::Mount)),
            Some(Liveness::Running(process.clone())),
            Some(Liveness::Unknown("NVML does not answer".to_owned())),
            None,
        ] {
            let missing = Presence::Missing(GRACE * 100);
            let actions = decide_for(state, &[(1, missing)], liveness.clone());
            assert!(
                matches!(actions.as_slice(), [(1, Action::Keep(_))]),
                "{state:?} {liveness:?}: {actions:?}"
            );
        }
    }
}
