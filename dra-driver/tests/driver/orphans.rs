//! Reconciliation of the node's claim files with the API server: a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_dra_driver::prepare::record::Stage;
use drava_dra_driver::reconcile::{self, Action, Found, Presence, Why};

use crate::fixture::claim_ref;

const GRACE: Duration = Duration::from_secs(600);

fn decide(found: &Found, presence: &[(u32, Presence)]) -> Vec<(u32, Action)> {
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

fn recorded(stages: &[(u32, Stage)]) -> Found {
    let recorded = stages
        .iter()
        .map(|(number, stage)| (claim_ref(*number).uid, (claim_ref(*number), *stage)));
    Found {
        recorded: recorded.collect(),
        ..Found::default()
    }
}

#[test]
fn removes_prepared_claim_only_after_grace_period() {
    let found = recorded(&[(1, Stage::Prepared)]);
    assert_eq!(
        decide(&found, &[(1, Presence::Holds(claim_ref(1)))]),
        [(1, Action::Restore)]
    );
    assert_eq!(decide(&found, &[(1, Presence::Lost(GRACE / 2))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Lost(GRACE))]),
        [(1, Action::Remove(Why::Gone))]
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
    assert_eq!(decide(&found, &[(1, Presence::Holds(claim_ref(1)))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Lost(Duration::ZERO))]),
        [(1, Action::Remove(Why::Interrupted))]
    );
}

#[test]
fn rebuilds_damaged_record_and_keeps_its_files() {
    let uid = claim_ref(1).uid;
    let found = Found {
        damaged: BTreeSet::from([uid.clone()]),
        traces: BTreeSet::from([uid]),
        ..Found::default()
    };
    assert_eq!(decide(&found, &[]), []);
    assert_eq!(decide(&found, &[(1, Presence::Lost(Duration::ZERO))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Holds(claim_ref(1)))]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn resumes_interrupted_rebuild() {
    let mut found = recorded(&[(1, Stage::Intent)]);
    found.damaged.insert(claim_ref(1).uid);
    assert_eq!(decide(&found, &[(1, Presence::Lost(Duration::ZERO))]), []);
    let holds = Presence::Holds(claim_ref(1));
    assert_eq!(
        decide(&found, &[(1, holds)]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn removes_files_without_record() {
    let mut found = recorded(&[(1, Stage::Prepared)]);
    found.traces = BTreeSet::from([claim_ref(1).uid, claim_ref(2).uid]);
    let actions = decide(&found, &[(1, Presence::Lost(Duration::ZERO))]);
    assert_eq!(actions, [(2, Action::Remove(Why::NoRecord))]);
}
