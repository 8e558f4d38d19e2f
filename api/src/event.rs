//! Reasons of the Kubernetes events that drava emits, with what each means and what to do about it.
//!
//! The programs emit no event whose reason is not in this table. `cargo xtask codegen` writes
//! `docs/reference/events.md` from it.

use std::fmt;

/// Type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventType {
    /// Information.
    Normal,
    /// A fault or a decision against the user.
    Warning,
}

impl EventType {
    /// Value of the event's field `type`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Program that emits an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// The controller.
    Controller,
    /// The node driver.
    NodeDriver,
}

impl Component {
    /// Value of the event's field `reportingComponent`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Controller => "drava-controller",
            Self::NodeDriver => "drava-dra-driver",
        }
    }
}

macro_rules! event_reasons {
    ($($name:ident: $type:ident, $component:ident, $objects:literal, $meaning:literal, $action:literal;)*) => {
        /// Reason of an event. The names are part of the interface.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum EventReason {
            $(#[doc = $meaning] $name,)*
        }

        impl EventReason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Value of the event's field `reason`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Type of the events with this reason.
            #[must_use]
            pub const fn event_type(self) -> EventType {
                match self {
                    $(Self::$name => EventType::$type,)*
                }
            }

            /// Program that emits the reason.
            #[must_use]
            pub const fn component(self) -> Component {
                match self {
                    $(Self::$name => Component::$component,)*
                }
            }

            /// Kinds of the objects that the events regard.
            #[must_use]
            pub const fn objects(self) -> &'static str {
                match self {
                    $(Self::$name => $objects,)*
                }
            }

            /// Cause of the event.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }

            /// What a user or administrator can do.
            #[must_use]
            pub const fn action(self) -> &'static str {
                match self {
                    $(Self::$name => $action,)*
                }
            }
        }
    };
}

