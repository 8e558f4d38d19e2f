//! Liveness of claims by NVML's process lists, GPU by GPU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_nvml::GpuUuid;
use futures::future::join_all;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::kubelet::claims::blocking;
use crate::node::claim::ClaimUid;
use crate::prepare::liveness::{Held, Inspector, Liveness};

/// Longest wait for NVML's process lists.
const NVML_TIMEOUT: Duration = Duration::from_secs(10);

/// Inspects GPUs. NVML calls for a GPU can hang for ever, so each GPU has a thread of its own, and gets no second one while
/// its thread hangs.
#[derive(Debug, Default)]
pub(super) struct GpuInspections {
    /// Held by the threads.
    threads: BTreeMap<GpuUuid, Arc<Mutex<()>>>,
}

impl GpuInspections {
    /// Returns the liveness of claims of which no share is mounted.
    pub(super) async fn liveness(
        &mut self,
        inspector: &Inspector,
        claims: Vec<Held>,
    ) -> BTreeMap<ClaimUid, Liveness> {
        let mut by_gpu: BTreeMap<GpuUuid, Vec<Held>> = BTreeMap::new();
        let mut liveness = BTreeMap::new();
        for held in claims {
            liveness.insert(held.uid.clone(), Liveness::Ended);
            for gpu in &held.gpus {
                let of_gpu = by_gpu.entry(gpu.clone()).or_default();
                of_gpu.push(held.of_gpu(gpu));
            }
        }
        let inspected = by_gpu.into_iter().map(|(gpu, claims)| {
            let thread = self.threads.entry(gpu.clone()).or_default();
            let thread = Arc::clone(thread).try_lock_owned().ok();
            inspect(inspector.clone(), gpu, claims, thread)
        });
        for (uid, found) in join_all(inspected).await.into_iter().flatten() {
            if let Some(known) = liveness.get_mut(&uid)
                && rank(&found) > rank(known)
            {
                *known = found;
            }
        }
        liveness
    }
}

/// Returns which of two states of a claim counts: a process on one of its GPUs, then a GPU that cannot be inspected.
const fn rank(liveness: &Liveness) -> u8 {
    match liveness {
        Liveness::Running(_) => 2,
        Liveness::Unknown(_) => 1,
        Liveness::Ended => 0,
    }
}

/// Inspects a GPU for claims; `thread` is `None` while an earlier call for the GPU has not returned.
async fn inspect(
    inspector: Inspector,
    gpu: GpuUuid,
    claims: Vec<Held>,
    thread: Option<OwnedMutexGuard<()>>,
) -> Vec<(ClaimUid, Liveness)> {
    let uids: Vec<_> = claims.iter().map(|held| held.uid.clone()).collect();
    let unknown = |reason: String| {
        let unknown = |uid| (uid, Liveness::Unknown(reason.clone()));
        uids.into_iter().map(unknown).collect()
    };
    let hangs = format!("NVML calls for GPU {gpu} do not return");
    let Some(thread) = thread else {
        return unknown(hangs);
    };
    let inspected = blocking(move || {
        // Released when NVML returns, however long the caller waits.
        let _thread = thread;
        let liveness = |held: Held| {
            let liveness = inspector.gpu_liveness(&held);
            (held.uid, liveness)
        };
        claims.into_iter().map(liveness).collect()
    });
    match tokio::time::timeout(NVML_TIMEOUT, inspected).await {
        Ok(Ok(inspected)) => inspected,
        Ok(Err(error)) => unknown(describe(&error)),
        Err(_) => {
            tracing::warn!(gpu.uuid = %gpu, "cannot list the GPU processes: NVML calls do not return; reset the GPU or reboot the node");
            unknown(hangs)
        }
    }
}
