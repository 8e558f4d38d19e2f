//! Watches the daemons of MPS: starts those that have ended, replaces those that take no programs, ends those that no claim needs, and
//! reports and heals faults.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drava_api::error::describe;
use drava_api::event::EventReason;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::until;
use crate::agent::Terminate;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::metrics::operations::MpsOperations;
use crate::metrics::telemetry::GpuTable;
use crate::mps::{Daemons, MpsError, Server};
use crate::node::claim::ClaimRef;
use crate::prepare::effects::NodeEffects;
use crate::report::Subject;

/// Time between two looks at a daemon.
const PERIOD: Duration = Duration::from_secs(1);

/// Looks between two comparisons of the daemons with the records of the claims, which reads all of these.
const COMPARE_EVERY: u32 = 10;

/// How long programs have to end after a fault, before their server is ended: until then it takes no new program.
const FAULT_GRACE: Duration = Duration::from_secs(1);

/// Time in which what shows a fault is of one fault: the state of the server and XIDs, in any order, also after the server was ended.
const SAME_FAULT: Duration = Duration::from_secs(3);

/// Longest time in which a program is ended on its server, before it is killed.
const TERMINATE: Duration = Duration::from_secs(1);

/// Returns what ends the work of programs before they are killed.
pub(super) fn terminate(daemons: Arc<Daemons>) -> Terminate {
    Arc::new(move |gpu, pid| {
        if let Err(error) = daemons.terminate_client(gpu.as_str(), pid, TERMINATE) {
            tracing::warn!(
                gpu.uuid = gpu.as_str(),
                pid,
                error = describe(&error),
                "a client of MPS is killed with its work; it may disturb the others of its server"
            );
        }
    })
}

/// What is done about the server of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Nothing.
    None,
    /// The fault is new: it is reported at the claims.
    Report(Fault),
    /// Its programs had time to end.
    EndServers,
}

/// What is known of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The server has it.
    OfServer,
    /// The GPU has an XID. The program may have left MPS; the server of one that has not may have ended since.
    OfProgram,
}

impl Fault {
    fn note(self, gpu: &str) -> String {
        match self {
            Self::OfServer => format!(
                "a program had a fatal fault on GPU {gpu}: the programs of all claims that share its multiprocessors get errors and must \
                 start again"
            ),
            Self::OfProgram => format!(
                "a program had a fatal fault on GPU {gpu}: unless it had left MPS, the programs of all claims that share its \
                 multiprocessors get errors and must start again"
            ),
        }
    }
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
        Server::NoDaemon | Server::Serving | Server::Quitting => None,
        Server::Fault => Some(seen.fault_since.unwrap_or(now)),
    };
    let is_new_fault = since.is_some() && seen.fault_since.is_none();
    seen.fault_since = since;
    let is_past = |time: Instant, length| now.duration_since(time) >= length;
    // Of the same fault may be another XID, which costs no look.
    if since.is_some_and(|time| is_past(time, FAULT_GRACE)) {
        // A server that faults again is a new fault.
        seen.fault_since = None;
        return Step::EndServers;
    }
    let is_other = |time| is_past(time, SAME_FAULT);
    if (is_new_fault || is_new_xid) && seen.reported.is_none_or(is_other) {
        seen.reported = Some(now);
        return Step::Report(match since {
            Some(_) => Fault::OfServer,
            None => Fault::OfProgram,
        });
    }
    Step::None
}

/// Returns how long the next look can wait until the programs of a fault had time to end; `None` without a fault.
fn time_to_end(seen: &Seen, now: Instant) -> Option<Duration> {
    let since = seen.fault_since?;
    Some((since + FAULT_GRACE).saturating_duration_since(now))
}

/// Looks once, and again when the programs of a fault had time to end: not only at the next turn, which may just be too early. `look`
/// returns how long that takes.
fn look_until_healed(mut look: impl FnMut() -> Option<Duration>, mut wait: impl FnMut(Duration)) {
    if let Some(time) = look() {
        wait(time);
        look();
    }
}

