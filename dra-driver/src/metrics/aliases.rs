//! Metrics under the names of HAMi and of Volcano's vGPU plugin, so that their dashboards work with drava. Pure.
//!
//! Values and units are those of the originals: MiB, bytes, percent. HAMi has renamed its metrics to `hami_*`; both names
//! are shown. A share that several containers use is shown for each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use drava_api::metric::{Metric, alias};
use drava_nvml::{Memory, Sensor};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::claim_view::{ClaimEntry, Container, DeviceAccess, DeviceEntry};
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
        let (mut used, mut busy) = (Vec::new(), Vec::new());
        let (mut limit, mut bytes, mut cores) = (Vec::new(), Vec::new(), Vec::new());
        for (uuid, gpu) in &self.snapshot.gpus {
            let (Some(info), Some(telemetry)) = (&gpu.info, self.snapshot.fresh(gpu)) else {
                continue;
            };
            let (index, model) = (info.index.to_string(), info.model.clone());
            let of_host = [
                self.node.clone(),
                index.clone(),
                uuid.to_string(),
                model.clone(),
            ];
            let of_gpu = [self.node.clone(), uuid.to_string(), index, model];
            if let Sensor::Value(Memory::Dedicated {
                total_bytes,
                used_bytes,
                reserved_bytes: _,
            }) = telemetry.memory
            {
                used.push((of_host.clone(), used_bytes as f64));
                let labels = [uuid.to_string(), self.node.clone()];
                limit.push((labels, (total_bytes / MIB) as f64));
                bytes.push((of_gpu.clone(), total_bytes as f64));
            }
            if let Sensor::Value(utilization) = telemetry.utilization {
                busy.push((of_host, f64::from(utilization.gpu_percent)));
            }
            cores.push((of_gpu, 100.0));
        }
        encode(encoder, &alias::HAMI_HOST_MEMORY_USED, used.clone())?;
        encode(encoder, &alias::HOST_GPU_MEMORY_USAGE, used)?;
        encode(encoder, &alias::HAMI_HOST_UTILIZATION, busy.clone())?;
        encode(encoder, &alias::HOST_CORE_UTILIZATION, busy)?;
        encode(encoder, &alias::HAMI_GPU_MEMORY_LIMIT, bytes)?;
        encode(encoder, &alias::HAMI_GPU_CORE_LIMIT, cores)?;
        encode(encoder, &alias::VOLCANO_MEMORY_LIMIT, limit)
    }

    /// Devices of containers. `vdeviceid` numbers the shares of a container, over all its claims.
    fn encode_containers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (mut used, mut limit) = (BTreeMap::new(), BTreeMap::new());
        let (mut busy, mut idle) = (BTreeMap::new(), BTreeMap::new());
        let mut allocated: BTreeMap<[String; 5], [f64; 2]> = BTreeMap::new();
        let mut numbers: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
        for (entry, pod, container) in self.containers() {
            let devices = entry.devices.iter();
            let devices = devices.filter(|device| uses(container, device));
            let shares = devices.filter_map(|device| Some((device, self.share(device)?)));
            let number = numbers
                .entry((&entry.claim.namespace, pod, &container.name))
                .or_default();
            for (device, share) in shares {
                let labels = [
                    entry.claim.namespace.clone(),
                    pod.to_owned(),
                    container.name.clone(),
                    number.to_string(),
                    device.gpu.clone(),
                ];
                *number += 1;
                used.insert(labels.clone(), share.figures.used_bytes as f64);
                busy.insert(labels.clone(), f64::from(share.utilization_percent));
                if let Some(bytes) = share.limit_bytes {
                    limit.insert(labels.clone(), bytes as f64);
                }
                if share.figures.last_demand_us > 0 {
                    let now = self.snapshot.now.monotonic_us;
                    let idle_us = now.saturating_sub(share.figures.last_demand_us);
                    idle.insert(labels, (idle_us / 1_000_000) as f64);
                }
                let sums = allocated.entry([
                    entry.claim.namespace.clone(),
                    self.node.clone(),
                    pod.to_owned(),
                    container.index.to_string(),
                    device.gpu.clone(),
                ]);
                let sums = sums.or_default();
                sums[0] += share.limit_bytes.unwrap_or(0) as f64;
                sums[1] += f64::from(share.guaranteed_percent);
            }
        }
        for (metrics, samples) in [
            (
                [
                    alias::VGPU_MEMORY_USAGE,
                    alias::DEVICE_MEMORY,
                    alias::HAMI_VGPU_MEMORY_USED,
                    alias::HAMI_DEVICE_MEMORY,
                ]
                .as_slice(),
                used,
            ),
            (
                &[alias::VGPU_MEMORY_LIMIT, alias::HAMI_VGPU_MEMORY_LIMIT],
                limit,
            ),
            (
                &[alias::DEVICE_UTILIZATION, alias::HAMI_DEVICE_UTILIZATION],
                busy,
            ),
            (&[alias::LAST_KERNEL, alias::HAMI_LAST_KERNEL], idle),
        ] {
            for metric in metrics {
                encode(encoder, metric, samples.clone())?;
            }
        }
        for (column, metric) in [
            alias::HAMI_VGPU_MEMORY_ALLOCATED,
            alias::HAMI_VGPU_CORE_ALLOCATED,
        ]
        .iter()
        .enumerate()
        {
            encode(encoder, metric, self::column(&allocated, column))?;
        }
        Ok(())
    }

    /// Returns the containers with their claims and pods.
    fn containers(&self) -> impl Iterator<Item = (&ClaimEntry, &str, &Container)> {
        self.snapshot.claims.iter().flat_map(|entry| {
            let pods = entry.containers.iter();
            pods.flat_map(move |(pod, containers)| {
                let containers = containers.iter();
                containers.map(move |container| (entry, pod.as_str(), container))
            })
        })
    }

    /// Allocations of the shares of each GPU, and of each pod.
    fn encode_allocations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // Shares, memory in bytes, percent of GPU time.
        let gpus = self.snapshot.gpus.keys();
        let mut of_gpu: BTreeMap<[String; 2], [f64; 3]> = gpus
            .map(|uuid| ([uuid.to_string(), self.node.clone()], [0.0; 3]))
            .collect();
        let mut of_pod: BTreeMap<[String; 3], [f64; 2]> = BTreeMap::new();
        for entry in self.snapshot.claims.iter() {
            for device in &entry.devices {
                let Some(share) = self.share(device) else {
                    continue;
                };
                let bytes = share.limit_bytes.unwrap_or(0);
                let cores = f64::from(share.guaranteed_percent);
                let gpu = [device.gpu.clone(), self.node.clone()];
                let sum = of_gpu.entry(gpu).or_default();
                *sum = [sum[0] + 1.0, sum[1] + bytes as f64, sum[2] + cores];
                for pod in &entry.pods {
                    let pod = [device.gpu.clone(), self.node.clone(), pod.clone()];
                    let sum = of_pod.entry(pod).or_default();
                    *sum = [sum[0] + (bytes / MIB) as f64, sum[1] + cores];
                }
            }
        }
        self.encode_allocations_of_hami(encoder, &of_gpu)?;
        let mib = column(&of_gpu, 1);
        let mib = mib.map(|(labels, bytes)| (labels, (bytes / MIB as f64).floor()));
        encode(encoder, &alias::VOLCANO_SHARED_NUMBER, column(&of_gpu, 0))?;
        encode(encoder, &alias::VOLCANO_ALLOCATED_MEMORY, mib)?;
        encode(encoder, &alias::VOLCANO_ALLOCATED_CORES, column(&of_gpu, 2))?;
        encode(encoder, &alias::VOLCANO_POD_MEMORY, column(&of_pod, 0))?;
        encode(encoder, &alias::VOLCANO_POD_CORES, column(&of_pod, 1))
    }

    /// Allocations of the GPUs with a known model.
    fn encode_allocations_of_hami(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        of_gpu: &BTreeMap<[String; 2], [f64; 3]>,
    ) -> fmt::Result {
        let (mut sums, mut bytes) = (BTreeMap::new(), Vec::new());
        for ([gpu, node], sum) in of_gpu {
            let known = self.snapshot.gpus.iter();
            let mut known = known.filter(|(uuid, _)| uuid.as_str() == gpu);
            let Some(info) = known.next().and_then(|(_, gpu)| gpu.info.as_ref()) else {
                continue;
            };
            let (index, model) = (info.index.to_string(), info.model.clone());
            let cores = "100".to_owned();
            let labels = [
                node.clone(),
                gpu.clone(),
                index.clone(),
                cores,
                model.clone(),
            ];
            bytes.push((labels, sum[1]));
            sums.insert([node.clone(), gpu.clone(), index, model], *sum);
        }
        encode(encoder, &alias::HAMI_GPU_MEMORY_ALLOCATED, bytes)?;
        encode(encoder, &alias::HAMI_GPU_SHARED, column(&sums, 0))?;
        encode(encoder, &alias::HAMI_GPU_CORE_ALLOCATED, column(&sums, 2))
    }

    /// Returns the measurements of the share of a device.
    fn share(&self, device: &DeviceEntry) -> Option<&ShareMetrics> {
        let DeviceAccess::Share(id) = &device.access else {
            return None;
        };
        self.snapshot.shares.iter().find(|share| share.share == *id)
    }
}

/// Returns one value of each sample.
fn column<const N: usize, const M: usize>(
    sums: &BTreeMap<[String; N], [f64; M]>,
    column: usize,
) -> impl Iterator<Item = ([String; N], f64)> {
    let value = move |sums: &[f64; M]| sums.get(column).copied().unwrap_or_default();
    sums.iter()
        .map(move |(labels, sums)| (labels.clone(), value(sums)))
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
