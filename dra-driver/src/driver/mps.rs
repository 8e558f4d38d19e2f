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
use crate::metrics::telemetry::GpuTable;
use crate::mps::{Daemons, Server};
use crate::node::claim::ClaimRef;
use crate::prepare::effects::NodeEffects;
use crate::report::Subject;

/// Time between two looks at a daemon.
const PERIOD: Duration = Duration::from_secs(1);

/// Looks between two comparisons of the daemons with the records of the claims, which reads all of these.
const COMPARE_EVERY: u32 = 10;

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

/// What was seen of the GPU before.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// When the present fault of the server was first seen.
    fault_since: Option<Instant>,
    /// When a fault was reported last.
    reported: Option<Instant>,
    /// Number of XIDs of the GPU that programs have caused.
    xids: u64,
}

/// Returns what is done next, and updates what was seen. A server whose programs end at once has its fault for a moment only, which an
/// XID shows too.
fn step(server: Server, xids: u64, seen: &mut Seen, now: Instant) -> Step {
    let is_new_xid = xids > seen.xids;
    seen.xids = xids;
    let since = match server {
        Server::NoDaemon | Server::Serving => None,
        Server::Fault => Some(seen.fault_since.unwrap_or(now)),
    };
    let is_new_fault = since.is_some() && seen.fault_since.is_none();
    seen.fault_since = since;
    let is_over = |time: Instant| now.duration_since(time) >= FAULT_GRACE;
    if (is_new_fault || is_new_xid) && seen.reported.is_none_or(is_over) {
        seen.reported = Some(now);
        return Step::Report;
    }
    if since.is_some_and(is_over) {
        // A server that faults again is a new fault.
        seen.fault_since = None;
        return Step::EndServers;
    }
    Step::None
}

/// Watches until `stop`.
pub(super) async fn run(
    claims: Arc<ClaimService<NodeEffects>>,
    daemons: Arc<Daemons>,
    (operations, gpus): (MpsOperations, GpuTable),
    stop: CancellationToken,
) {
    let mut watch = Watch {
        claims,
        daemons,
        operations,
        gpus,
        looks: 0,
        seen: BTreeMap::new(),
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
    gpus: GpuTable,
    looks: u32,
    /// By GPU.
    seen: BTreeMap<String, Seen>,
    /// Last error, by GPU.
    failed: BTreeMap<String, String>,
}

impl Watch {
    fn look(&mut self) {
        let compares = self.looks.is_multiple_of(COMPARE_EVERY);
        self.looks = self.looks.wrapping_add(1);
        let gpus = match self.watched(compares) {
            Ok(gpus) => gpus,
            Err(error) => {
                self.note("", Some(error));
                return;
            }
        };
        self.seen.retain(|gpu, _| gpus.contains_key(gpu));
        self.failed.retain(|gpu, _| gpus.contains_key(gpu));
        for (gpu, has_files) in gpus {
            let looked = self.look_at(&gpu, compares, has_files);
            self.note(&gpu, looked.err());
        }
    }

    /// Returns the GPUs that have a daemon, or should have one, and whether there are files of one.
    fn watched(&self, compares: bool) -> Result<BTreeMap<String, bool>, String> {
        let mut gpus = BTreeMap::new();
        if compares {
            let claims = self.claims.applier.spatial_claims(None);
            let claims = claims.map_err(|error| describe(&error))?;
            gpus.extend(claims.by_gpu.into_keys().map(|gpu| (gpu, false)));
        }
        let with_files = self.daemons.gpus().map_err(|error| describe(&error))?;
        gpus.extend(with_files.into_iter().map(|gpu| (gpu, true)));
        Ok(gpus)
    }

    fn look_at(&mut self, gpu: &str, compares: bool, has_files: bool) -> Result<(), String> {
        if compares {
            let trimmed = self.daemons.trim_logs(gpu);
            trimmed.map_err(|error| describe(&error))?;
        }
        let mut server = self.daemons.server(gpu).map_err(|error| describe(&error))?;
        if compares || server == Server::NoDaemon {
            let settled = self.claims.applier.settle_mps(gpu);
            let started = settled.map_err(|error| describe(&error))?;
            // Without files it may be the first daemon of the GPU, whose claim is being prepared.
            if !started.is_empty() && has_files {
                self.operations.restarts.inc();
                self.report(
                    &started,
                    &format!(
                        "the MPS control daemon of GPU {gpu} had ended and was started again: the programs of all claims on the GPU get \
                         errors and must start again"
                    ),
                );
            }
            if !started.is_empty() {
                server = Server::Serving;
            }
        }
        let xids = self.gpus.application_xids(gpu);
        let seen = self.seen.entry(gpu.to_owned()).or_insert(Seen {
            fault_since: None,
            reported: None,
            xids,
        });
        match step(server, xids, seen, Instant::now()) {
            Step::None => {}
            Step::Report => {
                self.operations.faults.inc();
                let claims = self.claims.applier.spatial_claims(None);
                let claims = claims.map_err(|error| describe(&error))?.by_gpu;
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
        let mut seen = Seen {
            fault_since: None,
            reported: None,
            xids: 3,
        };
        let mut at = |millis, server, xids| {
            let now = start + Duration::from_millis(millis);
            step(server, xids, &mut seen, now)
        };
        assert_eq!(at(0, Server::Serving, 3), Step::None);
        assert_eq!(at(10, Server::Fault, 3), Step::Report);
        assert_eq!(at(1000, Server::Fault, 4), Step::None, "the same fault");
        assert_eq!(at(2010, Server::Fault, 4), Step::EndServers);
        assert_eq!(at(3000, Server::Serving, 4), Step::None);
        assert_eq!(at(4500, Server::Fault, 4), Step::Report, "a new fault");
        assert_eq!(at(4600, Server::NoDaemon, 4), Step::None);
        assert_eq!(at(9000, Server::Fault, 4), Step::Report, "of a new daemon");
    }

    #[test]
    fn reports_fault_whose_programs_have_ended() {
        let start = Instant::now();
        let mut seen = Seen {
            fault_since: None,
            reported: None,
            xids: 0,
        };
        let mut at = |millis, xids| {
            let now = start + Duration::from_millis(millis);
            step(Server::Serving, xids, &mut seen, now)
        };
        assert_eq!(at(0, 0), Step::None);
        assert_eq!(at(1000, 1), Step::Report);
        assert_eq!(at(2000, 1), Step::None);
        assert_eq!(at(5000, 2), Step::Report);
    }
}
