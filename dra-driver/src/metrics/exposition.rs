//! Samples of a snapshot. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use drava_api::metric::{BUILD_INFO, driver as metric};
use drava_nvml::{GpuUuid, Memory, Sensor, Telemetry};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::claim_view::{ClaimEntry, Container, DeviceAccess, DeviceEntry};
use super::operations::Operations;
use super::telemetry::{GpuEntry, Xid};
use crate::agent::share_metrics::{CoresOf, ShareMetrics, ShareViolation};
use crate::gpu_health::HealthByGpu;
use crate::gpu_health::state::Scope;
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::prepare::apply::Unreturned;
use crate::report::conditions::Condition;

/// Age from which a reading of a GPU is not shown, seconds.
const STALE_SECONDS: f64 = 60.0;

/// What the exporter shows at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Readiness conditions, and whether each is met.
    pub conditions: Vec<(Condition, bool)>,
    /// GPUs.
    pub gpus: BTreeMap<GpuUuid, GpuEntry>,
    /// Health of the GPUs.
    pub health: Arc<HealthByGpu>,
    /// Shares that the node agent follows.
    pub shares: Arc<[ShareMetrics]>,
    /// Violations of their limits.
    pub violations: Arc<[ShareViolation]>,
    /// Prepared claims.
    pub claims: Arc<[ClaimEntry]>,
    /// Prepare and unprepare calls.
    pub operations: Operations,
    /// Time of the snapshot.
    pub now: Now,
}

/// One moment by two clocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Now {
    /// Unix time.
    pub unix_seconds: f64,
    /// `CLOCK_MONOTONIC`.
    pub monotonic_us: u64,
}

impl Now {
    /// Converts a time of `CLOCK_MONOTONIC`.
    fn unix(self, monotonic_us: u64) -> f64 {
        self.unix_seconds - seconds(self.monotonic_us.saturating_sub(monotonic_us))
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let version = env!("CARGO_PKG_VERSION");
        BUILD_INFO.encode(encoder, [(["driver", version], 1.0)])?;
        let condition =
            |(condition, is_met): &(Condition, bool)| ([condition.as_str()], flag(*is_met));
        metric::CONDITION.encode(encoder, self.conditions.iter().map(condition))?;
        let calls = [
            (["prepare"], &self.operations.prepare),
            (["unprepare"], &self.operations.unprepare),
        ];
        let durations = calls.map(|(labels, calls)| (labels, &calls.seconds));
        metric::CLAIM_OPERATION_SECONDS.encode_histograms(encoder, durations)?;
        let errors = calls.map(|(labels, calls)| (labels, calls.errors.get() as f64));
        metric::CLAIM_OPERATION_ERRORS.encode(encoder, errors)?;
        let missed = Unreturned::ALL.map(|cause| {
            let count = self.operations.missed_reclaims.of(cause).get() as f64;
            ([cause.as_str()], count)
        });
        metric::BURST_RECLAIM_MISSED.encode(encoder, missed)?;
        let mps = &self.operations.mps;
        let mps = [(["daemon"], &mps.restarts), (["server"], &mps.faults)];
        let mps = mps.map(|(labels, counter)| (labels, counter.get() as f64));
        metric::MPS_FAULTS.encode(encoder, mps)?;
        self.encode_gpus(encoder)?;
        self.encode_telemetry(encoder)?;
        self.encode_claims(encoder)?;
        self.encode_shares(encoder)
    }
}

impl Snapshot {
    fn encode_gpus(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let info = self.gpus.iter().filter_map(|(uuid, gpu)| {
            let info = gpu.info.as_ref()?;
            Some((uuid.as_str(), info.index.to_string(), info))
        });
        let info: Vec<_> = info.collect();
        metric::GPU_INFO.encode(
            encoder,
            info.iter().map(|(uuid, index, info)| {
                let labels = [
                    *uuid,
                    index.as_str(),
                    &info.model,
                    &info.pci_bus_id,
                    &info.driver_version,
                ];
                (labels, 1.0)
            }),
        )?;
        self.encode_health(encoder)?;
        let xids = self.gpus.iter().flat_map(|(uuid, gpu)| {
            let xid = |(xid, count): (&Xid, &u64)| {
                let number = match xid {
                    Xid::Number(number) => number.to_string(),
                    Xid::Other => "other".to_owned(),
                };
                (uuid.as_str(), number, *count as f64)
            };
            gpu.xids.iter().map(xid)
        });
        let xids: Vec<_> = xids.collect();
        metric::GPU_XID_ERRORS.encode(
            encoder,
            xids.iter()
                .map(|(uuid, number, count)| ([*uuid, number.as_str()], *count)),
        )
    }

