//! The ledger: the state of every claim, and devices that are reserved for pods whose claims are not written.
//!
//! The ledger is rebuilt from the lists of a new leader. The state of a claim follows from its newest version and from the
//! writes in flight, which end before the next leader starts.
//!
//! A pod that waits for devices holds those that are free, so that pods behind it in the queue do not take them: the head
//! of the queue, and a pod for which others were evicted. Pods ahead of the owner ignore the reservation. Reservations are
//! not stored. They follow from the queue and the cluster: the owner is decided before every pod behind it, also by a new
//! leader, and pods that are being deleted are the cheapest ones to wait for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::node::PodDemand;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Placement;
use drava_allocator::steps;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::action::event::ReleaseReason;
use crate::decide::queue::QueueOrder;
use crate::pods::claim;
use crate::pods::gang::GangName;

mod unreserved;

pub(crate) use unreserved::Users;
use unreserved::{ReleaseCheck, ReleaseTimers, ReleaseTimes, UnreservedAllocation};

/// Interval after which the owner of a reservation is decided again even without a change.
pub(crate) const REVIEW_INTERVAL: Duration = Duration::from_secs(30);

/// State of a claim.
#[derive(Debug, Clone)]
pub(crate) enum ClaimState {
    /// Without allocation.
    Free,
    /// Without allocation; devices are reserved.
    Planned,
    /// An allocation is being written, or rolled back.
    Writing,
    /// Allocated and not reserved; by this controller if there is an entry.
    Allocated(Option<UnreservedAllocation>),
    /// Reserved for a pod.
    Reserved,
    /// The unreserved allocation is being released.
    Releasing(UnreservedAllocation),
}

impl ClaimState {
    /// Returns the unreserved allocation of this controller.
    const fn unreserved(&self) -> Option<&UnreservedAllocation> {
        match self {
            Self::Allocated(Some(unreserved)) | Self::Releasing(unreserved) => Some(unreserved),
            Self::Free | Self::Planned | Self::Writing | Self::Allocated(None) | Self::Reserved => {
                None
            }
        }
    }
}

/// A claim with its state.
#[derive(Debug)]
struct Entry {
    claim: Arc<ResourceClaim>,
    state: ClaimState,
}

/// Origin of a claim's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The watch.
    Watch,
    /// The response to a write of this controller, which precedes the watches of all components.
    Write,
}

/// Owner of a reservation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// A pod, by UID.
    Pod(String),
    /// A gang.
    Gang(GangName),
}

/// Why devices are reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The owner is the first pod of the queue that waits for the end of other pods.
    HeadOfQueue,
    /// The owner fits when pods that are being deleted have ended; they may have been evicted for it.
    Preemption,
}

impl Purpose {
    /// Returns whether the devices count against quotas. Those of the waiting head of the queue do not: they may be the ones
    /// that its own tenant still uses.
    pub(crate) const fn is_charged(self) -> bool {
        match self {
            Self::HeadOfQueue => false,
            Self::Preemption => true,
        }
    }
}

/// What is reserved for a pod.
#[derive(Debug, Clone)]
pub(crate) struct ReservedPod {
    /// UID of the pod.
    pub(crate) uid: String,
    /// Demand on its node.
    pub(crate) demand: PodDemand,
    /// Its devices.
    pub(crate) placement: Placement,
}

/// Devices that are reserved for pods whose claims are not written.
#[derive(Debug, Clone)]
pub(crate) struct Reservation {
    /// Why the devices are reserved.
    pub(crate) purpose: Purpose,
    /// Order of the owner in the queue.
    pub(crate) order: QueueOrder,
    /// The pod, or the members of the gang.
    pub(crate) pods: Vec<ReservedPod>,
    /// When it is decided again, even without a change.
    pub(crate) review_at: Instant,
}

