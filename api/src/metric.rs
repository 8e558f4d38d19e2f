//! Metrics of drava's programs: names, types, labels, and their encoding as OpenMetrics text.
//!
//! The tables are the only source of names: the exporters encode what is in them, and `cargo xtask codegen` writes
//! `docs/reference/metrics.md` from them. Units are the base units of Prometheus (seconds, bytes, ratios of 0 to 1).

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

mod sample;

pub use sample::Sample;

/// Media type of [`exposition`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that rises and falls.
    Gauge,
    /// A value that only rises, until its program or its object restarts.
    Counter,
    /// A distribution of durations.
    Histogram,
}

impl MetricKind {
    /// Returns the type in the words of Prometheus.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }

    const fn metric_type(self) -> MetricType {
        match self {
            Self::Gauge => MetricType::Gauge,
            Self::Counter => MetricType::Counter,
            Self::Histogram => MetricType::Histogram,
        }
    }
}

/// Description of one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Name; samples of a counter have the suffix `_total` in addition.
    pub name: &'static str,
    /// Type.
    pub kind: MetricKind,
    /// Names of the labels, in the order of their values.
    pub labels: &'static [&'static str],
    /// Meaning and unit.
    pub help: &'static str,
}

impl Metric {
    /// Encodes the samples of a gauge or a counter. Without samples nothing is encoded.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn encode<'a, const N: usize>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        samples: impl IntoIterator<Item = ([&'a str; N], f64)>,
    ) -> fmt::Result {
        self.encode_each(encoder, samples, |kind, mut sample, value| match kind {
            MetricKind::Gauge | MetricKind::Histogram => sample.encode_gauge(&value),
            MetricKind::Counter => sample.encode_counter::<NoLabelSet, _, f64>(&value, None),
        })
    }

    /// Encodes the samples of a histogram.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn encode_histograms<'a, const N: usize>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        samples: impl IntoIterator<Item = ([&'a str; N], &'a Histogram)>,
    ) -> fmt::Result {
        self.encode_each(encoder, samples, |_, sample, histogram| {
            histogram.encode(sample)
        })
    }

    fn encode_each<'a, const N: usize, V>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        samples: impl IntoIterator<Item = ([&'a str; N], V)>,
        encode: impl Fn(MetricKind, MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        debug_assert_eq!(self.labels.len(), N, "labels of {}", self.name);
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let mut family =
            encoder.encode_descriptor(self.name, self.help, None, self.kind.metric_type())?;
        for (values, value) in samples {
            let labels: Vec<(&str, &str)> = self.labels.iter().copied().zip(values).collect();
            encode(self.kind, family.encode_family(&labels)?, value)?;
        }
        Ok(())
    }
}

