//! Every name that crosses a process boundary: driver, pools, taints, labels, attributes, capacities, classes.
//!
//! One home, so that the node driver, the controller, the chart's tests and the command line cannot disagree.

/// Name of the DRA driver, and domain of its unqualified attributes and capacities.
pub const DRIVER: &str = "gpu.drava.dev";

/// API group of the opaque config and of the custom resources.
pub const GROUP: &str = "gpu.drava.dev";

/// Version of [`GROUP`] that this build reads and writes.
pub const VERSION: &str = "v1alpha1";

/// `apiVersion` of the opaque config.
pub const API_VERSION: &str = "gpu.drava.dev/v1alpha1";

/// Taint that reserves every device for the controller in managed mode; its effect is `NoSchedule`.
pub const MANAGED_TAINT: &str = "gpu.drava.dev/managed";

/// Taint on a device that must not be used; its value is the reason, such as `xid-79`.
pub const UNHEALTHY_TAINT: &str = "gpu.drava.dev/unhealthy";

/// Finalizer that kubelet's and kube-controller-manager's claim life cycle relies on (KEP-4381).
pub const CLAIM_FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Annotation on a claim that the controller has allocated: UID of the pod for which it did.
pub const ALLOCATED_FOR_ANNOTATION: &str = "gpu.drava.dev/allocated-for";

/// Scheduling gate under which a pod waits for its allocation without costing kube-scheduler anything.
pub const ALLOCATION_GATE: &str = "gpu.drava.dev/allocation";

/// Label that selects the nodes on which the driver runs.
pub const ENABLED_LABEL: &str = "gpu.drava.dev/enabled";

/// Kind of the CDI specs that the driver writes, one per claim.
pub const CDI_KIND: &str = "gpu.drava.dev/claim";

/// Name of the pool that a node publishes. The slash keeps it apart from the bare node names that other
/// drivers use: counter caches of kube-scheduler before 1.36.3 collide on pool names (kubernetes #140434).
#[must_use]
pub fn pool(node: &str) -> String {
    format!("{node}/gpus")
}

/// Device classes of the chart.
pub mod class {
    /// A whole card.
    pub const GPU: &str = "gpu.drava.dev";
    /// A share of a card, enforced by libvgpu.
    pub const VGPU: &str = "vgpu.drava.dev";
    /// A hardware partition.
    pub const MIG: &str = "mig.drava.dev";
    /// A share or a partition, whichever is better.
    pub const FRACTION: &str = "fraction.drava.dev";
}

/// Attribute names. Unqualified ones belong to the domain [`DRIVER`].
pub mod attribute {
    /// `gpu`, `vgpu` or `mig` ([`crate::DeviceType`]).
    pub const TYPE: &str = "type";
    /// UUID of the card; of the parent card on a partition.
    pub const UUID: &str = "uuid";
    /// MIG profile, `none` on other types.
    pub const PROFILE: &str = "profile";
    /// Marketing name, as NVML gives it.
    pub const PRODUCT_NAME: &str = "productName";
    /// Brand, such as `Nvidia` or `GeForce`.
    pub const BRAND: &str = "brand";
    /// Architecture, such as `Hopper`.
    pub const ARCHITECTURE: &str = "architecture";
    /// CUDA compute capability as a version.
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// Version of the kernel driver.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// Newest CUDA version that the driver serves.
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// `none`, `hmm` or `ats`.
    pub const ADDRESSING_MODE: &str = "addressingMode";
    /// What the card offers now: `auto`, `exclusive`, `vgpu`, `mig` or `dynamic`.
    pub const MODE: &str = "mode";
    /// Minor number of the device node.
    pub const MINOR: &str = "minor";
    /// NVML index.
    pub const INDEX: &str = "index";
    /// True where the node offers more memory than the card has.
    pub const OVERSUBSCRIBED: &str = "oversubscribed";
    /// Clique of cards joined by NVLink.
    pub const NVLINK_DOMAIN: &str = "nvlinkDomain";
    /// PCI bus id (standard attribute of Kubernetes).
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// PCIe root complex (standard attribute of Kubernetes).
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// NUMA node, −1 when unknown (standard attribute of Kubernetes, KEP-6072).
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
}

/// Capacity names, all in the domain [`DRIVER`].
pub mod capacity {
    /// Device memory in bytes.
    pub const MEMORY: &str = "memory";
    /// Percent of the card's compute.
    pub const CORES: &str = "cores";
    /// Tenants of one card.
    pub const SLOTS: &str = "slots";
    /// Streaming multiprocessors of a partition.
    pub const MULTIPROCESSORS: &str = "multiprocessors";
}