/// Time after which a daemon that takes no new program is replaced: one that ends by itself is gone before.
const QUITTING: Duration = Duration::from_secs(2);

/// Time after which a daemon without an answer is replaced, with the programs of all claims: on a node without processor time it is the
/// client that takes long.
const UNANSWERED: Duration = Duration::from_secs(30);

/// Returns how long a daemon may stay so; `None` for one that serves, and where it is not the daemon that fails.
const fn patience(found: &Result<Server, MpsError>) -> Option<Duration> {
    match found {
        Ok(Server::Quitting) => Some(QUITTING),
        Err(MpsError::NoAnswer { .. }) => Some(UNANSWERED),
        _ => None,
    }
}

/// Longest time between two attempts to start a daemon.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// When a daemon that does not start is tried again: after 1, 2, 4 … 60 seconds.
#[derive(Debug, Default)]
struct Attempts {
    failed: u32,
    next: Option<Instant>,
}

impl Attempts {
    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    fn note(&mut self, has_started: bool, now: Instant) {
        if has_started {
            *self = Self::default();
            return;
        }
        let pause = PERIOD.saturating_mul(1_u32.checked_shl(self.failed).unwrap_or(u32::MAX));
        self.failed = self.failed.saturating_add(1);
        self.next = Some(now + pause.min(LONGEST_PAUSE));
    }
}

/// Looks at GPUs, each in a thread: one that takes long delays no other.
struct Looks<W>(BTreeMap<String, JoinHandle<W>>);

impl<W: Send + 'static> Looks<W> {
    /// Starts a look at each of the GPUs whose last look is over, with what that one returned.
    async fn start<F>(&mut self, gpus: BTreeMap<String, bool>, new: impl Fn(&str) -> W, look: F)
    where
        F: Fn(&mut W, bool) + Clone + Send + 'static,
    {
        self.0
            .retain(|gpu, running| gpus.contains_key(gpu) || !running.is_finished());
        for (gpu, has_files) in gpus {
            let mut watch = match self.0.entry(gpu.clone()) {
                Entry::Occupied(running) if !running.get().is_finished() => continue,
                // After a panic it begins anew.
                Entry::Occupied(ended) => ended.remove().await.unwrap_or_else(|_| new(&gpu)),
                Entry::Vacant(_) => new(&gpu),
            };
            let look = look.clone();
            let running = tokio::task::spawn_blocking(move || {
                look(&mut watch, has_files);
                watch
            });
            self.0.insert(gpu, running);
        }
    }
}

/// Watches until `stop`.
pub(super) async fn run(
    claims: Arc<ClaimService<NodeEffects>>,
    daemons: Arc<Daemons>,
    (operations, gpus): (MpsOperations, GpuTable),
    stop: CancellationToken,
) {
    let node = Arc::new(Node {
        claims,
        daemons,
        operations,
        gpus,
    });
    let mut looks = Looks(BTreeMap::new());
    let mut claimed = BTreeSet::new();
    let mut failed = None;
    for turn in 0_u32.. {
        if !until(&stop, tokio::time::sleep(PERIOD)).await {
            return;
        }
        let (watched, compares) = (Arc::clone(&node), turn.is_multiple_of(COMPARE_EVERY));
        let watched = blocking(move || {
            let found = watched.watched(compares, &mut claimed);
            (found, claimed)
        });
        let found = match watched.await {
            Ok((found, kept)) => {
                claimed = kept;
                found
            }
            Err(error) => {
                tracing::error!(error = describe(&error), "cannot watch the MPS daemons");
                return;
            }
        };
        match found {
            Ok(gpus) => {
                failed = None;
                let node = Arc::clone(&node);
                let look = move |watch: &mut Watch, has_files| {
                    look_until_healed(
                        || {
                            watch.look(&node, has_files);
                            let seen = watch.seen.as_ref()?;
                            time_to_end(seen, Instant::now())
                        },
                        std::thread::sleep,
                    );
                };
                looks.start(gpus, Watch::new, look).await;
            }
            Err(error) if failed.as_ref() != Some(&error) => {
                tracing::warn!(error, "cannot find the MPS daemons");
                failed = Some(error);
            }
            Err(_) => {}
        }
    }
}

