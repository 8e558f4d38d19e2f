//! Reports findings of the agent: an event on the claim, and for a violation the condition `Enforced` of the device, and a
//! metric. The use of a GPU of others is an event on the pod, too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drava_api::condition::ConditionReason;
use drava_api::error::describe;
use drava_api::event::EventReason;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::agent::policy::detection::{
    SuspectedViolation, Unenforced, ViolationChange, ViolationKind,
};
use crate::agent::policy::share_metrics::ShareViolation;
use crate::agent::{Finding, FindingKind};
use crate::gpus::inventory::State;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded};
use crate::report::pods::{PodRef, reserving_pods};
use crate::report::{Injection, Subject, Violation};

const MIB: u64 = 1 << 20;

/// Time between two checks of the conditions: preparing a claim again overwrites its condition.
const REPEAT: Duration = Duration::from_secs(60);

/// Violations that are not cleared.
#[derive(Debug, Default)]
struct OpenViolations(BTreeMap<(ClaimUid, ShareId), BTreeMap<ViolationKind, Violation>>);

impl OpenViolations {
    fn metrics(&self) -> Arc<[ShareViolation]> {
        let all = self.0.iter().flat_map(|((claim, share), violations)| {
            violations.values().map(|violation| ShareViolation {
                claim: claim.clone(),
                share: share.clone(),
                reason: violation.reason,
            })
        });
        all.collect()
    }
}

/// Reports findings until `stop` or the end of the agent. `metrics` receives the violations that are not cleared.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    mut findings: mpsc::Receiver<Finding>,
    metrics: watch::Sender<Arc<[ShareViolation]>>,
    stop: CancellationToken,
) {
    let mut open = OpenViolations::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            finding = findings.recv() => {
                let Some(finding) = finding else { return };
                let claim = finding.claim.clone();
                if let Err(error) = report(&claims, &mut open, finding).await {
                    tracing::warn!(%claim, error, "cannot report the finding");
                }
            }
            () = tokio::time::sleep(REPEAT) => repeat(&claims, &mut open).await,
        }
        metrics.send_replace(open.metrics());
    }
}

async fn report<E: Effects>(
    claims: &ClaimService<E>,
    open: &mut OpenViolations,
    Finding { claim, share, kind }: Finding,
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
    let mut subjects = vec![Subject::Claim(record.claim.clone())];
    if let FindingKind::Violation(ViolationChange::Confirmed(SuspectedViolation::OtherGpu {
        gpu,
        ..
    })) = &kind
    {
        let Some(pods) = pods_without(claims, &record, gpu).await? else {
            return Ok(());
        };
        subjects.extend(pods.into_iter().map(Subject::Pod));
    }
    let (reason, note) = match &kind {
        FindingKind::Violation(ViolationChange::Confirmed(suspected)) => {
            let violation = violation(suspected);
            open.0
                .entry(key.clone())
                .or_default()
                .insert(suspected.kind(), violation.clone());
            (
                event_reason(suspected.kind()),
                format!(
                    "{about}: {}; {}",
                    violation.message,
                    remedy(suspected.kind())
                ),
            )
        }
        FindingKind::Violation(ViolationChange::Cleared(kind)) => {
            if let Some(of_share) = open.0.get_mut(&key) {
                of_share.remove(kind);
                if of_share.is_empty() {
                    open.0.remove(&key);
                }
            }
            tracing::info!(claim = %record.claim, ?kind, "violation cleared");
            return write(claims, open, &record).await;
        }
        FindingKind::LongKernel(us) => {
            let note = format!(
                "{about}: one kernel ran for {} ms; a running kernel cannot be interrupted, so the GPU keeps its shares \
                 only over longer periods; split the kernel or allocate a whole GPU",
                us / 1000
            );
            (EventReason::LongKernel, note)
        }
        FindingKind::Reclaimed { pid, claim } => {
            let found = claims.fetch(&record.claim).await;
            let found = found.map_err(|error| describe(&error))?;
            let pods = found.as_ref().map(reserving_pods).unwrap_or_default();
            subjects.extend(pods.into_iter().map(Subject::Pod));
            // The names of its pods are worth less than the event.
            let guaranteed = claims.fetch(claim).await.ok().flatten();
            let pods = guaranteed.as_ref().map(reserving_pods);
            (
                EventReason::BurstReclaimed,
                reclaimed_note(
                    &about,
                    *pid,
                    &record.claim.namespace,
                    claim,
                    &pods.unwrap_or_default(),
                ),
            )
        }
        FindingKind::Killed { pid, reason } => {
            let note = format!(
                "{about}: killed process {pid} (PID on the node) because {}; the device class has enforcement: required",
                match reason {
                    ViolationKind::OverLimit => "the share exceeded its memory limit",
                    ViolationKind::NotCounted => "the process used the GPU without libvgpu",
                    ViolationKind::Region => "the usage region was damaged",
                    ViolationKind::OtherGpu => "the process used another GPU",
                }
            );
            (EventReason::ProcessKilled, note)
        }
    };
    for subject in subjects {
        claims.reporter.event(subject, reason, note.clone());
    }
    write(claims, open, &record).await
}

