//! Reconciliation of the node's claim files with the API server: a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_dra_driver::prepare::record::Stage;
use drava_dra_driver::reconcile::{self, Action, NodeState, Presence, RemovalReason};

use crate::fixture::claim_ref;

const GRACE: Duration = Duration::from_secs(600);

fn decide(found: &NodeState, presence: &[(u32, Presence)]) -> Vec<(u32, Action)> {
    let presence = presence
        .iter()
        .map(|(number, presence)| (claim_ref(*number).uid, presence.clone()))
        .collect();
    let actions: BTreeMap<_, _> = reconcile::decide(found, &presence, GRACE);
    let number = |uid: &str| uid[24..].parse().unwrap();
    actions
        .into_iter()
        .map(|(uid, action)| (number(uid.as_str()), action))
        .collect()
}

fn recorded(stages: &[(u32, Stage)]) -> NodeState {
    let recorded = stages
        .iter()
        .map(|(number, stage)| (claim_ref(*number).uid, (claim_ref(*number), *stage)));
    NodeState {
        recorded: recorded.collect(),
        ..NodeState::default()
    }
}

#[test]
fn removes_prepared_claim_only_after_grace_period() {
    let found = recorded(&[(1, Stage::Prepared)]);
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
fn removes_interrupted_prepare_of_deleted_claim() {
    let found = recorded(&[(1, Stage::Intent)]);
    assert_eq!(
        decide(&found, &[(1, Presence::Allocated(claim_ref(1)))]),
        []
    );
    assert_eq!(
        decide(&found, &[(1, Presence::Missing(Duration::ZERO))]),
        [(1, Action::Remove(RemovalReason::Interrupted))]
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
fn resumes_interrupted_rebuild() {
    let mut found = recorded(&[(1, Stage::Intent)]);
    found.damaged.insert(claim_ref(1).uid);
    assert_eq!(
        decide(&found, &[(1, Presence::Missing(Duration::ZERO))]),
        []
    );
    let holds = Presence::Allocated(claim_ref(1));
    assert_eq!(
        decide(&found, &[(1, holds)]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn removes_files_without_record() {
    let mut found = recorded(&[(1, Stage::Prepared)]);
    found.residues = BTreeSet::from([claim_ref(1).uid, claim_ref(2).uid]);
    let actions = decide(&found, &[(1, Presence::Missing(Duration::ZERO))]);
    assert_eq!(actions, [(2, Action::Remove(RemovalReason::NoRecord))]);
}
