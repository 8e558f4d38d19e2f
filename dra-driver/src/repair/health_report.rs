//! Reports changes of the health of GPUs: an event on the node, and for each claim with a device on the GPU the condition
//! `Healthy` and an event on the claim and its pods, once for each change.
//!
//! [`Reported`] decides; the rest reads the records and the claims. The API server stores what was reported: after a
//! restart, a claim whose condition has the fault already gets no second event.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_api::condition::ConditionType;
use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpu_health::state::{Degradation, Fault, GpuHealth, Scope};
use crate::gpu_health::{HealthByGpu, RecordedFaults};
use crate::gpus::inventory::State;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::ClaimUid;
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordError};
use crate::prepare::{Partition, Prepared};
use crate::report::pods::reserving_pods;
use crate::report::{Injection, Reporter, Subject};

/// Time after which failed reads are repeated, and between two checks of the claims that were prepared meanwhile.
const REPEAT: Duration = Duration::from_secs(10);

/// Reported health of the claims, by device.
#[derive(Debug, Default)]
struct Reported(BTreeMap<ClaimUid, BTreeMap<String, Option<Fault>>>);

/// A device of a claim whose health changed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    device: String,
    gpu: String,
    fault: Option<Fault>,
    /// Whether the fault is certainly new: this instance has reported another health.
    is_known: bool,
}

impl Reported {
    fn has_fault(&self) -> bool {
        let mut devices = self.0.values().flat_map(BTreeMap::values);
        devices.any(Option::is_some)
    }

    /// Removes claims that are not prepared.
    fn retain(&mut self, records: &[ClaimRecord]) {
        let prepared: BTreeSet<_> = records.iter().map(|record| &record.claim.uid).collect();
        self.0.retain(|uid, _| prepared.contains(uid));
    }

    /// Returns the devices of a claim whose health is not reported. A claim prepared after the start has the condition of
    /// prepare; `is_first` means that earlier instances may have reported another health.
    fn changes(&self, record: &ClaimRecord, health: &HealthByGpu, is_first: bool) -> Vec<Change> {
        let reported = self.0.get(&record.claim.uid);
        let change = |device: &Prepared| {
            let present = health.get(&GpuUuid::new(&device.gpu.uuid))?;
            let fault = present.of_device(device.partition().map(Partition::placement));
            let before = reported.and_then(|reported| reported.get(&device.device));
            let is_reported = match before {
                Some(before) => *before == fault,
                None => fault.is_none() && !is_first,
            };
            (!is_reported).then(|| Change {
                device: device.device.clone(),
                gpu: device.gpu.uuid.clone(),
                fault,
                is_known: before.is_some(),
            })
        };
        record.devices.iter().filter_map(change).collect()
    }

    fn set(&mut self, record: &ClaimRecord, health: &HealthByGpu) {
        let device = |device: &Prepared| {
            let present = health.get(&GpuUuid::new(&device.gpu.uuid))?;
            let fault = present.of_device(device.partition().map(Partition::placement));
            Some((device.device.clone(), fault))
        };
        let devices = record.devices.iter().filter_map(device);
        let reported = self.0.entry(record.claim.uid.clone()).or_default();
        reported.extend(devices);
    }
}

