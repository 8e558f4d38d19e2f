//! The planner, its writers and its publisher against a model of the API server, with faults.
//!
//! The model has what a cluster has and a test with one fault has not: watches that lag, are lost or go silent one by one,
//! requests that conflict, take long, time out before or after their execution or are executed late, a rolling update (SIGTERM),
//! a leader that is stopped at any request and continues (SIGSTOP), tenants that create and delete pods and gangs, with and
//! without gates, within a quota, a namespace that is observed late, and kube-scheduler, which also releases allocations.
//!
//! Checked after each write: no GPU has more allocated than it has, and no gate of a gang is removed before the gang was
//! allocated as a whole. Checked at the end, without faults: every pod was served, and no allocation is left. Time is virtual, and
//! the faults follow from the seed. Writes are tasks whose order is that of the runtime, so a seed does not repeat each interleaving.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use drava_api::listed::Change;
use futures::FutureExt;
use kube::Client;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Executor, decision_time, finished};
use crate::action::Outcome;
use crate::decide::fixture::settings;
use crate::decide::planner::{Planner, Settings};
use crate::fixture::random::Random;
use crate::fixture::{class, node, object, slice};
use crate::operate::clock::Clock;
use crate::operate::health::Health;
use crate::watch::{Kind, Observation};
use crate::write::event_publisher::EventPublisher;
use crate::write::evictions::Evictor;
use crate::write::lease::Term;
use crate::write::writes::{Timing, Writer};

mod server;

use server::{Event, Server};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Time of one iteration.
const TICK: Duration = Duration::from_millis(100);
/// Iterations with faults.
const FAULTY_TICKS: u32 = 1500;
/// Iterations without faults in which everything must be served: ten minutes.
const CALM_TICKS: u32 = 6000;
/// Time that a successor waits for a leader that does not renew, in iterations: the duration of the lease.
const TAKEOVER_TICKS: u32 = 150;

/// A replica that leads, or led and does not know better.
struct Replica {
    id: usize,
    planner: Planner,
    executor: Executor,
    /// The wait until the server admits writes of this replica.
    admission: Option<JoinHandle<()>>,
    /// Next change of the history to observe.
    cursor: usize,
    /// The watch of pods or of claims that is silent, and for how many iterations.
    silent: Option<(bool, usize)>,
    /// Iterations until the namespace is observed.
    namespace_after: u32,
    stop: CancellationToken,
    term_ended: Arc<AtomicBool>,
}

