//! Decides what to do about claims that have state on the node. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::node::claim::{ClaimRef, ClaimUid};
use crate::prepare::liveness::Liveness;

/// State of claims on the node.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// Claims with a valid record.
    pub recorded: BTreeMap<ClaimUid, ClaimRef>,
    /// Claims with a damaged record.
    pub damaged: BTreeSet<ClaimUid>,
    /// Claims with a record of another build, which are left to that build.
    pub unsupported: BTreeSet<ClaimUid>,
    /// Claims with a CDI spec, files or mounts, in containers too.
    pub residues: BTreeSet<ClaimUid>,
    /// Claims with a share that is mounted in a container.
    pub mounted: BTreeSet<ClaimUid>,
}

impl NodeState {
    /// Returns the claims with state and without a record.
    pub fn unrecorded(&self) -> impl Iterator<Item = &ClaimUid> {
        let has_record = |uid: &ClaimUid| {
            self.recorded.contains_key(uid)
                || self.damaged.contains(uid)
                || self.unsupported.contains(uid)
        };
        self.residues.iter().filter(move |uid| !has_record(uid))
    }
}

/// A claim according to the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// Devices of this node are allocated to the claim and reserved.
    Allocated(ClaimRef),
    /// The claim was deleted, replaced by another claim of the same name, or holds no device of this node; for this
    /// long.
    Missing(Duration),
}

/// Action on one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Remove the claim's state from the node.
    Remove(RemovalReason),
    /// Recreate what the record lists and the node lacks.
    Restore,
    /// Prepare the claim again because its record is damaged or lost.
    Rebuild(ClaimRef),
    /// Keep the state although the API server has no such claim, for this reason.
    Keep(String),
}

impl Action {
    /// Returns the claim that the API server has for a claim whose record is damaged or lost.
    #[must_use]
    pub fn claim(&self) -> Option<&ClaimRef> {
        match self {
            Self::Rebuild(claim) => Some(claim),
            Self::Remove(_) | Self::Restore | Self::Keep(_) => None,
        }
    }
}

/// Reason for removing a claim's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovalReason {
    /// The claim has no record.
    NoRecord,
    /// The claim is missing for longer than the grace period.
    Missing,
}

impl fmt::Display for RemovalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRecord => "the claim has no record",
            Self::Missing => "the claim is gone and kubelet did not unprepare it in time",
        })
    }
}

/// Returns the actions by claim. A claim without an entry in `presence` is skipped: the API server did not answer.
///
/// State is removed only if the claim is missing and [`Liveness::Ended`]; a missing entry of `liveness` means unknown.
#[must_use]
pub fn decide(
    state: &NodeState,
    presence: &BTreeMap<ClaimUid, Presence>,
    liveness: &BTreeMap<ClaimUid, Liveness>,
    grace: Duration,
) -> BTreeMap<ClaimUid, Action> {
    let remove = |uid: &ClaimUid, reason| match liveness.get(uid) {
        Some(Liveness::Ended) => Action::Remove(reason),
        Some(Liveness::Running(evidence)) => Action::Keep(evidence.to_string()),
        Some(Liveness::Unknown(reason)) => {
            Action::Keep(format!("its processes are unknown: {reason}"))
        }
        None => Action::Keep("its processes are unknown".to_owned()),
    };
    let mut actions = BTreeMap::new();
    for uid in state.recorded.keys().chain(&state.damaged) {
        let action = match presence.get(uid) {
            None => None,
            Some(Presence::Allocated(claim)) if state.damaged.contains(uid) => {
                Some(Action::Rebuild(claim.clone()))
            }
            // Also after an interrupted preparation: its containers may run if the record was rebuilt.
            Some(Presence::Allocated(_)) => Some(Action::Restore),
            Some(Presence::Missing(since)) => {
                (*since >= grace).then(|| remove(uid, RemovalReason::Missing))
            }
        };
        actions.extend(action.map(|action| (uid.clone(), action)));
    }
    for uid in state.unrecorded() {
        let action = match presence.get(uid) {
            None => None,
            Some(Presence::Allocated(claim)) => Some(Action::Rebuild(claim.clone())),
            Some(Presence::Missing(_)) => Some(remove(uid, RemovalReason::NoRecord)),
        };
        actions.extend(action.map(|action| (uid.clone(), action)));
    }
    actions
}