/// Returns the note for a process of a claim of `namespace` that was killed for the memory that `guaranteed` of these pods gets.
fn reclaimed_note(
    about: &str,
    pid: u32,
    namespace: &str,
    guaranteed: &ClaimRef,
    pods: &[PodRef],
) -> String {
    let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
    let of_pods = match names.as_slice() {
        [] => String::new(),
        [pod] => format!(" of pod {pod}"),
        pods => format!(" of pods {}", pods.join(", ")),
    };
    let guaranteed = match guaranteed.namespace == namespace {
        true => format!("claim {}/{}{of_pods}", namespace, guaranteed.name),
        false => "a claim of another namespace".to_owned(),
    };
    format!(
        "{about}: killed process {pid} (PID on the node) because the share did not give back memory beyond its request, which \
         {guaranteed} is guaranteed; the claim has memory.reclaim: kill"
    )
}

/// Returns the pods of a claim; `None` if one of them has the GPU by another claim, so that its use is right.
async fn pods_without<E: Effects>(
    claims: &ClaimService<E>,
    record: &ClaimRecord,
    gpu: &str,
) -> Result<Option<Vec<PodRef>>, String> {
    let applier = Arc::clone(&claims.applier);
    let recorded = blocking(move || {
        let store = applier.store();
        let listed = store.list()?.recorded.into_iter();
        listed
            .map(|uid| store.load(&uid))
            .collect::<Result<Vec<_>, _>>()
    });
    let recorded = recorded.await.map_err(|error| describe(&error))?;
    let recorded = recorded.map_err(|error| describe(&error))?;
    let pods_of = async |claim: &ClaimRef| {
        let found = claims.fetch(claim).await;
        let found = found.map_err(|error| describe(&error))?;
        Ok::<_, String>(found.as_ref().map(reserving_pods).unwrap_or_default())
    };
    let pods = pods_of(&record.claim).await?;
    for loaded in recorded {
        let Loaded::Present(other) = loaded else {
            continue;
        };
        if other.devices.iter().any(|device| device.gpu.uuid == gpu)
            && pods_of(&other.claim)
                .await?
                .iter()
                .any(|pod| pods.contains(pod))
        {
            return Ok(None);
        }
    }
    Ok(Some(pods))
}

/// Updates the conditions of all claims with violations.
async fn repeat<E: Effects>(claims: &ClaimService<E>, open: &mut OpenViolations) {
    let uids: Vec<ClaimUid> = open.0.keys().map(|(uid, _)| uid.clone()).collect();
    for uid in uids {
        match load(claims, &uid).await {
            Ok(Some(record)) => {
                if let Err(error) = write(claims, open, &record).await {
                    tracing::debug!(claim = %record.claim, error, "cannot update the conditions of the claim");
                }
            }
            Ok(None) => open.0.retain(|(present, _), _| *present != uid),
            Err(error) => {
                tracing::debug!(claim = %uid, error, "cannot read the record of the claim")
            }
        }
    }
}

