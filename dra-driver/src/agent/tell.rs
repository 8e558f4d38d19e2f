//! Tells people what the agent found: an event on the claim, and for a breach the condition `Enforced` of its device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drava_api::condition::ConditionReason;
use drava_api::error::describe;
use drava_api::event::EventReason;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Finding;
use super::card::What;
use super::detect::{Kind, News, Suspicion};
use crate::claim::{ClaimUid, ShareId};
use crate::claims::{ClaimService, blocking};
use crate::inventory::State;
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded};
use crate::report::{Injection, Subject, Violation};

const MIB: u64 = 1 << 20;

/// Time between two looks whether the claims still say what is the case: preparing a claim again writes its condition.
const REPEAT: Duration = Duration::from_secs(60);

/// The breaches that are not over.
#[derive(Debug, Default)]
struct Standing(BTreeMap<(ClaimUid, ShareId), BTreeMap<Kind, Violation>>);

/// Tells what comes, until `stop` or the agent's end.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    mut findings: mpsc::Receiver<Finding>,
    stop: CancellationToken,
) {
    let mut standing = Standing::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            finding = findings.recv() => {
                let Some(finding) = finding else { return };
                let claim = finding.claim.clone();
                if let Err(error) = tell(&claims, &mut standing, finding).await {
                    tracing::warn!(%claim, error, "cannot report the finding");
                }
            }
            () = tokio::time::sleep(REPEAT) => repeat(&claims, &mut standing).await,
        }
    }
}

async fn tell<E: Effects>(
    claims: &ClaimService<E>,
    standing: &mut Standing,
    Finding { claim, share, what }: Finding,
) -> Result<(), String> {
    let Some(record) = load(claims, &claim).await? else {
        return Ok(());
    };
    let key = (claim, share);
    let device = record
        .devices
        .iter()
        .find(|device| device.share().is_some_and(|share| share.id == key.1));
    let device = device.map_or_else(String::new, |device| format!(" (device {})", device.device));
    let about = format!("claim {}{device}", record.claim);
    let (reason, note) = match &what {
        What::News(News::Confirmed(suspicion)) => {
            let breach = breach(suspicion);
            standing
                .0
                .entry(key.clone())
                .or_default()
                .insert(suspicion.kind(), breach.clone());
            (
                event_reason(suspicion.kind()),
                format!("{about}: {}; {}", breach.message, remedy(suspicion.kind())),
            )
        }
        What::News(News::Over(kind)) => {
            if let Some(of_share) = standing.0.get_mut(&key) {
                of_share.remove(kind);
                if of_share.is_empty() {
                    standing.0.remove(&key);
                }
            }
            tracing::info!(claim = %record.claim, ?kind, "violation cleared");
            return write(claims, standing, &record).await;
        }
        What::LongKernel(us) => {
            let note = format!(
                "{about}: one kernel ran for {} ms; a running kernel cannot be interrupted, so the GPU keeps its shares \
                 only over longer periods; split the kernel or allocate a whole GPU",
                us / 1000
            );
            (EventReason::LongKernel, note)
        }
        What::Killed { pid, why } => {
            let note = format!(
                "{about}: killed process {pid} (PID on the node) because {}; the device class has enforcement: required",
                match why {
                    Kind::OverLimit => "the share exceeded its memory limit",
                    Kind::NotCounted => "the process used the GPU without libvgpu",
                    Kind::Region => "the usage region was damaged",
                }
            );
            (EventReason::ProcessKilled, note)
        }
    };
    claims
        .reporter
        .event(Subject::Claim(record.claim.clone()), reason, note);
    write(claims, standing, &record).await
}

/// Writes the conditions of all claims with breaches, where they say something else.
async fn repeat<E: Effects>(claims: &ClaimService<E>, standing: &mut Standing) {
    let uids: Vec<ClaimUid> = standing.0.keys().map(|(uid, _)| uid.clone()).collect();
    for uid in uids {
        match load(claims, &uid).await {
            Ok(Some(record)) => {
                if let Err(error) = write(claims, standing, &record).await {
                    tracing::debug!(claim = %record.claim, error, "cannot update the conditions of the claim");
                }
            }
            Ok(None) => standing.0.retain(|(present, _), _| *present != uid),
            Err(error) => {
                tracing::debug!(claim = %uid, error, "cannot read the record of the claim")
            }
        }
    }
}

async fn write<E: Effects>(
    claims: &ClaimService<E>,
    standing: &Standing,
    record: &ClaimRecord,
) -> Result<(), String> {
    let breaches: BTreeMap<ShareId, Violation> = standing
        .0
        .iter()
        .filter(|((uid, _), _)| *uid == record.claim.uid)
        .filter_map(|((_, share), breaches)| {
            Some((share.clone(), breaches.values().next()?.clone()))
        })
        .collect();
    let Some(found) = claims
        .fetch(&record.claim)
        .await
        .map_err(|error| describe(&error))?
    else {
        return Ok(());
    };
    let state = claims.gpus.borrow().clone();
    if let State::Known(node) = state {
        claims.reporter.devices(
            &found,
            record,
            &node.inventory,
            &Injection::Observed(breaches),
        );
    }
    Ok(())
}

async fn load<E: Effects>(
    claims: &ClaimService<E>,
    uid: &ClaimUid,
) -> Result<Option<ClaimRecord>, String> {
    let (applier, uid) = (Arc::clone(&claims.applier), uid.clone());
    let loaded = blocking(move || applier.store().load(&uid)).await;
    let loaded = loaded.map_err(|error| describe(&error))?;
    let loaded = loaded.map_err(|error| describe(&error))?;
    Ok(match loaded {
        Loaded::Present(record) => Some(*record),
        Loaded::Absent | Loaded::Unsupported(_) | Loaded::Damaged(_) => None,
    })
}

fn breach(suspicion: &Suspicion) -> Violation {
    match suspicion {
        Suspicion::OverLimit {
            used_bytes,
            limit_bytes,
            pids,
        } => Violation {
            reason: ConditionReason::MemoryOverLimit,
            message: format!(
                "processes {} use {} MiB of GPU memory, limit {} MiB",
                pids.iter()
                    .map(u32::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
                used_bytes / MIB,
                limit_bytes / MIB
            ),
        },
        Suspicion::NotCounted { pid, name } => Violation {
            reason: ConditionReason::ProcessNotCounted,
            message: format!(
                "process {pid} ({name}) uses the GPU without libvgpu; no limit is enforced"
            ),
        },
        Suspicion::Region(problem) => Violation {
            reason: ConditionReason::UsageRegionDamaged,
            message: format!("the usage region {problem}; libvgpu denies GPU memory"),
        },
    }
}

fn event_reason(kind: Kind) -> EventReason {
    match kind {
        Kind::OverLimit => EventReason::MemoryOverLimit,
        Kind::NotCounted => EventReason::ProcessNotCounted,
        Kind::Region => EventReason::UsageRegionDamaged,
    }
}

fn remedy(kind: Kind) -> &'static str {
    match kind {
        Kind::OverLimit => {
            "the program allocates memory by a function that libvgpu does not hook: restart the pod and report the CUDA \
             function to drava; a device class with enforcement: required kills such processes"
        }
        Kind::NotCounted => {
            "check that the program loads /usr/local/lib/drava/libvgpu.so, then restart the pod; usual causes are an image \
             without glibc, a statically linked program, and a container that changes /etc/ld.so.preload"
        }
        Kind::Region => {
            "a program of the claim wrote to or removed /run/drava/<share>/usage/region; restart the pod"
        }
    }
}
