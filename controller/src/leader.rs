//! The loop of the leading replica: passes observations and outcomes to the planner, and executes the actions that it returns.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::action::event::PendingEvent;
use crate::action::{Action, Outcome};
use crate::decide::planner::{DecisionTime, Planner, Settings};
use crate::operate::health::Health;
use crate::operate::metrics::Metrics;
use crate::pods::claim;
use crate::watch::{self, Observation};
use crate::write::event_publisher::EventPublisher;
use crate::write::evictions::Evictor;
use crate::write::lease::Term;
use crate::write::writes::{Timing, Writer};

#[cfg(test)]
mod model;
mod silence;
#[cfg(test)]
mod tests;

use silence::Silence;

/// Maximum time between iterations of the loop; much shorter than the time after which the loop counts as stalled.
const IDLE_PERIOD: Duration = Duration::from_secs(10);

/// Time after which no further observation is passed on before decisions, and no further decision is started before writes,
/// observations and the lease have their turn.
const SLICE: Duration = Duration::from_millis(50);

/// Time between two updates of the metrics of the cluster; an idle loop updates them every [`IDLE_PERIOD`].
const REPORT_PERIOD: Duration = Duration::from_secs(5);

/// Leads until `stop`, with the client of the watches. Starts from complete lists; returns when no write is in flight. No write is sent after `term`.
pub async fn lead(
    client: Client,
    watching: &Client,
    settings: Settings,
    health: Arc<Health>,
    metrics: &Arc<Metrics>,
    term: Arc<Term>,
    stop: CancellationToken,
) {
    health.set_ready(false);
    let mut planner = Planner::new(settings, Box::new(|| uuid::Uuid::new_v4().to_string()));
    let mut silence = Silence::default();
    let mut executor = Executor {
        evictor: Evictor::new(client.clone(), Arc::clone(&term)),
        publisher: EventPublisher::start(client.clone(), Arc::clone(&term), Arc::clone(metrics)),
        writer: Writer::new(client.clone(), term, stop.clone(), Timing::default()),
        writes: JoinSet::new(),
        health,
    };
    let health = Arc::clone(&executor.health);
    // Boxed: the future of the loop below needs no room for it.
    Box::pin(executor.writer.wait_until_holder(|| health.planning_runs())).await;
    let mut observations = watch::all(watching);
    metrics.set_leading(true);
    let mut report_at = Instant::now();
    let mut is_ready = false;
    loop {
        executor.health.planning_runs();
        executor.health.set_silence(silence.longest(Instant::now()));
        let idle_end = Instant::now() + IDLE_PERIOD;
        let deadline = planner.next_deadline().unwrap_or(idle_end).min(idle_end);
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(write) = executor.writes.join_next() => {
                let mut next = Some(write);
                while let Some(write) = next {
                    if let Some(outcome) = finished(write, &stop) {
                        count(&planner, &outcome, Timestamp::now(), metrics);
                        planner.finished(outcome, Instant::now());
                    }
                    next = executor.writes.try_join_next();
                }
            }
            Some(observation) = observations.next() => {
                let mut next = Some(observation);
                let started = Instant::now();
                while let Some(observation) = next {
                    let now = Instant::now();
                    silence.observe(&observation, now);
                    report_failure(&observation, metrics);
                    planner.observe(observation, now);
                    let is_over = is_slice_over(started, Instant::now());
                    next = (!is_over).then(|| observations.ready()).flatten();
                }
            }
            Some(event) = executor.publisher.next_failed() => {
                planner.finished(Outcome::EventFailed(Box::new(event)), Instant::now());
            }
            () = tokio::time::sleep_until(deadline) => {}
        }
        if planner.is_synced() && !std::mem::replace(&mut is_ready, true) {
            tracing::info!("cluster state is complete; allocating");
            executor.health.set_ready(true);
        }
        let started = Instant::now();
        let actions = planner.actions(&decision_time());
        metrics.decided(started.elapsed());
        for action in actions {
            if let Some(failed) = executor.execute(action) {
                planner.finished(failed, Instant::now());
            }
        }
        // A slice of planning must not keep the lease's tasks from running.
        tokio::task::yield_now().await;
        if Instant::now() >= report_at {
            report_at = Instant::now() + REPORT_PERIOD;
            let nodes = planner.changed_node_metrics();
            metrics.set_cluster(planner.metrics(), nodes, planner.synced_kinds());
        }
    }
    metrics.set_leading(false);
    executor.health.planning_ended();
    while let Some(write) = executor.writes.join_next().await {
        if let Some(outcome) = finished(write, &stop) {
            planner.finished(outcome, Instant::now());
        }
    }
    for event in planner.into_write_events() {
        let _ = executor.publish(event);
    }
}

