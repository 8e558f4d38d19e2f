//! Names that cross a process boundary: driver, pools, taints, labels, attributes, capacities, classes.
//!
//! The node driver, the controller, the chart's tests and the command line use only these constants.

/// Name of the DRA driver, and domain of its unqualified attributes and capacities.
pub const DRIVER: &str = "gpu.drava.dev";

/// Driver under which the controller records an allocation in its config: one that no node driver serves, so that each ignores
/// the record.
pub const RECORD_DRIVER: &str = "controller.gpu.drava.dev";

/// API group of the opaque config and of the custom resources.
pub const GROUP: &str = "gpu.drava.dev";

/// Version of [`GROUP`] that drava reads and writes.
pub const VERSION: &str = "v1alpha1";

/// `apiVersion` of the opaque config.
pub const API_VERSION: &str = "gpu.drava.dev/v1alpha1";

/// Taint that reserves every device for the controller in managed mode; its effect is `NoSchedule`.
pub const MANAGED_TAINT: &str = "gpu.drava.dev/managed";

/// Taint of an unusable device; the value is the reason, such as `xid-79`.
pub const UNHEALTHY_TAINT: &str = "gpu.drava.dev/unhealthy";

/// Taint of devices that `kubectl drava cordon` and `drain` exclude from allocation.
pub const CORDONED_TAINT: &str = "gpu.drava.dev/cordoned";

/// Finalizer that a claim has before its allocation, required by kubelet and kube-controller-manager (KEP-4381).
pub const CLAIM_FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Annotation of a claim: resource version of a write without response, which this annotation keeps from being executed late.
pub const WRITE_FENCE_ANNOTATION: &str = "gpu.drava.dev/write-fence";

/// Label that the chart's admission policy sets at the creation of a claim for drava's devices: `template` on a claim that was
/// generated from a template.
pub const CLAIM_LABEL: &str = "gpu.drava.dev/claim";

/// Value of [`CLAIM_LABEL`] on a claim that was generated from a template.
pub const GENERATED: &str = "template";

/// Estimated memory of a CUDA context by a word of the GPU's product name, MiB, as the node driver charges it. The attributes of
/// a GPU do not show it.
pub const CONTEXT_MIB: [(&str, u64); 6] = [
    ("T4", 160),
    ("A30", 416),
    ("A100", 432),
    ("H100", 528),
    ("H200", 528),
    ("B200", 592),
];

/// Annotation of the chart's device classes: namespace of drava. Tenants may not write device classes, so the command line takes
/// from there what they could imitate elsewhere: prices, and the pods of node drivers.
pub const NAMESPACE_ANNOTATION: &str = "gpu.drava.dev/namespace";

/// Label of a claim that adds capacity to the shares of another claim, its base: UID of the base.
pub const COMPANION_LABEL: &str = "gpu.drava.dev/companion-of";

/// Label of a claim whose shares are to be suspended, with the value [`SUSPEND`]. Only the controller writes and removes it.
pub const SUSPEND_LABEL: &str = "gpu.drava.dev/suspend";

/// Annotation of a claim whose shares a user wishes to be suspended, with the value [`SUSPEND`]. The controller acts on it.
pub const SUSPEND_WISH_ANNOTATION: &str = "gpu.drava.dev/suspend-requested";

/// Annotation of a claim that is suspended for a pod: which pod, as a text for readers of the claim's namespace; or
/// [`SUSPENDED_FOR_IDLENESS`]. Only the controller writes it, together with [`SUSPEND_LABEL`].
pub const SUSPENDED_FOR_ANNOTATION: &str = "gpu.drava.dev/suspended-for";

/// Value of [`SUSPENDED_FOR_ANNOTATION`] of a claim that is suspended because it was idle.
pub const SUSPENDED_FOR_IDLENESS: &str = "idle";

/// Value of [`SUSPEND_LABEL`] and [`SUSPEND_WISH_ANNOTATION`].
pub const SUSPEND: &str = "true";

/// Scheduling gate of pods without allocation, which kube-scheduler then does not try.
pub const ALLOCATION_GATE: &str = "gpu.drava.dev/allocation";

/// Condition of a pod: whether its claims are allocated, and why not.
pub const ALLOCATED_CONDITION: &str = "gpu.drava.dev/Allocated";

/// Condition of a pod: False while its share is suspended. A readiness gate can name it.
pub const RUNNING_CONDITION: &str = "gpu.drava.dev/Running";

/// Annotation of a pod: name of its gang in the namespace. The pods of a gang are allocated together.
pub const GANG_ANNOTATION: &str = "gpu.drava.dev/gang";

/// Annotation of a pod in a gang: number of pods that the gang needs to start; further pods are elastic.
pub const GANG_MIN_ANNOTATION: &str = "gpu.drava.dev/gang-min";

/// Annotation of a pod: name of its PodGroup of Volcano, which Volcano sets.
pub const VOLCANO_GROUP_ANNOTATION: &str = "scheduling.k8s.io/group-name";

/// Label of pods whose extended resources were translated into a claim, and of their claim templates.
pub const TRANSLATED_LABEL: &str = "gpu.drava.dev/translated";

