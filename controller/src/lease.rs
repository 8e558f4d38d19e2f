//! Leader election by Lease: of several replicas only the holder allocates.
//!
//! The protocol of Kubernetes components: the holder renews; candidates observe the renewals with their own clocks and
//! acquire the lease when it was not renewed for its duration. A holder that cannot renew stops leading before another
//! candidate can acquire the lease. Every change is guarded by the resource version.

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
/// Time without renewal after which another candidate may acquire the lease.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time without renewal after which the holder stops leading.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between renewals, and between attempts to acquire the lease.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Time-out of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Leader election.
pub trait Election {
    /// Returns a value that is true while this replica leads.
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
    /// Participates in the election until `stop`; then releases the lease.
    #[must_use]
    pub fn start(client: Client, namespace: &str, identity: &str, stop: CancellationToken) -> Self {
        let (sender, leading) = watch::channel(false);
        let candidate = Candidate {
            leases: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            observed: None,
        };
        let task = tokio::spawn(candidate.run(sender, stop));
        Self { leading, task }
    }

    /// Waits until the lease is released after `stop`.
    pub async fn finished(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "election task aborted");
        }
    }
}

struct Candidate {
    leases: Api<Lease>,
    identity: String,
    /// Last observed renewal of another holder, and when it was observed.
    observed: Option<(Option<MicroTime>, Instant)>,
}

impl Candidate {
    async fn run(mut self, leading: watch::Sender<bool>, stop: CancellationToken) {
        let mut renewed: Option<Instant> = None;
        loop {
            let requested_at = Instant::now();
            // An unrenewed holder stops leading at this time, so no wait exceeds it.
            let stop_leading_at = renewed.map(|renewed| renewed + RENEW_DEADLINE);
            let no_later = |duration: Duration| {
                stop_leading_at.map_or(requested_at + duration, |at| {
                    at.min(requested_at + duration)
                })
            };
            match tokio::time::timeout_at(no_later(REQUEST_TIMEOUT), self.try_acquire()).await {
                Ok(Ok(true)) => {
                    // The response may be late, so the lease starts with the request.
                    renewed = Some(requested_at);
                    if !leading.send_replace(true) {
                        tracing::info!(identity = self.identity, "started leading");
                    }
                }
                Ok(Ok(false)) => renewed = None,
                Ok(Err(error)) => {
                    tracing::warn!(
                        error = describe(&error),
                        lease = LEASE_NAME,
                        "cannot renew or acquire the lease"
                    )
                }
                Err(_) => {
                    tracing::warn!(
                        lease = LEASE_NAME,
                        "cannot renew or acquire the lease: request timed out"
                    )
                }
            }
            let is_holder = renewed.is_some_and(|renewed| renewed.elapsed() < RENEW_DEADLINE);
            if !is_holder && leading.send_replace(false) {
                tracing::warn!(identity = self.identity, "stopped leading");
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY_PERIOD) => {}
                () = tokio::time::sleep_until(stop_leading_at.unwrap_or(requested_at)), if stop_leading_at.is_some_and(|at| at > Instant::now()) && is_holder => {}
                () = stop.cancelled() => break,
            }
        }
        if leading.send_replace(false)
            && let Err(error) = self.release().await
        {
            tracing::warn!(
                error = describe(&error),
                lease = LEASE_NAME,
                "cannot release the lease; it expires by itself"
            );
        }
    }

    /// Acquires or renews the lease. Returns false if another candidate holds it.
    async fn try_acquire(&mut self) -> Result<bool, kube::Error> {
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.leases.get_opt(LEASE_NAME).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE_NAME.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.held_lease(LeaseSpec::default(), now)),
            };
            return acquired(self.leases.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() && !self.has_expired(&spec) {
            return Ok(false);
        }
        lease.spec = Some(self.held_lease(spec, now));
        acquired(
            self.leases
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await,
        )
    }

    /// Returns whether the lease was not renewed for its duration, by the clock of this replica.
    fn has_expired(&mut self, spec: &LeaseSpec) -> bool {
        let now = Instant::now();
        match &self.observed {
            Some((renewal, since)) if *renewal == spec.renew_time => {
                now.duration_since(*since) > LEASE_DURATION
            }
            _ => {
                self.observed = Some((spec.renew_time.clone(), now));
                false
            }
        }
    }

    fn held_lease(&self, spec: LeaseSpec, now: MicroTime) -> LeaseSpec {
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

/// A conflict means that another candidate has changed the lease.
fn acquired(response: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match response {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
