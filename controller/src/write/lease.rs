//! Leader election by Lease: of several replicas only the holder allocates.
//!
//! The protocol of Kubernetes components: the holder renews; candidates observe the renewals with their own clocks and
//! acquire the lease when it was not renewed for its duration. A holder that cannot renew stops leading before another
//! candidate can acquire the lease. Every change is guarded by the resource version. Wall clocks decide nothing.
//!
//! A term starts when [`leader`] names this replica to the admission policy. [`Candidate`] decides; [`LeaseElection`] sends
//! the requests.

use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::leader::GpuControllerLeader;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::operate::clock::Clock;
use crate::operate::health::Health;

mod candidate;
mod leader;
mod term;

use candidate::{Candidate, Step};
use leader::Named;
pub use term::Term;

/// Name of the Lease object.
pub const LEASE_NAME: &str = "drava-controller";
/// Time without renewal after which another candidate may acquire the lease.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time after a renewal for which the holder sends requests.
const VALIDITY: Duration = Duration::from_secs(10);
/// Time-out of one request of the holder.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(4);
/// Time between renewals, and between attempts to acquire the lease.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Minimum time between rounds.
const MIN_PAUSE: Duration = Duration::from_millis(500);
/// Time-out of one request for the lease.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

// A request that is sent at the end of the validity ends before another candidate can acquire the lease.
const _: () =
    assert!(VALIDITY.as_millis() + WRITE_TIMEOUT.as_millis() < LEASE_DURATION.as_millis());

// Two renewals share a connection. One that a request without an answer leaves is not used by the next one, which is sent
// within the validity. And no request is repeated by the client: it could be sent after the validity.
const _: () = assert!(
    RETRY_PERIOD.as_millis() < drava_connection::MAX_IDLE.as_millis()
        && drava_connection::MAX_IDLE.as_millis() < REQUEST_TIMEOUT.as_millis()
        && RETRY_PERIOD.as_millis() + REQUEST_TIMEOUT.as_millis() + MIN_PAUSE.as_millis()
            < VALIDITY.as_millis()
);

/// Why a round has failed.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error("cannot {0}")]
    Request(&'static str, #[source] Box<kube::Error>),
    #[error("cannot {0}: request timed out")]
    TimedOut(&'static str),
}

/// An election by Lease.
#[derive(Debug)]
pub struct LeaseElection {
    terms: watch::Receiver<Option<Arc<Term>>>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl LeaseElection {
    /// Participates in the election until [`Self::release`].
    #[must_use]
    pub fn start(
        client: Client,
        namespace: &str,
        identity: &str,
        clock: Clock,
        health: Arc<Health>,
    ) -> Self {
        let (sender, terms) = watch::channel(None);
        let stop = CancellationToken::new();
        let participant = Participant {
            leases: Api::namespaced(client.clone(), namespace),
            leaders: Api::all(client),
            candidate: Candidate::new(identity.to_owned(), clock.clone()),
            clock,
            health,
            elected: None,
            terms: sender,
        };
        let task = tokio::spawn(participant.run(stop.clone()));
        Self { terms, stop, task }
    }

    /// Returns the newest term of this replica, which may have ended.
    #[must_use]
    pub fn terms(&self) -> watch::Receiver<Option<Arc<Term>>> {
        self.terms.clone()
    }

    /// Ends the term, releases the lease and stops participating. To be called when no write is in flight.
    pub async fn release(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!(%error, "election task aborted");
        }
    }
}

/// Sends the requests of a candidate.
struct Participant {
    leases: Api<Lease>,
    leaders: Api<GpuControllerLeader>,
    candidate: Candidate,
    clock: Clock,
    health: Arc<Health>,
    /// Term that has not started yet: the admission policy does not know this replica as the holder.
    elected: Option<Arc<Term>>,
    terms: watch::Sender<Option<Arc<Term>>>,
}

impl Participant {
    async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let started_at = self.clock.now();
            match self.round().await {
                Ok(true) => self.health.confirm_lease(),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(error = describe(&error), lease = LEASE_NAME, "round failed")
                }
            }
            if let Err(error) = self.start_term().await {
                tracing::warn!(error = describe(&error), "cannot start leading; will retry");
            }
            let elapsed = self.clock.now().saturating_sub(started_at);
            tokio::select! {
                () = tokio::time::sleep(RETRY_PERIOD.saturating_sub(elapsed).max(MIN_PAUSE)) => {}
                () = stop.cancelled() => {}
            }
        }
        if let Err(error) = self.release().await {
            tracing::warn!(
                error = describe(&error),
                lease = LEASE_NAME,
                "cannot release the lease; it expires by itself"
            );
        }
    }

    /// Renews or acquires the lease. Returns whether this replica or another one holds it.
    async fn round(&mut self) -> Result<bool, RoundError> {
        let mut step = self.candidate.start(&now());
        loop {
            let sent_at = self.clock.now();
            let written = match step {
                Step::Read => {
                    let lease = request("read the Lease", self.leases.get_opt(LEASE_NAME)).await?;
                    step = self.candidate.read(lease, &now());
                    if matches!(step, Step::Wait) {
                        return Ok(true);
                    }
                    continue;
                }
                Step::Create(lease) => {
                    request(
                        "create the Lease",
                        self.leases.create(&PostParams::default(), &lease),
                    )
                    .await
                }
                Step::Replace(lease) => {
                    request(
                        "replace the Lease",
                        self.leases
                            .replace(LEASE_NAME, &PostParams::default(), &lease),
                    )
                    .await
                }
                Step::Wait => return Ok(false),
            };
            step = match written {
                Ok(lease) => {
                    if let Some(term) = self.candidate.written(lease, sent_at) {
                        self.elected = Some(term);
                    }
                    return Ok(true);
                }
                Err(error) if error.is_conflict() => self.candidate.conflicted(),
                Err(error) => return Err(error),
            };
        }
    }

    /// Names this replica as the leader, then starts the term for which it was elected.
    async fn start_term(&mut self) -> Result<(), RoundError> {
        let Some(term) = &self.elected else {
            return Ok(());
        };
        match leader::name(&self.leaders, self.candidate.identity(), term).await? {
            Named::Yes => {}
            Named::NotServed => tracing::warn!(
                "the API server does not serve GpuControllerLeader, so it accepts writes of replicas that have lost the lease; \
                 apply the custom resource definitions of the chart"
            ),
            Named::TermEnded => {
                self.elected = None;
                return Ok(());
            }
        }
        tracing::info!("started leading");
        self.terms.send_replace(self.elected.take());
        Ok(())
    }

    async fn release(&mut self) -> Result<(), RoundError> {
        let lease = request("read the Lease", self.leases.get_opt(LEASE_NAME)).await?;
        if let Some(released) = lease.and_then(|lease| self.candidate.released(lease)) {
            request(
                "release the Lease",
                self.leases
                    .replace(LEASE_NAME, &PostParams::default(), &released),
            )
            .await?;
        }
        Ok(())
    }
}

impl RoundError {
    /// Returns whether the object was changed or deleted by another request.
    fn is_conflict(&self) -> bool {
        matches!(self.code(), Some(404 | 409))
    }

    fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// HTTP status of the response.
    fn code(&self) -> Option<u16> {
        match self {
            Self::Request(_, error) => match error.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            Self::TimedOut(_) => None,
        }
    }
}

async fn request<T>(
    verb: &'static str,
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, RoundError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, response).await {
        Ok(response) => response.map_err(|error| RoundError::Request(verb, Box::new(error))),
        Err(_) => Err(RoundError::TimedOut(verb)),
    }
}

fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}

#[cfg(test)]
mod tests;