/// Returns the outcome of a write. That of an aborted one is unknown: the leader stops, and starts again from complete lists.
fn finished(write: Result<Outcome, JoinError>, stop: &CancellationToken) -> Option<Outcome> {
    match write {
        Ok(outcome) => Some(outcome),
        Err(error) => {
            tracing::error!(%error, "write task aborted; restarting from complete lists");
            stop.cancel();
            None
        }
    }
}

/// Logs and counts the failure of a watch, which is restarted.
fn report_failure(observation: &Observation, metrics: &Metrics) {
    if let Observation::WatchFailed(kind, failure) = observation {
        tracing::warn!(?kind, error = failure.error, "watch failed; restarting it");
        metrics.watch_failed(*kind);
    }
}

/// Counts the outcome of a write, before the planner learns it.
fn count(planner: &Planner, outcome: &Outcome, now: Timestamp, metrics: &Metrics) {
    match outcome {
        Outcome::Allocation(outcome) if outcome.failure.is_none() => {
            let waits = outcome.pods.iter().map(|uid| {
                let created = planner.created(uid);
                created.map(|created| now.duration_since(created))
            });
            metrics.allocated(waits);
        }
        Outcome::Allocation(_) => metrics.allocation_failed(),
        Outcome::Release(outcome) => {
            let claim = outcome.claim.as_deref();
            if claim.is_some_and(|claim| !claim::is_allocated(claim)) {
                metrics.released();
            }
        }
        Outcome::Eviction(outcome) => metrics.evicted(outcome),
        Outcome::GateRemoval(_)
        | Outcome::Suspension(_)
        | Outcome::QuotaStatus(_)
        | Outcome::PolicyStatus(_)
        | Outcome::LeaderStatus(_)
        | Outcome::EventFailed(_) => {}
    }
}

fn decision_time() -> DecisionTime {
    let now = Timestamp::now();
    DecisionTime {
        instant: Instant::now(),
        // Kubernetes stores whole seconds.
        time: Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
        is_slice_over: |started| is_slice_over(started, Instant::now()),
    }
}

/// Returns whether the slice of a time is over, and with it the observations or decisions at a stretch.
fn is_slice_over(started: Instant, now: Instant) -> bool {
    now.duration_since(started) >= SLICE
}

/// Executes actions.
struct Executor {
    writer: Writer,
    evictor: Evictor,
    publisher: EventPublisher,
    /// Writes in flight.
    writes: JoinSet<Outcome>,
    health: Arc<Health>,
}

impl Executor {
    /// Executes an action. Returns its outcome if it failed at once.
    fn execute(&mut self, action: Action) -> Option<Outcome> {
        let writer = self.writer.clone();
        match action {
            Action::Allocate(job) => {
                self.writes
                    .spawn(async move { Outcome::Allocation(writer.allocate(job).await) });
            }
            Action::Release(release) => {
                self.writes
                    .spawn(async move { Outcome::Release(writer.release(release).await) });
            }
            Action::Evict(eviction) => {
                let evictor = self.evictor.clone();
                self.writes.spawn(async move {
                    Outcome::Eviction(Box::new(evictor.evict(eviction).await))
                });
            }
            Action::RemoveGate(pod) => {
                self.writes
                    .spawn(async move { Outcome::GateRemoval(writer.remove_gate(pod).await) });
            }
            Action::WriteSuspension(write) => {
                self.writes.spawn(async move {
                    Outcome::Suspension(writer.write_suspension(write).await)
                });
            }
            Action::WriteQuotaStatus(update) => {
                self.writes
                    .spawn(async move { Outcome::QuotaStatus(writer.write_status(update).await) });
            }
            Action::WritePolicyStatus(update) => {
                self.writes
                    .spawn(async move { Outcome::PolicyStatus(writer.write_status(update).await) });
            }
            Action::WriteLeaderStatus(update) => {
                self.writes
                    .spawn(async move { Outcome::LeaderStatus(writer.write_status(update).await) });
            }
            Action::PublishEvent(event) => return self.publish(event),
            Action::WritePodCondition(update) => self.publisher.write_condition(update),
        }
        None
    }

    fn publish(&self, event: PendingEvent) -> Option<Outcome> {
        tracing::info!(
            kind = event.regarding.kind,
            namespace = event.regarding.namespace,
            name = event.regarding.name,
            reason = event.reason.as_str(),
            message = event.message,
            "publishing event"
        );
        let queued = self.publisher.publish(event);
        queued.err().map(Outcome::EventFailed)
    }
}