/// Reports the health until `stop`. `recorded` are the faults that an earlier instance of the driver reported.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    mut health: watch::Receiver<Arc<HealthByGpu>>,
    recorded: RecordedFaults,
    stop: CancellationToken,
) {
    let mut faults = recorded
        .into_iter()
        .flat_map(|(gpu, faults)| faults.into_iter().map(move |(s, f)| ((gpu.clone(), s), f)))
        .collect();
    let mut degradations = BTreeSet::new();
    let mut reported = Reported::default();
    let mut is_first = true;
    loop {
        let present = Arc::clone(&health.borrow_and_update());
        report_gpus(&claims.reporter, &mut faults, &present);
        report_degradations(&claims.reporter, &mut degradations, &present);
        // Until all GPUs were seen, the health of a claim may be unknown. Later, claims on healthy GPUs have the condition
        // of prepare.
        let is_healthy = present.values().all(GpuHealth::is_healthy);
        let is_due = is_first || !is_healthy || reported.has_fault();
        if is_due && is_complete(&claims.gpus.borrow(), &present) {
            match report_claims(&claims, &mut reported, &present, is_first).await {
                Ok(()) => is_first = false,
                Err(error) => {
                    tracing::warn!(error, "cannot report the health of GPUs on their claims")
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = health.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(REPEAT) => {}
        }
    }
}

/// Returns whether the health of all GPUs of the node is known.
fn is_complete(gpus: &State, health: &HealthByGpu) -> bool {
    match gpus {
        State::Known(node) => {
            let mut gpus = node.inventory.nvml.gpus.iter();
            gpus.all(|gpu| health.contains_key(&gpu.uuid))
        }
        State::Pending | State::Unknown(_) => false,
    }
}

/// Raises events on the node for changed faults.
fn report_gpus(
    reporter: &Reporter,
    before: &mut BTreeMap<(GpuUuid, Scope), Fault>,
    health: &HealthByGpu,
) {
    let present: BTreeMap<_, _> = health
        .iter()
        .flat_map(|(gpu, health)| health.faults().map(move |(s, f)| ((gpu.clone(), s), f)))
        .collect();
    for ((gpu, scope), fault) in &present {
        if before.get(&(gpu.clone(), *scope)) != Some(fault) {
            let note = format!(
                "GPU {gpu}{}: {fault}; its devices have the taint {}={}; {}",
                slices(*scope),
                names::UNHEALTHY_TAINT,
                fault.value(),
                fault.remedy()
            );
            reporter.event(Subject::Node, EventReason::GpuUnhealthy, note);
        }
    }
    // The recorded fault of a GPU that was not seen so far is not over.
    before.retain(|key, fault| {
        let is_over = health.contains_key(&key.0) && !present.contains_key(key);
        if is_over {
            let note = format!("GPU {}{} has recovered from: {fault}", key.0, slices(key.1));
            reporter.event(Subject::Node, EventReason::GpuRecovered, note);
        }
        !is_over
    });
    before.extend(present);
}

/// Raises an event on the node for each new fault that leaves its GPU healthy.
fn report_degradations(
    reporter: &Reporter,
    before: &mut BTreeSet<(GpuUuid, Degradation)>,
    health: &HealthByGpu,
) {
    let of_gpu = |(gpu, health): (&GpuUuid, &GpuHealth)| {
        let degradations = health.degradations.clone().into_iter();
        let gpu = gpu.clone();
        degradations.map(move |degradation| (gpu.clone(), degradation))
    };
    let present: BTreeSet<_> = health.iter().flat_map(of_gpu).collect();
    for (gpu, degradation) in present.difference(before) {
        let note = format!("GPU {gpu}: {degradation}");
        reporter.event(Subject::Node, EventReason::GpuDegraded, note);
    }
    *before = present;
}

fn slices(scope: Scope) -> String {
    match scope {
        Scope::Gpu => String::new(),
        Scope::Slices(slices) => format!(" (MIG instance at slices {slices})"),
    }
}

async fn report_claims<E: Effects>(
    claims: &ClaimService<E>,
    reported: &mut Reported,
    health: &HealthByGpu,
    is_first: bool,
) -> Result<(), String> {
    let applier = Arc::clone(&claims.applier);
    let records = blocking(move || {
        let mut records = Vec::new();
        for uid in applier.store().list()?.recorded {
            if let Loaded::Present(record) = applier.store().load(&uid)? {
                records.push(*record);
            }
        }
        Ok::<_, RecordError>(records)
    });
    let records = records.await.map_err(|error| describe(&error))?;
    let records = records.map_err(|error| describe(&error))?;
    reported.retain(&records);
    let mut outcome = Ok(());
    for record in &records {
        let changes = reported.changes(record, health, is_first);
        if changes.is_empty() {
            reported.set(record, health);
            continue;
        }
        match claims.fetch(&record.claim).await {
            Ok(found) => {
                let uid = Some(record.claim.uid.as_str());
                let found = found.filter(|found| found.metadata.uid.as_deref() == uid);
                if let Some(found) = found {
                    report_claim(claims, &found, record, &changes);
                }
                reported.set(record, health);
            }
            // The others are reported now, this one with the next pass.
            Err(error) => outcome = Err(describe(&error)),
        }
    }
    outcome
}

fn report_claim<E: Effects>(
    claims: &ClaimService<E>,
    found: &ResourceClaim,
    record: &ClaimRecord,
    changes: &[Change],
) {
    for change in changes {
        let written = written_message(found, &change.device);
        let claim = Subject::Claim(record.claim.clone());
        match change.fault {
            Some(fault) => {
                let is_written = written.is_some_and(|(is_healthy, message)| {
                    !is_healthy && message.ends_with(&fault.to_string())
                });
                if is_written && !change.is_known {
                    continue;
                }
                let note = format!(
                    "claim {} (device {}): GPU {} is unhealthy: {fault}; delete the pod so that a new one gets another GPU",
                    record.claim, change.device, change.gpu
                );
                let pods = reserving_pods(found).into_iter().map(Subject::Pod);
                for subject in pods.chain([claim]) {
                    let reporter = &claims.reporter;
                    reporter.event(subject, EventReason::GpuUnhealthy, note.clone());
                }
            }
            None if change.is_known || written.is_some_and(|(is_healthy, _)| !is_healthy) => {
                let note = format!(
                    "claim {} (device {}): GPU {} has recovered",
                    record.claim, change.device, change.gpu
                );
                claims
                    .reporter
                    .event(claim, EventReason::GpuRecovered, note);
            }
            None => {}
        }
    }
    let state = claims.gpus.borrow().clone();
    if let State::Known(node) = state {
        let reporter = &claims.reporter;
        reporter.devices(found, record, &node.inventory, &Injection::Unchecked);
    }
}

/// Returns status and message of the condition `Healthy` of a device.
fn written_message<'a>(claim: &'a ResourceClaim, device: &str) -> Option<(bool, &'a str)> {
    let devices = claim.status.as_ref()?.devices.as_ref()?;
    let device = devices
        .iter()
        .find(|status| status.driver == names::DRIVER && status.device == device)?;
    let mut conditions = device.conditions.iter().flatten();
    let condition =
        conditions.find(|condition| condition.type_ == ConditionType::Healthy.as_str())?;
    Some((condition.status == "True", condition.message.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::claim::ClaimRef;
    use crate::prepare::base::CommonEdits;
    use crate::prepare::{Access, Delivery, GpuRef};

    fn record() -> ClaimRecord {
        let device = |minor: u32| Prepared {
            request: "gpu".to_owned(),
            pool: "node-a/gpus".to_owned(),
            device: names::gpu_device(minor),
            gpu: GpuRef {
                uuid: format!("GPU-{minor}"),
                minor,
                pci_bus_id: String::new(),
            },
            access: Access::Whole,
        };
        ClaimRecord {
            claim: ClaimRef {
                namespace: "default".to_owned(),
                name: "claim".to_owned(),
                uid: ClaimUid::parse("00000000-0000-4000-8000-000000000001").unwrap(),
            },
            devices: vec![device(0), device(1)],
            library: String::new(),
            hook: String::new(),
            delivery: Delivery::Preload,
            common: CommonEdits::InClaim,
            can_wait: true,
        }
    }

    fn health(fault: Option<Fault>) -> HealthByGpu {
        let gpu = |minor: u32, gpu| {
            let health = GpuHealth {
                gpu,
                ..GpuHealth::default()
            };
            (GpuUuid::new(format!("GPU-{minor}")), health)
        };
        HealthByGpu::from([gpu(0, None), gpu(1, fault)])
    }

    #[test]
    fn reports_each_change_of_a_device_once() {
        let (mut reported, record) = (Reported::default(), record());
        let (healthy, faulty) = (health(None), health(Some(Fault::Xid(79))));
        assert_eq!(reported.changes(&record, &healthy, false), []);
        let changes = reported.changes(&record, &faulty, false);
        let change = |fault, is_known| Change {
            device: "gpu-1".to_owned(),
            gpu: "GPU-1".to_owned(),
            fault,
            is_known,
        };
        assert_eq!(changes, [change(Some(Fault::Xid(79)), false)]);
        reported.set(&record, &faulty);
        assert!(reported.has_fault());
        assert_eq!(reported.changes(&record, &faulty, false), []);
        assert_eq!(
            reported.changes(&record, &healthy, false),
            [change(None, true)]
        );
        reported.retain(&[]);
        assert!(!reported.has_fault(), "unprepared");
    }

    #[test]
    fn checks_all_claims_after_a_restart() {
        let changes = Reported::default().changes(&record(), &health(None), true);
        let devices: Vec<&str> = changes.iter().map(|change| &*change.device).collect();
        assert_eq!(devices, ["gpu-0", "gpu-1"]);
        let unknown = HealthByGpu::new();
        assert_eq!(
            Reported::default().changes(&record(), &unknown, true),
            [],
            "before the GPUs were seen"
        );
    }
}