    /// Returns the last reading of a GPU unless it is stale.
    pub(super) fn fresh<'a>(&self, gpu: &'a GpuEntry) -> Option<&'a Telemetry> {
        let (telemetry, unix_seconds) = gpu.sample.as_ref()?;
        let is_fresh = self.now.unix_seconds - unix_seconds <= STALE_SECONDS;
        is_fresh.then_some(telemetry)
    }

    fn encode_health(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // Without NVML the health of no GPU is known.
        let is_nvml_available = self.conditions.contains(&(Condition::Gpus, true));
        let healthy = self.health.iter().map(|(uuid, health)| {
            let is_healthy = is_nvml_available && health.is_healthy();
            ([uuid.as_str()], flag(is_healthy))
        });
        metric::GPU_HEALTHY.encode(encoder, healthy)?;
        let faults = self.health.iter().flat_map(|(uuid, health)| {
            health.faults().map(move |(scope, fault)| {
                let slices = match scope {
                    Scope::Gpu => String::new(),
                    Scope::Slices(slices) => slices.to_string(),
                };
                (uuid.as_str(), slices, fault.value())
            })
        });
        let faults: Vec<_> = faults.collect();
        let faults = faults
            .iter()
            .map(|(uuid, slices, fault)| ([*uuid, slices.as_str(), fault.as_str()], 1.0));
        metric::GPU_FAULT_INFO.encode(encoder, faults)
    }

    fn encode_telemetry(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let samples = self.gpus.iter().filter_map(|(uuid, gpu)| {
            let (_, unix_seconds) = gpu.sample.as_ref()?;
            Some((uuid.as_str(), *unix_seconds))
        });
        let samples: Vec<(&str, f64)> = samples.collect();
        let timestamps = samples.iter().map(|(uuid, unix)| ([*uuid], *unix));
        metric::GPU_SAMPLE_TIMESTAMP_SECONDS.encode(encoder, timestamps)?;
        let fresh = self.gpus.iter();
        let fresh: Vec<(&str, &Telemetry)> = fresh
            .filter_map(|(uuid, gpu)| Some((uuid.as_str(), self.fresh(gpu)?)))
            .collect();
        let each = |value: fn(&Telemetry) -> Option<f64>| {
            let sample =
                move |(uuid, telemetry): &(_, &Telemetry)| Some(([*uuid], value(telemetry)?));
            fresh.iter().filter_map(sample)
        };
        let memory = |value: fn(u64, u64, u64) -> u64| {
            let sample = move |(uuid, telemetry): &(_, &Telemetry)| match telemetry.memory {
                Sensor::Value(Memory::Dedicated {
                    total_bytes,
                    reserved_bytes,
                    used_bytes,
                }) => Some((
                    [*uuid],
                    value(total_bytes, reserved_bytes, used_bytes) as f64,
                )),
                Sensor::Value(Memory::NotSupported) | Sensor::Absent | Sensor::Failed(_) => None,
            };
            fresh.iter().filter_map(sample)
        };
        metric::GPU_MEMORY_TOTAL_BYTES.encode(encoder, memory(|total, _, _| total))?;
        metric::GPU_MEMORY_RESERVED_BYTES.encode(encoder, memory(|_, reserved, _| reserved))?;
        metric::GPU_MEMORY_USED_BYTES.encode(encoder, memory(|_, _, used| used))?;
        metric::GPU_UTILIZATION_RATIO.encode(
            encoder,
            each(|t| Some(f64::from(t.utilization.value()?.gpu_percent) / 100.0)),
        )?;
        metric::GPU_MEMORY_CONTROLLER_UTILIZATION_RATIO.encode(
            encoder,
            each(|t| Some(f64::from(t.utilization.value()?.memory_percent) / 100.0)),
        )?;
        metric::GPU_TEMPERATURE_CELSIUS.encode(
            encoder,
            each(|t| t.temperature_celsius.value().map(f64::from)),
        )?;
        metric::GPU_POWER_WATTS.encode(
            encoder,
            each(|t| Some(f64::from(t.power_milliwatts.value()?) / 1000.0)),
        )?;
        metric::GPU_ENERGY_JOULES.encode(
            encoder,
            each(|t| Some(t.energy_millijoules.value()? as f64 / 1000.0)),
        )?;
        let clocks = fresh.iter().flat_map(|(uuid, telemetry)| {
            let clock =
                |(name, mhz): (_, Option<u32>)| Some(([*uuid, name], f64::from(mhz?) * 1e6));
            [
                ("sm", telemetry.sm_clock_mhz.value()),
                ("memory", telemetry.memory_clock_mhz.value()),
            ]
            .into_iter()
            .filter_map(clock)
        });
        metric::GPU_CLOCK_HERTZ.encode(encoder, clocks)?;
        let errors = fresh.iter().flat_map(|(uuid, telemetry)| {
            let error = |(kind, count): (_, Option<u64>)| Some(([*uuid, kind], count? as f64));
            [
                ("corrected", telemetry.ecc_corrected.value()),
                ("uncorrected", telemetry.ecc_uncorrected.value()),
            ]
            .into_iter()
            .filter_map(error)
        });
        metric::GPU_ECC_ERRORS.encode(encoder, errors)
    }

    fn encode_claims(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let devices = self.claims.iter().flat_map(|entry| {
            let claim = &entry.claim;
            entry.devices.iter().map(move |device| {
                let (access, share) = access(device);
                let labels = [
                    claim.namespace.as_str(),
                    &claim.name,
                    claim.uid.as_str(),
                    &device.request,
                    &device.device,
                    &device.gpu,
                    access,
                    share,
                ];
                (labels, 1.0)
            })
        });
        // A claim can have the whole of one GPU only once, but admin access twice.
        let devices: BTreeMap<[&str; 8], f64> = devices.collect();
        metric::CLAIM_DEVICE_INFO.encode(encoder, devices)?;
        let suspended = |value: fn(&Self, &DeviceEntry) -> Option<f64>| {
            self.claims.iter().flat_map(move |entry| {
                let (namespace, name) = (&entry.claim.namespace, &entry.claim.name);
                entry.devices.iter().filter_map(move |device| {
                    let labels = [namespace.as_str(), name.as_str(), access(device).1];
                    Some((labels, value(self, device)?))
                })
            })
        };
        let bytes = suspended(|_, device| Some(device.suspended_bytes? as f64));
        metric::SHARE_SUSPENDED_BYTES.encode(encoder, bytes)?;
        let seconds = suspended(|snapshot, device| {
            let since = device.suspended_since? as f64;
            Some((snapshot.now.unix_seconds - since).max(0.0))
        });
        metric::SHARE_SUSPENDED_SECONDS.encode(encoder, seconds)?;
        let pods = self.claims.iter().flat_map(|entry| {
            let ClaimRef {
                namespace, name, ..
            } = &entry.claim;
            let pods = entry.pods.iter();
            pods.map(move |pod| [namespace.as_str(), name, pod])
        });
        // A deleted claim and its successor of the same name may be prepared at the same time.
        let pods: BTreeSet<[&str; 3]> = pods.collect();
        metric::CLAIM_POD_INFO.encode(encoder, pods.into_iter().map(|labels| (labels, 1.0)))?;
        let containers: BTreeSet<[&str; 8]> =
            self.claims.iter().flat_map(container_devices).collect();
        let containers = containers.into_iter().map(|labels| (labels, 1.0));
        metric::CONTAINER_DEVICE_INFO.encode(encoder, containers)
    }

    fn encode_shares(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let known: BTreeMap<&ClaimUid, &ClaimRef> = self
            .claims
            .iter()
            .map(|entry| (&entry.claim.uid, &entry.claim))
            .collect();
        // A share whose claim is not known yet has no name; it appears with the next snapshot.
        let shares: Vec<([&str; 3], &ShareMetrics)> = self
            .shares
            .iter()
            .filter_map(|share| {
                let claim = known.get(&share.claim)?;
                let labels = [claim.namespace.as_str(), &claim.name, share.share.as_str()];
                Some((labels, share))
            })
            .collect();
        let now = self.now;
        let each = |value: &dyn Fn(&ShareMetrics) -> Option<f64>| -> Vec<([&str; 3], f64)> {
            let sample = |(labels, share): &([_; 3], &ShareMetrics)| Some((*labels, value(share)?));
            shares.iter().filter_map(sample).collect()
        };
        let bytes = |bytes: u64| Some(bytes as f64);
        let limits = each(&|share| bytes(share.limit_bytes?));
        metric::SHARE_MEMORY_LIMIT_BYTES.encode(encoder, limits)?;
        let burst = each(&|share| bytes(share.burst_bytes?));
        metric::SHARE_BURST_BYTES.encode(encoder, burst)?;
        let lent = each(&|share| bytes(share.lent_bytes?));
        metric::SHARE_LENT_BYTES.encode(encoder, lent)?;
        let used = each(&|share| bytes(share.figures.used_bytes));
        metric::SHARE_MEMORY_USED_BYTES.encode(encoder, used)?;
        let peak = each(&|share| bytes(share.figures.peak_bytes));
        metric::SHARE_MEMORY_PEAK_BYTES.encode(encoder, peak)?;
        let driver = each(&|share| bytes(share.figures.driver_bytes));
        metric::SHARE_MEMORY_DRIVER_BYTES.encode(encoder, driver)?;
        let processes = each(&|share| bytes(share.figures.processes_bytes?));
        metric::SHARE_MEMORY_PROCESSES_BYTES.encode(encoder, processes)?;
        let part_of = |of: CoresOf, share: &ShareMetrics| {
            (share.cores_of == of).then(|| f64::from(share.guaranteed_percent) / 100.0)
        };
        let guaranteed = each(&|share| part_of(CoresOf::Time, share));
        metric::SHARE_GUARANTEED_RATIO.encode(encoder, guaranteed)?;
        let multiprocessors = each(&|share| part_of(CoresOf::Multiprocessors, share));
        metric::SHARE_MULTIPROCESSORS_RATIO.encode(encoder, multiprocessors)?;
        // What is not measured is not zero.
        let time_of =
            |us: u64, share: &ShareMetrics| (share.cores_of == CoresOf::Time).then(|| seconds(us));
        let gpu_time = each(&|share| time_of(share.gpu_time_us, share));
        metric::SHARE_GPU_TIME_SECONDS.encode(encoder, gpu_time)?;
        let throttled = each(&|share| time_of(share.throttled_us, share));
        metric::SHARE_THROTTLED_SECONDS.encode(encoder, throttled)?;
        let denials = each(&|share| Some(share.figures.denied as f64));
        metric::SHARE_MEMORY_DENIALS.encode(encoder, denials)?;
        let states = shares
            .iter()
            .flat_map(|([namespace, claim, share], metrics)| {
                let figures = &metrics.figures;
                [
                    ("registered", figures.registered),
                    ("escaped", figures.escaped),
                ]
                .map(|(state, count)| ([*namespace, *claim, *share, state], count as f64))
            });
        metric::SHARE_PROCESSES.encode(encoder, states)?;
        let violations = self.violations.iter().filter_map(|violation| {
            let claim = known.get(&violation.claim)?;
            let (share, reason) = (violation.share.as_str(), violation.reason.as_str());
            Some(([claim.namespace.as_str(), &claim.name, share, reason], 1.0))
        });
        metric::SHARE_VIOLATION_INFO.encode(encoder, violations)?;
        let idle = each(&|share| {
            let idle_us = now.monotonic_us.saturating_sub(share.idle_since_us?);
            Some(seconds(idle_us))
        });
        metric::SHARE_IDLE_SECONDS.encode(encoder, idle)?;
        let activity = each(&|share| match share.figures.last_demand_us {
            0 => None,
            last_us => Some(now.unix(last_us)),
        });
        metric::SHARE_LAST_ACTIVITY_TIMESTAMP_SECONDS.encode(encoder, activity)
    }
}

/// Returns whether a container uses a device of its claim.
pub(super) fn uses(container: &Container, device: &DeviceEntry) -> bool {
    container.requests.is_empty() || container.requests.contains(&device.request)
}

/// Returns the labels of the devices of the containers of a claim.
fn container_devices(entry: &ClaimEntry) -> Vec<[&str; 8]> {
    let mut all = Vec::new();
    for (pod, containers) in &entry.containers {
        for container in containers {
            let used = entry.devices.iter();
            for device in used.filter(|device| uses(container, device)) {
                all.push([
                    entry.claim.namespace.as_str(),
                    pod,
                    &container.name,
                    &entry.claim.name,
                    &device.request,
                    &device.device,
                    &device.gpu,
                    access(device).1,
                ]);
            }
        }
    }
    all
}

/// Returns kind and share of the access to a device.
pub(super) fn access(device: &DeviceEntry) -> (&'static str, &str) {
    match &device.access {
        DeviceAccess::Share(share) => ("share", ShareId::as_str(share)),
        DeviceAccess::Whole => ("whole", ""),
        DeviceAccess::Partition => ("partition", ""),
        DeviceAccess::Admin => ("admin", ""),
    }
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