impl Replica {
    /// Starts a term, without lists yet.
    fn start(id: usize, server: &Arc<Mutex<Server>>) -> Self {
        let client = Client::new(server::service(id, server), "default");
        let term_ended = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&term_ended);
        let seconds = move || Duration::from_secs(has_ended.load(Ordering::Relaxed).into());
        let clock = Clock::new(seconds);
        let term = Arc::new(Term::new(clock.clone(), Duration::from_secs(1)));
        let stop = CancellationToken::new();
        let executor = Executor {
            evictor: Evictor::new(client.clone(), Arc::clone(&term)),
            publisher: EventPublisher::start(client.clone(), Arc::clone(&term), Arc::default()),
            writer: Writer::new(client, term, stop.clone(), Timing::default()),
            writes: JoinSet::new(),
            health: Arc::new(Health::new(clock)),
        };
        let mut shares = 0;
        let share_ids = Box::new(move || {
            shares += 1;
            format!("share-{id}-{shares}")
        });
        let settings = Settings {
            preemption: false,
            ..settings()
        };
        let writer = executor.writer.clone();
        let admission = tokio::spawn(async move { writer.wait_until_holder(|| {}).await });
        let mut replica = Self {
            id,
            planner: Planner::new(settings, share_ids),
            executor,
            admission: Some(admission),
            cursor: 0,
            silent: None,
            namespace_after: 10,
            stop,
            term_ended,
        };
        let quota = object(server::quota());
        replica.observe(Observation::Quota(Change::Applied(Box::new(quota))));
        replica.observe(Observation::Class(Change::Applied(Box::new(class()))));
        for name in NODES {
            replica.observe(Observation::Node(Change::Applied(Box::new(node(name)))));
            replica.observe(Observation::Slice(Change::Applied(Box::new(slice(name)))));
        }
        replica
    }

    /// Reads complete lists once the server admits writes of this replica. Returns whether that has happened.
    fn is_listed(&mut self, server: &Server) -> bool {
        if self
            .admission
            .take_if(|admission| admission.is_finished())
            .is_some()
        {
            self.list(server);
            for kind in Kind::ALL {
                self.observe(Observation::Listed(kind));
            }
        }
        self.admission.is_none()
    }

    fn observe(&mut self, observation: Observation) {
        self.planner.observe(observation, Instant::now());
    }

    /// Lists all objects, also after a lost watch; objects that are gone are reported as deleted.
    fn list(&mut self, server: &Server) {
        for observation in server.missed(self.cursor) {
            self.observe(observation);
        }
        self.cursor = server.history.len();
    }

    /// Observes up to `limit` changes.
    fn watch(&mut self, server: &Server, limit: usize) {
        for event in server.history.iter().skip(self.cursor).take(limit) {
            self.cursor += 1;
            let is_pod = matches!(event, Event::Pod(..));
            if self.silent.is_some_and(|(pods, _)| pods == is_pod) {
                continue;
            }
            self.planner
                .observe(server::observation(event), Instant::now());
        }
        match &mut self.silent {
            // The watch is restarted, with a new list.
            Some((_, 0)) => {
                self.silent = None;
                self.list(server);
            }
            Some((_, left)) => *left -= 1,
            None => {}
        }
    }

    /// Runs one iteration of the leader's loop.
    fn run(&mut self) {
        while let Some(Some(write)) = self.executor.writes.join_next().now_or_never() {
            if let Some(outcome) = finished(write, &self.stop) {
                self.planner.finished(outcome, Instant::now());
            }
        }
        if self.stop.is_cancelled() {
            return;
        }
        self.namespace_after = self.namespace_after.saturating_sub(1);
        if self.namespace_after == 1 {
            let namespace = object(server::namespace());
            self.observe(Observation::Namespace(Change::Applied(Box::new(namespace))));
        }
        while let Some(Some(event)) = self.executor.publisher.next_failed().now_or_never() {
            self.planner
                .finished(Outcome::EventFailed(Box::new(event)), Instant::now());
        }
        for action in self.planner.actions(&decision_time()) {
            if let Some(failed) = self.executor.execute(action) {
                self.planner.finished(failed, Instant::now());
            }
        }
    }
}

/// What the holder of the lease does.
enum Phase {
    Leads,
    /// SIGTERM: the lease is released after the last write.
    Drains,
    /// SIGSTOP, for this number of iterations.
    Stopped(u32),
}

struct Cluster {
    random: Random,
    server: Arc<Mutex<Server>>,
    leader: Replica,
    phase: Phase,
    /// A replica that was stopped for longer than its lease, with its iterations since it continued.
    predecessor: Option<(Replica, Option<u32>)>,
    replicas: usize,
}

impl Cluster {
    fn new(seed: u64) -> Self {
        let server = Arc::new(Mutex::new(Server::new(seed)));
        Self {
            random: Random::new(seed ^ 0xa5a5_a5a5),
            leader: Replica::start(0, &server),
            server,
            phase: Phase::Leads,
            predecessor: None,
            replicas: 1,
        }
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap()
    }

    /// A new replica acquires the lease and lists. Returns the previous leader.
    fn take_over(&mut self) -> Replica {
        let id = self.replicas;
        self.replicas += 1;
        self.server().set_holder(id);
        let next = Replica::start(id, &self.server);
        self.phase = Phase::Leads;
        std::mem::replace(&mut self.leader, next)
    }