event_reasons! {
    Allocated: Normal, Controller, "Pod",
        "The controller allocated the claims of the pod.",
        "None.";
    AllocationFailed: Warning, Controller, "Pod",
        "The API server rejected an allocation.",
        "None if a later attempt succeeds; otherwise follow the message.";
    BurstReclaimed: Warning, NodeDriver, "Pod, ResourceClaim",
        "A process was killed, because its share did not give back memory beyond its request that another claim is guaranteed.",
        "None if the program restarts; otherwise request more memory, or remove `memory.limit` from the claim.";
    CdiIgnored: Warning, NodeDriver, "Pod, ResourceClaim",
        "A container runs without the CDI devices of its claim, because CDI is off in the container runtime.",
        "Set `enable_cdi = true` in containerd's config; restart containerd and the pod.";
    ClaimMissing: Warning, NodeDriver, "Node",
        "The API server lacks a claim whose containers or GPU processes run. Its limits and its GPU stay reserved until they end.",
        "Delete the pod that uses the claim, or wait until its processes end.";
    GrowthRefused: Warning, NodeDriver, "ResourceClaim",
        "The claim has the label of a companion and is prepared for a pod, which uses its capacity: it adds to no other share.",
        "Remove the label `gpu.drava.dev/companion-of` from the claim.";
    GrowthWaits: Warning, Controller, "Pod",
        "A claim that is to add to the share of the pod, its companion, is not allocated. The message has the reason.",
        "Wait if the message says that there is no room; otherwise delete the companion, and follow the message.";
    ClaimStateMissing: Warning, NodeDriver, "ResourceClaim",
        "Node state of a prepared claim is missing and cannot be recreated at present, so its containers cannot restart.",
        "Remove the cause in the message; the node driver repeats the repair every few seconds.";
    ClaimStateRepaired: Warning, NodeDriver, "ResourceClaim",
        "Node state of a prepared claim was missing or damaged and was repaired.",
        "Find out which program changes the driver's directories if the event repeats.";
    FieldsDropped: Warning, NodeDriver, "Node",
        "The API server drops fields of the ResourceSlices, because a feature gate is off.",
        "Turn on the feature gate that the message names.";
    GangIncomplete: Warning, Controller, "Pod",
        "Too few members of the pod's gang were bound in time, so the bound members are evicted, as far as budgets allow it, and their devices are free again.",
        "Free what the other members of the gang wait for (see their events), then create the pods again.";
    GpuDegraded: Warning, NodeDriver, "Node",
        "A GPU stays in use, and reported an XID that this version of drava does not know, memory whose repair waits for a reset, or a defect of its NVLink fabric.",
        "Follow the message; see [health](health.md).";
    GpuOvercommitted: Warning, Controller, "Pod, ResourceClaim",
        "More of a GPU is allocated than it has. The controller releases the newest allocation that no pod has reserved; \
         reserved ones stay, and the node driver rejects what does not fit.",
        "If the event repeats, delete one of the pods, and find out which program writes allocations besides the controller.";
    GpuPoolExcluded: Warning, Controller, "Node",
        "The ResourceSlices of a node are inconsistent, so the controller allocates none of its GPUs.",
        "Follow the message; restart the node driver of the node if the slices are malformed.";
    GpuRecovered: Normal, NodeDriver, "Node, ResourceClaim",
        "A GPU or MIG instance that was unhealthy has recovered; its devices are no longer tainted.",
        "None.";
    GpuUnavailable: Warning, NodeDriver, "Node",
        "A GPU is not published, or only as a whole.",
        "Follow the message, for example set compute mode Default.";
    GpuUnhealthy: Warning, NodeDriver, "Node, Pod, ResourceClaim",
        "A GPU or MIG instance is unhealthy; its devices are tainted. The message names the XID or other fault.",
        "Replace the pods that use the GPU, then reset the GPU or reboot the node; see [health](health.md).";
    GpuUnschedulable: Warning, Controller, "Pod, ResourceClaim",
        "No node can serve the claims of a pod. The message begins with the number of nodes per reason code (see below).",
        "Run `kubectl drava explain pod <pod>`; change the claim or release GPUs.";
    LongKernel: Warning, NodeDriver, "ResourceClaim",
        "One kernel ran so long that the shares of its GPU are not kept over short periods.",
        "Split the kernel or allocate a whole GPU.";
    MemoryOverLimit: Warning, NodeDriver, "ResourceClaim",
        "The processes of a claim use more GPU memory than its limit.",
        "Check the program, restart the pod, and report the CUDA function to drava.";
    MpsFault: Warning, NodeDriver, "ResourceClaim",
        "A program of a claim with `computePolicy: spatial` had a fatal fault, or MPS of its GPU ended. The programs of all claims \
         on the GPU, which are of one namespace, get CUDA errors.",
        "None if the programs start again, as containers do that end. Use another policy for programs that must not suffer from \
         each other.";
    NotReady: Warning, NodeDriver, "Node",
        "The node driver is not ready. The message names the unmet condition: directories, artifacts, records, gpus, \
         profiles, exclusive, registered or published.",
        "Follow the message.";
    ObjectUnreadable: Warning, Controller, "any watched object",
        "The controller cannot read the object, so it works without it, or with the version that it read last. The devices of \
         an unreadable claim count as taken, and no other device of their pools is allocated.",
        "Repair the field that the message names, or delete the object. Update drava if a newer release wrote the object.";
    OrphanRemoved: Normal, NodeDriver, "Node, ResourceClaim",
        "Node state of a claim that no longer exists was removed.",
        "None.";
    OtherGpuUsed: Warning, NodeDriver, "Pod, ResourceClaim",
        "A process of a limited claim uses a GPU of the node that its pod has by no claim, as privileged containers and volumes \
         of /dev allow.",
        "Run the pod without privileges and volumes of /dev, or request the GPU in a claim.";
    PartitionInUse: Warning, NodeDriver, "ResourceClaim",
        "A program such as dcgm-exporter holds the MIG partition of a deleted pod, so it cannot be destroyed. After three attempts the \
         pod ends; the partition stays reserved until it is destroyed.",
        "Restart the programs that the message names.";
    PreemptionBlocked: Warning, Controller, "Pod",
        "Other pods could make room for a pod, and one of them cannot be evicted.",
        "Follow the message, for example wait for the PodDisruptionBudget to allow the eviction.";
    Preempted: Warning, Controller, "Pod",
        "The pod was evicted, or lost its allocation before it was bound, for another pod, which the message names: one of \
         higher priority, or one within the guarantee of its GpuQuota, while this pod used borrowed GPUs.",
        "None if a workload recreates the pod; otherwise create it again, or raise its priority or the guarantee.";
    Preempting: Normal, Controller, "Pod",
        "Pods of lower priority, or pods that borrow, were evicted for this pod, which gets their devices when they end.",
        "None.";
    ShareIdle: Normal, Controller, "Pod",
        "The share of the pod has used no GPU time for as long as `idle.after` of the GpuPolicy that applies to it. The message says what \
         the controller does, or why it does not.",
        "Delete the pod if it is not needed, or use the GPU.";
    IdleEvicted: Warning, Controller, "Pod",
        "The pod was evicted, because its share has used no GPU time for as long as `idle.after` of the GpuPolicy that applies to it, \
         with `action: evict`; or it cannot be evicted.",
        "Use the GPU, or let the share be suspended: `action: suspend` and `suspend.allowed: true`.";
    ShareResumed: Normal, Controller, "Pod",
        "The suspended share of the pod has room on its GPU again, and its programs go on.",
        "None.";
    ShareSuspended: Normal, Controller, "Pod",
        "The share of the pod is being suspended, or is suspended: for another pod, or because a user wishes it. Its programs stand \
         still, and their GPU memory is in host memory.",
        "None: the share is resumed when its amounts are free on its GPU; after `kubectl drava suspend`, with `kubectl drava resume`.";
    SuspensionExpired: Warning, Controller, "Pod",
        "The share of the pod was suspended for another pod for longer than its `suspend.maxSuspendSeconds`, or its node was restarted while \
         it was suspended, so the pod is evicted: its workload starts it again where there is room.",
        "None if a workload recreates the pod. If the pod cannot be evicted, follow the message.";
    SuspensionRefused: Warning, Controller, "Pod",
        "The share of the pod was to be suspended, for a user or for a pod of higher priority, and cannot be; the message says why.",
        "Follow the message, or take the wish back with `kubectl drava resume`.";
    ProcessKilled: Warning, NodeDriver, "ResourceClaim",
        "A process violated the limits of a claim whose device class has `enforcement: required`, and was killed.",
        "See MemoryOverLimit, ProcessNotCounted and UsageRegionDamaged.";
    ProcessNotCounted: Warning, NodeDriver, "ResourceClaim",
        "A process of a limited claim uses the GPU without libvgpu: its GPU time has no limit, and its memory only if the NVIDIA driver limits it.",
        "Use an image with glibc and a dynamically linked program that keeps /etc/ld.so.preload; restart the pod.";
    ProfileConflict: Warning, NodeDriver, "GpuNodeProfile",
        "Another profile selects the node too and applies there, because its name is first.",
        "Change a nodeSelector, so that one profile selects the node.";
    ProfileWaiting: Normal, NodeDriver, "GpuNodeProfile",
        "A change of the profile would take something from allocated devices. They get no new allocations, and change when no \
         claim holds them.",
        "None; delete the pods that use the devices to apply the change at once.";
    Released: Warning, Controller, "Pod, ResourceClaim",
        "An allocation was released, because the pod was not bound to its node.",
        "None: the controller allocates again and tries that node last.";
    ResetRequired: Warning, NodeDriver, "GpuNodeProfile",
        "The mode of the profile needs another MIG mode of a GPU, which changes at a reset of the GPU only.",
        "Drain the GPU, then run the commands of the message on the node.";
    RestoreFailed: Warning, NodeDriver, "Pod, ResourceClaim",
        "A process of a suspended share was killed, because libcuda could not restore it, and cannot any more: most often its GPU \
         had too little free memory.",
        "None if the program restarts. If the event repeats, find out which processes use the GPU without a claim.";
    RuntimeCorrected: Normal, NodeDriver, "Node",
        "The container runtime of the node no longer has a setting that was reported as RuntimeMisconfigured.",
        "None.";
    RuntimeMisconfigured: Warning, NodeDriver, "Node",
        "The configuration of the container runtime gives GPUs to pods without a claim, or ignores the devices of claims.",
        "Follow the message, and restart the container runtime.";
    RuntimeUnchecked: Warning, NodeDriver, "Node",
        "The node driver does not find the configuration of the container runtime, so it does not check it.",
        "Check that CDI is on and that NVIDIA's runtime is not the default.";
    UsageRegionDamaged: Warning, NodeDriver, "ResourceClaim",
        "The usage region of a share is damaged or missing; libvgpu denies GPU memory.",
        "Restart the pod; its program wrote to /run/drava.";
}

impl fmt::Display for EventReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
