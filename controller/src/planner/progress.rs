//! What suspended decisions have found so far. Their next turns do not search it again, so every decision ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_allocator::explanation::Explanation;
use drava_allocator::pod_request::SearchedNodes;
use drava_allocator::turn;
use drava_api::reason::Reason;

use super::Planner;
use super::room::RoomProgress;

/// See the [module](self). By the UID of the pod.
#[derive(Debug, Default)]
pub(super) struct SuspendedDecisions(BTreeMap<String, Progress>);

#[derive(Debug, Default)]
struct Progress {
    searched: Arc<SearchedNodes>,
    /// Whether the search for devices used up a turn, so that the search for room began in another one.
    has_waited_for_room: bool,
    room: Option<RoomProgress>,
}

impl SuspendedDecisions {
    /// Returns the nodes whose devices were searched in vain.
    pub(super) fn searched(&self, uid: &str) -> Arc<SearchedNodes> {
        let progress = self.0.get(uid);
        progress.map_or_else(Arc::default, |progress| Arc::clone(&progress.searched))
    }

    /// Returns whether the search for room is to begin in another turn: once, because the search for devices used up this one.
    pub(super) fn starts_room_later(&mut self, uid: &str) -> bool {
        let progress = self.0.entry(uid.to_owned()).or_default();
        turn::has_searched() && !std::mem::replace(&mut progress.has_waited_for_room, true)
    }

    /// Returns how far the search for room has come.
    pub(super) fn room(&self, uid: &str) -> Option<&RoomProgress> {
        self.0.get(uid)?.room.as_ref()
    }

    /// Removes and returns how far the search for room has come.
    pub(super) fn take_room(&mut self, uid: &str) -> Option<RoomProgress> {
        self.0.get_mut(uid)?.room.take()
    }

    /// Notes how far the search for room has come.
    pub(super) fn set_room(&mut self, uid: &str, room: RoomProgress) {
        self.0.entry(uid.to_owned()).or_default().room = Some(room);
    }

    /// Notes the nodes that were searched in vain.
    pub(super) fn add_searched(&mut self, uid: &str, explanation: &Explanation) {
        let searched = &mut self.0.entry(uid.to_owned()).or_default().searched;
        let verdicts = explanation.verdicts().iter();
        Arc::make_mut(searched).extend(
            verdicts
                .filter(|verdict| verdict.reason != Reason::NodeUnfit)
                .map(|verdict| (verdict.node.clone(), Arc::clone(verdict))),
        );
    }

    /// Forgets a pod whose decision has ended.
    pub(super) fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }
}

impl Planner {
    /// Ends the decision for a pod. It is repeated if something has changed since its first turn.
    pub(super) fn end_decision(&mut self, uid: &str) {
        self.backlog.suspended_decisions.forget(uid);
        if let Some(pending) = self.backlog.queue.get_mut(uid) {
            pending.decided();
        }
    }
}