/// Annotation of a translated pod: the claim as JSON, from which the controller creates the template.
pub const TRANSLATED_CLAIM_ANNOTATION: &str = "gpu.drava.dev/translated-claim";

/// Label of the nodes that run the node driver.
pub const ENABLED_LABEL: &str = "gpu.drava.dev/enabled";

/// Kind of the CDI specs of the node driver, one per claim.
pub const CDI_KIND: &str = "gpu.drava.dev/claim";

/// Kind of the CDI specs with the edits that claims share.
pub const CDI_BASE_KIND: &str = "gpu.drava.dev/base";

/// Annotation of a Node on which the node driver closes NVML, so that the NVIDIA kernel modules can be unloaded.
pub const RELEASE_NVML: &str = "gpu.drava.dev/release-nvml";

/// Labels of a Node by which NVIDIA's GPU operator controls programs that use its driver.
pub mod gpu_operator {
    /// Prefix of the labels of its operands, such as `nvidia.com/gpu.deploy.client` of programs that it does not know.
    pub const DEPLOY: &str = "nvidia.com/gpu.deploy.";
    /// Prefix of the value while the operand must not use the GPUs: `paused-for-driver-upgrade`, `paused-for-mig-change`.
    pub const PAUSED: &str = "paused-for-";
    /// State of an upgrade of the NVIDIA driver.
    pub const UPGRADE_STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
    /// State in which the pod of the driver is replaced, after the pods that use the GPUs were deleted.
    pub const RESTART_REQUIRED: &str = "pod-restart-required";
}

/// Extended resources with which device plugins offer NVIDIA GPUs.
const DEVICE_PLUGIN_RESOURCES: [&str; 3] = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "volcano.sh/vgpu-number",
];

/// Returns whether a device plugin offers NVIDIA GPUs or MIG partitions with this extended resource.
#[must_use]
pub fn is_device_plugin_resource(name: &str) -> bool {
    DEVICE_PLUGIN_RESOURCES.contains(&name) || name.starts_with("nvidia.com/mig-")
}

/// Returns the name of a node's pool. The slash distinguishes it from the bare node names of other drivers: counter
/// caches of kube-scheduler before 1.36.3 collide on pool names (kubernetes #140434).
#[must_use]
pub fn pool(node: &str) -> String {
    format!("{node}/gpus")
}

/// Returns the node of a pool with this name.
#[must_use]
pub fn node_of_pool(pool: &str) -> Option<&str> {
    pool.strip_suffix("/gpus")
}

/// Name of the device that is a whole GPU, and of its counter set. `number` is that of `/dev/nvidia<number>`, unless minor
/// numbers shifted at a reboot while a claim held the GPU.
#[must_use]
pub fn gpu_device(number: u32) -> String {
    format!("gpu-{number}")
}

/// Name of the device whose shares libvgpu enforces; see [`gpu_device`] for `number`.
#[must_use]
pub fn vgpu_device(number: u32) -> String {
    format!("gpu-{number}-vgpu")
}

/// Returns the number of the GPU of a device with this name.
#[must_use]
pub fn gpu_number(device: &str) -> Option<u32> {
    let rest = device.strip_prefix("gpu-")?;
    let number = rest.split_once('-').map_or(rest, |(number, _)| number);
    number.parse().ok()
}

/// Name of the device that is a MIG partition of `profile` (such as `1g.10gb+me`) from memory slice `start`; see
/// [`gpu_device`] for `number`.
#[must_use]
pub fn mig_device(number: u32, profile: &str, start: u32) -> String {
    // `1g.24gb+me` and `1g.24gb-me` are two profiles.
    let profile = profile
        .to_ascii_lowercase()
        .replace('-', "-no-")
        .replace('+', "-plus-")
        .replace('.', "-");
    format!("gpu-{number}-mig-{profile}-{start}")
}

/// Returns the name of the GPU of a MIG partition whose device has this name.
#[must_use]
pub fn gpu_of_mig_device(device: &str) -> Option<&str> {
    device.split_once("-mig-").map(|(gpu, _)| gpu)
}

/// Device classes of the chart.
pub mod class {
    /// A whole GPU.
    pub const GPU: &str = "gpu.drava.dev";
    /// A share of a GPU, enforced by libvgpu.
    pub const VGPU: &str = "vgpu.drava.dev";
    /// A MIG partition.
    pub const MIG: &str = "mig.drava.dev";
    /// A share or a MIG partition.
    pub const FRACTION: &str = "fraction.drava.dev";
    /// All of them.
    pub const ALL: [&str; 4] = [GPU, VGPU, MIG, FRACTION];
}