    fn lead(&mut self, is_faulty: bool) {
        let server = Arc::clone(&self.server);
        if !self.leader.is_listed(&server.lock().unwrap()) {
            return;
        }
        match self.phase {
            Phase::Leads if is_faulty && self.random.chance(1) => {
                self.leader.stop.cancel();
                self.phase = Phase::Drains;
            }
            Phase::Leads if is_faulty && self.predecessor.is_none() && self.random.chance(1) => {
                let id = self.leader.id;
                self.server().set_stopped(id, true);
                let is_short = self.random.chance(30);
                self.phase = Phase::Stopped(if is_short { 40 } else { TAKEOVER_TICKS });
            }
            Phase::Leads => {
                let is_lost = is_faulty && self.random.chance(1);
                let limit = if is_faulty {
                    self.random.below(12)
                } else {
                    usize::MAX
                };
                if is_faulty && self.leader.silent.is_none() && self.random.chance(1) {
                    let is_of_pods = self.random.chance(50);
                    self.leader.silent = Some((is_of_pods, self.random.below(450)));
                }
                let server = self.server.lock().unwrap();
                if is_lost {
                    self.leader.list(&server);
                } else {
                    self.leader.watch(&server, limit);
                }
                drop(server);
                self.leader.run();
            }
            Phase::Drains => {
                self.leader.run();
                if self.leader.executor.writes.is_empty() {
                    self.take_over();
                }
            }
            Phase::Stopped(0) => {
                let id = self.leader.id;
                // A short stop ends before the lease.
                if self.random.chance(30) {
                    self.server().set_stopped(id, false);
                    self.phase = Phase::Leads;
                } else {
                    let stopped = self.take_over();
                    self.predecessor = Some((stopped, None));
                }
            }
            Phase::Stopped(left) => self.phase = Phase::Stopped(left - 1),
        }
    }

    /// Continues a predecessor: it sends what it was about to send, decides on what it knows, and notices a little later that
    /// its term has ended.
    fn continue_predecessor(&mut self, is_faulty: bool) {
        let Some((mut replica, continued)) = self.predecessor.take() else {
            return;
        };
        let is_known = self.server().policy_holder() == self.leader.id;
        let continued = match continued {
            None if is_known && (!is_faulty || self.random.chance(2)) => {
                self.server().set_stopped(replica.id, false);
                Some(0)
            }
            None => None,
            Some(ticks) => {
                if ticks == 3 {
                    replica.term_ended.store(true, Ordering::Relaxed);
                    replica.stop.cancel();
                }
                replica.run();
                if ticks > 3 && replica.executor.writes.is_empty() {
                    return;
                }
                Some(ticks + 1)
            }
        };
        self.predecessor = Some((replica, continued));
    }

    async fn tick(&mut self, is_faulty: bool) {
        self.server().tick(is_faulty);
        self.lead(is_faulty);
        self.continue_predecessor(is_faulty);
        tokio::time::sleep(TICK).await;
    }
}

async fn run(seed: u64) {
    let mut cluster = Cluster::new(seed);
    for _ in 0..FAULTY_TICKS {
        cluster.tick(true).await;
    }
    for tick in 0..CALM_TICKS {
        cluster.tick(false).await;
        if tick > 700 && cluster.server().is_idle() {
            break;
        }
    }
    let server = cluster.server();
    let problems = server.problems();
    assert!(
        problems.is_empty(),
        "seed {seed}: {problems:#?}\n{}",
        server.summary()
    );
    println!("seed {seed}: {}", server.summary());
    assert!(server.served > 20, "seed {seed}: {}", server.summary());
}

/// `DRAVA_MODEL_SEEDS` sets the number of seeds, `DRAVA_MODEL_FIRST` the first one.
#[test]
fn allocates_without_leak_or_overcommit_under_faults() {
    let seeds = std::env::var("DRAVA_MODEL_SEEDS").ok();
    let count = seeds.and_then(|count| count.parse().ok()).unwrap_or(24);
    let first: u64 = std::env::var("DRAVA_MODEL_FIRST")
        .ok()
        .and_then(|first| first.parse().ok())
        .unwrap_or(1);
    for seed in first..first + count {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(run(seed));
    }
}
