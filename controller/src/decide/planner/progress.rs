//! What suspended decisions have found so far. Their next turns do not search it again, so every decision ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_allocator::explanation::Explanation;
use drava_allocator::placement::Placement;
use drava_allocator::searched::SearchedNodes;
use drava_allocator::turn::{Turn, Work};

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
    members: Decided,
}

/// What was decided for members of a gang, by UID.
pub(super) type Decided = BTreeMap<String, Result<Placement, Explanation>>;

impl SuspendedDecisions {
    /// Returns what was found on nodes.
    pub(super) fn searched(&self, uid: &str) -> Arc<SearchedNodes> {
        let progress = self.0.get(uid);
        progress.map_or_else(Arc::default, |progress| Arc::clone(&progress.searched))
    }

    /// Returns the work because of which the search for room begins in another turn: once, if the decision before it used up
    /// this one.
    pub(super) fn starts_room_later(&mut self, uid: &str, turn: &Turn) -> Option<Work> {
        let progress = self.0.entry(uid.to_owned()).or_default();
        let work = turn.over_by()?;
        (!std::mem::replace(&mut progress.has_waited_for_room, true)).then_some(work)
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

    /// Notes what a turn has found on nodes.
    pub(super) fn add_searched(&mut self, uid: &str, found: SearchedNodes) {
        let searched = &mut self.0.entry(uid.to_owned()).or_default().searched;
        Arc::make_mut(searched).extend(found);
    }

    /// Removes and returns what was decided for members of the gang whose first pod has this UID.
    pub(super) fn take_members(&mut self, first: &str) -> Decided {
        let progress = self.0.get_mut(first);
        progress.map_or_else(Decided::new, |progress| {
            std::mem::take(&mut progress.members)
        })
    }

    /// Notes what was decided for members of the gang whose first pod has this UID.
    pub(super) fn set_members(&mut self, first: &str, members: Decided) {
        self.0.entry(first.to_owned()).or_default().members = members;
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