/// Returns the OpenMetrics text of what `collector` encodes.
///
/// # Errors
/// When the collector fails.
pub fn exposition(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

macro_rules! metrics {
    ($(#[$doc:meta])* $list:ident { $($name:ident = $metric:literal $kind:ident [$($label:literal),*] $help:literal;)* }) => {
        $(
            #[doc = $help]
            pub const $name: Metric = Metric {
                name: $metric,
                kind: MetricKind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        $(#[$doc])*
        pub const $list: &[Metric] = &[$($name),*];
    };
}

/// Version of the program; the value is 1.
pub const BUILD_INFO: Metric = Metric {
    name: "drava_build_info",
    kind: MetricKind::Gauge,
    labels: &["component", "version"],
    help: "Version of the program; the value is 1.",
};

/// Metrics of the node driver.
pub mod driver {
    use super::{Metric, MetricKind};

    metrics! {
        /// All metrics of the node driver except [`super::BUILD_INFO`].
        ALL {
            CONDITION = "drava_driver_condition" Gauge ["condition"]
                "Whether a readiness condition of the node driver is met: 1 or 0.";
            CLAIM_OPERATION_SECONDS = "drava_claim_operation_seconds" Histogram ["operation"]
                "Duration of prepare and unprepare by claim, failed ones included.";
            CLAIM_OPERATION_ERRORS = "drava_claim_operation_errors" Counter ["operation"]
                "Failed prepare and unprepare calls by claim.";
            BURST_RECLAIM_MISSED = "drava_burst_reclaim_missed" Counter ["cause"]
                "Prepare calls that failed because lent memory was not given back in time: in_use or not_lowered.";
            MPS_FAULTS = "drava_mps_faults" Counter ["part"]
                "Faults of MPS, which serves shares with computePolicy spatial: daemon (ended and started again) or server (fatal fault of a program).";
            GPU_INFO = "drava_gpu_info" Gauge ["gpu", "index", "model", "pci_bus_id", "driver_version"]
                "GPU of the node by UUID; the value is 1.";
            GPU_HEALTHY = "drava_gpu_healthy" Gauge ["gpu"]
                "Whether the GPU and all its MIG instances are healthy: 1 or 0.";
            GPU_FAULT_INFO = "drava_gpu_fault_info" Gauge ["gpu", "slices", "reason"]
                "Fault of an unhealthy GPU, or of the MIG instance with these memory slices, as the value of its taint; the value is 1.";
            GPU_MEMORY_TOTAL_BYTES = "drava_gpu_memory_total_bytes" Gauge ["gpu"]
                "Memory of the GPU.";
            GPU_MEMORY_RESERVED_BYTES = "drava_gpu_memory_reserved_bytes" Gauge ["gpu"]
                "GPU memory that the NVIDIA driver reserves.";
            GPU_MEMORY_USED_BYTES = "drava_gpu_memory_used_bytes" Gauge ["gpu"]
                "GPU memory in use, without the reserved memory.";
            GPU_UTILIZATION_RATIO = "drava_gpu_utilization_ratio" Gauge ["gpu"]
                "Part of NVML's last sample period with a running kernel.";
            GPU_MEMORY_CONTROLLER_UTILIZATION_RATIO = "drava_gpu_memory_controller_utilization_ratio" Gauge ["gpu"]
                "Part of NVML's last sample period with memory reads or writes.";
            GPU_TEMPERATURE_CELSIUS = "drava_gpu_temperature_celsius" Gauge ["gpu"]
                "Temperature of the GPU.";
            GPU_POWER_WATTS = "drava_gpu_power_watts" Gauge ["gpu"]
                "Power draw of the GPU.";
            GPU_ENERGY_JOULES = "drava_gpu_energy_joules" Counter ["gpu"]
                "Energy of the GPU since the NVIDIA driver was loaded; absent before Volta.";
            GPU_CLOCK_HERTZ = "drava_gpu_clock_hertz" Gauge ["gpu", "clock"]
                "Current clock: sm or memory.";
            GPU_ECC_ERRORS = "drava_gpu_ecc_errors" Counter ["gpu", "kind"]
                "ECC errors since the NVIDIA driver was loaded: corrected or uncorrected.";
            GPU_XID_ERRORS = "drava_gpu_xid_errors" Counter ["gpu", "xid"]
                "Critical errors (XIDs) since the node driver started; numbers beyond the first 32 of a GPU count as other.";
            GPU_SAMPLE_TIMESTAMP_SECONDS = "drava_gpu_sample_timestamp_seconds" Gauge ["gpu"]
                "Unix time at which NVML last reported; the values of the GPU are from then, and disappear after 60 s.";
            CLAIM_DEVICE_INFO = "drava_claim_device_info" Gauge
                ["namespace", "claim", "claim_uid", "request", "device", "gpu", "access", "share"]
                "Device of a prepared claim; access is share, whole, partition or admin; the value is 1.";
            CLAIM_POD_INFO = "drava_claim_pod_info" Gauge ["namespace", "claim", "pod"]
                "Pod that reserves a prepared claim; one series for each pod of a shared claim; the value is 1.";
            CONTAINER_DEVICE_INFO = "drava_container_device_info" Gauge
                ["namespace", "pod", "container", "claim", "request", "device", "gpu", "share"]
                "Device of a container by its claim; share is empty for other access than a share; the value is 1.";
            SHARE_MEMORY_LIMIT_BYTES = "drava_share_memory_limit_bytes" Gauge ["namespace", "claim", "share"]
                "Memory limit of the share; absent without a limit.";
            SHARE_BURST_BYTES = "drava_share_burst_bytes" Gauge ["namespace", "claim", "share"]
                "Part of the memory limit beyond what the share is guaranteed; absent without memory.limit.";
            SHARE_IDLE_SECONDS = "drava_share_idle_seconds" Gauge ["namespace", "claim", "share"]
                "Time without GPU time of an idle share; absent while it is not idle, and for the first minute.";
            SHARE_LENT_BYTES = "drava_share_lent_bytes" Gauge ["namespace", "claim", "share"]
                "Part of its guarantee that the share lends to others; absent without memory.lendIdle of its class.";
            SHARE_SUSPENDED_BYTES = "drava_share_suspended_bytes" Gauge ["namespace", "claim", "share"]
                "GPU memory of the processes of a suspended share, which waits in host memory; absent while the share runs.";
            SHARE_SUSPENDED_SECONDS = "drava_share_suspended_seconds" Gauge ["namespace", "claim", "share"]
                "Time since the GPU memory of a suspended share is free for others; absent while it is not, and for shares that an older build \
                 has suspended.";
            SHARE_MEMORY_USED_BYTES = "drava_share_memory_used_bytes" Gauge ["namespace", "claim", "share"]
                "Memory charged to the share by libvgpu.";
            SHARE_MEMORY_PEAK_BYTES = "drava_share_memory_peak_bytes" Gauge ["namespace", "claim", "share"]
                "Highest memory charged to the share.";
            SHARE_MEMORY_DRIVER_BYTES = "drava_share_memory_driver_bytes" Gauge ["namespace", "claim", "share"]
                "Part of the charged memory that libcuda uses for itself beyond its reserve.";
            SHARE_MEMORY_PROCESSES_BYTES = "drava_share_memory_processes_bytes" Gauge ["namespace", "claim", "share"]
                "Memory of the processes of the share by NVML, with the memory of libcuda, also as far as it is not charged; a process with several shares counts for the first.";
            SHARE_GUARANTEED_RATIO = "drava_share_gpu_time_guaranteed_ratio" Gauge ["namespace", "claim", "share"]
                "Guaranteed part of the GPU time; 0 is best effort. Absent for a share whose GPU time is not measured.";
            SHARE_MULTIPROCESSORS_RATIO = "drava_share_multiprocessors_ratio" Gauge ["namespace", "claim", "share"]
                "Part of the GPU's multiprocessors that the share has; only with computePolicy: spatial.";
            SHARE_GPU_TIME_SECONDS = "drava_share_gpu_time_seconds" Counter ["namespace", "claim", "share"]
                "GPU time that the share has used; absent where it is not measured.";
            SHARE_THROTTLED_SECONDS = "drava_share_throttled_seconds" Counter ["namespace", "claim", "share"]
                "Time that launches of the share have waited for GPU time, summed over processes; absent where it is not measured.";
            SHARE_MEMORY_DENIALS = "drava_share_memory_denials" Counter ["namespace", "claim", "share"]
                "Allocations that were denied because of the memory limit.";
            SHARE_PROCESSES = "drava_share_processes" Gauge ["namespace", "claim", "share", "state"]
                "Processes with a context on the GPU: registered (limited by libvgpu) or escaped (without libvgpu, although a limit of the share needs it).";
            SHARE_VIOLATION_INFO = "drava_share_violation_info" Gauge ["namespace", "claim", "share", "reason"]
                "Violation of the limits of the share, by the reason of the claim's condition Enforced; the value is 1.";
            SHARE_LAST_ACTIVITY_TIMESTAMP_SECONDS = "drava_share_last_activity_timestamp_seconds" Gauge
                ["namespace", "claim", "share"]
                "Unix time at which a process of the share last used or waited for GPU time; absent before the first use.";
        }
    }
}

/// Metrics of the node driver under the names of HAMi and of Volcano's vGPU plugin, off by default.
pub mod alias {
    use super::{Metric, MetricKind};

    metrics! {
        /// All aliases.
        ALL {
            HOST_GPU_MEMORY_USAGE = "HostGPUMemoryUsage" Gauge ["nodeid", "deviceidx", "deviceuuid", "devicetype"]
                "GPU memory in use, bytes (HAMi).";
            HOST_CORE_UTILIZATION = "HostCoreUtilization" Gauge ["nodeid", "deviceidx", "deviceuuid", "devicetype"]
                "Utilization of the GPU, percent (HAMi).";
            VGPU_MEMORY_USAGE = "vGPU_device_memory_usage_in_bytes" Gauge
                ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"]
                "Memory charged to a share of a container (HAMi).";
            VGPU_MEMORY_LIMIT = "vGPU_device_memory_limit_in_bytes" Gauge
                ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"]
                "Memory limit of a share of a container (HAMi).";
            DEVICE_MEMORY = "Device_memory_desc_of_container" Gauge
                ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"]
                "Memory charged to a share of a container (HAMi), without the labels of its parts.";
            DEVICE_UTILIZATION = "Device_utilization_desc_of_container" Gauge
                ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"]
                "GPU time that a share of a container used lately, percent of the GPU (HAMi).";
            LAST_KERNEL = "Device_last_kernel_of_container" Gauge
                ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"]
                "Seconds since the last demand for GPU time of a share of a container (HAMi).";
            HAMI_HOST_MEMORY_USED = "hami_host_gpu_memory_used_bytes" Gauge ["node", "device_index", "device_uuid", "device_type"]
                "HostGPUMemoryUsage by the present name of HAMi.";
            HAMI_HOST_UTILIZATION = "hami_host_gpu_utilization_ratio" Gauge ["node", "device_index", "device_uuid", "device_type"]
                "HostCoreUtilization by the present name of HAMi, percent.";
            HAMI_VGPU_MEMORY_USED = "hami_vgpu_memory_used_bytes" Gauge
                ["namespace", "pod", "container", "vdevice_index", "device_uuid"]
                "vGPU_device_memory_usage_in_bytes by the present name of HAMi.";
            HAMI_VGPU_MEMORY_LIMIT = "hami_vgpu_memory_limit_bytes" Gauge
                ["namespace", "pod", "container", "vdevice_index", "device_uuid"]
                "vGPU_device_memory_limit_in_bytes by the present name of HAMi.";
            HAMI_DEVICE_MEMORY = "hami_container_device_memory_bytes" Gauge
                ["namespace", "pod", "container", "vdevice_index", "device_uuid"]
                "Device_memory_desc_of_container by the present name of HAMi.";
            HAMI_DEVICE_UTILIZATION = "hami_container_device_utilization_ratio" Gauge
                ["namespace", "pod", "container", "vdevice_index", "device_uuid"]
                "Device_utilization_desc_of_container by the present name of HAMi, percent.";
            HAMI_LAST_KERNEL = "hami_container_last_kernel_elapsed_seconds" Gauge
                ["namespace", "pod", "container", "vdevice_index", "device_uuid"]
                "Device_last_kernel_of_container by the present name of HAMi.";
            HAMI_GPU_MEMORY_LIMIT = "hami_gpu_memory_limit_bytes" Gauge ["node", "device_uuid", "device_index", "device_type"]
                "Memory of the GPU (HAMi).";
            HAMI_GPU_MEMORY_ALLOCATED = "hami_gpu_memory_allocated_bytes" Gauge
                ["node", "device_uuid", "device_index", "device_cores", "device_type"]
                "Memory limits of the shares of the GPU (HAMi).";
            HAMI_GPU_CORE_LIMIT = "hami_gpu_core_limit_ratio" Gauge ["node", "device_uuid", "device_index", "device_type"]
                "GPU time of the GPU, percent: 100 (HAMi).";
            HAMI_GPU_CORE_ALLOCATED = "hami_gpu_core_allocated_ratio" Gauge ["node", "device_uuid", "device_index", "device_type"]
                "Guaranteed GPU time of the shares of the GPU, percent (HAMi).";
            HAMI_GPU_SHARED = "hami_gpu_shared_count" Gauge ["node", "device_uuid", "device_index", "device_type"]
                "Shares of the GPU (HAMi).";
            HAMI_VGPU_MEMORY_ALLOCATED = "hami_vgpu_memory_allocated_bytes" Gauge
                ["namespace", "node", "pod", "container_index", "device_uuid"]
                "Memory limits of the shares of a container on the GPU (HAMi).";
            HAMI_VGPU_CORE_ALLOCATED = "hami_vgpu_core_allocated_ratio" Gauge
                ["namespace", "node", "pod", "container_index", "device_uuid"]
                "Guaranteed GPU time of the shares of a container on the GPU, percent (HAMi).";
            VOLCANO_SHARED_NUMBER = "volcano_vgpu_device_shared_number" Gauge ["devID", "NodeName"]
                "Shares of the GPU (Volcano).";
            VOLCANO_ALLOCATED_MEMORY = "volcano_vgpu_device_allocated_memory" Gauge ["devID", "NodeName"]
                "Memory limits of the shares of the GPU, MiB (Volcano).";
            VOLCANO_ALLOCATED_CORES = "volcano_vgpu_device_allocated_cores" Gauge ["devID", "NodeName"]
                "Guaranteed GPU time of the shares of the GPU, percent (Volcano).";
            VOLCANO_MEMORY_LIMIT = "volcano_vgpu_device_memory_limit" Gauge ["devID", "NodeName"]
                "Memory of the GPU, MiB (Volcano).";
            VOLCANO_POD_MEMORY = "volcano_vgpu_device_memory_allocation_for_a_certain_pod" Gauge ["devID", "NodeName", "podName"]
                "Memory limits of the shares of a pod on the GPU, MiB (Volcano).";
            VOLCANO_POD_CORES = "volcano_vgpu_device_core_allocation_for_a_certain_pod" Gauge ["devID", "NodeName", "podName"]
                "Guaranteed GPU time of the shares of a pod on the GPU, percent (Volcano).";
        }
    }
}

/// Metrics of the controller. Only the leading replica has metrics of the cluster.
pub mod controller {
    use super::{Metric, MetricKind};

    metrics! {
        /// All metrics of the controller except [`super::BUILD_INFO`].
        ALL {
            LEADER = "drava_controller_leader" Gauge []
                "Whether this replica leads: 1 or 0.";
            SYNCED = "drava_controller_watch_synced" Gauge ["kind"]
                "Whether the first list of a watched kind is complete: 1 or 0.";
            WATCH_FAILURES = "drava_controller_watch_failures" Counter ["kind"]
                "Interrupted watches; each is restarted.";
            UNREADABLE = "drava_controller_unreadable_objects" Gauge ["kind"]
                "Objects that this build cannot read, by kind; events name them. The pools of an unreadable claim are excluded.";
            CAPACITY = "drava_device_capacity" Gauge ["node", "device", "capacity"]
                "Published capacity of a shareable device: memory in bytes, cores in percent of GPU time, slots.";
            ALLOCATED = "drava_device_allocated" Gauge ["node", "device", "capacity"]
                "Allocated part of the capacity of a shareable device, in the unit of drava_device_capacity.";
            RESERVED = "drava_device_reserved" Gauge ["node", "device", "capacity"]
                "Part of the capacity of a shareable device that is reserved for pods which wait, and not allocated.";
            OVERCOMMITTED = "drava_device_overcommitted" Gauge ["node", "device"]
                "Whether more is allocated than the device has: 1 or 0.";
            EXCLUSIVE = "drava_device_exclusive_allocations" Gauge ["node", "device"]
                "Claims that have the device alone; more than 1 is a double allocation.";
            FRAGMENTATION = "drava_node_fragmentation_ratio" Gauge ["node"]
                "Part of the free GPU memory of a node that is on partly allocated GPUs; 0 without free memory.";
            EXCLUDED_POOLS = "drava_controller_excluded_pools" Gauge []
                "Pools that are excluded from allocation because they are incomplete or malformed.";
            PENDING_PODS = "drava_controller_pending_pods" Gauge ["reason"]
                "Unbound pods with claims for devices, by the reason of their last rejection; None before the first decision and after an allocation.";
            GANGS = "drava_controller_gangs" Gauge ["state"]
                "Gangs with unfinished members: pending (a member is not bound) or running.";
            COMPANIONS = "drava_controller_companions" Gauge ["state"]
                "Claims that are to add to shares of running pods: waiting (not allocated), refused (not allocated, because the claim adds to no share as it is: InvalidCompanion), allocated, or returning (deleted, and the share keeps the capacity until its programs free it).";
            IN_FLIGHT = "drava_controller_allocations_in_flight" Gauge []
                "Allocation jobs that are being written.";
            DECISION_SECONDS = "drava_controller_decision_seconds" Histogram []
                "Duration of one pass of decisions over the pods that are due.";
            WAIT_SECONDS = "drava_controller_pod_wait_seconds" Histogram []
                "Time from the creation of a pod until the allocations of its claims are written.";
            EXPLANATION_SECONDS = "drava_controller_pod_explanation_seconds" Histogram []
                "Time from the creation of a pod, which Kubernetes stores in whole seconds, until its first condition says why it waits.";
            ALLOCATIONS = "drava_controller_allocation_jobs" Counter ["outcome"]
                "Finished allocation jobs: allocated or failed.";
            QUOTA_USED = "drava_quota_used" Gauge ["quota", "resource"]
                "Amount of a GpuQuota that is allocated or reserved: memory in bytes, cores in percent of GPU time, devices.";
            QUOTA_SUSPENDED = "drava_quota_suspended" Gauge ["quota", "resource"]
                "Used amount of suspended shares, which get it back when they are resumed, in the unit of drava_quota_used.";
            QUOTA_LIMIT = "drava_quota_limit" Gauge ["quota", "resource"]
                "Limit of a GpuQuota, in the unit of drava_quota_used; absent without a limit.";
            QUOTA_GUARANTEE = "drava_quota_guarantee" Gauge ["quota", "resource"]
                "Guarantee of a GpuQuota, in the unit of drava_quota_used; absent without a guarantee.";
            QUOTA_BORROWED = "drava_quota_borrowed" Gauge ["quota", "resource"]
                "Used amount beyond the guarantee, in the unit of drava_quota_used; absent without a guarantee.";
            QUOTA_ALERT_THRESHOLD_RATIO = "drava_quota_alert_threshold_ratio" Gauge ["quota"]
                "Ratio of the limit from which on the alert DravaQuotaAlmostUsed fires.";
            NAMESPACE_MEMORY = "drava_namespace_allocated_memory_bytes" Gauge ["namespace"]
                "GPU memory that the claims of a namespace have.";
            NAMESPACE_GPUS = "drava_namespace_allocated_gpus" Gauge ["namespace"]
                "GPU time that is guaranteed to the claims of a namespace, in GPUs: 1 for a whole GPU, 0.3 for a share with 30 cores, 0 for a partition.";
            NAMESPACE_DEVICES = "drava_namespace_allocated_devices" Gauge ["namespace"]
                "GPUs, shares and partitions that the claims of a namespace have.";
            NAMESPACE_MEMORY_SECONDS = "drava_namespace_memory_byte_seconds" Counter ["namespace"]
                "Integral of drava_namespace_allocated_memory_bytes over time: a basis for costs. Starts at 0 with each leader.";
            NAMESPACE_GPU_SECONDS = "drava_namespace_gpu_seconds" Counter ["namespace"]
                "Integral of drava_namespace_allocated_gpus over time (core-seconds of 100 cores): a basis for costs. Starts at 0 with each leader.";
            NAMESPACE_DEVICE_SECONDS = "drava_namespace_device_seconds" Counter ["namespace"]
                "Integral of drava_namespace_allocated_devices over time. Starts at 0 with each leader.";
            CERTIFICATE_START = "drava_webhook_certificate_start_timestamp_seconds" Gauge []
                "Unix time from which the certificate of the webhook is valid.";
            CERTIFICATE_END = "drava_webhook_certificate_end_timestamp_seconds" Gauge []
                "Unix time at which the certificate of the webhook expires.";
            RELEASES = "drava_controller_releases" Counter []
                "Allocations released because no pod reserved them.";
            SCHEDULER_RELEASES = "drava_controller_scheduler_releases" Counter []
                "Unreserved allocations of this controller that kube-scheduler released, because it cannot use the node.";
            PREEMPTIONS = "drava_controller_preemptions" Counter ["precedence"]
                "Pods for which others were evicted, by why they precede them: priority or guarantee (of a GpuQuota).";
            EVICTIONS = "drava_controller_evictions" Counter ["cause"]
                "Evicted pods: preemption, incomplete-gang, suspension (suspended for longer than the claim allows) or idle (as a GpuPolicy says).";
            EVICTION_FAILURES = "drava_controller_eviction_failures" Counter ["cause"]
                "Pods that could not be evicted, for example because of a PodDisruptionBudget; cause as in drava_controller_evictions.";
            LEDGER_DRIFT = "drava_controller_ledger_drift_seconds" Gauge []
                "Age of the oldest write to a claim that the watch of the controller has not delivered; 0 if all are delivered.";
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn all() -> impl Iterator<Item = &'static Metric> {
        [&BUILD_INFO]
            .into_iter()
            .chain(driver::ALL)
            .chain(controller::ALL)
    }

    #[test]
    fn names_are_unique_and_in_the_style_of_prometheus() {
        let names: BTreeSet<&str> = all().map(|metric| metric.name).collect();
        assert_eq!(names.len(), all().count());
        for metric in all() {
            let name = metric.name;
            let is_lower = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(
                name.starts_with("drava_") && name.chars().all(is_lower),
                "{name}"
            );
            assert!(!name.ends_with("_total"), "{name}: the encoder adds it");
            assert!(metric.help.ends_with('.'), "{name}");
            for unit in ["us", "ms", "mib", "percent", "milliwatts", "mhz"] {
                let has_unit = name.split('_').any(|word| word == unit);
                assert!(!has_unit, "{name}: not a base unit");
            }
        }
    }
}
