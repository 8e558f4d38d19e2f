//! The planner in a small cluster; the test acts as API server, kube-scheduler and clock.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::object::object_key;
use drava_api::leader::GpuControllerLeader;
use drava_api::listed::{Change, DeletedObject};
use drava_api::names;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use tokio::time::Instant;

use crate::action::status::StatusUpdate;
use crate::action::{
    Action, AllocationFailure, AllocationJob, AllocationOutcome, Eviction, EvictionCause,
    EvictionFailure, EvictionOutcome, GateRemovalOutcome, Release, ReleaseOutcome,
    SuspensionOutcome, SuspensionWrite,
};
use crate::decide::fixture::settings;
use crate::decide::planner::{DecisionTime, Planner, Settings};
use crate::fixture::{claim, class, node, object, pod, slice};
use crate::pods::pod_condition::PodConditionUpdate;

pub(super) const RELEASE_AFTER: Duration = Duration::from_secs(60);

/// The planner with the objects of a cluster.
pub(super) struct TestCluster {
    pub(super) planner: Planner,
    pub(super) start: Instant,
    pub(super) now: Instant,
    pub(super) version: u64,
    pub(super) claims: BTreeMap<String, ResourceClaim>,
    /// Object, reason and message of each event.
    pub(super) events: Vec<(String, &'static str, String)>,
    pub(super) pods: BTreeMap<String, Pod>,
    nodes: Vec<String>,
    /// Evictions that were not executed so far.
    pub(super) evictions: Vec<Eviction>,
    /// Gate removals in flight.
    pub(super) gate_removals: Vec<ObjectReference>,
    /// Writes of intents in flight.
    pub(super) suspensions: Vec<SuspensionWrite>,
    pub(super) quotas: BTreeMap<String, GpuQuota>,
    /// Writes of statuses in flight.
    pub(super) quota_statuses: Vec<StatusUpdate<GpuQuota>>,
    pub(super) policy_statuses: Vec<StatusUpdate<GpuPolicy>>,
    pub(super) leader_statuses: Vec<StatusUpdate<GpuControllerLeader>>,
    /// Writes of conditions in flight.
    pub(super) pod_conditions: Vec<PodConditionUpdate>,
    pub(super) is_slice_over: fn(Instant) -> bool,
    /// Whether kube-scheduler binds pods that the tests do not mention.
    pub(super) is_scheduler_active: bool,
}

impl TestCluster {
    /// Creates a cluster whose nodes have one GPU each.
    pub(super) fn new(nodes: &[&str]) -> Self {
        let settings = Settings {
            release_after: RELEASE_AFTER,
            ..settings()
        };
        let now = Instant::now();
        let mut ids = 0;
        let share_ids = Box::new(move || {
            ids += 1;
            format!("share-{ids}")
        });
        let mut cluster = Self {
            planner: Planner::new(settings, share_ids),
            start: now,
            now,
            version: 100,
            claims: BTreeMap::new(),
            events: Vec::new(),
            pods: BTreeMap::new(),
            nodes: nodes.iter().map(|name| (*name).to_owned()).collect(),
            evictions: Vec::new(),
            gate_removals: Vec::new(),
            suspensions: Vec::new(),
            quotas: BTreeMap::new(),
            quota_statuses: Vec::new(),
            policy_statuses: Vec::new(),
            leader_statuses: Vec::new(),
            pod_conditions: Vec::new(),
            is_slice_over: |_| false,
            is_scheduler_active: true,
        };
        cluster.planner.class(applied(class()));
        for name in nodes {
            cluster.planner.node(applied(node(name)));
            cluster.planner.slice(applied(slice(name)));
        }
        cluster.planner.set_synced();
        cluster
    }

    pub(super) fn add_claim(&mut self, claim: ResourceClaim) {
        self.observe(claim);
    }

    pub(super) fn add_pod(&mut self, pod: Pod) {
        let name = pod.metadata.name.clone().unwrap();
        self.pods.insert(name, pod.clone());
        self.planner.pod(applied(pod));
    }

