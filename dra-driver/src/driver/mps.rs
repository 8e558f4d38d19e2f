//! Watches the daemons of MPS: starts those that have ended, ends those that no claim needs, and reports and heals faults.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drava_api::error::describe;
use drava_api::event::EventReason;
use tokio_util::sync::CancellationToken;

use super::until;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::metrics::operations::MpsOperations;
use crate::mps::{Daemons, Server};
use crate::node::claim::ClaimRef;
use crate::prepare::effects::NodeEffects;
use crate::report::Subject;

/// Time between two looks at a daemon.
const PERIOD: Duration = Duration::from_secs(1);

/// How long programs have to end after a fault, before their server is ended: until then it takes no new program.
const FAULT_GRACE: Duration = Duration::from_secs(2);

/// What is done about the server of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Nothing.
    None,
    /// The fault is new: it is reported at the claims.
    Report,
    /// Its programs had time to end.
    EndServers,
}

/// Returns what is done next. `fault_since` is when the fault was first seen, and is updated.
fn step(server: Server, fault_since: &mut Option<Instant>, now: Instant) -> Step {
    match (server, *fault_since) {
        (Server::NoDaemon | Server::Serving, _) => {
            *fault_since = None;
            Step::None
        }
        (Server::Fault, None) => {
            *fault_since = Some(now);
            Step::Report
        }
        (Server::Fault, Some(since)) if now.duration_since(since) >= FAULT_GRACE => {
            // A server that faults again is a new fault.
            *fault_since = None;
            Step::EndServers
        }
        (Server::Fault, Some(_)) => Step::None,
    }
}

/// Watches until `stop`.
pub(super) async fn run(
    claims: Arc<ClaimService<NodeEffects>>,
    daemons: Arc<Daemons>,
    operations: MpsOperations,
    stop: CancellationToken,
) {
    let mut watch = Watch {
        claims,
        daemons,
        operations,
        faults: BTreeMap::new(),
        failed: BTreeMap::new(),
    };
    while until(&stop, tokio::time::sleep(PERIOD)).await {
        let looked = blocking(move || {
            watch.look();
            watch
        });
        match looked.await {
            Ok(looked) => watch = looked,
            Err(error) => {
                tracing::error!(error = describe(&error), "cannot watch the MPS daemons");
                return;
            }
        }
    }
}

struct Watch {
    claims: Arc<ClaimService<NodeEffects>>,
    daemons: Arc<Daemons>,
    operations: MpsOperations,
    /// Time at which the fault of a server was first seen, by GPU.
    faults: BTreeMap<String, Option<Instant>>,
    /// Last error, by GPU.
    failed: BTreeMap<String, String>,
}

impl Watch {
    fn look(&mut self) {
        let gpus = match self.daemons.gpus() {
            Ok(gpus) => gpus,
            Err(error) => {
                self.note("", Some(describe(&error)));
                return;
            }
        };
        self.faults.retain(|gpu, _| gpus.contains(gpu));
        self.failed.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            let looked = self.look_at(&gpu);
            self.note(&gpu, looked.err());
        }
    }

    fn look_at(&mut self, gpu: &str) -> Result<(), String> {
        let applier = &self.claims.applier;
        let started = applier.settle_mps(gpu).map_err(|error| describe(&error))?;
        if !started.is_empty() {
            self.operations.restarts.inc();
            self.report(
                &started,
                &format!(
                    "the MPS control daemon of GPU {gpu} had ended and was started again: the programs of all claims on the GPU get \
                     errors and must start again"
                ),
            );
        }
        let server = self.daemons.server(gpu).map_err(|error| describe(&error))?;
        let since = self.faults.entry(gpu.to_owned()).or_default();
        match step(server, since, Instant::now()) {
            Step::None => {}
            Step::Report => {
                self.operations.faults.inc();
                let claims = self.claims.applier.spatial_claims(None);
                let claims = claims
                    .map_err(|error| describe(&error))?
                    .unwrap_or_default();
                let hit = claims.get(gpu).map_or(&[][..], Vec::as_slice);
                self.report(
                    hit,
                    &format!(
                        "a program had a fatal fault on GPU {gpu}: the programs of all claims that share its multiprocessors get \
                         errors and must start again"
                    ),
                );
            }
            Step::EndServers => {
                let ended = self.daemons.end_servers(gpu);
                ended.map_err(|error| describe(&error))?;
                tracing::info!(
                    gpu.uuid = gpu,
                    "ended the MPS server of a GPU after a fault"
                );
            }
        }
        Ok(())
    }

    fn report(&self, claims: &[ClaimRef], note: &str) {
        for claim in claims {
            let subject = Subject::Claim(claim.clone());
            self.claims
                .reporter
                .event(subject, EventReason::MpsFault, note.to_owned());
        }
    }

    /// Logs an error once.
    fn note(&mut self, gpu: &str, error: Option<String>) {
        let Some(error) = error else {
            self.failed.remove(gpu);
            return;
        };
        if self.failed.get(gpu) != Some(&error) {
            tracing::warn!(gpu.uuid = gpu, error, "cannot watch the MPS daemon");
            self.failed.insert(gpu.to_owned(), error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_fault_once_and_ends_server_after_grace() {
        let start = Instant::now();
        let mut since = None;
        let mut at =
            |server, millis| step(server, &mut since, start + Duration::from_millis(millis));
        assert_eq!(at(Server::Serving, 0), Step::None);
        assert_eq!(at(Server::Fault, 10), Step::Report);
        assert_eq!(at(Server::Fault, 1000), Step::None);
        assert_eq!(at(Server::Fault, 2010), Step::EndServers);
        assert_eq!(at(Server::Serving, 3000), Step::None);
        assert_eq!(at(Server::Fault, 3500), Step::Report, "a new fault");
        assert_eq!(at(Server::NoDaemon, 3600), Step::None);
        assert_eq!(at(Server::Fault, 3700), Step::Report, "of a new daemon");
    }
}
