//! State of the leading replica: decides on the next steps. Pure: no I/O, no clock.

use std::collections::BTreeSet;
use std::time::Duration;

use drava_api::listed::Change;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::silence::Silence;
use crate::action::{
    Action, AllocationJob, AllocationOutcome, Eviction, EvictionOutcome, GateRemoval,
    GateRemovalOutcome, PolicyStatusOutcome, PolicyStatusUpdate, QuotaStatusOutcome,
    QuotaStatusUpdate, Release, ReleaseOutcome,
};
use crate::claim;
use crate::event::PendingEvent;
use crate::metrics::Metrics;
use crate::planner::{DecisionTime, Planner};
use crate::pod_condition::PodConditionUpdate;
use crate::watches::{Kind, Observation, WatchFailure};

/// An input of the state.
#[derive(Debug)]
pub(super) enum Input {
    /// A watch has observed something.
    Observed(Observation),
    /// An allocation job has ended.
    AllocationFinished(AllocationOutcome),
    /// A release has ended.
    ReleaseFinished(ReleaseOutcome),
    /// An eviction has ended.
    EvictionFinished(Box<EvictionOutcome>),
    /// A gate removal has ended.
    GateRemovalFinished(GateRemovalOutcome),
    /// The write of a quota's status has ended.
    QuotaStatusFinished(QuotaStatusOutcome),
    /// The write of a policy's status has ended.
    PolicyStatusFinished(PolicyStatusOutcome),
    /// An event could not be published.
    EventFailed(Box<PendingEvent>),
    /// A write task has ended without an outcome.
    WriteAborted(String),
}

/// A step to execute.
#[derive(Debug)]
pub(super) enum Step {
    /// Report this replica as ready.
    MarkReady,
    /// Write the allocations of a pod's claims.
    Allocate(AllocationJob),
    /// Release an allocation.
    Release(Release),
    /// Evict pods.
    Evict(Eviction),
    /// Remove the allocation gate of a pod.
    RemoveGate(GateRemoval),
    /// Write the condition of a pod.
    WritePodCondition(PodConditionUpdate),
    /// Write the status of a quota.
    WriteQuotaStatus(QuotaStatusUpdate),
    /// Write the status of a policy.
    WritePolicyStatus(PolicyStatusUpdate),
    /// Publish an event.
    PublishEvent(PendingEvent),
    /// Log the failure of a watch, which restarts by itself.
    LogWatchFailure {
        /// Kind of the watched objects.
        kind: Kind,
        /// The failure.
        error: String,
    },
    /// Stop and start again from complete lists: the outcome of a write is unknown.
    Restart {
        /// The failure.
        error: String,
    },
}

/// See the [module](self).
pub(super) struct State {
    planner: Planner,
    /// Kinds whose first list is incomplete.
    unlisted: BTreeSet<Kind>,
    silence: Silence,
    /// Changes of pods before all PodGroups are known, which say to which gangs they belong.
    early_pods: Vec<Change<Pod>>,
    /// Steps that precede those of the planner.
    steps: Vec<Step>,
}

