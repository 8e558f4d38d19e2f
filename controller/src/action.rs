//! What the planner wants done, and what it hears back of it.

use std::sync::Arc;

use drava_allocator::cluster::ObjectKey;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

use crate::notice::Notice;

/// Something to do.
#[derive(Debug)]
pub enum Action {
    /// Write the allocations of a pod's claims, all or none.
    Allocate(Job),
    /// Take an allocation back that nobody has reserved.
    Release(Release),
    /// Tell a user.
    Tell(Notice),
}

/// Allocations of one pod's claims.
#[derive(Debug)]
pub struct Job {
    /// UID of the pod.
    pub pod_uid: String,
    /// The pod, for messages.
    pub pod: ObjectReference,
    /// Node that was chosen.
    pub node: String,
    /// Claims with what is to be written.
    pub writes: Vec<ClaimWrite>,
}

/// One allocation to be written.
#[derive(Debug, Clone)]
pub struct ClaimWrite {
    /// The claim as it is known.
    pub claim: Arc<ResourceClaim>,
    /// What its status gets.
    pub allocation: AllocationResult,
    /// For the event on the claim.
    pub summary: String,
}

/// An allocation to be taken back.
#[derive(Debug)]
pub struct Release {
    /// The claim as it is known.
    pub claim: Arc<ResourceClaim>,
    /// Why, for the log and the event.
    pub why: String,
}

/// How the writing of a [`Job`] ended.
#[derive(Debug)]
pub struct JobOutcome {
    /// UID of the pod.
    pub pod_uid: String,
    /// Claims of the job.
    pub keys: Vec<ObjectKey>,
    /// Claims in their newest known versions.
    pub claims: Vec<ResourceClaim>,
    /// The failure, with what the user needs to know; claims that had been written were released again.
    pub failure: Option<JobFailure>,
}

/// Why a job failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFailure {
    /// For the log and the event.
    pub message: String,
    /// Whether the user must hear of it: not when somebody else just was faster.
    pub tell: bool,
}
