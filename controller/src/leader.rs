//! The loop of the leading replica: passes inputs to a pure state and executes the steps that the state returns.

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event::PendingEvent;
use crate::event_publisher::EventPublisher;
use crate::evictions::Evictor;
use crate::health::Health;
use crate::lease::Term;
use crate::metrics::Metrics;
use crate::planner::{DecisionTime, Planner, Settings};
use crate::watches;
use crate::writes::{Timing, Writer};

#[cfg(test)]
mod model;
mod silence;
mod state;
#[cfg(test)]
mod tests;

use state::{Input, State, Step};

/// Maximum number of queued observations that are passed before the next decision.
const BATCH: usize = 4096;
/// Maximum time between iterations of the loop; much shorter than the time after which the loop counts as stalled.
const IDLE_PERIOD: Duration = Duration::from_secs(10);

/// Time after which no further decision is started before writes, observations and the lease have their turn.
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
    let planner = Planner::new(settings, Box::new(|| uuid::Uuid::new_v4().to_string()));
    let mut state = State::new(planner);
    let mut executor = Executor {
        evictor: Evictor::new(client.clone(), Arc::clone(&term)),
        publisher: EventPublisher::start(client.clone(), Arc::clone(&term), Arc::clone(metrics)),
        writer: Writer::new(client.clone(), term, stop.clone(), Timing::default()),
        writes: JoinSet::new(),
        health,
        stop: stop.clone(),
    };
    let health = Arc::clone(&executor.health);
    // Boxed: the future of the loop below needs no room for it.
    Box::pin(executor.writer.wait_until_holder(|| health.planning_runs())).await;
    let mut observations = watches::all(watching);
    metrics.set_leading(true);
    let mut report_at = Instant::now();
    loop {
        executor.health.planning_runs();
        executor.health.set_silence(state.silence(Instant::now()));
        let idle_end = Instant::now() + IDLE_PERIOD;
        let deadline = state.next_deadline().unwrap_or(idle_end).min(idle_end);
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(write) = executor.writes.join_next() => {
                let mut next = Some(write);
                while let Some(write) = next {
                    let write = finished(write);
                    state.count(&write, Timestamp::now(), metrics);
                    state.apply(write, Instant::now());
                    next = executor.writes.try_join_next();
                }
            }
            Some(observation) = observations.next() => {
                state.apply(Input::Observed(observation), Instant::now());
                for _ in 0..BATCH {
                    match observations.next().now_or_never() {
                        Some(Some(observation)) => state.apply(Input::Observed(observation), Instant::now()),
                        _ => break,
                    }
                }
            }
            Some(event) = executor.publisher.next_failed() => {
                state.apply(Input::EventFailed(Box::new(event)), Instant::now());
            }
            () = tokio::time::sleep_until(deadline) => {}
        }
        let started = Instant::now();
        let steps = state.next_steps(&decision_time());
        metrics.decided(started.elapsed());
        for step in steps {
            if let Step::LogWatchFailure { kind, .. } = &step {
                metrics.watch_failed(*kind);
            }
            if let Some(failed) = executor.execute(step) {
                state.apply(failed, Instant::now());
            }
        }
        // A slice of planning must not keep the lease's tasks from running.
        tokio::task::yield_now().await;
        if Instant::now() >= report_at {
            report_at = Instant::now() + REPORT_PERIOD;
            state.report(metrics);
        }
    }
    metrics.set_leading(false);
    executor.health.planning_ended();
    while let Some(write) = executor.writes.join_next().await {
        state.apply(finished(write), Instant::now());
    }
    for event in state.into_events() {
        let _ = executor.publish(event);
    }
}

fn finished(write: Result<Input, JoinError>) -> Input {
    write.unwrap_or_else(|error| Input::WriteAborted(error.to_string()))
}

fn decision_time() -> DecisionTime {
    let now = Timestamp::now();
    DecisionTime {
        instant: Instant::now(),
        // Kubernetes stores whole seconds.
        time: Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
        is_slice_over: |started| started.elapsed() >= SLICE,
    }
}

/// Executes steps.
struct Executor {
    writer: Writer,
    evictor: Evictor,
    publisher: EventPublisher,
    /// Writes in flight.
    writes: JoinSet<Input>,
    health: Arc<Health>,
    stop: CancellationToken,
}

impl Executor {
    /// Executes a step. Returns an input if it failed at once.
    fn execute(&mut self, step: Step) -> Option<Input> {
        match step {
            Step::MarkReady => {
                tracing::info!("cluster state is complete; allocating");
                self.health.set_ready(true);
            }
            Step::Allocate(job) => {
                let writer = self.writer.clone();
                self.writes
                    .spawn(async move { Input::AllocationFinished(writer.allocate(job).await) });
            }
            Step::Release(release) => {
                let writer = self.writer.clone();
                self.writes
                    .spawn(async move { Input::ReleaseFinished(writer.release(release).await) });
            }
            Step::Evict(eviction) => {
                let evictor = self.evictor.clone();
                self.writes.spawn(async move {
                    Input::EvictionFinished(Box::new(evictor.evict(eviction).await))
                });
            }
            Step::RemoveGate(removal) => {
                let writer = self.writer.clone();
                self.writes.spawn(async move {
                    Input::GateRemovalFinished(writer.remove_gate(removal).await)
                });
            }
            Step::WriteQuotaStatus(update) => {
                let writer = self.writer.clone();
                self.writes.spawn(async move {
                    Input::QuotaStatusFinished(writer.write_quota_status(update).await)
                });
            }
            Step::WritePolicyStatus(update) => {
                let writer = self.writer.clone();
                self.writes.spawn(async move {
                    Input::PolicyStatusFinished(writer.write_policy_status(update).await)
                });
            }
            Step::PublishEvent(event) => return self.publish(event),
            Step::WritePodCondition(update) => self.publisher.write_condition(update),
            Step::LogWatchFailure { kind, error } => {
                tracing::warn!(?kind, error, "watch failed; restarting it");
            }
            Step::Restart { error } => {
                tracing::error!(error, "write task aborted; restarting from complete lists");
                self.stop.cancel();
            }
        }
        None
    }

    fn publish(&self, event: PendingEvent) -> Option<Input> {
        tracing::info!(
            kind = event.regarding.kind,
            namespace = event.regarding.namespace,
            name = event.regarding.name,
            reason = event.reason.as_str(),
            message = event.message,
            "publishing event"
        );
        let queued = self.publisher.publish(event);
        queued.err().map(Input::EventFailed)
    }
}
