//! Actions of the planner and the outcomes of their writes.

use std::sync::Arc;

use drava_allocator::object::ObjectKey;
use drava_api::event::EventReason;
use drava_api::leader::GpuControllerLeader;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{
    AllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};

use crate::action::event::{PendingEvent, ReleaseReason};
use crate::action::status::{StatusOutcome, StatusUpdate};
use crate::pods::pod_condition::PodConditionUpdate;

pub mod event;
pub mod status;

/// An action of the planner.
#[derive(Debug)]
pub enum Action {
    /// Write allocations, all or none.
    Allocate(AllocationJob),
    /// Evict pods.
    Evict(Eviction),
    /// Release an allocation that no pod has reserved, or that a companion has given back.
    Release(Release),
    /// Remove the allocation gate of a pod.
    RemoveGate(ObjectReference),
    /// Write or withdraw the intent to suspend a claim.
    WriteSuspension(SuspensionWrite),
    /// Publish an event.
    PublishEvent(PendingEvent),
    /// Write the condition of a pod.
    WritePodCondition(PodConditionUpdate),
    /// Write the status of a quota.
    WriteQuotaStatus(StatusUpdate<GpuQuota>),
    /// Write the status of a policy.
    WritePolicyStatus(StatusUpdate<GpuPolicy>),
    /// Write what the leader reserves.
    WriteLeaderStatus(StatusUpdate<GpuControllerLeader>),
}

/// What has become of an action.
#[derive(Debug)]
pub enum Outcome {
    /// An allocation job has ended.
    Allocation(AllocationOutcome),
    /// A release has ended.
    Release(ReleaseOutcome),
    /// An eviction has ended.
    Eviction(Box<EvictionOutcome>),
    /// A gate removal has ended.
    GateRemoval(GateRemovalOutcome),
    /// The write of an intent to suspend a claim has ended.
    Suspension(SuspensionOutcome),
    /// The write of a quota's status has ended.
    QuotaStatus(StatusOutcome<GpuQuota>),
    /// The write of a policy's status has ended.
    PolicyStatus(StatusOutcome<GpuPolicy>),
    /// The write of what the leader reserves has ended.
    LeaderStatus(StatusOutcome<GpuControllerLeader>),
    /// An event could not be published.
    EventFailed(Box<PendingEvent>),
}

/// Allocations of the claims of a pod, or of the pods of a gang: all or none.
#[derive(Debug)]
pub struct AllocationJob {
    /// The pods; at least one.
    pub pods: Vec<PodAllocation>,
}

/// Allocations of one pod's claims.
#[derive(Debug)]
pub struct PodAllocation {
    /// UID of the pod.
    pub uid: String,
    /// Reference to the pod.
    pub pod: ObjectReference,
    /// Selected node.
    pub node: String,
    /// Allocations to write.
    pub writes: Vec<ClaimWrite>,
}

/// One allocation to write.
#[derive(Debug, Clone)]
pub struct ClaimWrite {
    /// The claim in its newest known version.
    pub claim: Arc<ResourceClaim>,
    /// `status.allocation` to write.
    pub allocation: AllocationResult,
    /// The pod for which the claim is reserved together with the allocation: that of a companion, which no pod names. All other
    /// claims are reserved by kube-scheduler.
    pub consumer: Option<ResourceClaimConsumerReference>,
}

/// Evictions of pods: all or none, as far as a dry run tells.
#[derive(Debug, Clone)]
pub struct Eviction {
    /// Why the pods are evicted.
    pub cause: EvictionCause,
    /// Pods to evict.
    pub victims: Vec<Victim>,
}

/// Why pods are evicted.
#[derive(Debug, Clone)]
pub enum EvictionCause {
    /// Another pod needs their devices.
    Preemption(Preemptor),
    /// No other pod; the text says more of the cause.
    Own(OwnCause, String),
}

/// Why pods are evicted although no other pod needs their devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnCause {
    /// Too few members of their gang were bound in time.
    IncompleteGang,
    /// Their share was suspended for longer than it may be.
    SuspensionExpired,
    /// Their share has used no GPU time for as long as a policy allows.
    Idle,
}

impl OwnCause {
    /// All causes.
    pub const ALL: [Self; 3] = [Self::IncompleteGang, Self::SuspensionExpired, Self::Idle];

