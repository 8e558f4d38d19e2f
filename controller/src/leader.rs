//! The loop of the replica that leads: observations in, actions out.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_allocator::cluster::{ObjectKey, object_key};
use drava_api::event::EventReason;
use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::action::{Action, Job, JobOutcome};
use crate::claim;
use crate::events::Poster;
use crate::health::Health;
use crate::notice::Notice;
use crate::planner::{Moment, Planner, Settings};
use crate::watches::{self, Kind, Observation};
use crate::writes::{Timing, Writer};

/// Observations taken in before the next decision: what arrives together is decided together.
const BATCH: usize = 4096;

/// A write that ended.
enum Done {
    Job(JobOutcome),
    Release(ObjectKey, Option<Box<ResourceClaim>>),
}

/// Leads until `stop`: starts from full lists, and leaves no write running.
pub async fn lead(
    client: Client,
    settings: Settings,
    health: Arc<Health>,
    stop: CancellationToken,
) {
    health.set_ready(false);
    let mut leader = Leader {
        poster: Poster::start(client.clone()),
        planner: Planner::new(settings, Box::new(|| uuid::Uuid::new_v4().to_string())),
        to_list: Kind::ALL.into_iter().collect(),
        running: JoinSet::new(),
        health,
        writer: Writer::new(client.clone(), stop.clone(), Timing::default()),
        stop: stop.clone(),
    };
    let mut observations = watches::all(&client);
    loop {
        let deadline = leader.planner.next_deadline();
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(done) = leader.running.join_next() => leader.done(done),
            Some(observation) = observations.next() => {
                leader.observe(observation);
                for _ in 0..BATCH {
                    match observations.next().now_or_never() {
                        Some(Some(observation)) => leader.observe(observation),
                        _ => break,
                    }
                }
            }
            () = wait_until(deadline) => {}
        }
        leader.act();
    }
    while leader.running.join_next().await.is_some() {}
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

struct Leader {
    writer: Writer,
    planner: Planner,
    poster: Poster,
    /// Kinds of which the first list is not complete.
    to_list: BTreeSet<Kind>,
    running: JoinSet<Done>,
    health: Arc<Health>,
    stop: CancellationToken,
}

impl Leader {
    fn observe(&mut self, observation: Observation) {
        let now = Instant::now();
        match observation {
            Observation::Pod(change) => self.planner.pod(change),
            Observation::Claim(change) => self.planner.claim(change, now),
            Observation::Class(change) => self.planner.class(change),
            Observation::Slice(change) => self.planner.slice(change),
            Observation::Node(change) => self.planner.node(change),
            Observation::Listed(kind) => {
                if self.to_list.remove(&kind) && self.to_list.is_empty() {
                    tracing::info!("the state of the cluster is known; allocating from now on");
                    self.planner.set_synced();
                    self.health.set_ready(true);
                }
            }
            Observation::Broken(kind, error) => {
                tracing::warn!(?kind, error, "a watch broke; starting it again");
            }
        }
    }

    fn act(&mut self) {
        let moment = Moment {
            instant: Instant::now(),
            time: Time(whole_seconds(Timestamp::now())),
        };
        for action in self.planner.actions(&moment) {
            match action {
                Action::Tell(notice) => {
                    tracing::info!(
                        kind = notice.regarding.kind,
                        namespace = notice.regarding.namespace,
                        name = notice.regarding.name,
                        reason = notice.reason.as_str(),
                        text = notice.message,
                        "telling"
                    );
                    self.poster.post(notice);
                }
                Action::Allocate(job) => self.allocate(job),
                Action::Release(release) => {
                    let (writer, poster) = (self.writer.clone(), self.poster.clone());
                    self.running.spawn(async move {
                        let key = object_key(&release.claim.metadata);
                        let claim = writer.release(&release).await;
                        if claim.as_ref().is_some_and(|claim| {
                            claim
                                .status
                                .as_ref()
                                .is_none_or(|status| status.allocation.is_none())
                        }) {
                            poster.post(Notice {
                                regarding: claim::reference(&release.claim),
                                reason: EventReason::Released,
                                message: format!("released the allocation: {}", release.why),
                            });
                        }
                        Done::Release(key, claim.map(Box::new))
                    });
                }
            }
        }
    }

    fn allocate(&mut self, job: Job) {
        let (writer, poster) = (self.writer.clone(), self.poster.clone());
        self.running.spawn(async move {
            let (pod, node) = (job.pod.clone(), job.node.clone());
            let told: Vec<_> = job
                .writes
                .iter()
                .map(|write| (claim::reference(&write.claim), write.summary.clone()))
                .collect();
            let outcome = writer.allocate(job).await;
            if outcome.failure.is_none() {
                for (regarding, summary) in told {
                    tracing::info!(
                        namespace = regarding.namespace,
                        claim = regarding.name,
                        pod = pod.name,
                        node,
                        summary,
                        "allocated"
                    );
                    poster.post(Notice {
                        regarding,
                        reason: EventReason::Allocated,
                        message: format!(
                            "{summary}, for pod {}",
                            pod.name.as_deref().unwrap_or_default()
                        ),
                    });
                }
            }
            Done::Job(outcome)
        });
    }

    fn done(&mut self, done: Result<Done, tokio::task::JoinError>) {
        let now = Instant::now();
        match done {
            Ok(Done::Job(outcome)) => self.planner.written(outcome, now),
            Ok(Done::Release(key, claim)) => {
                self.planner.released(&key, claim.map(|claim| *claim), now)
            }
            Err(error) => {
                // What the write has done is unknown now; a fresh start reads everything again.
                tracing::error!(%error, "a write ended unexpectedly; starting over");
                self.stop.cancel();
            }
        }
    }
}

/// Kubernetes keeps times by the second.
fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