/// What all looks share.
struct Node {
    claims: Arc<ClaimService<NodeEffects>>,
    daemons: Arc<Daemons>,
    operations: MpsOperations,
    gpus: GpuTable,
}

impl Node {
    /// Returns the GPUs that have a daemon, or should have one, and whether there are files of one. `claimed` are those of the last
    /// comparison with the claims.
    fn watched(
        &self,
        compares: bool,
        claimed: &mut BTreeSet<String>,
    ) -> Result<BTreeMap<String, bool>, String> {
        if compares {
            let claims = self.claims.applier.spatial_claims(None);
            let claims = claims.map_err(|error| describe(&error))?;
            *claimed = claims.by_gpu.into_keys().collect();
        }
        let with_files = self.daemons.gpus().map_err(|error| describe(&error))?;
        let mut gpus: BTreeMap<String, bool> =
            claimed.iter().map(|gpu| (gpu.clone(), false)).collect();
        gpus.extend(with_files.into_iter().map(|gpu| (gpu, true)));
        Ok(gpus)
    }

    fn report(&self, claims: &[ClaimRef], note: &str) {
        for claim in claims {
            let subject = Subject::Claim(claim.clone());
            self.claims
                .reporter
                .event(subject, EventReason::MpsFault, note.to_owned());
        }
    }
}

/// The watch over the daemon of a GPU.
struct Watch {
    gpu: String,
    looks: u32,
    seen: Option<Seen>,
    starts: Attempts,
    /// Since when the daemon gives no answer or takes no new program.
    useless_since: Option<Instant>,
    /// Last error.
    failed: Option<String>,
}

impl Watch {
    fn new(gpu: &str) -> Self {
        Self {
            gpu: gpu.to_owned(),
            looks: 0,
            seen: None,
            starts: Attempts::default(),
            useless_since: None,
            failed: None,
        }
    }

    /// Looks once. Logs an error once.
    fn look(&mut self, node: &Node, has_files: bool) {
        let error = self.try_look(node, has_files).err();
        if let Some(error) = &error
            && self.failed.as_ref() != Some(error)
        {
            tracing::warn!(gpu.uuid = self.gpu, error, "cannot watch the MPS daemon");
        }
        self.failed = error;
    }

