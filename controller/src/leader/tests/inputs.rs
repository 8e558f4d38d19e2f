//! What the leader passes to the planner, and what follows.

use std::io;
use std::sync::{Arc, Mutex};

use drava_allocator::object::object_key;
use drava_api::event::EventReason;
use drava_api::listed::Change;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;
use tokio::time::Instant;

use crate::action::event::ReleaseReason;
use crate::action::{
    Action, AllocationFailure, AllocationJob, AllocationOutcome, Outcome, Release, ReleaseOutcome,
};
use crate::decide::fixture::settings;
use crate::decide::planner::{DecisionTime, Planner};
use crate::fixture::{claim, class, node, object, pod, slice};
use crate::leader::{count, report_failure};
use crate::operate::metrics::Metrics;
use crate::watch::{Kind, Observation, WatchFailure};

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

fn observe(planner: &mut Planner, observation: Observation) {
    planner.observe(observation, Instant::now());
}

/// Planner with a node, a pod and its claim, before the lists are complete.
fn unsynced() -> Planner {
    let mut planner = Planner::new(settings(), Box::new(|| "share".to_owned()));
    observe(&mut planner, Observation::Class(applied(class())));
    observe(&mut planner, Observation::Node(applied(node("n1"))));
    observe(&mut planner, Observation::Slice(applied(slice("n1"))));
    observe(&mut planner, Observation::Claim(applied(claim("a", "8Gi"))));
    let mut pod = pod("a", &["a"]);
    pod.metadata.creation_timestamp = Some(time().time);
    observe(&mut planner, Observation::Pod(applied(pod)));
    planner
}

/// Planner with one job in flight.
fn allocating() -> (Planner, AllocationJob) {
    let mut planner = unsynced();
    for kind in Kind::ALL {
        observe(&mut planner, Observation::Listed(kind));
    }
    let mut actions = planner.actions(&time());
    assert_eq!(actions.len(), 1, "{actions:?}");
    match actions.remove(0) {
        Action::Allocate(job) => (planner, job),
        other => panic!("{other:?}"),
    }
}

fn outcome(job: AllocationJob, failure: Option<AllocationFailure>) -> Outcome {
    let writes = &job.pods[0].writes;
    let claims = writes.iter().map(|write| {
        let mut claim = write.claim.as_ref().clone();
        claim.metadata.resource_version = Some("2".to_owned());
        if failure.is_none() {
            claim.status.get_or_insert_default().allocation = Some(write.allocation.clone());
        }
        claim
    });
    Outcome::Allocation(AllocationOutcome {
        keys: writes
            .iter()
            .map(|write| object_key(&write.claim.metadata))
            .collect(),
        claims: claims.collect(),
        pods: job.pods.into_iter().map(|pod| pod.uid).collect(),
        failure,
    })
}

fn events(actions: Vec<Action>) -> Vec<(EventReason, String)> {
    actions
        .into_iter()
        .map(|action| match action {
            Action::PublishEvent(event) => (event.reason, event.message),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn waits_for_all_lists_before_first_action() {
    let mut planner = unsynced();
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Leaders) {
        assert!(planner.actions(&time()).is_empty(), "{kind:?} is missing");
        assert_eq!(planner.next_deadline(), None);
        assert!(!planner.is_synced());
        observe(&mut planner, Observation::Listed(kind));
    }
    assert!(planner.is_synced());
    let actions = planner.actions(&time());
    assert!(
        matches!(actions[..], [Action::Allocate(_)]),
        "decisions do not depend on the GpuControllerLeader: {actions:?}"
    );
    assert!(planner.synced_kinds().contains(&(Kind::Leaders, false)));
    observe(&mut planner, Observation::Listed(Kind::Pods));
    assert!(
        planner.actions(&time()).is_empty(),
        "a list of a restarted watch changes nothing"
    );
}

#[test]
fn observes_pods_when_pod_groups_are_known() {
    let mut planner = unsynced();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_pod_groups()) {
        assert_eq!(planner.metrics().pending.len(), 0);
        observe(&mut planner, Observation::Listed(kind));
    }
    assert_eq!(planner.metrics().pending.len(), 1);
}

#[test]
fn publishes_allocated_event_after_successful_write() {
    let (mut planner, job) = allocating();
    assert!(
        planner.actions(&time()).is_empty(),
        "the write is in flight"
    );
    planner.finished(outcome(job, None), Instant::now());
    assert_eq!(
        events(planner.actions(&time())),
        [(
            EventReason::Allocated,
            "claim a: 8 GiB of memory and best-effort GPU time on n1/gpu-0; node n1: only feasible node; \
             gpu-0: only feasible GPU"
                .to_owned()
        )]
    );
    assert!(planner.actions(&time()).is_empty(), "once");
}

/// Returns the metrics after these outcomes.
fn counted(outcomes: impl FnOnce(AllocationJob) -> Vec<Outcome>) -> String {
    let (mut planner, job) = allocating();
    let metrics = Metrics::default();
    let now = "2026-01-01T00:00:05Z".parse().unwrap();
    for outcome in outcomes(job) {
        count(&planner, &outcome, now, &metrics);
    }
    let nodes = planner.changed_node_metrics();
    metrics.set_cluster(planner.metrics(), nodes, planner.synced_kinds());
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
        let released = Outcome::Release(ReleaseOutcome {
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
    let (mut planner, job) = allocating();
    let failure = AllocationFailure {
        message: "claim default/a: rejected".to_owned(),
        is_reportable: true,
    };
    planner.finished(outcome(job, Some(failure)), Instant::now());
    assert_eq!(
        events(planner.actions(&time())),
        [(
            EventReason::AllocationFailed,
            "claim default/a: rejected".to_owned()
        )]
    );
}

#[test]
fn publishes_released_event_if_claim_is_unallocated() {
    let released = |claim: Option<ResourceClaim>| {
        let (mut planner, job) = allocating();
        let release = Release {
            claim: Arc::clone(&job.pods[0].writes[0].claim),
            reason: ReleaseReason::NoPendingPod,
        };
        planner.finished(
            Outcome::Release(ReleaseOutcome {
                release,
                claim: claim.map(Box::new),
            }),
            Instant::now(),
        );
        events(planner.actions(&time()))
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
    let (mut planner, job) = allocating();
    planner.finished(outcome(job, None), Instant::now());
    assert_eq!(planner.into_write_events().count(), 1);
}

/// A log in memory.
#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn logs_and_counts_watch_failure() {
    let (metrics, lines) = (Metrics::default(), Lines::default());
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let failure = WatchFailure {
        error: "timeout".to_owned(),
        is_answered: false,
    };
    tracing::subscriber::with_default(log.with_ansi(false).finish(), || {
        report_failure(&Observation::WatchFailed(Kind::Pods, failure), &metrics);
        report_failure(&Observation::Listed(Kind::Nodes), &metrics);
    });
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("WARN") && text.contains("kind=Pods error=\"timeout\""),
        "{text}"
    );
    let metrics = metrics.text().unwrap();
    let sample = "drava_controller_watch_failures_total{kind=\"pods\"} 1.0";
    assert!(metrics.contains(sample), "{metrics}");
}
