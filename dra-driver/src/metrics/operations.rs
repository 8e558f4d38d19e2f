//! Durations and failures of prepare and unprepare.

use std::sync::Arc;
use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;

use crate::kubelet::plugin::service::Claims;
use crate::kubelet::proto::dra_v1::Device;
use crate::node::claim::ClaimRef;
use crate::prepare::apply::MissedReclaims;

/// Upper bounds of the duration buckets, seconds. Kubelet's call times out after 45 s.
const BUCKETS: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0, 45.0,
];

/// Calls of one operation.
#[derive(Debug, Clone)]
pub struct Calls {
    /// Duration, seconds.
    pub seconds: Histogram,
    /// Failed calls.
    pub errors: Counter,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            seconds: Histogram::new(BUCKETS),
            errors: Counter::default(),
        }
    }
}

impl Calls {
    /// Starts to measure a call. A call that is dropped before its end, at the time limit, is a failure.
    fn start(&self) -> Running<'_> {
        Running {
            calls: self,
            started: Instant::now(),
            has_failed: true,
        }
    }
}

struct Running<'a> {
    calls: &'a Calls,
    started: Instant,
    has_failed: bool,
}

impl Running<'_> {
    fn end<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E> {
        self.has_failed = outcome.is_err();
        outcome
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.calls
            .seconds
            .observe(self.started.elapsed().as_secs_f64());
        if self.has_failed {
            self.calls.errors.inc();
        }
    }
}

/// Calls of prepare and unprepare; clones share the values.
#[derive(Debug, Clone, Default)]
pub struct Operations {
    /// Calls of prepare.
    pub prepare: Calls,
    /// Calls of unprepare.
    pub unprepare: Calls,
    /// Calls of prepare that failed because lent memory was not given back.
    pub missed_reclaims: MissedReclaims,
    /// Faults of MPS.
    pub mps: MpsOperations,
}

/// Faults of MPS; clones share the values.
#[derive(Debug, Clone, Default)]
pub struct MpsOperations {
    /// Daemons that were started again.
    pub restarts: Counter,
    /// Servers with a fatal fault.
    pub faults: Counter,
}

/// Measures the calls of `claims`.
#[derive(Debug)]
pub struct Measured<C> {
    /// Handles the calls.
    pub claims: Arc<C>,
    /// Receives the measurements.
    pub operations: Operations,
}

impl<C: Claims> Claims for Measured<C> {
    type PrepareError = C::PrepareError;
    type UnprepareError = C::UnprepareError;

    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>, C::PrepareError> {
        let running = self.operations.prepare.start();
        running.end(self.claims.prepare(claim).await)
    }

    async fn unprepare(&self, claim: &ClaimRef) -> Result<(), C::UnprepareError> {
        let running = self.operations.unprepare.start();
        running.end(self.claims.unprepare(claim).await)
    }
}
