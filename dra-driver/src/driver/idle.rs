//! Reports since when shares are idle, in the condition `Idle` of their claims. It is written when the level changes, and of a share
//! that is not idle only if an earlier node driver has written that it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drava_api::condition::ConditionReason;
use drava_api::error::describe;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::agent::node::now_us;
use crate::agent::policy::idle::FIRST_US;
use crate::agent::policy::share_metrics::ShareMetrics;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::{ClaimUid, ShareId};
use crate::prepare::effects::Effects;
use crate::prepare::record::Loaded;
use crate::report;

/// Times of reports.
#[derive(Debug, Clone, Copy)]
pub struct IdleTimes {
    /// Time without GPU time after which a share is reported as idle, µs.
    pub after_us: u64,
    /// Time until a write that failed is repeated.
    pub retry: Duration,
}

impl Default for IdleTimes {
    fn default() -> Self {
        Self {
            after_us: FIRST_US,
            retry: Duration::from_secs(20),
        }
    }
}

/// Time limit of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Since when a share is idle, µs of `CLOCK_MONOTONIC`.
type Level = Option<u64>;

/// Follows the levels until `stop`, or the end of the agent. A write that failed is repeated after `retry`.
pub(super) async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    mut shares: watch::Receiver<Arc<[ShareMetrics]>>,
    retry: Duration,
    stop: CancellationToken,
) {
    let mut reported: BTreeMap<(ClaimUid, ShareId), Level> = BTreeMap::new();
    let mut retries: BTreeMap<(ClaimUid, ShareId), Instant> = BTreeMap::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = shares.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
        let seen = Arc::clone(&shares.borrow_and_update());
        let is_known = |key: &(ClaimUid, ShareId)| {
            let mut known = seen.iter();
            known.any(|share| (&share.claim, &share.share) == (&key.0, &key.1))
        };
        reported.retain(|key, _| is_known(key));
        retries.retain(|key, _| is_known(key));
        for share in seen.iter() {
            let key = (share.claim.clone(), share.share.clone());
            let level = share.idle_since_us;
            let is_resting = retries
                .get(&key)
                .is_some_and(|until| Instant::now() < *until);
            if reported.get(&key) == Some(&level) || is_resting {
                continue;
            }
            let write = write(&claims, &share.claim, level);
            let written = tokio::select! {
                () = stop.cancelled() => return,
                written = tokio::time::timeout(WRITE_TIMEOUT, write) => written,
            };
            match written.unwrap_or_else(|_| Err("no answer of the API server".to_owned())) {
                Ok(()) => {
                    retries.remove(&key);
                    reported.insert(key, level);
                }
                Err(error) => {
                    tracing::debug!(claim.uid = %share.claim, error, "cannot write whether a share is idle; retrying");
                    retries.insert(key, Instant::now() + retry);
                }
            }
        }
    }
}

async fn write<E: Effects>(
    claims: &ClaimService<E>,
    uid: &ClaimUid,
    level: Level,
) -> Result<(), String> {
    let (applier, wanted) = (Arc::clone(&claims.applier), uid.clone());
    let loaded = blocking(move || applier.store().load(&wanted)).await;
    let loaded = loaded.map_err(|error| describe(&error))?;
    let Loaded::Present(record) = loaded.map_err(|error| describe(&error))? else {
        return Ok(());
    };
    if level.is_none() {
        let found = claims.fetch(&record.claim).await;
        let found = found.map_err(|error| describe(&error))?;
        if found.and_then(|claim| report::idle(&claim)) != Some(ConditionReason::NoGpuTime) {
            return Ok(());
        }
    }
    let since = level.map(|since_us| {
        let idle = Duration::from_micros(now_us().saturating_sub(since_us));
        Timestamp::now()
            .checked_sub(idle)
            .unwrap_or(Timestamp::UNIX_EPOCH)
    });
    let written = report::write_idle(&claims.client, &record, since).await;
    written.map_err(|error| describe(&error))
}
