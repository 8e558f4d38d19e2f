//! Suspension of shares: the intent of the controller, the wish of a user, and the answer of the node driver, all on the claim.
//!
//! All of them are levels: each reader acts on what it sees now, however often it has seen it before. A share is suspended, so
//! that others may use its memory and GPU time, only while the intent stands **and** the answer says so.

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use k8s_openapi::jiff::Timestamp;

use crate::condition::{ConditionReason, ConditionType};
use crate::names;

/// Returns whether the controller intends the claim to be suspended.
#[must_use]
pub fn is_intended(metadata: &ObjectMeta) -> bool {
    metadata
        .labels
        .as_ref()
        .is_some_and(|labels| labels.contains_key(names::SUSPEND_LABEL))
}

/// Returns whether a user wishes the claim to be suspended.
#[must_use]
pub fn is_wished(metadata: &ObjectMeta) -> bool {
    let annotations = metadata.annotations.as_ref();
    let wish = annotations.and_then(|all| all.get(names::SUSPEND_WISH_ANNOTATION));
    wish.is_some_and(|wish| wish == names::SUSPEND)
}

/// Why a claim is suspended, or is going to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause<'a> {
    /// A user wishes it.
    Wish,
    /// For this pod, as a text for readers of the claim's namespace.
    Pod(&'a str),
    /// Its share was idle: it stays suspended until a program calls CUDA.
    Idleness,
}

/// Returns why the claim is suspended; `None` if it is not to be, or the cause is over.
#[must_use]
pub fn cause(metadata: &ObjectMeta) -> Option<Cause<'_>> {
    if is_wished(metadata) {
        return Some(Cause::Wish);
    }
    let annotations = metadata.annotations.as_ref()?;
    let cause = annotations.get(names::SUSPENDED_FOR_ANNOTATION)?;
    is_intended(metadata).then_some(match cause.as_str() {
        names::SUSPENDED_FOR_IDLENESS => Cause::Idleness,
        pod => Cause::Pod(pod),
    })
}

/// Returns the pod for which the claim is suspended, as a text for readers of its namespace; `None` if it is for another cause, or
/// the claim is not to be suspended.
#[must_use]
pub fn suspended_for(metadata: &ObjectMeta) -> Option<&str> {
    match cause(metadata)? {
        Cause::Pod(pod) => Some(pod),
        Cause::Wish | Cause::Idleness => None,
    }
}

/// Returns whether the controller has suspended the claim because its share was idle, whatever a user wishes since.
#[must_use]
pub fn is_for_idleness(metadata: &ObjectMeta) -> bool {
    let annotations = metadata.annotations.as_ref();
    let cause = annotations.and_then(|all| all.get(names::SUSPENDED_FOR_ANNOTATION));
    is_intended(metadata) && cause.is_some_and(|cause| cause == names::SUSPENDED_FOR_IDLENESS)
}

/// Returns whether a program of the suspended claim has called CUDA, and waits.
#[must_use]
pub fn is_demanded(claim: &ResourceClaim) -> bool {
    answers(claim).any(|answer| answer.reason == ConditionReason::Demanded.as_str())
}

/// Returns whether the claim is suspended, and the state of its programs is lost.
#[must_use]
pub fn is_lost(claim: &ResourceClaim) -> bool {
    is_suspended(claim)
        && answers(claim).any(|answer| answer.reason == ConditionReason::StateLost.as_str())
}

/// Returns since when the claim's only share has used no GPU time. Time before it was resumed last does not count: its programs
/// stood still.
#[must_use]
pub fn idle_since(claim: &ResourceClaim) -> Option<Timestamp> {
    let mut conditions = conditions(claim, ConditionType::Idle);
    let idle = conditions.next().filter(|idle| idle.status == "True")?;
    let resumed = answers(claim).filter(|answer| answer.status == "False");
    let resumed = resumed.map(|answer| answer.last_transition_time.0).max();
    conditions.next().is_none().then_some(())?;
    Some(resumed.map_or(idle.last_transition_time.0, |resumed| {
        resumed.max(idle.last_transition_time.0)
    }))
}

/// Returns since when others may use the memory and GPU time of the claim's shares.
#[must_use]
pub fn suspended_since(claim: &ResourceClaim) -> Option<Timestamp> {
    let times = answers(claim).map(|answer| answer.last_transition_time.0);
    times.max().filter(|_| is_suspended(claim))
}

/// Returns the answers of the node driver, one for each device of the claim that has one.
pub fn answers(claim: &ResourceClaim) -> impl Iterator<Item = &Condition> {
    conditions(claim, ConditionType::Suspended)
}

fn conditions(claim: &ResourceClaim, kind: ConditionType) -> impl Iterator<Item = &Condition> {
    let devices = claim
        .status
        .iter()
        .flat_map(|status| status.devices.iter().flatten());
    let own = devices.filter(|device| device.driver == names::DRIVER);
    own.filter_map(move |device| {
        let mut conditions = device.conditions.iter().flatten();
        conditions.find(|condition| condition.type_ == kind.as_str())
    })
}

/// Returns whether others may use the memory and GPU time of the claim's shares: the intent stands, and the node driver says of
/// each device of the allocation that it is suspended.
#[must_use]
pub fn is_suspended(claim: &ResourceClaim) -> bool {
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref()?.devices.as_ref());
    let results = allocation
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let devices = results
        .filter(|result| result.driver == names::DRIVER)
        .count();
    is_intended(&claim.metadata)
        && devices > 0
        && answers(claim)
            .filter(|answer| answer.status == "True")
            .count()
            == devices
}

/// Returns whether an answer says that the claim is being resumed.
#[must_use]
pub fn is_resuming(answer: &Condition) -> bool {
    answer.reason == ConditionReason::Resuming.as_str()
}

/// Returns why the claim cannot be suspended, if the node driver says so.
#[must_use]
pub fn refusal(claim: &ResourceClaim) -> Option<&Condition> {
    let reasons = [
        ConditionReason::SuspendRefused,
        ConditionReason::SuspendFailed,
    ];
    answers(claim).find(|answer| {
        answer.status == "False"
            && reasons
                .iter()
                .any(|reason| answer.reason == reason.as_str())
    })
}
