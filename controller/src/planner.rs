//! What to do next, as a pure function of what has been observed: no client, no clock of its own.
//!
//! [`Planner`] is fed the changes of watched objects and the outcomes of writes, and yields [`Action`]s. It never
//! acts on half a picture: nothing is decided before [`Planner::set_synced`], and what is being written counts as taken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::cluster::{Cluster, ObjectKey, object_key};
use drava_allocator::placement::Policies;
use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use crate::action::{Action, JobOutcome, Release};
use crate::change::Change;
use crate::left_out::LeftOut;
use crate::notice::{Notice, Notices};
use crate::unreserved::Unreserved;
use crate::waiting::Phase;
use crate::waiting::list::WaitingList;
use crate::{claim, pod};

mod decide;

/// Placements that are being written at once; the rest waits in order.
const MAX_WRITING: usize = 64;

/// What the planner is set to.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Policies between nodes and between cards.
    pub policies: Policies,
    /// Schedulers whose pods are served.
    pub schedulers: Vec<String>,
    /// Time after which an allocation that no pod has reserved is taken back.
    pub release_after: Duration,
}

/// The moment of a decision.
#[derive(Debug, Clone)]
pub struct Moment {
    /// For pauses and time-outs.
    pub instant: Instant,
    /// For what is written.
    pub time: Time,
}

/// Yields the UUIDs of shares.
pub type ShareIds = Box<dyn FnMut() -> String + Send>;

/// See the [module](self).
pub struct Planner {
    settings: Settings,
    share_ids: ShareIds,
    cluster: Cluster,
    claims: BTreeMap<ObjectKey, Arc<ResourceClaim>>,
    waiting: WaitingList,
    unreserved: BTreeMap<ObjectKey, Unreserved>,
    notices: Notices,
    to_tell: Vec<Notice>,
    left_out: LeftOut,
    writing: usize,
    wake_all: bool,
    synced: bool,
}

impl Planner {
    /// A planner that knows nothing yet.
    #[must_use]
    pub fn new(settings: Settings, share_ids: ShareIds) -> Self {
        Self {
            settings,
            share_ids,
            cluster: Cluster::default(),
            claims: BTreeMap::new(),
            waiting: WaitingList::default(),
            unreserved: BTreeMap::new(),
            notices: Notices::default(),
            to_tell: Vec::new(),
            left_out: LeftOut::default(),
            writing: 0,
            wake_all: false,
            synced: false,
        }
    }

    /// The full lists of all kinds have been observed: decisions may be taken from now on.
    pub fn set_synced(&mut self) {
        self.synced = true;
    }

    /// Observes a pod.
    pub fn pod(&mut self, change: Change<Pod>) {
        match change {
            Change::Applied(pod) => self.pod_applied(*pod),
            Change::Gone(gone) => self.pod_gone(&gone.uid),
        }
    }

    fn pod_applied(&mut self, pod: Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if drava_allocator::cluster::is_finished(&pod) {
            self.pod_gone(&uid);
            return;
        }
        self.cluster.upsert_pod(&pod);
        if !pod::may_wait(&pod, &self.settings.schedulers) {
            self.stop_waiting(&uid);
            return;
        }
        self.waiting.put(&uid, pod);
    }

    fn pod_gone(&mut self, uid: &str) {
        if self.cluster.remove_pod(uid) {
            self.wake_all = true;
        }
        self.stop_waiting(uid);
    }

    fn stop_waiting(&mut self, uid: &str) {
        if self.waiting.remove(uid) {
            self.notices.forget(uid);
            self.cluster.forget_pod(uid);
        }
    }

    /// Observes a claim.
    pub fn claim(&mut self, change: Change<ResourceClaim>, now: Instant) {
        match change {
            Change::Applied(claim) => self.claim_applied(*claim, now),
            Change::Gone(gone) => {
                let key = (gone.namespace, gone.name);
                self.claims.remove(&key);
                self.unreserved.remove(&key);
                self.notices.forget(&gone.uid);
                if self.cluster.remove_claim(&key) {
                    self.wake_all = true;
                }
            }
        }
    }

    fn claim_applied(&mut self, claim: ResourceClaim, now: Instant) {
        let key = object_key(&claim.metadata);
        let known = self.claims.get(&key).cloned();
        if known
            .as_ref()
            .is_some_and(|known| claim::is_older(&claim, known))
        {
            return;
        }
        if self.cluster.upsert_claim(&claim) {
            self.wake_all = true;
        }
        if let Some(known) = known
            && claim::is_allocated(&known)
            && !claim::is_allocated(&claim)
            && known.metadata.uid == claim.metadata.uid
        {
            self.allocation_lost(&key, &known, now);
        }
        match Unreserved::observe(&claim, self.unreserved.get(&key), now) {
            Some(unreserved) => self.unreserved.insert(key.clone(), unreserved),
            None => self.unreserved.remove(&key),
        };
        self.claims.insert(key.clone(), Arc::new(claim));
        self.waiting.wake_users(&key);
    }