    fn try_look(&mut self, node: &Node, has_files: bool) -> Result<(), String> {
        let gpu = self.gpu.as_str();
        let compares = self.looks.is_multiple_of(COMPARE_EVERY);
        self.looks = self.looks.wrapping_add(1);
        if compares {
            let trimmed = node.daemons.trim_logs(gpu);
            trimmed.map_err(|error| describe(&error))?;
        }
        let now = Instant::now();
        let daemon = node.daemons.running(gpu);
        let found = node.daemons.server(gpu);
        let patience = patience(&found);
        let since = patience.map(|_| self.useless_since.unwrap_or(now));
        self.useless_since = since;
        let is_over = |patience| since.is_some_and(|since| since.elapsed() >= patience);
        let useless = daemon.filter(|_| patience.is_some_and(is_over));
        let mut server = match useless {
            Some(_) => Server::NoDaemon,
            None => found.map_err(|error| describe(&error))?,
        };
        if server == Server::NoDaemon && !self.starts.is_due(now) {
            // As after the attempt before.
            return self.failed.clone().map_or(Ok(()), Err);
        }
        if compares || server == Server::NoDaemon {
            // Another one may run since.
            let replace = || {
                if useless.is_some() && node.daemons.running(gpu) == useless {
                    tracing::warn!(
                        gpu.uuid = gpu,
                        "the MPS daemon takes no programs and is replaced"
                    );
                    node.daemons.kill(gpu);
                }
            };
            let settled = node.claims.applier.settle_mps(gpu, replace);
            self.useless_since = None;
            self.starts.note(settled.is_ok(), Instant::now());
            let started = settled.map_err(|error| describe(&error))?;
            // Without files it may be the first daemon of the GPU, whose claim is being prepared.
            if !started.is_empty() && has_files {
                node.operations.restarts.inc();
                node.report(
                    &started,
                    &format!(
                        "the MPS control daemon of GPU {gpu} had ended, or took no programs, and was started again: the programs of all \
                         claims on the GPU get errors and must start again"
                    ),
                );
            }
            if !started.is_empty() {
                server = Server::Serving;
            }
        }
        let xids = node.gpus.application_xids(gpu);
        let seen = self.seen.get_or_insert(Seen {
            fault_since: None,
            reported: None,
            xids,
        });
        match step(server, xids, seen, Instant::now()) {
            Step::None => {}
            Step::Report(fault) => {
                node.operations.faults.inc();
                let claims = node.claims.applier.spatial_claims(None);
                let claims = claims.map_err(|error| describe(&error))?.by_gpu;
                let hit = claims.get(gpu).map_or(&[][..], Vec::as_slice);
                node.report(hit, &fault.note(gpu));
            }
            Step::EndServers => {
                let ended = node.daemons.end_servers(gpu);
                ended.map_err(|error| describe(&error))?;
                tracing::info!(
                    gpu.uuid = gpu,
                    "ended the MPS server of a GPU after a fault"
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that could not be started, or failed, says nothing about the daemon.
    #[test]
    fn replaces_a_daemon_only_for_what_it_does_itself() {
        let (gpu, command) = ("GPU".to_owned(), "get_server_list".to_owned());
        let failed = MpsError::Command {
            gpu: gpu.clone(),
            command: command.clone(),
            reason: "Resource temporarily unavailable".to_owned(),
        };
        for kept in [
            Err(failed),
            Ok(Server::Serving),
            Ok(Server::Fault),
            Ok(Server::NoDaemon),
        ] {
            assert_eq!(patience(&kept), None, "{kept:?}");
        }
        let silent = patience(&Err(MpsError::NoAnswer { gpu, command }));
        let quits = patience(&Ok(Server::Quitting));
        assert!(quits.is_some() && quits < silent, "{quits:?} {silent:?}");
    }

    #[tokio::test]
    async fn hung_daemon_delays_no_other() {
        let gpus = || BTreeMap::from(["hung", "well"].map(|gpu| (gpu.to_owned(), true)));
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = Arc::new(std::sync::Mutex::new(hangs));
        let (looked, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let look = move |watch: &mut (String, u32), _| {
            watch.1 += 1;
            if watch.0 == "hung" {
                let _ = hangs.lock().unwrap().recv();
            }
            looked.send(watch.clone()).unwrap();
        };
        let mut looks = Looks(BTreeMap::new());
        let new = |gpu: &str| (gpu.to_owned(), 0);
        let mut next = 1;
        while next <= 3 {
            looks.start(gpus(), new, look.clone()).await;
            if let Ok((gpu, number)) = seen.try_recv() {
                assert_eq!((gpu.as_str(), number), ("well", next));
                next += 1;
            }
            tokio::task::yield_now().await;
        }
        drop(release);
        // One look at a GPU at a time, however long it takes.
        while let Some((gpu, number)) = seen.recv().await {
            if gpu == "hung" {
                assert_eq!(number, 1);
                break;
            }
        }
    }

    #[test]
    fn start_that_fails_is_tried_ever_later() {
        let start = Instant::now();
        let mut attempts = Attempts::default();
        let mut now = start;
        let mut pauses = Vec::new();
        for _ in 0..40 {
            assert!(attempts.is_due(now));
            attempts.note(false, now);
            let next = attempts.next.unwrap();
            assert!(!attempts.is_due(next - Duration::from_millis(1)));
            pauses.push((next - now).as_secs());
            now = next;
        }
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses.last(), Some(&60));
        attempts.note(true, now);
        assert!(attempts.is_due(now));
    }

    const fn seen(xids: u64) -> Seen {
        Seen {
            fault_since: None,
            reported: None,
            xids,
        }
    }

    #[test]
    fn reports_fault_once_and_ends_server_after_grace() {
        let start = Instant::now();
        let mut seen = seen(3);
        let mut at = |millis, server, xids| {
            let now = start + Duration::from_millis(millis);
            step(server, xids, &mut seen, now)
        };
        let report = Step::Report(Fault::OfServer);
        assert_eq!(at(0, Server::Serving, 3), Step::None);
        assert_eq!(at(10, Server::Fault, 3), report);
        assert_eq!(at(1000, Server::Fault, 4), Step::None, "the same fault");
        assert_eq!(at(1010, Server::Fault, 5), Step::EndServers, "one more XID");
        assert_eq!(at(3000, Server::Serving, 5), Step::None);
        assert_eq!(at(4500, Server::Fault, 5), report, "a new fault");
        assert_eq!(at(4600, Server::NoDaemon, 5), Step::None);
        assert_eq!(at(9000, Server::Fault, 5), report, "of a new daemon");
    }

    #[test]
    fn reports_fault_whose_programs_have_ended() {
        let start = Instant::now();
        let mut seen = seen(0);
        let mut at = |millis, xids| {
            let now = start + Duration::from_millis(millis);
            step(Server::Serving, xids, &mut seen, now)
        };
        let report = Step::Report(Fault::OfProgram);
        assert_eq!(at(0, 0), Step::None);
        assert_eq!(at(1000, 1), report);
        assert_eq!(at(1900, 1), Step::None);
        assert_eq!(at(5000, 2), report);
        // No other program needs to start again because of one that has left MPS.
        assert!(
            Fault::OfProgram
                .note("GPU-1")
                .contains("unless it had left MPS")
        );
        assert!(!Fault::OfServer.note("GPU-1").contains("unless"));
    }

    /// The part of the product in "healed within 5 s": the rest is the end and the start of containers. Whenever the fault happens, and
    /// also when XIDs of it arrive later than the state of the server.
    #[test]
    fn fault_is_seen_and_server_ended_within_two_seconds() {
        let start = Instant::now();
        let period = PERIOD.as_millis();
        for fault in 0..period {
            for xid_after in [0, 1, 700, 999, 1000, 1200] {
                let millis = |millis: u128| Duration::from_millis(millis.try_into().unwrap());
                let fault = start + millis(fault);
                let now = std::cell::Cell::new(start);
                let (mut seen, mut ended, mut looks) = (seen(0), None, 0);
                let mut reports = 0;
                while ended.is_none() {
                    assert!(looks < 6, "the server is not ended");
                    // A node under load looks later than it should.
                    now.set(now.get() + PERIOD + Duration::from_millis(3));
                    let look = || {
                        let at = now.get();
                        looks += u32::from(at >= fault);
                        let server = match at >= fault && ended.is_none() {
                            true => Server::Fault,
                            false => Server::Serving,
                        };
                        let xids = u64::from(at >= fault + millis(xid_after));
                        match step(server, xids, &mut seen, at) {
                            Step::EndServers => ended = Some(at),
                            Step::Report(_) => reports += 1,
                            Step::None => {}
                        }
                        time_to_end(&seen, at)
                    };
                    look_until_healed(look, |time| now.set(now.get() + time));
                }
                assert_eq!(looks, 2, "one that sees it, one that ends the server");
                let needed = ended.unwrap() - fault;
                let late = Duration::from_millis(3);
                assert!(needed <= PERIOD + FAULT_GRACE + late, "{needed:?}");
                let next = now.get() + PERIOD;
                reports += u32::from(step(Server::Serving, 1, &mut seen, next) != Step::None);
                assert_eq!(
                    reports, 1,
                    "the XID after {xid_after} ms is of the same fault"
                );
            }
        }
        assert!(PERIOD + FAULT_GRACE <= Duration::from_secs(2));
    }
}
