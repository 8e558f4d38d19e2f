//! Reason codes of pods that cannot be scheduled.
//!
//! `cargo xtask codegen` writes `docs/reference/events.md` from this table.

use std::fmt;

/// Why a container has no claim for GPUs beside one with `computePolicy: spatial`; controller and node driver end their messages with it.
pub const BESIDE_SPATIAL: &str = "beside a claim with computePolicy: spatial a container has no other claim for GPUs, because its \
                                  programs find the MPS daemon of one GPU only: give it one of the claims";

macro_rules! reasons {
    ($($name:ident: $meaning:literal;)*) => {
        /// Stable code of a reason. The codes are part of the interface: events and `kubectl drava explain` contain them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $(#[doc = $meaning] $name,)*
        }

        impl Reason {
            /// All codes.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the code.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Returns the meaning of the code.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }
        }
    };
}

reasons! {
    InsufficientMemory: "No GPU of the node has enough free memory.";
    InsufficientCores: "No GPU of the node has enough free cores.";
    SlotsExhausted: "Every GPU of the node has its maximum number of shares.";
    InsufficientCapacity: "Another capacity is insufficient.";
    InsufficientDevices: "The node has fewer devices than requested.";
    ExclusiveConflict: "GPUs are in use by other claims in a way that excludes the request.";
    TypeMismatch: "No device of the node is of the requested class.";
    SelectorMismatch: "No device of the node satisfies the selectors of the request.";
    SelectorError: "A selector could not be evaluated.";
    Tainted: "Devices are tainted.";
    Unhealthy: "Devices are unhealthy.";
    TopologyUnsatisfied: "Free devices do not satisfy the constraints of the claim or of a container.";
    PoolIncomplete: "The pool of the node is incomplete or malformed.";
    NodeUnfit: "The pod cannot run on the node, regardless of devices.";
    MixedDrivers: "A claim requests devices of several drivers.";
    DriverUnspecified: "No selector of a request names a driver, and kube-scheduler found no device of another driver.";
    ExtendedResource: "A container requests an extended resource of a device class of drava instead of a claim.";
    SchedulerNotServed: "The controller does not serve the scheduler of the pod.";
    ClaimMissing: "A claim of the pod does not exist, is being deleted, belongs to another pod or cannot be read.";
    UnknownClass: "A device class does not exist.";
    InvalidRequest: "A requested amount is invalid.";
    InvalidConfig: "The opaque config is invalid.";
    Unsupported: "The claim uses a feature that is not supported.";
    IncompatibleClaims: "A container has a claim with `computePolicy: spatial` and another claim for GPUs.";
    NoDevices: "No node publishes devices.";
    QuotaExceeded: "The claim, or the claims of the namespace together, would exceed a GpuQuota.";
    NamespaceUnknown: "Quotas or policies select namespaces by labels, and those of the pod's namespace are not known so far.";
    WaitingForGang: "The gang of the pod cannot start: pods are missing, or too few of them fit at the same time.";
    WaitingForDeletion: "Pods that are being deleted, evicted for the pod or for another cause, have its devices.";
    WaitingForSuspension: "Shares of other pods are being suspended for the pod; it gets their memory and GPU time then.";
    Reserved: "Free devices are reserved for another pod: the head of the queue, or one for which others were evicted.";
    RolloutBlocked: "Pods of the same Deployment hold the devices, and its rollout ends them only when this pod runs.";
    NotBound: "The scheduler of the pod did not bind it where its claims were allocated; they are allocated later again.";
    InvalidCompanion: "The claim cannot add to the shares of another one, as its label says.";
    InvalidGang: "The annotations of the pod do not define a gang.";
    SearchLimit: "The devices can be combined in too many ways to try all of them.";
    CostlySearch: "The search takes long: devices can be combined, or pods could end, in many ways; it goes on after other pods.";
    CostlySelectors: "CEL selectors take long to evaluate; the evaluation goes on after the decisions for other pods.";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
