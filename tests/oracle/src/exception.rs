//! Listed differences between the two allocators. Each is a predicate, so that it covers no other case.
//!
//! The taint that reserves devices for the controller is not listed: the case that the Go program gets is without it.

use drava_api::{Quantity, names};
use drava_cluster::Kubernetes;
use k8s_openapi::api::resource::v1 as dra;

use crate::allocator::Decision;
use crate::case::Case;
use crate::program::NodeAnswer;
use crate::validator::request;

/// A listed difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exception {
    /// Admin access ignores what is in use: counters and capacities are not charged. Upstream charges them during the
    /// search (kubernetes#140729), so a monitor does not fit on a busy GPU.
    AdminAccess,
    /// Zero memory and more than 100 percent of a GPU are rejected as mistakes; upstream rounds or skips the device.
    RejectedAmount,
    /// A selector fails on a device that upstream does not evaluate, because it finds a solution before or because the
    /// device is in use. Our allocator evaluates every device, so the result does not depend on their order.
    UnreachedSelectorError,
    /// An allocated device is not published, so the free counters of its pool are unknown: our allocator excludes the
    /// pool. Upstream ignores the device and over-commits (kubernetes#140802).
    UnpublishedDevice,
    /// A device of `All` violates a constraint: upstream reports an error for the pod, also where another alternative
    /// of `firstAvailable` fits.
    AllViolatesConstraint,
    /// Kubernetes 1.36: `All` leaves out shareable devices without enough free capacity, instead of failing. Kubernetes
    /// 1.37 fails.
    AllWithoutFullDevices,
    /// Kubernetes 1.36: an incomplete or invalid pool with counters of another node fails `All` on every node.
    AllBlockedByOtherNode,
    /// Kubernetes 1.36: the solution of upstream violates a `distinctAttribute`, because of each request only the value of
    /// its last device is compared.
    DistinctRepeated,
    /// Our search has reached its limit.
    SearchLimit,
}

/// Whether the claims fit, by both allocators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disagreement {
    /// Only our allocator has a solution.
    OnlyOurs,
    /// Only upstream has a solution.
    OnlyUpstream,
    /// Both have solutions, with other devices.
    OtherDevices,
}

/// Returns the listed difference that explains a disagreement. `violations` are the rules that the solution of upstream
/// violates.
#[must_use]
pub fn find(
    release: Kubernetes,
    case: &Case,
    node: &str,
    disagreement: Disagreement,
    ours: &Decision,
    upstream: &NodeAnswer,
    violations: &[String],
) -> Option<Exception> {
    use Disagreement::{OnlyOurs, OnlyUpstream, OtherDevices};
    let reason = ours.as_ref().err().map_or("", String::as_str);
    let alternatives = || {
        case.claims
            .iter()
            .flat_map(request::of_claim)
            .flatten()
            .collect::<Vec<_>>()
    };
    let violates_constraint = || {
        violations
            .iter()
            .any(|text| text.starts_with("constraint on "))
    };
    let has_admin = || alternatives().iter().any(|one| one.is_admin);
    match disagreement {
        OnlyOurs | OtherDevices if has_admin() => Some(Exception::AdminAccess),
        OnlyUpstream if has_admin() && has_share_twice(upstream) => Some(Exception::AdminAccess),
        OnlyOurs
            if upstream
                .error
                .contains("a claim constraint would not be satisfied") =>
        {
            Some(Exception::AllViolatesConstraint)
        }
        OnlyOurs
            if release == Kubernetes::V1_36
                && upstream.error.contains("asks for all devices")
                && !upstream.error.contains(&format!("/{node}/")) =>
        {
            Some(Exception::AllBlockedByOtherNode)
        }
        OnlyUpstream | OtherDevices
            if release == Kubernetes::V1_36
                && alternatives().iter().any(|one| one.count.is_none()) =>
        {
            Some(Exception::AllWithoutFullDevices)
        }
        OnlyUpstream | OtherDevices if release == Kubernetes::V1_36 && violates_constraint() => {
            Some(Exception::DistinctRepeated)
        }
        OnlyUpstream if reason.contains("SelectorError") => Some(Exception::UnreachedSelectorError),
        OnlyUpstream
            if alternatives()
                .iter()
                .any(|one| has_rejected_amount(one.capacity)) =>
        {
            Some(Exception::RejectedAmount)
        }
        OnlyUpstream if has_unpublished_device(case) => Some(Exception::UnpublishedDevice),
        OnlyUpstream if reason.contains("SearchLimit") => Some(Exception::SearchLimit),
        OnlyOurs | OnlyUpstream | OtherDevices => None,
    }
}

/// Upstream gives one claim admin access to a shareable device twice.
fn has_share_twice(upstream: &NodeAnswer) -> bool {
    upstream.allocations.iter().any(|allocation| {
        let results: Vec<_> = allocation
            .devices
            .iter()
            .filter_map(|devices| devices.results.as_ref())
            .flatten()
            .collect();
        results.iter().enumerate().any(|(index, one)| {
            one.share_id.is_some()
                && results
                    .iter()
                    .take(index)
                    .any(|other| (&other.pool, &other.device) == (&one.pool, &one.device))
        })
    })
}

fn has_rejected_amount(capacity: Option<&dra::CapacityRequirements>) -> bool {
    capacity
        .and_then(|capacity| capacity.requests.as_ref())
        .into_iter()
        .flatten()
        .any(|(name, raw)| {
            Quantity::try_from(raw).is_ok_and(|amount| match name.as_str() {
                names::capacity::MEMORY | names::capacity::SLOTS => amount.is_zero(),
                names::capacity::CORES => amount > Quantity::count(100),
                _ => false,
            })
        })
}

fn has_unpublished_device(case: &Case) -> bool {
    case.allocated
        .iter()
        .filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref())
        .filter_map(|devices| devices.results.as_ref())
        .flatten()
        .any(|result| {
            let newest = case
                .slices
                .iter()
                .filter(|slice| slice.spec.pool.name == result.pool)
                .map(|slice| slice.spec.pool.generation)
                .max();
            !case
                .slices
                .iter()
                .filter(|slice| {
                    slice.spec.pool.name == result.pool
                        && Some(slice.spec.pool.generation) == newest
                })
                .flat_map(|slice| slice.spec.devices.iter().flatten())
                .any(|device| device.name == result.device)
        })
}