/// Attribute names. Unqualified names belong to the domain [`DRIVER`].
pub mod attribute {
    /// `gpu`, `vgpu` or `mig` ([`crate::DeviceType`]).
    pub const TYPE: &str = "type";
    /// UUID of the GPU; on a partition, of the parent GPU.
    pub const UUID: &str = "uuid";
    /// UUID of a partition's GPU, as other drivers name it.
    pub const PARENT_UUID: &str = "parentUUID";
    /// MIG profile; `none` on other types.
    pub const PROFILE: &str = "profile";
    /// Product name, as reported by NVML.
    pub const PRODUCT_NAME: &str = "productName";
    /// Brand, such as `Nvidia` or `GeForce`.
    pub const BRAND: &str = "brand";
    /// Architecture, such as `Hopper`.
    pub const ARCHITECTURE: &str = "architecture";
    /// CUDA compute capability as a version.
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// Version of the NVIDIA driver.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// Newest CUDA version that the NVIDIA driver supports.
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// `none`, `hmm` or `ats`.
    pub const ADDRESSING_MODE: &str = "addressingMode";
    /// What limits the memory of shares of the GPU: `driver` (the NVIDIA driver, by cgroup, and libvgpu) or `library` (libvgpu).
    pub const MEMORY_ENFORCEMENT: &str = "memoryEnforcement";
    /// Why the NVIDIA driver does not limit it ([`crate::obstacle::LimitObstacle`]); `none` where it does.
    pub const MEMORY_ENFORCEMENT_OBSTACLE: &str = "memoryEnforcementObstacle";
    /// Why the GPU has no shares with `computePolicy: spatial` ([`crate::obstacle::SpatialObstacle`]); `none` where it can have them.
    pub const SPATIAL_OBSTACLE: &str = "spatialObstacle";
    /// Value of both for no obstacle.
    pub const NO_OBSTACLE: &str = "none";
    /// Mode of the GPU: `auto`, `exclusive`, `vgpu`, `mig` or `dynamic`.
    pub const MODE: &str = "mode";
    /// Minor number of the device node.
    pub const MINOR: &str = "minor";
    /// NVML index.
    pub const INDEX: &str = "index";
    /// Memory of the GPU in MiB as `nvidia-smi` shows it: with the part that the NVIDIA driver reserves, which no claim gets. Of a
    /// MIG partition that of its profile.
    pub const MEMORY_MIB: &str = "memoryMib";
    /// True if the node publishes more memory than the GPU has.
    pub const OVERSUBSCRIBED: &str = "oversubscribed";
    /// Host memory in MiB that all suspended shares of the node may have together; absent without a limit.
    pub const SUSPEND_HOST_MEMORY_MIB: &str = "suspendHostMemoryMib";
    /// NVLink clique of the GPU, if it is in one.
    pub const NVLINK_DOMAIN: &str = "nvlinkDomain";
    /// PCI bus id (standard attribute of Kubernetes).
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// PCIe root complex (standard attribute of Kubernetes).
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// NUMA node, if it is known (standard attribute of Kubernetes, KEP-6072).
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
}

/// Capacity names, all in the domain [`DRIVER`].
pub mod capacity {
    /// Device memory in bytes.
    pub const MEMORY: &str = "memory";
    /// Percent of GPU time.
    pub const CORES: &str = "cores";
    /// Maximum number of shares of a GPU.
    pub const SLOTS: &str = "slots";
    /// Streaming multiprocessors of a partition.
    pub const MULTIPROCESSORS: &str = "multiprocessors";
    /// Copy engines of a partition.
    pub const COPY_ENGINES: &str = "copyEngines";
    /// Video decoders of a partition.
    pub const DECODERS: &str = "decoders";
    /// Video encoders of a partition.
    pub const ENCODERS: &str = "encoders";
    /// JPEG engines of a partition.
    pub const JPEG_ENGINES: &str = "jpegEngines";
    /// Optical flow engines of a partition.
    pub const OFA_ENGINES: &str = "ofaEngines";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_variants_of_a_profile_differently() {
        for (profile, name) in [
            ("1g.24gb", "gpu-0-mig-1g-24gb-3"),
            ("1g.24gb+me", "gpu-0-mig-1g-24gb-plus-me-3"),
            ("1g.24gb-me", "gpu-0-mig-1g-24gb-no-me-3"),
            ("1g.24gb+me.all", "gpu-0-mig-1g-24gb-plus-me-all-3"),
        ] {
            assert_eq!(mig_device(0, profile, 3), name);
        }
    }

    #[test]
    fn reads_node_and_gpu_from_names() {
        assert_eq!(node_of_pool(&pool("n1")), Some("n1"));
        assert_eq!(node_of_pool("n1"), None);
        let partition = mig_device(12, "1g.24gb-me", 0);
        assert_eq!(gpu_of_mig_device(&partition), Some(&*gpu_device(12)));
        for name in [gpu_device(12), vgpu_device(12)] {
            assert_eq!(gpu_of_mig_device(&name), None, "{name}");
        }
    }

    #[test]
    fn reads_number_from_every_device_name() {
        for name in [
            gpu_device(12),
            vgpu_device(12),
            mig_device(12, "1g.10gb", 0),
        ] {
            assert_eq!(gpu_number(&name), Some(12), "{name}");
        }
        for name in ["gpu", "gpu-", "gpu-x", "nic-1"] {
            assert_eq!(gpu_number(name), None, "{name}");
        }
    }
}