impl Reservation {
    /// Returns the claims with reserved devices.
    pub(crate) fn claims(&self) -> impl Iterator<Item = ObjectKey> {
        let pods = self.pods.iter();
        pods.flat_map(|pod| &pod.placement.claims)
            .map(|claim| (claim.claim.namespace.clone(), claim.claim.name.clone()))
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Ledger {
    claims: BTreeMap<ObjectKey, Entry>,
    /// When the newest version of a claim was written, until the watch has delivered it.
    undelivered: BTreeMap<ObjectKey, Instant>,
    reservations: BTreeMap<Owner, Reservation>,
    times: ReleaseTimes,
    timers: ReleaseTimers,
    /// Claims whose release waits for a sign of life of kube-scheduler.
    frozen: BTreeSet<ObjectKey>,
}

/// Effect of a claim's version on its state.
#[derive(Debug)]
pub(crate) enum Observed {
    /// The version is older than the known one.
    Outdated,
    /// The version is the newest one.
    Newest,
    /// A pod has reserved the claim.
    Reserved,
    /// An unreserved allocation of this controller was released.
    Released(UnreservedAllocation),
}

impl Ledger {
    /// Creates an empty ledger. Unreserved allocations are released after this time.
    pub(crate) fn new(release_after: Duration) -> Self {
        Self {
            claims: BTreeMap::new(),
            undelivered: BTreeMap::new(),
            reservations: BTreeMap::new(),
            times: ReleaseTimes::new(release_after),
            timers: ReleaseTimers::default(),
            frozen: BTreeSet::new(),
        }
    }

    /// Returns the newest version of a claim.
    pub(crate) fn claim(&self, key: &ObjectKey) -> Option<&Arc<ResourceClaim>> {
        self.claims.get(key).map(|entry| &entry.claim)
    }

    /// Returns whether the watch has delivered the newest version of the claim.
    pub(crate) fn is_delivered(&self, key: &ObjectKey) -> bool {
        self.claims.contains_key(key) && !self.undelivered.contains_key(key)
    }

    /// Returns when the oldest version was written that the watch has not delivered.
    pub(crate) fn oldest_undelivered(&self) -> Option<Instant> {
        steps::counted(self.undelivered.values()).min().copied()
    }

    /// Returns whether devices of the claim are selected and its allocation is not written so far.
    pub(crate) fn is_pending(&self, key: &ObjectKey) -> bool {
        let state = self.claims.get(key).map(|entry| &entry.state);
        matches!(state, Some(ClaimState::Planned | ClaimState::Writing))
    }

    /// Returns whether a write to the claim is in flight.
    pub(crate) fn is_in_flight(&self, key: &ObjectKey) -> bool {
        let state = self.claims.get(key).map(|entry| &entry.state);
        matches!(state, Some(ClaimState::Writing | ClaimState::Releasing(_)))
    }

    /// Returns whether the claim has an allocation of this controller that no pod has reserved.
    pub(crate) fn is_unreserved(&self, key: &ObjectKey) -> bool {
        let state = self.claims.get(key).map(|entry| &entry.state);
        matches!(state, Some(ClaimState::Allocated(Some(_))))
    }

    /// Returns whether the claim is allocated, and no write to it is in flight.
    pub(crate) fn is_settled(&self, key: &ObjectKey) -> bool {
        let state = self.claims.get(key).map(|entry| &entry.state);
        matches!(state, Some(ClaimState::Allocated(_) | ClaimState::Reserved))
    }

    /// Returns whether the claim has no allocation, or one of this controller that can be released at once.
    pub(crate) fn can_be_freed(&self, key: &ObjectKey) -> bool {
        let state = self.claims.get(key).map(|entry| &entry.state);
        matches!(
            state,
            None | Some(ClaimState::Free | ClaimState::Planned | ClaimState::Allocated(Some(_)))
        )
    }

    /// Reserves devices.
    pub(crate) fn reserve(&mut self, owner: Owner, reservation: Reservation) {
        for key in reservation.claims() {
            if let Some(entry) = self.claims.get_mut(&key)
                && matches!(entry.state, ClaimState::Free)
            {
                entry.state = ClaimState::Planned;
            }
        }
        self.reservations.insert(owner, reservation);
    }

    /// Returns the reservations.
    pub(crate) fn reservations(&self) -> impl Iterator<Item = (&Owner, &Reservation)> {
        self.reservations.iter()
    }

    /// Returns the owners of the reservations.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &Owner> {
        self.reservations.keys()
    }

    /// Returns the UIDs of the pods whose reservations are due for review, and sets the next review.
    pub(crate) fn start_due_reviews(&mut self, now: Instant) -> Vec<String> {
        let mut pods = Vec::new();
        for reservation in self.reservations.values_mut() {
            if reservation.review_at <= now {
                reservation.review_at = now + REVIEW_INTERVAL;
                pods.extend(reservation.pods.iter().map(|pod| pod.uid.clone()));
            }
        }
        pods
    }

    /// Returns when the next reservation is due for review.
    pub(crate) fn next_review(&self) -> Option<Instant> {
        let reservations = self.reservations.values();
        reservations.map(|reservation| reservation.review_at).min()
    }

    /// Ends a reservation.
    pub(crate) fn end_reservation(&mut self, owner: &Owner) -> Option<Reservation> {
        let reservation = self.reservations.remove(owner)?;
        for key in reservation.claims() {
            if let Some(entry) = self.claims.get_mut(&key)
                && matches!(entry.state, ClaimState::Planned)
            {
                entry.state = ClaimState::Free;
            }
        }
        Some(reservation)
    }

    /// Observes a version of a claim.
    pub(crate) fn observe(
        &mut self,
        claim: ResourceClaim,
        origin: Origin,
        now: Instant,
    ) -> Observed {
        let key = object_key(&claim.metadata);
        let known = self.claims.get(&key);
        if known.is_some_and(|known| claim::is_older(&claim, &known.claim)) {
            return Observed::Outdated;
        }
        let known = known.filter(|known| known.claim.metadata.uid == claim.metadata.uid);
        let before = known.map(|known| &known.state);
        let version = &claim.metadata.resource_version;
        let is_same = known.is_some_and(|known| known.claim.metadata.resource_version == *version);
        let state = match before {
            // A job that rolls back releases the allocation itself, so no scheduler has refused the node.
            Some(ClaimState::Writing) => ClaimState::Writing,
            Some(before) => next_state(&claim, before, now),
            None => next_state(&claim, &ClaimState::Free, now),
        };
        let released = before
            .and_then(ClaimState::unreserved)
            .filter(|_| matches!(state, ClaimState::Free))
            .cloned();
        let is_reserved =
            matches!(state, ClaimState::Reserved) && !matches!(before, Some(ClaimState::Reserved));
        match origin {
            Origin::Watch => {
                self.undelivered.remove(&key);
            }
            Origin::Write if is_same => {}
            Origin::Write => {
                self.undelivered.insert(key.clone(), now);
            }
        }
        let entry = Entry {
            claim: Arc::new(claim),
            state,
        };
        self.claims.insert(key.clone(), entry);
        self.set_timer(&key);
        match released {
            Some(released) => Observed::Released(released),
            None if is_reserved => Observed::Reserved,
            None => Observed::Newest,
        }
    }

    /// Removes a deleted claim.
    pub(crate) fn remove(&mut self, key: &ObjectKey) {
        self.claims.remove(key);
        self.undelivered.remove(key);
        self.set_timer(key);
    }

    /// Sets when the claim is checked for release, after a change of its state.
    fn set_timer(&mut self, key: &ObjectKey) {
        self.frozen.remove(key);
        match self.claims.get(key).map(|entry| &entry.state) {
            Some(ClaimState::Allocated(Some(unreserved))) => {
                let at = unreserved.first_check(&self.times);
                self.timers.set(key, &unreserved.node, at);
            }
            Some(_) | None => self.timers.remove(key),
        }
    }

    /// kube-scheduler has bound or rejected a pod, reserved a claim or released one.
    pub(crate) fn scheduler_active(&mut self, now: Instant) {
        self.times.scheduler_active(now);
        for key in std::mem::take(&mut self.frozen) {
            self.restart_timeout(&key, now);
        }
    }

    /// A pod that references the claim is gone, or was rejected by its scheduler.
    pub(crate) fn users_changed(&mut self, key: &ObjectKey) {
        self.set_timer(key);
    }

    /// A job that allocates these claims has started.
    pub(crate) fn writing_started(&mut self, keys: impl Iterator<Item = ObjectKey>) {
        for key in keys {
            if let Some(entry) = self.claims.get_mut(&key) {
                entry.state = ClaimState::Writing;
                self.set_timer(&key);
            }
        }
    }

    /// The job that allocates these claims has ended, and the newest versions are observed.
    pub(crate) fn writing_ended(&mut self, keys: &[ObjectKey], now: Instant) {
        for key in keys {
            if let Some(entry) = self.claims.get_mut(key)
                && matches!(entry.state, ClaimState::Writing)
            {
                entry.state = next_state(&entry.claim, &ClaimState::Free, now);
                self.set_timer(key);
            }
        }
    }

    /// Makes the release of an unreserved allocation due at once.
    pub(crate) fn release_now(&mut self, key: &ObjectKey, reason: ReleaseReason) {
        if let Some(Entry {
            state: ClaimState::Allocated(Some(unreserved)),
            ..
        }) = self.claims.get_mut(key)
        {
            unreserved.release_now(reason);
            self.set_timer(key);
        }
    }

    /// Starts the time-out of an unreserved allocation again: kube-scheduler has not tried the pod before.
    pub(crate) fn restart_timeout(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(Entry {
            state: ClaimState::Allocated(Some(unreserved)),
            ..
        }) = self.claims.get_mut(key)
        {
            unreserved.restart(now);
            self.set_timer(key);
        }
    }

    /// Makes the release of all unreserved allocations on a deleted node due at once.
    pub(crate) fn node_deleted(&mut self, node: &str) {
        for key in self.timers.on_node(node) {
            let node = node.to_owned();
            self.release_now(&key, ReleaseReason::NodeDeleted { node });
        }
    }

    /// Starts the releases that are due, each with its reason. `use_of` returns which pending pods reference the claim, and
    /// whether the node exists.
    pub(crate) fn start_due_releases(
        &mut self,
        now: Instant,
        use_of: impl Fn(&ObjectKey, &str) -> (Users, bool),
    ) -> Vec<(Arc<ResourceClaim>, ReleaseReason)> {
        let mut due = Vec::new();
        for key in self.timers.pop_due(now) {
            let Some(entry) = self.claims.get_mut(&key) else {
                continue;
            };
            let ClaimState::Allocated(Some(unreserved)) = &entry.state else {
                continue;
            };
            let (users, node_exists) = use_of(&key, &unreserved.node);
            match unreserved.check(now, &self.times, users, node_exists) {
                ReleaseCheck::Due(reason) => {
                    let mut unreserved = unreserved.clone();
                    unreserved.start_release(reason.clone());
                    entry.state = ClaimState::Releasing(unreserved);
                    due.push((Arc::clone(&entry.claim), reason));
                    self.timers.remove(&key);
                }
                ReleaseCheck::NotBefore(at) => {
                    self.timers.set(&key, &unreserved.node, at);
                }
                ReleaseCheck::Frozen(until) => {
                    self.timers.set(&key, &unreserved.node, until);
                    self.frozen.insert(key);
                }
            }
        }
        due
    }

    /// A release has ended. After a successful one the next version of the claim is unallocated.
    pub(crate) fn release_ended(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(entry) = self.claims.get_mut(key)
            && let ClaimState::Releasing(unreserved) = &mut entry.state
        {
            unreserved.retry_later(now);
            entry.state = ClaimState::Allocated(Some(unreserved.clone()));
            self.set_timer(key);
        }
    }

    /// Returns when the next release may become due without a new observation.
    pub(crate) fn next_release(&self) -> Option<Instant> {
        self.timers.next()
    }
}

/// Returns the state of a claim in a new version when no write is in flight.
fn next_state(claim: &ResourceClaim, before: &ClaimState, now: Instant) -> ClaimState {
    if !claim::is_allocated(claim) {
        return match before {
            ClaimState::Planned => ClaimState::Planned,
            ClaimState::Free
            | ClaimState::Writing
            | ClaimState::Allocated(_)
            | ClaimState::Reserved
            | ClaimState::Releasing(_) => ClaimState::Free,
        };
    }
    if claim::is_reserved(claim) {
        return ClaimState::Reserved;
    }
    match before {
        ClaimState::Releasing(unreserved) => ClaimState::Releasing(unreserved.clone()),
        ClaimState::Allocated(Some(unreserved)) => ClaimState::Allocated(Some(unreserved.clone())),
        ClaimState::Free
        | ClaimState::Planned
        | ClaimState::Writing
        | ClaimState::Allocated(None)
        | ClaimState::Reserved => ClaimState::Allocated(UnreservedAllocation::of(claim, now)),
    }
}
