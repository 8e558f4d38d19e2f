//! Two replicas under random outages, slow requests and pauses.

use std::pin::Pin;
use std::task::{Context, Poll};

use proptest::prelude::*;

use super::*;

/// Fault of one replica.
#[derive(Debug, Clone, Copy)]
struct Fault {
    replica: usize,
    start: Duration,
    length: Duration,
    kind: FaultKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FaultKind {
    /// Requests are not executed.
    Outage,
    /// Requests are executed; the responses are lost.
    ResponsesLost,
    /// Requests are executed late, also those that the client has given up.
    Slow(Duration),
    /// Responses are sent late.
    SlowResponses(Duration),
    /// The process is stopped, as by SIGSTOP.
    Stopped,
}

/// Time in which faults start.
const FAULT_PERIOD_MS: u64 = 200_000;
/// Maximum length of a fault.
const MAX_FAULT_MS: u64 = 40_000;
const TICK: Duration = Duration::from_millis(50);

fn faults() -> impl Strategy<Value = Vec<Fault>> {
    let kind = prop_oneof![
        Just(FaultKind::Outage),
        Just(FaultKind::ResponsesLost),
        (100_u64..9_000).prop_map(|ms| FaultKind::Slow(Duration::from_millis(ms))),
        (100_u64..5_000).prop_map(|ms| FaultKind::SlowResponses(Duration::from_millis(ms))),
        Just(FaultKind::Stopped),
    ];
    let fault = (0..2_usize, 0..FAULT_PERIOD_MS, 1_000..MAX_FAULT_MS, kind).prop_map(
        |(replica, start, length, kind)| Fault {
            replica,
            start: Duration::from_millis(start),
            length: Duration::from_millis(length),
            kind,
        },
    );
    prop::collection::vec(fault, 0..12)
}

impl Fault {
    fn is_active(&self, now: Duration) -> bool {
        self.start <= now && now < self.start + self.length
    }
}

/// Faults of one replica, by virtual time.
#[derive(Clone)]
struct Faults {
    start: Instant,
    faults: Vec<Fault>,
}

impl Faults {
    fn current(&self) -> Vec<FaultKind> {
        let now = self.start.elapsed();
        let active = self.faults.iter().filter(|fault| fault.is_active(now));
        active.map(|fault| fault.kind).collect()
    }

    /// Returns the end of a stop that is active now.
    fn stopped_until(&self) -> Option<Instant> {
        let now = self.start.elapsed();
        let stops = self.faults.iter();
        stops
            .filter(|fault| fault.kind == FaultKind::Stopped && fault.is_active(now))
            .map(|fault| self.start + fault.start + fault.length)
            .max()
    }

    fn client(&self, server: &Server) -> Client {
        let (faults, server) = (self.clone(), server.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (faults, server) = (faults.clone(), server.clone());
            // The server executes a request even after the client has given up.
            let execution = tokio::spawn(async move {
                let active = faults.current();
                for kind in &active {
                    match kind {
                        FaultKind::Outage => std::future::pending().await,
                        FaultKind::Slow(delay) => tokio::time::sleep(*delay).await,
                        FaultKind::ResponsesLost
                        | FaultKind::SlowResponses(_)
                        | FaultKind::Stopped => {}
                    }
                }
                let (code, response) = server.serve(request).await;
                for kind in &active {
                    match kind {
                        FaultKind::ResponsesLost => std::future::pending().await,
                        FaultKind::SlowResponses(delay) => tokio::time::sleep(*delay).await,
                        FaultKind::Outage | FaultKind::Slow(_) | FaultKind::Stopped => {}
                    }
                }
                Response::builder()
                    .status(code)
                    .body(Body::from(serde_json::to_vec(&response).unwrap()))
                    .unwrap()
            });
            async move { execution.await.map_err(tower::BoxError::from) }
        });
        Client::new(service, "drava-system")
    }
}

/// A process that makes no progress while it is stopped.
struct Process<F> {
    future: Pin<Box<F>>,
    faults: Faults,
    continued: Pin<Box<tokio::time::Sleep>>,
}

impl<F: Future<Output = ()>> Future for Process<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(until) = self.faults.stopped_until() {
            self.continued.as_mut().reset(until);
            if self.continued.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
        self.future.as_mut().poll(context)
    }
}

/// Starts a replica; its boot time differs from that of the other one.
fn start(server: &Server, index: usize, faults: &[Fault]) -> watch::Receiver<Option<Arc<Term>>> {
    let start = Instant::now();
    let own = faults.iter().filter(|fault| fault.replica == index);
    let faults = Faults {
        start,
        faults: own.copied().collect(),
    };
    let boot = Duration::from_secs(1000 * index as u64);
    let clock = Clock::new(move || boot + start.elapsed());
    let (sender, terms) = watch::channel(None);
    let participant = Participant {
        leases: Api::namespaced(faults.client(server), "drava-system"),
        leaders: Api::all(faults.client(server)),
        candidate: Candidate::new(format!("replica-{index}"), clock.clone()),
        health: Arc::new(Health::new(clock.clone())),
        clock,
        elected: None,
        terms: sender,
    };
    tokio::spawn(Process {
        future: Box::pin(participant.run(CancellationToken::new())),
        faults,
        continued: Box::pin(tokio::time::sleep(Duration::ZERO)),
    });
    terms
}

/// Returns the indexes of the replicas with a valid term.
fn leaders(replicas: &[watch::Receiver<Option<Arc<Term>>>]) -> Vec<usize> {
    let is_valid = |terms: &watch::Receiver<Option<Arc<Term>>>| {
        terms.borrow().as_ref().is_some_and(|term| term.is_valid())
    };
    (0..replicas.len())
        .filter(|index| is_valid(&replicas[*index]))
        .collect()
}

/// Runs two replicas; the second starts after `offset`, so that their rounds have any phase.
async fn run(faults: Vec<Fault>, offset: Duration) -> Result<(), TestCaseError> {
    let server = Server::default();
    let begin = Instant::now();
    let first = start(&server, 0, &faults);
    tokio::time::sleep(offset).await;
    let replicas = [first, start(&server, 1, &faults)];
    let end = Duration::from_millis(FAULT_PERIOD_MS + MAX_FAULT_MS) + 3 * LEASE_DURATION;
    let mut last: Option<(usize, Instant)> = None;
    while begin.elapsed() < end {
        tokio::time::sleep(TICK).await;
        let leaders = leaders(&replicas);
        prop_assert!(leaders.len() <= 1, "{leaders:?} at {:?}", begin.elapsed());
        let Some(&leader) = leaders.first() else {
            continue;
        };
        if let Some((before, at)) = last
            && before != leader
        {
            let gap = at.elapsed();
            prop_assert!(
                gap >= LEASE_DURATION - VALIDITY,
                "{gap:?} at {:?}",
                begin.elapsed()
            );
        }
        // Only the named leader's writes are admitted.
        prop_assert_eq!(server.named(), Some(format!("replica-{leader}")));
        last = Some((leader, Instant::now()));
    }
    prop_assert_eq!(leaders(&replicas).len(), 1, "after the last fault");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn elects_at_most_one_under_faults(faults in faults(), offset in 0..2_000_u64) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(run(faults, Duration::from_millis(offset)))?;
    }
}
