//! One of several replicas allocates: the one that holds the Lease.
//!
//! The usual protocol of Kubernetes components: the holder renews, the others watch the renewals with their own
//! clocks and take over when none came for the lease's duration. A holder that cannot renew stops being one well
//! before anybody else can become one, whatever the reason; every change is guarded by the resource version.

use std::time::Duration;

use drava_api::error::describe;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Name of the Lease object.
pub const LEASE_NAME: &str = "drava-controller";
/// Time without renewal after which others may take the lease.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time without renewal after which the holder gives up by itself.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between renewals, and between looks at somebody else's lease.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Longest that one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Says whether this replica leads.
pub trait Election {
    /// A value that is true while this replica leads.
    fn leading(&self) -> watch::Receiver<bool>;
}

/// An election by Lease.
#[derive(Debug)]
pub struct LeaseElection {
    leading: watch::Receiver<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Election for LeaseElection {
    fn leading(&self) -> watch::Receiver<bool> {
        self.leading.clone()
    }
}

impl LeaseElection {
    /// Takes part in the election until `stop`; then the lease is released.
    #[must_use]
    pub fn start(client: Client, namespace: &str, identity: &str, stop: CancellationToken) -> Self {
        let (sender, leading) = watch::channel(false);
        let candidate = Candidate {
            leases: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            seen: None,
        };
        let task = tokio::spawn(candidate.run(sender, stop));
        Self { leading, task }
    }

    /// Waits until the lease is released after `stop`.
    pub async fn finished(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the election ended unexpectedly");
        }
    }
}

struct Candidate {
    leases: Api<Lease>,
    identity: String,
    /// Renewal last seen of somebody else, and when it was seen.
    seen: Option<(Option<MicroTime>, Instant)>,
}

impl Candidate {
    async fn run(mut self, leading: watch::Sender<bool>, stop: CancellationToken) {
        let mut renewed: Option<Instant> = None;
        loop {
            let asked = Instant::now();
            // Never waits past the moment at which an unrenewed lease has to be given up.
            let give_up = renewed.map(|renewed| renewed + RENEW_DEADLINE);
            let no_later = |duration: Duration| {
                give_up.map_or(asked + duration, |at| at.min(asked + duration))
            };
            match tokio::time::timeout_at(no_later(REQUEST_TIMEOUT), self.try_acquire()).await {
                Ok(Ok(true)) => {
                    // The lease runs from before the request: it may have been answered late.
                    renewed = Some(asked);
                    if !leading.send_replace(true) {
                        tracing::info!(identity = self.identity, "leading");
                    }
                }
                Ok(Ok(false)) => renewed = None,
                Ok(Err(error)) => {
                    tracing::warn!(
                        error = describe(&error),
                        lease = LEASE_NAME,
                        "cannot renew or take the lease"
                    )
                }
                Err(_) => {
                    tracing::warn!(lease = LEASE_NAME, "no answer to the request for the lease")
                }
            }
            let held = renewed.is_some_and(|renewed| renewed.elapsed() < RENEW_DEADLINE);
            if !held && leading.send_replace(false) {
                tracing::warn!(identity = self.identity, "no longer leading");
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY_PERIOD) => {}
                () = tokio::time::sleep_until(give_up.unwrap_or(asked)), if give_up.is_some_and(|at| at > Instant::now()) && held => {}
                () = stop.cancelled() => break,
            }
        }
        if leading.send_replace(false)
            && let Err(error) = self.release().await
        {
            tracing::warn!(
                error = describe(&error),
                lease = LEASE_NAME,
                "cannot release the lease; it runs out by itself"
            );
        }
    }

    /// Takes or renews the lease; false when somebody else holds it.
    async fn try_acquire(&mut self) -> Result<bool, kube::Error> {
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.leases.get_opt(LEASE_NAME).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE_NAME.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.claim_lease(LeaseSpec::default(), now)),
            };
            return acquired(self.leases.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() && !self.has_run_out(&spec) {
            return Ok(false);
        }
        lease.spec = Some(self.claim_lease(spec, now));
        acquired(
            self.leases
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await,
        )
    }

    /// Whether the holder has not renewed for the lease's duration by this replica's clock.
    fn has_run_out(&mut self, spec: &LeaseSpec) -> bool {
        let now = Instant::now();
        match &self.seen {
            Some((renewal, since)) if *renewal == spec.renew_time => {
                now.duration_since(*since) > LEASE_DURATION
            }
            _ => {
                self.seen = Some((spec.renew_time.clone(), now));
                false
            }
        }
    }

    fn claim_lease(&self, spec: LeaseSpec, now: MicroTime) -> LeaseSpec {
        let renewal = spec.holder_identity.as_deref() == Some(&self.identity);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            acquire_time: if renewal {
                spec.acquire_time
            } else {
                Some(now.clone())
            },
            renew_time: Some(now),
            lease_transitions: match spec.lease_transitions {
                Some(count) if !renewal => Some(count.saturating_add(1)),
                count => Some(count.unwrap_or_default()),
            },
            ..spec
        }
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.leases.get_opt(LEASE_NAME).await? else {
            return Ok(());
        };
        let Some(spec) = lease.spec.as_mut() else {
            return Ok(());
        };
        if spec.holder_identity.as_deref() == Some(&self.identity) {
            spec.holder_identity = Some(String::new());
            self.leases
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await?;
        }
        Ok(())
    }
}

/// A conflict means that somebody else was faster.
fn acquired(answer: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match answer {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
