//! What only one instance of the driver on the node may do: publish, tidy up, and be the node agent.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::until;
use crate::agent::{self, Agent};
use crate::artifacts::{self, Installed, Stubs};
use crate::claims::{ClaimService, blocking};
use crate::conditions::{Condition, Conditions};
use crate::error::describe;
use crate::injection;
use crate::inventory::State;
use crate::layout::Layout;
use crate::lock::{Lock, Locks};
use crate::plugin::takeover::Standing;
use crate::prepare::effects::NodeEffects;
use crate::publish::amounts;
use crate::publish::writer::Publisher;
use crate::reconcile;

/// Findings of the agent that wait to be told.
const FINDINGS: usize = 256;

/// What it is done with.
pub(super) struct Active {
    pub(super) publisher: Publisher,
    pub(super) claims: Arc<ClaimService<NodeEffects>>,
    pub(super) layout: Layout,
    pub(super) agent: agent::Config,
    pub(super) orphan_grace: Duration,
    pub(super) untidy: Arc<Notify>,
    pub(super) stop: CancellationToken,
}

impl Active {
    /// Waits until no other instance is active, and does it until the driver is told to stop.
    pub(super) async fn run_when_alone(self, locks: &Locks, stand: &watch::Sender<Standing>) {
        let conditions = &self.publisher.conditions;
        let lock = become_active(locks, stand, conditions, &self.stop).await;
        if lock.is_some() {
            Box::pin(self.run()).await;
        }
    }

    async fn run(self) {
        let Self {
            publisher,
            claims,
            layout,
            agent,
            orphan_grace,
            untidy,
            stop,
        } = self;
        let state_dir = layout.state_dir().to_owned();
        let injected = injection::watch(Arc::clone(&claims), layout.clone(), stop.clone());
        let of_claims = Arc::clone(&claims);
        let tidy = reconcile::run(of_claims, layout, orphan_grace, untidy, stop.clone());
        let agent = run_agent(agent, Arc::clone(&claims), stop.clone());
        tokio::join!(
            publisher.run(stop.clone()),
            agent,
            tidy,
            injected,
            remove_old_artifacts(claims, state_dir, stop)
        );
    }
}

/// Waits until no other instance on the node is active; nothing when the driver is told to stop first.
async fn become_active(
    locks: &Locks,
    stand: &watch::Sender<Standing>,
    conditions: &Conditions,
    stop: &CancellationToken,
) -> Option<Lock> {
    loop {
        match locks.try_active() {
            Ok(Some(lock)) => {
                stand.send_replace(Standing::Active);
                return Some(lock);
            }
            Ok(None) if stand.send_replace(Standing::Beside) != Standing::Beside => {
                tracing::info!(
                    "another instance publishes this node's devices; taking over when it stops"
                );
                // What it publishes is what this one would: a rolling update goes on.
                conditions.set(Condition::Published, Ok(()));
            }
            Ok(None) => {}
            Err(error) => conditions.set(Condition::Published, Err(describe(&error))),
        }
        if !until(stop, tokio::time::sleep(Duration::from_millis(500))).await {
            return None;
        }
    }
}

/// What the driver takes in a context of the node's cards, as claims are prepared with.
pub(super) fn estimate(gpus: watch::Receiver<State>) -> agent::Estimate {
    Arc::new(move |card| match &*gpus.borrow() {
        State::Known(node) => {
            let card = node.inventory.card(card.as_str())?;
            Some(amounts::driver_reserve_bytes(card))
        }
        State::Pending | State::Unknown(_) => None,
    })
}

/// Runs the node agent until `stop`.
async fn run_agent(
    config: agent::Config,
    claims: Arc<ClaimService<NodeEffects>>,
    stop: CancellationToken,
) {
    let (findings, told) = mpsc::channel(FINDINGS);
    let stopped = stop.clone();
    let thread = std::thread::Builder::new().name("agent".to_owned());
    let started = thread.spawn(move || {
        Agent::new(config).run(&stopped, |finding| {
            if let Err(error) = findings.try_send(finding) {
                tracing::warn!(%error, "nobody tells what the agent found");
            }
        });
    });
    match started {
        Ok(_) => agent::tell::run(claims, told, stop).await,
        Err(error) => {
            tracing::error!(%error, "no thread for the node agent: shares keep what they were prepared with");
        }
    }
}

/// Removes libraries and hooks that no claim uses any more, once.
async fn remove_old_artifacts(
    claims: Arc<ClaimService<NodeEffects>>,
    state_dir: PathBuf,
    stop: CancellationToken,
) {
    let mut installed = claims.installed.clone();
    let current = tokio::select! {
        () = stop.cancelled() => return,
        installed = installed.wait_for(|outcome| matches!(outcome, Some(Ok(_)))) => match installed.as_deref() {
            Ok(Some(Ok(installed))) => installed.clone(),
            Ok(Some(Err(_)) | None) | Err(_) => return,
        },
    };
    let removed = blocking(move || {
        // A damaged record may refer to any of them.
        let Some(mut in_use) = claims
            .applier
            .artifacts_in_use()
            .map_err(|error| describe(&error))?
        else {
            return Ok(Vec::new());
        };
        let Installed {
            library,
            hook,
            stubs: Stubs { cuda, nvml },
        } = current;
        in_use.extend([library, hook, cuda, nvml]);
        artifacts::remove_unused(&state_dir, &in_use).map_err(|error| error.to_string())
    });
    match removed.await.and_then(|removed| removed) {
        Ok(removed) => removed
            .iter()
            .for_each(|path| tracing::info!(path = %path.display(), "removed an unused version")),
        Err(error) => tracing::warn!(
            error,
            "cannot remove unused versions of libvgpu and the CDI hook"
        ),
    }
}