    /// Reason of their events.
    #[must_use]
    pub const fn reason(self) -> EventReason {
        match self {
            Self::IncompleteGang => EventReason::GangIncomplete,
            Self::SuspensionExpired => EventReason::SuspensionExpired,
            Self::Idle => EventReason::IdleEvicted,
        }
    }
}

/// A pod for which others are evicted.
#[derive(Debug, Clone)]
pub struct Preemptor {
    /// UID of the pod.
    pub uid: String,
    /// Reference to the pod.
    pub pod: ObjectReference,
    /// Its priority.
    pub priority: i32,
    /// Why it precedes the evicted pods.
    pub precedence: Precedence,
}

impl Preemptor {
    /// Returns why the pod precedes the others, for an event of one of them.
    #[must_use]
    pub fn why(&self) -> String {
        match self.precedence {
            Precedence::Priority => format!("priority {}", self.priority),
            Precedence::Guarantee => {
                "within the guarantee of its quota; this pod used borrowed GPUs".to_owned()
            }
        }
    }
}

/// Why a pod precedes those that are evicted for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Precedence {
    /// Their priority is lower.
    Priority,
    /// The pod is within the guarantee of its quota, and the tenants of the evicted pods use more than theirs.
    Guarantee,
}

/// A pod to evict.
#[derive(Debug, Clone, PartialEq)]
pub struct Victim {
    /// Reference to the pod, with its UID.
    pub pod: ObjectReference,
    /// Its priority.
    pub priority: i32,
}

/// Outcome of an [`Eviction`].
#[derive(Debug)]
pub struct EvictionOutcome {
    /// The eviction.
    pub eviction: Eviction,
    /// Victims that were evicted.
    pub evicted: Vec<Victim>,
    /// Why the other victims were not evicted.
    pub failure: Option<EvictionFailure>,
}

/// Why a pod was not evicted.
#[derive(Debug, Clone, PartialEq)]
pub struct EvictionFailure {
    /// The pod.
    pub victim: Victim,
    /// Text for the event.
    pub message: String,
}

/// An allocation to release.
#[derive(Debug, Clone)]
pub struct Release {
    /// The claim in its newest known version.
    pub claim: Arc<ResourceClaim>,
    /// Why the allocation is released.
    pub reason: ReleaseReason,
}

/// Outcome of an [`AllocationJob`].
#[derive(Debug)]
pub struct AllocationOutcome {
    /// UIDs of the pods.
    pub pods: Vec<String>,
    /// Claims of the job.
    pub keys: Vec<ObjectKey>,
    /// Claims in their newest known versions.
    pub claims: Vec<ResourceClaim>,
    /// Why the job failed; its allocations were released.
    pub failure: Option<AllocationFailure>,
}

/// Why an [`AllocationJob`] failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationFailure {
    /// Text for log and event.
    pub message: String,
    /// Whether an event is published: not for a conflict with another writer.
    pub is_reportable: bool,
}

/// Outcome of a [`Release`].
#[derive(Debug)]
pub struct ReleaseOutcome {
    /// The release.
    pub release: Release,
    /// The claim in its newest known version; `None` if it is unknown or deleted.
    pub claim: Option<Box<ResourceClaim>>,
}

/// The intent to suspend a claim, or its end.
#[derive(Debug, Clone)]
pub struct SuspensionWrite {
    /// The claim in its newest known version.
    pub claim: Arc<ResourceClaim>,
    /// Whether the claim is to be suspended.
    pub is_intended: bool,
    /// The pod for which it is to be suspended, as a text for readers of its namespace, or
    /// [`SUSPENDED_FOR_IDLENESS`](drava_api::names::SUSPENDED_FOR_IDLENESS).
    pub suspended_for: Option<String>,
}

/// Outcome of a [`SuspensionWrite`].
#[derive(Debug)]
pub struct SuspensionOutcome {
    /// The claim.
    pub key: ObjectKey,
    /// Its newest known version.
    pub claim: Option<Box<ResourceClaim>>,
    /// Whether this version says what was to be written.
    pub is_written: bool,
}

/// Outcome of the removal of a pod's allocation gate.
#[derive(Debug)]
pub struct GateRemovalOutcome {
    /// UID of the pod.
    pub pod_uid: String,
    /// Why the gate was not removed.
    pub failure: Option<AllocationFailure>,
}