async fn write<E: Effects>(
    claims: &ClaimService<E>,
    open: &OpenViolations,
    record: &ClaimRecord,
) -> Result<(), String> {
    let violations: BTreeMap<ShareId, Violation> = open
        .0
        .iter()
        .filter(|((uid, _), _)| *uid == record.claim.uid)
        .filter_map(|((_, share), violations)| {
            Some((share.clone(), violations.values().next()?.clone()))
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
            &Injection::Observed(violations),
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

fn violation(suspected: &SuspectedViolation) -> Violation {
    match suspected {
        SuspectedViolation::OverLimit {
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
        SuspectedViolation::NotCounted {
            pid,
            name,
            unenforced,
        } => Violation {
            reason: ConditionReason::ProcessNotCounted,
            message: format!(
                "process {pid} ({name}) uses the GPU without libvgpu; {}",
                match unenforced {
                    Unenforced::All => "no limit is enforced",
                    Unenforced::GpuTime | Unenforced::Nothing =>
                        "the NVIDIA driver limits its memory, and nothing its GPU time",
                }
            ),
        },
        SuspectedViolation::Region(problem) => Violation {
            reason: ConditionReason::UsageRegionDamaged,
            message: format!("the usage region {problem}; libvgpu denies GPU memory"),
        },
        SuspectedViolation::OtherGpu { pid, name, gpu } => Violation {
            reason: ConditionReason::OtherGpuUsed,
            message: format!(
                "process {pid} ({name}) uses GPU {gpu}, which the claim does not have; no limit is enforced there"
            ),
        },
    }
}

fn event_reason(kind: ViolationKind) -> EventReason {
    match kind {
        ViolationKind::OverLimit => EventReason::MemoryOverLimit,
        ViolationKind::NotCounted => EventReason::ProcessNotCounted,
        ViolationKind::Region => EventReason::UsageRegionDamaged,
        ViolationKind::OtherGpu => EventReason::OtherGpuUsed,
    }
}

fn remedy(kind: ViolationKind) -> &'static str {
    match kind {
        ViolationKind::OverLimit => {
            "the program allocates memory by a function that libvgpu does not hook: restart the pod and report the CUDA \
             function to drava; a device class with enforcement: required kills such processes"
        }
        ViolationKind::NotCounted => {
            "check that the program loads /usr/local/lib/drava/libvgpu.so, then restart the pod; usual causes are an image \
             without glibc, a statically linked program, and a container that changes /etc/ld.so.preload or removes files \
             below /run/drava"
        }
        ViolationKind::Region => {
            "a program of the claim wrote to or removed /run/drava/<share>/usage/region; restart the pod"
        }
        ViolationKind::OtherGpu => {
            "a privileged container and a volume of /dev have all GPUs of the node: run the pod without them, or request the \
             GPU in a claim"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_pods_that_get_lent_memory() {
        let claim = ClaimRef {
            namespace: "research".to_owned(),
            name: "trainer-gpu".to_owned(),
            uid: ClaimUid::try_from("00000000-0000-4000-8000-000000000001".to_owned()).unwrap(),
        };
        let pod = |name: &str| PodRef {
            namespace: "research".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
        };
        for (namespace, pods, named) in [
            (
                "research",
                vec![],
                "which claim research/trainer-gpu is guaranteed",
            ),
            (
                "research",
                vec![pod("trainer-0")],
                "which claim research/trainer-gpu of pod trainer-0 is guaranteed",
            ),
            (
                "research",
                vec![pod("a"), pod("b")],
                "which claim research/trainer-gpu of pods a, b is guaranteed",
            ),
            // A tenant learns nothing of others.
            (
                "web",
                vec![pod("trainer-0")],
                "which a claim of another namespace is guaranteed",
            ),
        ] {
            let note = reclaimed_note("claim web/batch", 7, namespace, &claim, &pods);
            assert!(
                note.starts_with("claim web/batch: killed process 7"),
                "{note}"
            );
            assert!(note.contains(named), "{note}");
        }
    }
}