    /// Adds a pod of this priority with a claim of the same name.
    pub(super) fn add_pod_of_priority(&mut self, name: &str, memory: &str, priority: i32) {
        self.add_claim(claim(name, memory));
        let mut pod = pod(name, &[name]);
        pod.spec.as_mut().unwrap().priority = Some(priority);
        self.add_pod(pod);
    }

    /// Adds a member of the gang `g` with a claim of the same name.
    pub(super) fn add_member(&mut self, name: &str, memory: &str, min: &str) {
        self.add_claim(claim(name, memory));
        self.add_pod(member(pod(name, &[name]), min));
    }

    /// Adds pods that run on the only feasible node, each with its memory and priority.
    pub(super) fn add_running(&mut self, pods: &[(&str, &str, i32)]) {
        for (name, memory, priority) in pods {
            self.add_pod_of_priority(name, memory, *priority);
            let placed = self.settle();
            assert_eq!(placed.len(), 1, "{placed:?}");
            self.bind(placed[0].split_once(" → ").unwrap());
        }
    }

    /// Reserves the claims of a pod and binds it to a node, as kube-scheduler does.
    pub(super) fn bind(&mut self, (name, node): (&str, &str)) {
        let mut pod = self.pods[name].clone();
        let spec = pod.spec.as_mut().unwrap();
        spec.node_name = Some(node.to_owned());
        pod.status = Some(object(json!({
            "phase": "Running",
            "conditions": [{
                "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        })));
        for reference in spec.resource_claims.clone().unwrap_or_default() {
            self.reserve(&reference.resource_claim_name.unwrap(), name);
        }
        self.add_pod(pod);
    }

    /// The scheduler of a pod has tried it, and found no node.
    pub(super) fn reject(&mut self, name: &str) {
        let mut pod = self.pods[name].clone();
        pod.status = Some(object(json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
        }]})));
        self.add_pod(pod);
    }

    /// Starts the deletion of a pod; its grace period ends after 30 s.
    pub(super) fn start_deletion(&mut self, name: &str) {
        let mut pod = self.pods[name].clone();
        pod.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:30Z")));
        self.add_pod(pod);
    }

    /// Ends the containers of a pod, which keeps its claims for now.
    pub(super) fn finish_pod(&mut self, name: &str) {
        let mut pod = self.pods[name].clone();
        let ended = self.time().time;
        pod.status = Some(object(json!({
            "phase": "Succeeded",
            "conditions": [{
                "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z",
            }, {
                "type": "Ready", "status": "False", "reason": "PodCompleted", "lastTransitionTime": ended,
            }],
        })));
        self.add_pod(pod);
    }

    /// Ends a pod with its claim.
    pub(super) fn end(&mut self, name: &str) {
        self.delete_pod(name);
        self.delete_claim(name);
    }

    /// Executes the evictions; returns `victim for preemptor`, or the state of its gang, for each victim.
    pub(super) fn evict(&mut self) -> Vec<String> {
        let mut evicted = Vec::new();
        for eviction in std::mem::take(&mut self.evictions) {
            let cause = match &eviction.cause {
                EvictionCause::Preemption(preemptor) => {
                    format!("for {}", preemptor.pod.name.as_deref().unwrap())
                }
                EvictionCause::Own(_, state) => format!("because {state}"),
            };
            for victim in &eviction.victims {
                let name = victim.pod.name.clone().unwrap();
                self.start_deletion(&name);
                evicted.push(format!("{name} {cause}"));
            }
            let outcome = EvictionOutcome {
                evicted: eviction.victims.clone(),
                eviction,
                failure: None,
            };
            self.planner.eviction_finished(outcome, self.now);
        }
        evicted.sort();
        evicted
    }

    /// The API server refuses the eviction of the first victim that was decided last.
    pub(super) fn refuse_eviction(&mut self, message: &str) {
        let eviction = self.evictions.pop().unwrap();
        let failure = EvictionFailure {
            victim: eviction.victims[0].clone(),
            message: message.to_owned(),
        };
        let outcome = EvictionOutcome {
            eviction,
            evicted: Vec::new(),
            failure: Some(failure),
        };
        self.planner.eviction_finished(outcome, self.now);
    }

    /// Replaces the planner by that of a new leader, which observes the same objects.
    pub(super) fn change_leader(&mut self) {
        let nodes: Vec<&str> = self.nodes.iter().map(String::as_str).collect();
        let mut next = Self::new(&nodes);
        (next.start, next.now) = (self.start, self.now);
        next.version = self.version;
        for quota in std::mem::take(&mut self.quotas).into_values() {
            next.observe_quota(quota);
        }
        for claim in std::mem::take(&mut self.claims).into_values() {
            next.observe(claim);
        }
        for pod in std::mem::take(&mut self.pods).into_values() {
            next.add_pod(pod);
        }
        *self = next;
    }

    /// Adds a pod with a claim of the same name.
    pub(super) fn add_pod_with_claim(&mut self, name: &str, memory: &str) {
        self.add_claim(claim(name, memory));
        self.add_pod(pod(name, &[name]));
    }

    pub(super) fn observe(&mut self, mut claim: ResourceClaim) {
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        let name = claim.metadata.name.clone().unwrap();
        self.claims.insert(name, claim.clone());
        self.planner.claim(applied(claim), self.now);
    }

    pub(super) fn observe_quota(&mut self, mut quota: GpuQuota) {
        self.version += 1;
        quota.metadata.resource_version = Some(self.version.to_string());
        let name = quota.metadata.name.clone().unwrap();
        self.quotas.insert(name, quota.clone());
        self.planner.quota(applied(quota));
    }

    pub(super) fn advance(&mut self, time: Duration) {
        self.now += time;
        self.planner.commitments.is_scheduler_active |= self.is_scheduler_active;
    }

    pub(super) fn time(&self) -> DecisionTime {
        let start: Timestamp = object(json!("2026-01-01T00:00:00Z"));
        let time = start.saturating_add(self.now - self.start).unwrap();
        DecisionTime {
            instant: self.now,
            time: Time(time),
            is_slice_over: self.is_slice_over,
        }
    }

    /// Returns the jobs and releases, and records the events and gate removals.
    pub(super) fn actions(&mut self) -> (Vec<AllocationJob>, Vec<Release>) {
        let (mut jobs, mut releases) = (Vec::new(), Vec::new());
        for action in self.planner.actions(&self.time()) {
            match action {
                Action::Allocate(job) => jobs.push(job),
                Action::Release(release) => releases.push(release),
                Action::Evict(eviction) => self.evictions.push(eviction),
                Action::RemoveGate(pod) => self.gate_removals.push(pod),
                Action::WriteSuspension(write) => self.suspensions.push(write),
                Action::WritePodCondition(update) => self.pod_conditions.push(update),
                Action::WriteQuotaStatus(update) => self.quota_statuses.push(update),
                Action::WritePolicyStatus(update) => self.policy_statuses.push(update),
                Action::WriteLeaderStatus(update) => self.leader_statuses.push(update),
                Action::PublishEvent(event) => self.events.push((
                    format!(
                        "{}/{}",
                        event.regarding.kind.unwrap(),
                        event.regarding.name.unwrap()
                    ),
                    event.reason.as_str(),
                    event.message,
                )),
            }
        }
        (jobs, releases)
    }

    /// Executes a job.
    pub(super) fn write(&mut self, job: AllocationJob) {
        let written = self.written(&job);
        self.finish(job, written, None);
    }

    /// Writes the claims of a job, and returns them; the planner does not learn the outcome.
    pub(super) fn written(&mut self, job: &AllocationJob) -> Vec<ResourceClaim> {
        let mut written = Vec::new();
        let writes = job.pods.iter();
        for write in writes.flat_map(|pod| &pod.writes) {
            let mut claim = self.claims[write.claim.metadata.name.as_ref().unwrap()].clone();
            let status = claim.status.get_or_insert_default();
            status.allocation = Some(write.allocation.clone());
            if let Some(consumer) = &write.consumer {
                status.reserved_for = Some(vec![consumer.clone()]);
            }
            self.version += 1;
            claim.metadata.resource_version = Some(self.version.to_string());
            self.claims
                .insert(claim.metadata.name.clone().unwrap(), claim.clone());
            written.push(claim);
        }
        written
    }

    /// Ends a job with this outcome.
    pub(super) fn finish(
        &mut self,
        job: AllocationJob,
        claims: Vec<ResourceClaim>,
        failure: Option<AllocationFailure>,
    ) {
        let keys = job
            .pods
            .iter()
            .flat_map(|pod| &pod.writes)
            .map(|write| object_key(&write.claim.metadata))
            .collect();
        let outcome = AllocationOutcome {
            pods: job.pods.into_iter().map(|pod| pod.uid).collect(),
            keys,
            claims,
            failure,
        };
        self.planner.allocation_finished(outcome, self.now);
    }

    /// The watch delivers all claims in their newest versions.
    pub(super) fn deliver_claims(&mut self) {
        for claim in self.claims.values() {
            self.planner.claim(applied(claim.clone()), self.now);
        }
    }

    /// Executes all jobs; returns `pod → node` in the order of decisions.
    pub(super) fn settle(&mut self) -> Vec<String> {
        let mut placed = Vec::new();
        for _ in 0..20 {
            let (jobs, releases) = self.actions();
            assert!(releases.is_empty(), "unexpected releases: {releases:?}");
            if jobs.is_empty() {
                return placed;
            }
            for job in jobs {
                placed.extend(job.pods.iter().map(|placed| {
                    format!("{} → {}", placed.pod.name.as_deref().unwrap(), placed.node)
                }));
                self.write(job);
            }
            self.deliver_claims();
        }
        panic!("the planner does not settle");
    }

    /// Reserves a claim, as kube-scheduler does.
    pub(super) fn reserve(&mut self, claim: &str, pod: &str) {
        let mut claim = self.claims[claim].clone();
        let consumer = json!({"resource": "pods", "name": pod, "uid": format!("pod-{pod}")});
        claim.status.get_or_insert_default().reserved_for = Some(vec![object(consumer)]);
        self.observe(claim);
    }

    /// Removes an allocation, as kube-scheduler does in PostFilter.
    pub(super) fn deallocate(&mut self, claim: &str) {
        let mut claim = self.claims[claim].clone();
        claim.status = None;
        self.observe(claim);
    }

    /// Executes a release.
    pub(super) fn release(&mut self, release: &Release) {
        let mut claim = self.claims[release.claim.metadata.name.as_ref().unwrap()].clone();
        claim.status = None;
        claim.metadata.annotations = None;
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        self.claims
            .insert(claim.metadata.name.clone().unwrap(), claim.clone());
        self.release_finished(release, Some(claim));
    }

    /// Ends a release with this outcome.
    pub(super) fn release_finished(&mut self, release: &Release, claim: Option<ResourceClaim>) {
        let outcome = ReleaseOutcome {
            release: release.clone(),
            claim: claim.map(Box::new),
        };
        self.planner.release_finished(outcome, self.now);
    }

    /// Ends the writes of intents, which succeed or are lost.
    pub(super) fn end_intents(&mut self, is_written: bool) {
        if is_written {
            self.write_intents();
            return;
        }
        for write in std::mem::take(&mut self.suspensions) {
            let name = write.claim.metadata.name.clone().unwrap();
            let outcome = SuspensionOutcome {
                key: object_key(&write.claim.metadata),
                claim: self.claims.get(&name).cloned().map(Box::new),
                is_written: false,
            };
            self.planner.suspension_written(outcome, self.now);
        }
    }

    /// Executes the writes of intents; returns `+claim` for each that is written, and `-claim` for each that is withdrawn.
    pub(super) fn write_intents(&mut self) -> Vec<String> {
        let writes = std::mem::take(&mut self.suspensions).into_iter();
        let written = writes.filter_map(|write| {
            let name = write.claim.metadata.name.clone().unwrap();
            // It may be deleted.
            let mut claim = self.claims.get(&name)?.clone();
            let annotations = claim.metadata.annotations.get_or_insert_default();
            let annotation = names::SUSPENDED_FOR_ANNOTATION.to_owned();
            match write.suspended_for {
                Some(pod) => annotations.insert(annotation, pod),
                None => annotations.remove(&annotation),
            };
            let labels = claim.metadata.labels.get_or_insert_default();
            let sign = match write.is_intended {
                true => {
                    labels.insert(names::SUSPEND_LABEL.to_owned(), names::SUSPEND.to_owned());
                    "+"
                }
                false => {
                    labels.remove(names::SUSPEND_LABEL);
                    "-"
                }
            };
            self.version += 1;
            claim.metadata.resource_version = Some(self.version.to_string());
            self.claims.insert(name.clone(), claim.clone());
            let outcome = SuspensionOutcome {
                key: object_key(&claim.metadata),
                claim: Some(Box::new(claim)),
                is_written: true,
            };
            self.planner.suspension_written(outcome, self.now);
            Some(format!("{sign}{name}"))
        });
        written.collect()
    }

    /// Ends the gate removals in flight with this outcome; returns the names of their pods.
    pub(super) fn finish_gate_removals(
        &mut self,
        failure: Option<&AllocationFailure>,
    ) -> Vec<String> {
        let removals = std::mem::take(&mut self.gate_removals).into_iter();
        let names = removals.map(|pod| {
            let outcome = GateRemovalOutcome {
                pod_uid: pod.uid.unwrap(),
                failure: failure.cloned(),
            };
            self.planner.gate_removed(outcome, self.now);
            pod.name.unwrap()
        });
        names.collect()
    }

    pub(super) fn delete_pod(&mut self, name: &str) {
        let pod = self.pods.remove(name).unwrap();
        self.planner.pod(Change::Deleted(DeletedObject {
            namespace: pod.metadata.namespace.unwrap(),
            name: name.to_owned(),
            uid: format!("pod-{name}"),
        }));
    }

    /// Deletes a node with its slice.
    pub(super) fn delete_node(&mut self, name: &str) {
        let deleted = |name: String| DeletedObject {
            namespace: String::new(),
            uid: name.clone(),
            name,
        };
        self.planner
            .slice(Change::Deleted(deleted(format!("slice-{name}"))));
        self.planner.node(Change::Deleted(deleted(name.to_owned())));
    }

    pub(super) fn delete_claim(&mut self, name: &str) {
        let claim = self.claims.remove(name).unwrap();
        let deleted = DeletedObject {
            namespace: claim.metadata.namespace.unwrap(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        };
        self.planner.claim(Change::Deleted(deleted), self.now);
    }

    /// Returns the messages of the events of an object, except those of successful writes.
    pub(super) fn messages_of(&self, object: &str) -> Vec<&str> {
        self.events
            .iter()
            .filter(|(regarding, reason, _)| regarding == object && *reason != "Allocated")
            .map(|(_, _, message)| message.as_str())
            .collect()
    }
}

/// Makes the pod a member of the gang `g`, which needs `min` members.
pub(super) fn member(mut pod: Pod, min: &str) -> Pod {
    let annotations = [
        (names::GANG_ANNOTATION, "g"),
        (names::GANG_MIN_ANNOTATION, min),
    ];
    let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
    pod.metadata.annotations = Some(annotations.into());
    pod
}

pub(super) fn applied<K>(object: K) -> Change<K> {
    Change::Applied(Box::new(object))
}