impl State {
    pub(super) fn new(planner: Planner) -> Self {
        Self {
            planner,
            unlisted: Kind::ALL.into_iter().collect(),
            silence: Silence::default(),
            early_pods: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// Returns for how long a watch has failed without an answer of the API server.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        self.silence.longest(now)
    }

    /// Applies an input.
    pub(super) fn apply(&mut self, input: Input, now: Instant) {
        match input {
            Input::Observed(observation) => self.observe(observation, now),
            Input::AllocationFinished(outcome) => self.planner.allocation_finished(outcome, now),
            Input::ReleaseFinished(outcome) => self.planner.release_finished(outcome, now),
            Input::EvictionFinished(outcome) => self.planner.eviction_finished(*outcome, now),
            Input::GateRemovalFinished(outcome) => self.planner.gate_removed(outcome, now),
            Input::QuotaStatusFinished(outcome) => self.planner.quota_status_written(outcome, now),
            Input::PolicyStatusFinished(outcome) => {
                self.planner.policy_status_written(outcome, now);
            }
            Input::EventFailed(event) => self.planner.event_failed(*event, now),
            Input::WriteAborted(error) => self.steps.push(Step::Restart { error }),
        }
    }

    fn observe(&mut self, observation: Observation, now: Instant) {
        if let Some(kind) = observation.delivered_kind() {
            self.silence.delivered(kind);
        }
        match observation {
            Observation::Pod(change) if !self.knows_pod_groups() => self.early_pods.push(change),
            Observation::Pod(change) => self.planner.pod(change),
            Observation::Claim(change) => self.planner.claim(change, now),
            Observation::Template(change) => self.planner.template(change),
            Observation::Class(change) => self.planner.class(change),
            Observation::Slice(change) => self.planner.slice(change),
            Observation::Node(change) => self.planner.node(change),
            Observation::TaintRule(change) => self.planner.taint_rule(change),
            Observation::Quota(change) => self.planner.quota(change),
            Observation::Policy(change) => self.planner.policy(change),
            Observation::Namespace(change) => self.planner.namespace(change),
            Observation::VolumeClaim(change) => self.planner.volume_claim(change),
            Observation::Volume(change) => self.planner.volume(change),
            Observation::StorageClass(change) => self.planner.storage_class(change),
            Observation::PodGroup(change) => self.planner.pod_group(change),
            Observation::Unreadable(kind, object) => self.planner.unreadable(kind, &object),
            Observation::Readable(kind, key) => self.planner.readable(kind, key),
            Observation::Listed(kind) => {
                let is_first = self.unlisted.remove(&kind);
                if self.knows_pod_groups() {
                    for change in std::mem::take(&mut self.early_pods) {
                        self.planner.pod(change);
                    }
                }
                if is_first && self.unlisted.is_empty() {
                    self.planner.set_synced();
                    self.steps.push(Step::MarkReady);
                }
            }
            Observation::WatchFailed(kind, failure) => {
                if !failure.is_answered {
                    self.silence.failed(kind, now);
                }
                let WatchFailure { error, .. } = failure;
                self.steps.push(Step::LogWatchFailure { kind, error });
            }
        }
    }

    fn knows_pod_groups(&self) -> bool {
        let mut groups = Kind::ALL.into_iter().filter(|kind| kind.is_pod_groups());
        !groups.any(|kind| self.unlisted.contains(&kind))
    }

    /// Returns the next steps.
    pub(super) fn next_steps(&mut self, time: &DecisionTime) -> Vec<Step> {
        let mut steps = std::mem::take(&mut self.steps);
        steps.extend(
            self.planner
                .actions(time)
                .into_iter()
                .map(|action| match action {
                    Action::Allocate(job) => Step::Allocate(job),
                    Action::Release(release) => Step::Release(release),
                    Action::Evict(eviction) => Step::Evict(eviction),
                    Action::RemoveGate(removal) => Step::RemoveGate(removal),
                    Action::WritePodCondition(update) => Step::WritePodCondition(update),
                    Action::WriteQuotaStatus(update) => Step::WriteQuotaStatus(update),
                    Action::WritePolicyStatus(update) => Step::WritePolicyStatus(update),
                    Action::PublishEvent(event) => Step::PublishEvent(event),
                }),
        );
        steps
    }

    /// Updates the metrics of the cluster.
    pub(super) fn report(&self, metrics: &Metrics) {
        let is_synced = |kind: Kind| (kind, !self.unlisted.contains(&kind));
        metrics.set_cluster(self.planner.metrics(), Kind::ALL.map(is_synced).into());
    }

    /// Counts a finished write, before it is applied.
    pub(super) fn count(&self, input: &Input, now: Timestamp, metrics: &Metrics) {
        match input {
            Input::AllocationFinished(outcome) if outcome.failure.is_none() => {
                let waits = outcome.pods.iter().map(|uid| {
                    let created = self.planner.created(uid);
                    created.map(|created| now.duration_since(created))
                });
                metrics.allocated(waits);
            }
            Input::AllocationFinished(_) => metrics.allocation_failed(),
            Input::ReleaseFinished(outcome) => {
                let claim = outcome.claim.as_deref();
                if claim.is_some_and(|claim| !claim::is_allocated(claim)) {
                    metrics.released();
                }
            }
            Input::EvictionFinished(outcome) => metrics.evicted(outcome),
            Input::Observed(_)
            | Input::GateRemovalFinished(_)
            | Input::QuotaStatusFinished(_)
            | Input::PolicyStatusFinished(_)
            | Input::EventFailed(_)
            | Input::WriteAborted(_) => {}
        }
    }

    /// Returns when [`Self::next_steps`] has to be called without a new input.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.planner.next_deadline()
    }

