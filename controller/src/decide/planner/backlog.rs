//! Who waits, for what, and until when; and what was found out about those that wait.

use std::collections::BTreeSet;

use drava_allocator::object::ObjectKey;
use drava_allocator::pod::rejection;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::companions::Companions;
use super::missing_claims::MissingClaims;
use super::progress::SuspendedDecisions;
use super::rejections::Rejections;
use super::room::HolderCosts;
use super::round::{DecisionCount, Refresh, Round};
use super::wake::Wake;
use super::world::{Memo, World};
use crate::decide::ledger::Users;
use crate::decide::queue::PodQueue;
use crate::decide::timers::Timers;
use crate::pods::pod;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Backlog {
    pub(super) queue: PodQueue,
    pub(super) missing_claims: MissingClaims,
    pub(super) companions: Companions,
    pub(super) suspended_decisions: SuspendedDecisions,
    pub(super) rejections: Memo<Rejections>,
    pub(super) holder_costs: HolderCosts,
    /// Pods that could not be evicted, and are not tried again before this time.
    pub(super) protected: Timers<String>,
    /// Pods that were not evicted because their minimum runtime ends at this time.
    pub(super) in_minimum_runtime: Timers<String>,
    /// Pods for which no other is evicted before this time.
    pub(super) eviction_delays: Timers<String>,
    pub(super) activate_all: bool,
    /// Whether something has changed that helps none of the pods that wait, but may be the reason of one.
    pub(super) are_reasons_outdated: bool,
    pub(super) refresh: Refresh,
    /// Whether the owner of a reservation was decided and has none any longer: others may use the devices.
    pub(super) has_room_ended: bool,
    pub(super) round: Round,
    pub(super) decisions: DecisionCount,
}

impl Backlog {
    /// Makes the decisions due that a change can help.
    pub(super) fn wake(&mut self, wake: Wake) {
        match wake {
            Wake::None => {}
            Wake::Reasons => self.are_reasons_outdated = true,
            Wake::All => self.activate_all = true,
            Wake::Node { name, is_new } => {
                self.queue.node_changed(&name, is_new);
                self.are_reasons_outdated = true;
            }
            Wake::NodeDeleted(name) => {
                self.queue.node_deleted(&name);
                self.are_reasons_outdated = true;
            }
            Wake::Devices { node } => {
                self.queue.devices_changed(&node);
                self.are_reasons_outdated = true;
            }
            Wake::Bound => self.queue.neighbors_changed(),
            Wake::Ended { node } => {
                self.queue.resources_freed(&node);
                self.queue.neighbors_changed();
            }
            Wake::Above(priority) => self.queue.activate_above(priority),
            Wake::Gang(gang) => self.queue.activate_gang(&gang),
            Wake::Users(key) => self.queue.activate_users(&key),
            Wake::Namespaces(namespaces) => self.queue.activate_namespaces(&namespaces),
            Wake::MissingClaims { namespace } => {
                for uid in self.missing_claims.of_namespace(&namespace) {
                    self.activate(&uid);
                }
            }
        }
    }

    /// Forgets until when a pod that has ended is not evicted, or evicts no other.
    pub(super) fn forget_limits(&mut self, uid: &str) {
        self.protected.remove(uid);
        self.in_minimum_runtime.remove(uid);
        self.eviction_delays.remove(uid);
    }

    /// Makes the decision for a pod due.
    pub(super) fn activate(&mut self, uid: &str) {
        if let Some(pending) = self.queue.get_mut(uid) {
            pending.activate();
        }
    }

    /// Makes the decisions due that the changes since the last decisions can help, apart from those that were at once.
    pub(super) fn activate_changed(&mut self, world: &mut World, now: Instant) {
        let released_in = world.take_released();
        let are_outdated = std::mem::take(&mut self.are_reasons_outdated);
        self.activate_all |= self.refresh.is_due(are_outdated, now);
        if std::mem::take(&mut self.activate_all) {
            self.queue.activate_all();
        } else if !released_in.is_empty() {
            self.activate_after_release(&released_in, world);
        }
    }

    /// Activates the pods that devices released in these namespaces can help. A pod over its quota is helped only by
    /// devices that count against the same quota.
    pub(super) fn activate_after_release(&mut self, namespaces: &BTreeSet<String>, world: &World) {
        self.queue.activate_after_release(|waiting| {
            let mut namespaces = namespaces.iter();
            namespaces.any(|released| world.cluster.share_quota(released, waiting))
        });
    }

    /// Returns whether this version of a pending pod has another rejection by its scheduler than the one before.
    pub(super) fn is_newly_rejected(&self, uid: &str, pod: &Pod) -> bool {
        let rejected = rejection(pod);
        let before = self.queue.get(uid);
        rejected.is_some() && before.is_some_and(|before| rejection(&before.pod) != rejected)
    }

    /// Returns which pending pods reference a claim: those closest to their scheduler.
    pub(super) fn users_of(&self, key: &ObjectKey) -> Users {
        let uids = self.queue.users_of(key);
        let pending = uids.iter().filter_map(|uid| self.queue.get(uid));
        let users = pending.map(|pending| match pod::has_allocation_gate(&pending.pod) {
            true if pending.is_complete => Users::Complete,
            true => Users::Incomplete,
            false if rejection(&pending.pod).is_none() => Users::Untried,
            false => Users::Rejected,
        });
        users.max().unwrap_or(Users::Gone)
    }

    /// Returns when a decision is due without a change.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let protected = self.protected.next().into_iter();
        protected
            .chain(self.in_minimum_runtime.next())
            .chain(self.eviction_delays.next())
            .chain(self.queue.next_backoff_end())
            .chain(self.missing_claims.next_due())
            .chain(self.companions.next_due())
            .chain(self.round.resumes_at())
            .chain(self.refresh.next())
            .min()
    }
}
