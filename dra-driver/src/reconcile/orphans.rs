//! What is to be done about what is found on the node. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::claim::{ClaimRef, ClaimUid};
use crate::prepare::record::Stage;

/// What is on the node.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Claims with a sound record.
    pub recorded: BTreeMap<ClaimUid, (ClaimRef, Stage)>,
    /// Claims with a damaged record.
    pub damaged: BTreeSet<ClaimUid>,
    /// Claims with files or mounts.
    pub traces: BTreeSet<ClaimUid>,
}

/// What the API server says about a claim that something is left for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// It holds devices of this node.
    Holds(ClaimRef),
    /// It is gone, is another one, or holds nothing here, since this long.
    Lost(Duration),
}

/// What is to be done about one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Remove all that exists for it.
    Remove(Why),
    /// Make what its record says exist.
    Restore,
    /// Plan it anew: its record is damaged.
    Rebuild(ClaimRef),
}

/// Why something is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Nothing is recorded for the claim.
    NoRecord,
    /// Its preparation was interrupted and the claim is gone.
    Interrupted,
    /// The claim has been gone for the grace period.
    Gone,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoRecord => "nothing is recorded for it",
            Self::Interrupted => "its preparation was interrupted and the claim is gone",
            Self::Gone => "the claim has been gone for a while and kubelet has not unprepared it",
        })
    }
}

/// Decides what to do. A claim that `presence` says nothing about is left alone: the API server did not answer.
#[must_use]
pub fn decide(
    found: &Found,
    presence: &BTreeMap<ClaimUid, Presence>,
    grace: Duration,
) -> BTreeMap<ClaimUid, Action> {
    let mut actions = BTreeMap::new();
    // A claim can be both, when its rebuilding was interrupted: then it may have containers that run.
    let sound = found
        .recorded
        .iter()
        .filter(|(uid, _)| !found.damaged.contains(uid));
    for (uid, (_, stage)) in sound {
        let action = match (stage, presence.get(uid)) {
            (_, None) => None,
            (Stage::Prepared, Some(Presence::Holds(_))) => Some(Action::Restore),
            // Kubelet is about to prepare it again.
            (Stage::Intent, Some(Presence::Holds(_))) => None,
            (Stage::Intent, Some(Presence::Lost(_))) => Some(Action::Remove(Why::Interrupted)),
            (Stage::Prepared, Some(Presence::Lost(since))) => {
                (*since >= grace).then_some(Action::Remove(Why::Gone))
            }
        };
        actions.extend(action.map(|action| (uid.clone(), action)));
    }
    for uid in &found.damaged {
        let action = match presence.get(uid) {
            None => None,
            Some(Presence::Holds(claim)) => Some(Action::Rebuild(claim.clone())),
            Some(Presence::Lost(since)) => (*since >= grace).then_some(Action::Remove(Why::Gone)),
        };
        actions.extend(action.map(|action| (uid.clone(), action)));
    }
    let known = |uid: &ClaimUid| found.recorded.contains_key(uid) || found.damaged.contains(uid);
    let strays = found.traces.iter().filter(|uid| !known(uid));
    actions.extend(strays.map(|uid| (uid.clone(), Action::Remove(Why::NoRecord))));
    actions
}
