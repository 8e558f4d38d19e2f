//! HTTP endpoints `/healthz` and `/readyz`, next to [`crate::operate::metrics`].
//!
//! A replica is alive while it confirms the lease (it holds it, or sees another holder renew) and, as the leader, while its
//! planning loop runs.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use crate::operate::clock::Clock;
use crate::operate::metrics::{self, Metrics};

/// Time without progress after which a replica is not alive.
pub const STALL_LIMIT: Duration = Duration::from_secs(60);

/// State that the endpoints report.
#[derive(Debug)]
pub struct Health {
    clock: Clock,
    state: Mutex<HealthState>,
}

#[derive(Debug)]
struct HealthState {
    is_ready: bool,
    is_webhook_ready: bool,
    /// When the lease was confirmed last.
    lease_confirmed: Duration,
    /// When the planning loop ran last; `None` in a standby replica.
    planning_ran: Option<Duration>,
    /// For how long a watch of the leader has failed without an answer.
    silence: Duration,
}

/// Why a replica is not alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Stall {
    /// The lease is not confirmed.
    #[error("cannot acquire or observe the lease for {} s", .0.as_secs())]
    Lease(Duration),
    /// The planning loop does not run.
    #[error("planning is stalled for {} s", .0.as_secs())]
    Planning(Duration),
    /// A watch fails.
    #[error("the API server has not answered a watch for {} s", .0.as_secs())]
    Watches(Duration),
}

impl Health {
    /// Creates the health of a replica that starts now.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let state = HealthState {
            is_ready: false,
            is_webhook_ready: true,
            lease_confirmed: clock.now(),
            planning_ran: None,
            silence: Duration::ZERO,
        };
        Self {
            clock,
            state: Mutex::new(state),
        }
    }

    /// Sets readiness. A leader with complete lists is ready, and so is a standby replica.
    pub fn set_ready(&self, is_ready: bool) {
        self.lock().is_ready = is_ready;
    }

    /// Sets whether the webhook can serve; true in a replica without webhook.
    pub fn set_webhook_ready(&self, is_ready: bool) {
        self.lock().is_webhook_ready = is_ready;
    }

    /// Records that this replica holds the lease, or that another holder renews it.
    pub fn confirm_lease(&self) {
        self.lock().lease_confirmed = self.clock.now();
    }

    /// Records an iteration of the planning loop.
    pub fn planning_runs(&self) {
        self.lock().planning_ran = Some(self.clock.now());
    }

    /// Records for how long a watch of the leader has failed without an answer.
    pub fn set_silence(&self, silence: Duration) {
        self.lock().silence = silence;
    }

    /// Records that the planning loop has ended.
    pub fn planning_ended(&self) {
        let mut state = self.lock();
        state.planning_ran = None;
        state.silence = Duration::ZERO;
    }

    /// Returns whether the replica makes progress.
    ///
    /// # Errors
    /// When it does not for [`STALL_LIMIT`].
    pub fn liveness(&self) -> Result<(), Stall> {
        let now = self.clock.now();
        let state = self.lock();
        let without_lease = now.saturating_sub(state.lease_confirmed);
        if without_lease >= STALL_LIMIT {
            return Err(Stall::Lease(without_lease));
        }
        match state.planning_ran.map(|ran| now.saturating_sub(ran)) {
            Some(stalled) if stalled >= STALL_LIMIT => Err(Stall::Planning(stalled)),
            _ if state.silence >= STALL_LIMIT => Err(Stall::Watches(state.silence)),
            _ => Ok(()),
        }
    }

    /// Returns what a replica that is not ready waits for.
    fn unready(&self) -> Option<&'static str> {
        let state = self.lock();
        if !state.is_ready {
            Some("reading the state of the cluster")
        } else if !state.is_webhook_ready {
            Some("waiting for the certificate of the webhook in Secret drava-webhook")
        } else {
            None
        }
    }

    fn lock(&self) -> MutexGuard<'_, HealthState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the endpoints until `stop`.
///
/// # Errors
/// When the address cannot be bound.
pub async fn serve(
    listen: SocketAddr,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(health)
        .merge(metrics::router(metrics));
    let listener = tokio::net::TcpListener::bind(listen).await?;
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn healthz(State(health): State<Arc<Health>>) -> (StatusCode, String) {
    match health.liveness() {
        Ok(()) => (StatusCode::OK, "ok".to_owned()),
        Err(stall) => (StatusCode::SERVICE_UNAVAILABLE, stall.to_string()),
    }
}

async fn readyz(State(health): State<Arc<Health>>) -> (StatusCode, &'static str) {
    match health.unready() {
        None => (StatusCode::OK, "ok"),
        Some(cause) => (StatusCode::SERVICE_UNAVAILABLE, cause),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn health() -> (Arc<AtomicU64>, Health) {
        let seconds = Arc::new(AtomicU64::new(1000));
        let now = Arc::clone(&seconds);
        let clock = Clock::new(move || Duration::from_secs(now.load(Ordering::Relaxed)));
        (seconds, Health::new(clock))
    }

    #[test]
    fn fails_liveness_without_lease_for_a_minute() {
        let (seconds, health) = health();
        seconds.fetch_add(59, Ordering::Relaxed);
        assert_eq!(health.liveness(), Ok(()));
        seconds.fetch_add(1, Ordering::Relaxed);
        assert_eq!(health.liveness(), Err(Stall::Lease(STALL_LIMIT)));
        health.confirm_lease();
        assert_eq!(health.liveness(), Ok(()));
    }

    #[test]
    fn fails_liveness_when_planning_is_stalled() {
        let (seconds, health) = health();
        health.planning_runs();
        seconds.fetch_add(60, Ordering::Relaxed);
        health.confirm_lease();
        assert_eq!(health.liveness(), Err(Stall::Planning(STALL_LIMIT)));
        health.planning_runs();
        assert_eq!(health.liveness(), Ok(()));
        health.planning_ended();
        seconds.fetch_add(59, Ordering::Relaxed);
        health.confirm_lease();
        seconds.fetch_add(59, Ordering::Relaxed);
        assert_eq!(health.liveness(), Ok(()), "a standby replica plans nothing");
    }

    #[test]
    fn fails_liveness_of_a_blind_leader() {
        let (_, health) = health();
        health.planning_runs();
        health.set_silence(STALL_LIMIT - Duration::from_secs(1));
        assert_eq!(health.liveness(), Ok(()));
        health.set_silence(STALL_LIMIT);
        assert_eq!(health.liveness(), Err(Stall::Watches(STALL_LIMIT)));
        health.planning_ended();
        assert_eq!(
            health.liveness(),
            Ok(()),
            "a standby replica watches nothing"
        );
    }

    #[test]
    fn is_ready_when_state_and_webhook_are() {
        let (_, health) = health();
        health.set_webhook_ready(false);
        for (is_ready, is_webhook_ready) in [(false, false), (true, false), (false, true)] {
            health.set_ready(is_ready);
            health.set_webhook_ready(is_webhook_ready);
            assert!(health.unready().is_some(), "{is_ready} {is_webhook_ready}");
        }
        health.set_ready(true);
        assert_eq!(health.unready(), None);
    }
}
