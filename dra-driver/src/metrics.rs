//! Exporter: the metrics of the node driver, its GPUs and its shares at `/metrics`, and its state at `/debug/state`.
//!
//! | Source | Written by |
//! |---|---|
//! | GPUs and their health | [`crate::metrics::gpu_monitor`], a thread per GPU |
//! | shares | the node agent, see [`crate::agent::share_metrics`] |
//! | claims and their pods | [`claim_view`] |
//! | prepare and unprepare | [`operations`] |
//!
//! A scrape reads what these have written last; a scrape calls neither NVML nor the API server. [`exposition`] is pure.
//! Series of a share carry namespace, claim and share. Pods and containers are in separate info metrics, because several
//! of them can share a claim: with a pod label the memory of one share would be counted once for each pod. All series of
//! a claim end with the claim.

pub mod gpu_monitor;

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use drava_api::metric::{self, CONTENT_TYPE};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use tokio::sync::watch;

use crate::agent::share_metrics::{ShareMetrics, ShareViolation};
use crate::gpu_health::HealthByGpu;
use crate::report::conditions::Conditions;

pub mod aliases;
pub mod claim_view;
mod compression;
pub mod debug_state;
pub mod exposition;
pub mod operations;
pub mod telemetry;

use aliases::WithAliases;
use claim_view::ClaimEntry;
use compression::{GZIP, compressed};
use exposition::{Now, Snapshot};
use operations::Operations;
use telemetry::GpuTable;

/// What the exporter reads; clones share it.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Readiness conditions.
    pub conditions: Conditions,
    /// GPUs with their telemetry.
    pub gpus: GpuTable,
    /// Health of the GPUs.
    pub health: watch::Receiver<Arc<HealthByGpu>>,
    /// Shares that the node agent follows.
    pub shares: watch::Sender<Arc<[ShareMetrics]>>,
    /// Violations of their limits.
    pub violations: watch::Sender<Arc<[ShareViolation]>>,
    /// Prepared claims.
    pub claims: watch::Sender<Arc<[ClaimEntry]>>,
    /// Prepare and unprepare calls.
    pub operations: Operations,
    /// Name of the node, if the metrics are shown under the names of HAMi and Volcano too.
    pub aliases_of_node: Option<String>,
}

impl Sources {
    /// Returns sources without GPUs, shares and claims.
    #[must_use]
    pub fn new(conditions: Conditions, health: watch::Receiver<Arc<HealthByGpu>>) -> Self {
        Self {
            conditions,
            gpus: GpuTable::default(),
            health,
            shares: watch::Sender::new(Arc::default()),
            violations: watch::Sender::new(Arc::default()),
            claims: watch::Sender::new(Arc::default()),
            operations: Operations::default(),
            aliases_of_node: None,
        }
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            conditions: self.conditions.states(),
            gpus: self.gpus.entries(),
            health: Arc::clone(&self.health.borrow()),
            shares: Arc::clone(&self.shares.borrow()),
            violations: Arc::clone(&self.violations.borrow()),
            claims: Arc::clone(&self.claims.borrow()),
            operations: self.operations.clone(),
            now: now(),
        }
    }
}

/// Returns the router of `/metrics` and `/debug/state`.
pub fn router(sources: Sources) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/debug/state", get(debug_state))
        .with_state(sources)
}

async fn scrape(State(sources): State<Sources>, request: HeaderMap) -> Response {
    let snapshot = sources.snapshot();
    let text = match sources.aliases_of_node {
        Some(node) => metric::exposition(WithAliases { snapshot, node }),
        None => metric::exposition(snapshot),
    };
    match text {
        Ok(text) => {
            let content_type = [(header::CONTENT_TYPE, CONTENT_TYPE)];
            match compressed(&request, &text) {
                Some(bytes) => {
                    let encoding = [(header::CONTENT_ENCODING, GZIP)];
                    (content_type, encoding, bytes).into_response()
                }
                None => (content_type, text).into_response(),
            }
        }
        Err(error) => {
            tracing::error!(%error, "cannot encode the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn debug_state(State(sources): State<Sources>) -> Json<Value> {
    let unmet = sources.conditions.unmet();
    Json(debug_state::state(&sources.snapshot(), &unmet))
}

fn now() -> Now {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let monotonic = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(monotonic.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(monotonic.tv_nsec).unwrap_or(0);
    Now {
        unix_seconds: unix.map_or(0.0, |unix| unix.as_secs_f64()),
        monotonic_us: seconds * 1_000_000 + nanoseconds / 1000,
    }
}