    /// An allocation of ours is gone: by kube-scheduler's PostFilter, or by our own release.
    fn allocation_lost(&mut self, key: &ObjectKey, before: &ResourceClaim, now: Instant) {
        let Some(lost) = self.unreserved.get(key) else {
            return;
        };
        let node = lost.node.clone();
        let users: Vec<String> = self.waiting.users_of(key);
        let siblings: BTreeSet<ObjectKey> = users
            .iter()
            .filter_map(|uid| self.waiting.get(uid))
            .flat_map(|waiting| pod::claim_keys(&waiting.pod))
            .filter(|sibling| sibling != key)
            .collect();
        tracing::info!(
            claim = %format!("{}/{}", key.0, key.1),
            uid = before.metadata.uid.as_deref().unwrap_or_default(),
            node,
            "an unreserved allocation was taken back; planning again"
        );
        for uid in users {
            self.cluster.forget_pod(&uid);
            if let Some(waiting) = self.waiting.get_mut(&uid) {
                waiting.avoid(&node, now);
                waiting.pause(now);
                self.to_tell.push(Notice {
                    regarding: pod::reference(&waiting.pod),
                    reason: EventReason::Released,
                    message: format!(
                        "claim {} had devices on node {node}, but the pod was not bound there; planning again, that node \
                         last",
                        key.1
                    ),
                });
            }
        }
        for sibling in siblings {
            if let Some(unreserved) = self.unreserved.get_mut(&sibling) {
                unreserved.release_now("another claim of the pod lost its allocation");
            }
        }
    }

    /// Observes a device class.
    pub fn class(&mut self, change: Change<DeviceClass>) {
        match change {
            Change::Applied(class) => self.cluster.upsert_class(*class),
            Change::Gone(gone) => self.cluster.remove_class(&gone.name),
        }
        self.wake_all = true;
    }

    /// Observes a slice of this driver.
    pub fn slice(&mut self, change: Change<ResourceSlice>) {
        match change {
            Change::Applied(slice) => self.cluster.upsert_slice(&slice),
            Change::Gone(gone) => self.cluster.remove_slice(&gone.name),
        }
        self.wake_all = true;
    }

    /// Observes a node.
    pub fn node(&mut self, change: Change<Node>) {
        let helps = match change {
            Change::Applied(node) => self.cluster.upsert_node(&node),
            Change::Gone(gone) => {
                self.cluster.remove_node(&gone.name);
                for unreserved in self
                    .unreserved
                    .values_mut()
                    .filter(|unreserved| unreserved.node == gone.name)
                {
                    unreserved.release_now("the node is gone");
                }
                true
            }
        };
        if helps {
            self.wake_all = true;
        }
    }

    /// Takes the outcome of a job.
    pub fn written(&mut self, outcome: JobOutcome, now: Instant) {
        self.writing = self.writing.saturating_sub(1);
        for claim in outcome.claims {
            self.claim_applied(claim, now);
        }
        if outcome.failure.is_some() {
            for key in &outcome.keys {
                self.cluster.forget(key);
            }
            self.cluster.forget_pod(&outcome.pod_uid);
            self.wake_all = true;
        }
        let Some(waiting) = self.waiting.get_mut(&outcome.pod_uid) else {
            return;
        };
        match outcome.failure {
            None => waiting.phase = Phase::Due,
            Some(failure) => {
                waiting.pause(now);
                if failure.tell {
                    self.to_tell.push(Notice {
                        regarding: pod::reference(&waiting.pod),
                        reason: EventReason::AllocationFailed,
                        message: failure.message,
                    });
                }
            }
        }
    }

    /// A release ended; the claim in its newest version if it is known.
    pub fn released(&mut self, key: &ObjectKey, claim: Option<ResourceClaim>, now: Instant) {
        if let Some(unreserved) = self.unreserved.get_mut(key) {
            unreserved.release_ended(now);
        }
        if let Some(claim) = claim {
            self.claim_applied(claim, now);
        }
    }

    /// What to do now.
    pub fn actions(&mut self, moment: &Moment) -> Vec<Action> {
        if !self.synced {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if std::mem::take(&mut self.wake_all) {
            self.waiting.wake_all();
        }
        for notice in std::mem::take(&mut self.to_tell) {
            actions.extend(self.notices.offer(notice, moment.instant).map(Action::Tell));
        }
        for notice in self.left_out.news(&self.cluster) {
            actions.extend(self.notices.offer(notice, moment.instant).map(Action::Tell));
        }
        self.release_unreserved(moment.instant, &mut actions);
        for uid in self.waiting.due(moment.instant) {
            if self.writing >= MAX_WRITING {
                break;
            }
            self.plan(&uid, moment, &mut actions);
        }
        actions.extend(
            self.notices
                .due(moment.instant)
                .into_iter()
                .map(Action::Tell),
        );
        actions
    }

    /// When [`Self::actions`] has something to do without a new observation.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.synced {
            return None;
        }
        let releases = self.unreserved.iter().filter_map(|(key, unreserved)| {
            unreserved.due_at(self.settings.release_after, self.waiting.has_users(key))
        });
        releases
            .chain(self.waiting.first_pause_end())
            .chain(self.notices.next_due())
            .min()
    }

    fn release_unreserved(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let due: Vec<(ObjectKey, String)> = self
            .unreserved
            .iter()
            .filter_map(|(key, unreserved)| {
                let used = self.waiting.has_users(key);
                let node_exists = self.cluster.node(&unreserved.node).is_some();
                let why = unreserved.due(now, self.settings.release_after, used, node_exists)?;
                Some((key.clone(), why))
            })
            .collect();
        for (key, why) in due {
            let Some(claim) = self.claims.get(&key) else {
                continue;
            };
            if let Some(unreserved) = self.unreserved.get_mut(&key) {
                unreserved.release_started();
            }
            actions.push(Action::Release(Release {
                claim: Arc::clone(claim),
                why,
            }));
        }
    }
}

#[cfg(test)]
mod tests;
