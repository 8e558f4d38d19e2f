//! Metrics under the names of HAMi and of Volcano's vGPU plugin, so that their dashboards work with drava. Pure.
//!
//! Values and units are those of the originals: MiB, percent. A share that several containers use is shown for each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use drava_api::metric::{Metric, alias};
use drava_nvml::Memory;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::claim_view::{DeviceAccess, DeviceEntry};
use super::exposition::{Snapshot, uses};
use crate::agent::share_metrics::ShareMetrics;

const MIB: u64 = 1 << 20;

/// A snapshot with the aliases.
#[derive(Debug, Clone)]
pub struct WithAliases {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Name of the node.
    pub node: String,
}

impl Collector for WithAliases {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_gpus(&mut encoder)?;
        self.encode_containers(&mut encoder)?;
        self.encode_allocations(&mut encoder)?;
        self.snapshot.encode(encoder)
    }
}

impl WithAliases {
    fn encode_gpus(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (mut used, mut busy, mut limit) = (Vec::new(), Vec::new(), Vec::new());
        for (uuid, gpu) in &self.snapshot.gpus {
            let (Some(info), Some(telemetry)) = (&gpu.info, self.snapshot.fresh(gpu)) else {
                continue;
            };
            let labels = [
                self.node.clone(),
                info.index.to_string(),
                uuid.to_string(),
                info.model.clone(),
            ];
            if let Memory::Dedicated {
                total_bytes,
                used_bytes,
                reserved_bytes: _,
            } = telemetry.memory
            {
                used.push((labels.clone(), used_bytes as f64));
                let of_gpu = [uuid.to_string(), self.node.clone()];
                limit.push((of_gpu, (total_bytes / MIB) as f64));
            }
            if let Some(utilization) = telemetry.utilization {
                busy.push((labels, f64::from(utilization.gpu_percent)));
            }
        }
        encode(encoder, &alias::HOST_GPU_MEMORY_USAGE, used)?;
        encode(encoder, &alias::HOST_CORE_UTILIZATION, busy)?;
        encode(encoder, &alias::VOLCANO_MEMORY_LIMIT, limit)
    }

    /// Devices of containers. `vdeviceid` numbers the shares of a container.
    fn encode_containers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (mut used, mut limit, mut idle) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for entry in self.snapshot.claims.iter() {
            for (pod, containers) in &entry.containers {
                for container in containers {
                    let devices = entry.devices.iter();
                    let devices = devices.filter(|device| uses(container, device));
                    let shares = devices.filter_map(|device| Some((device, self.share(device)?)));
                    for (number, (device, share)) in shares.enumerate() {
                        let labels = [
                            entry.claim.namespace.clone(),
                            pod.clone(),
                            container.name.clone(),
                            number.to_string(),
                            device.gpu.clone(),
                        ];
                        used.insert(labels.clone(), share.figures.used_bytes as f64);
                        if let Some(bytes) = share.limit_bytes {
                            limit.insert(labels.clone(), bytes as f64);
                        }
                        if share.figures.last_demand_us > 0 {
                            let now = self.snapshot.now.monotonic_us;
                            let idle_us = now.saturating_sub(share.figures.last_demand_us);
                            idle.insert(labels, (idle_us / 1_000_000) as f64);
                        }
                    }
                }
            }
        }
        encode(encoder, &alias::VGPU_MEMORY_USAGE, used)?;
        encode(encoder, &alias::VGPU_MEMORY_LIMIT, limit)?;
        encode(encoder, &alias::LAST_KERNEL, idle)
    }

    /// Allocations of the shares of each GPU, and of each pod.
    fn encode_allocations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let gpus = self.snapshot.gpus.keys();
        let mut of_gpu: BTreeMap<[String; 2], [u64; 3]> = gpus
            .map(|uuid| ([uuid.to_string(), self.node.clone()], [0; 3]))
            .collect();
        let mut of_pod: BTreeMap<[String; 3], [u64; 2]> = BTreeMap::new();
        for entry in self.snapshot.claims.iter() {
            for device in &entry.devices {
                let Some(share) = self.share(device) else {
                    continue;
                };
                let memory_mib = share.limit_bytes.unwrap_or(0) / MIB;
                let cores = u64::from(share.guaranteed_percent);
                let gpu = [device.gpu.clone(), self.node.clone()];
                let sum = of_gpu.entry(gpu).or_default();
                *sum = [sum[0] + 1, sum[1] + memory_mib, sum[2] + cores];
                for pod in &entry.pods {
                    let pod = [device.gpu.clone(), self.node.clone(), pod.clone()];
                    let sum = of_pod.entry(pod).or_default();
                    *sum = [sum[0] + memory_mib, sum[1] + cores];
                }
            }
        }
        let column = |column: usize| {
            let value = |(labels, sums): (&[String; 2], &[u64; 3])| {
                (
                    labels.clone(),
                    sums.get(column).copied().unwrap_or(0) as f64,
                )
            };
            of_gpu.iter().map(value).collect::<Vec<_>>()
        };
        encode(encoder, &alias::VOLCANO_SHARED_NUMBER, column(0))?;
        encode(encoder, &alias::VOLCANO_ALLOCATED_MEMORY, column(1))?;
        encode(encoder, &alias::VOLCANO_ALLOCATED_CORES, column(2))?;
        let memory = of_pod
            .iter()
            .map(|(pod, [mib, _])| (pod.clone(), *mib as f64));
        encode(encoder, &alias::VOLCANO_POD_MEMORY, memory)?;
        let cores = of_pod
            .iter()
            .map(|(pod, [_, cores])| (pod.clone(), *cores as f64));
        encode(encoder, &alias::VOLCANO_POD_CORES, cores)
    }

    /// Returns the measurements of the share of a device.
    fn share(&self, device: &DeviceEntry) -> Option<&ShareMetrics> {
        let DeviceAccess::Share(id) = &device.access else {
            return None;
        };
        self.snapshot.shares.iter().find(|share| share.share == *id)
    }
}

fn encode<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric,
    samples: impl IntoIterator<Item = ([String; N], f64)>,
) -> fmt::Result {
    let samples: Vec<([String; N], f64)> = samples.into_iter().collect();
    let distinct: BTreeSet<&[String; N]> = samples.iter().map(|(labels, _)| labels).collect();
    debug_assert_eq!(distinct.len(), samples.len(), "labels of {}", metric.name);
    let samples = samples.iter();
    metric.encode(
        encoder,
        samples.map(|(labels, value)| (labels.each_ref().map(String::as_str), *value)),
    )
}