    /// Returns the unpublished events of finished writes.
    pub(super) fn into_events(self) -> Vec<PendingEvent> {
        self.planner.into_write_events().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use drava_allocator::object::object_key;
    use drava_allocator::placement::Policies;
    use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
    use drava_api::event::EventReason;
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use serde_json::json;

    use super::*;
    use crate::action::AllocationFailure;
    use crate::event::ReleaseReason;
    use crate::fixture::{claim, class, node, object, pod, slice};
    use crate::planner::Settings;
    use drava_api::listed::Change;

    fn time() -> DecisionTime {
        DecisionTime {
            instant: Instant::now(),
            time: object(json!("2026-01-01T00:00:00Z")),
            is_slice_over: |_| false,
        }
    }

    fn applied<K>(object: K) -> Change<K> {
        Change::Applied(Box::new(object))
    }

    fn observe(state: &mut State, observation: Observation) {
        state.apply(Input::Observed(observation), Instant::now());
    }

    /// State with a node, a pod and its claim, before the lists are complete.
    fn unsynced() -> State {
        let settings = Settings {
            policies: Policies {
                node: NodePlacementPolicy::Binpack,
                gpu: GpuPlacementPolicy::Binpack,
            },
            schedulers: vec!["default-scheduler".to_owned()],
            release_after: Duration::from_secs(60),
            preemption: true,
        };
        let mut state = State::new(Planner::new(settings, Box::new(|| "share".to_owned())));
        observe(&mut state, Observation::Class(applied(class())));
        observe(&mut state, Observation::Node(applied(node("n1"))));
        observe(&mut state, Observation::Slice(applied(slice("n1"))));
        observe(&mut state, Observation::Claim(applied(claim("a", "8Gi"))));
        let mut pod = pod("a", &["a"]);
        pod.metadata.creation_timestamp = Some(time().time);
        observe(&mut state, Observation::Pod(applied(pod)));
        state
    }

    /// State with one job in flight.
    fn allocating() -> (State, AllocationJob) {
        let mut state = unsynced();
        for kind in Kind::ALL {
            observe(&mut state, Observation::Listed(kind));
        }
        let mut steps = state.next_steps(&time());
        assert_eq!(steps.len(), 2, "{steps:?}");
        assert!(matches!(steps[0], Step::MarkReady));
        match steps.remove(1) {
            Step::Allocate(job) => (state, job),
            other => panic!("{other:?}"),
        }
    }

    fn outcome(job: AllocationJob, failure: Option<AllocationFailure>) -> Input {
        let writes = &job.pods[0].writes;
        let claims = writes.iter().map(|write| {
            let mut claim = write.claim.as_ref().clone();
            claim.metadata.resource_version = Some("2".to_owned());
            if failure.is_none() {
                claim.status.get_or_insert_default().allocation = Some(write.allocation.clone());
            }
            claim
        });
        Input::AllocationFinished(AllocationOutcome {
            keys: writes
                .iter()
                .map(|write| object_key(&write.claim.metadata))
                .collect(),
            claims: claims.collect(),
            pods: job.pods.into_iter().map(|pod| pod.uid).collect(),
            failure,
        })
    }

    fn events(steps: Vec<Step>) -> Vec<(EventReason, String)> {
        steps
            .into_iter()
            .map(|step| match step {
                Step::PublishEvent(event) => (event.reason, event.message),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn waits_for_all_lists_before_first_step() {
        let mut state = unsynced();
        for kind in Kind::ALL {
            assert!(state.next_steps(&time()).is_empty(), "{kind:?} is missing");
            assert_eq!(state.next_deadline(), None);
            observe(&mut state, Observation::Listed(kind));
        }
        let steps = state.next_steps(&time());
        assert!(
            matches!(steps[..], [Step::MarkReady, Step::Allocate(_)]),
            "{steps:?}"
        );
        observe(&mut state, Observation::Listed(Kind::Pods));
        assert!(
            state.next_steps(&time()).is_empty(),
            "a list of a restarted watch changes nothing"
        );
    }

    #[test]
    fn observes_pods_when_pod_groups_are_known() {
        let mut state = unsynced();
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_pod_groups()) {
            assert_eq!(state.planner.metrics().pending.len(), 0);
            observe(&mut state, Observation::Listed(kind));
        }
        assert_eq!(state.planner.metrics().pending.len(), 1);
    }

    #[test]
    fn publishes_allocated_event_after_successful_write() {
        let (mut state, job) = allocating();
        assert!(
            state.next_steps(&time()).is_empty(),
            "the write is in flight"
        );
        state.apply(outcome(job, None), Instant::now());
        assert_eq!(
            events(state.next_steps(&time())),
            [(
                EventReason::Allocated,
                "8 GiB of memory and best-effort GPU time on n1/gpu-0 for pod a; node n1: only feasible node; \
                 gpu-0: only feasible GPU"
                    .to_owned()
            )]
        );
        assert!(state.next_steps(&time()).is_empty(), "once");
    }

    /// Returns the metrics after these inputs.
    fn counted(inputs: impl FnOnce(AllocationJob) -> Vec<Input>) -> String {
        let (state, job) = allocating();
        let metrics = Metrics::default();
        let now = "2026-01-01T00:00:05Z".parse().unwrap();
        for input in inputs(job) {
            state.count(&input, now, &metrics);
        }
        state.report(&metrics);
        metrics.text().unwrap()
    }

    #[test]
    fn counts_writes_and_reports_cluster() {
        let allocated = counted(|job| vec![outcome(job, None)]);
        for sample in [
            "drava_controller_allocation_jobs_total{outcome=\"allocated\"} 1.0",
            "drava_controller_pod_wait_seconds_sum 5.0",
            "drava_controller_allocations_in_flight 1.0",
            "drava_controller_watch_synced{kind=\"pods\"} 1.0",
            "drava_controller_releases_total 0.0",
        ] {
            assert!(
                allocated.replace("{}", "").contains(sample),
                "{sample}\n{allocated}"
            );
        }
        let failed = counted(|job| {
            let failure = AllocationFailure {
                message: "rejected".to_owned(),
                is_reportable: true,
            };
            let release = Release {
                claim: Arc::clone(&job.pods[0].writes[0].claim),
                reason: ReleaseReason::NoPendingPod,
            };
            let released = Input::ReleaseFinished(ReleaseOutcome {
                release,
                claim: Some(Box::new(claim("a", "8Gi"))),
            });
            vec![outcome(job, Some(failure)), released]
        });
        assert!(failed.contains("allocation_jobs_total{outcome=\"failed\"} 1.0"));
        assert!(
            failed
                .replace("{}", "")
                .contains("drava_controller_releases_total 1.0")
        );
    }

    #[test]
    fn publishes_no_allocated_event_after_failed_write() {
        let (mut state, job) = allocating();
        let failure = AllocationFailure {
            message: "claim default/a: rejected".to_owned(),
            is_reportable: true,
        };
        state.apply(outcome(job, Some(failure)), Instant::now());
        assert_eq!(
            events(state.next_steps(&time())),
            [(
                EventReason::AllocationFailed,
                "claim default/a: rejected".to_owned()
            )]
        );
    }

    #[test]
    fn publishes_released_event_if_claim_is_unallocated() {
        let released = |claim: Option<ResourceClaim>| {
            let (mut state, job) = allocating();
            let release = Release {
                claim: Arc::clone(&job.pods[0].writes[0].claim),
                reason: ReleaseReason::NoPendingPod,
            };
            state.apply(
                Input::ReleaseFinished(ReleaseOutcome {
                    release,
                    claim: claim.map(Box::new),
                }),
                Instant::now(),
            );
            events(state.next_steps(&time()))
        };
        assert_eq!(
            released(Some(claim("a", "8Gi"))),
            [(
                EventReason::Released,
                "released the allocation: no pending pod references the claim".to_owned()
            )]
        );
        assert!(released(None).is_empty(), "a deleted claim");
        let mut reserved = claim("a", "8Gi");
        reserved.status = Some(object(json!({"allocation": {}})));
        assert!(released(Some(reserved)).is_empty(), "still allocated");
    }

    #[test]
    fn keeps_events_of_writes_that_end_during_shutdown() {
        let (mut state, job) = allocating();
        state.apply(outcome(job, None), Instant::now());
        assert_eq!(state.into_events().len(), 1);
    }

    #[test]
    fn restarts_after_aborted_write() {
        let (mut state, _) = allocating();
        state.apply(Input::WriteAborted("panicked".to_owned()), Instant::now());
        let steps = state.next_steps(&time());
        assert!(matches!(&steps[..], [Step::Restart { error }] if error == "panicked"));
    }

    #[test]
    fn logs_watch_failure() {
        let mut state = unsynced();
        observe(
            &mut state,
            Observation::WatchFailed(
                Kind::Pods,
                WatchFailure {
                    error: "timeout".to_owned(),
                    is_answered: false,
                },
            ),
        );
        let steps = state.next_steps(&time());
        assert!(matches!(
            &steps[..],
            [Step::LogWatchFailure {
                kind: Kind::Pods,
                ..
            }]
        ));
    }
}
