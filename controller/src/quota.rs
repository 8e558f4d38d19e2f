//! Status of a quota, computed from the cluster.

use drava_allocator::cluster::QuotaUse;
use drava_allocator::reason::quota_amount;
use drava_api::quota::{
    GpuQuota, GpuQuotaStatus, LIMIT_EXCEEDED, QuotaAmounts, QuotaResource, WITHIN_LIMIT,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Returns the status of a quota of which this version is known.
pub(crate) fn status(quota: &QuotaUse<'_>, known: &GpuQuota, time: &Time) -> GpuQuotaStatus {
    let amounts = |amount: &dyn Fn(QuotaResource) -> Option<drava_api::Quantity>| {
        let mut amounts = QuotaAmounts::default();
        for resource in QuotaResource::ALL {
            if let Some(amount) = amount(resource) {
                amounts.set(resource, amount);
            }
        }
        amounts
    };
    GpuQuotaStatus {
        observed_generation: known.metadata.generation,
        namespaces: u32::try_from(quota.namespaces.len()).unwrap_or(u32::MAX),
        used: quota.used.amounts(),
        borrowed: amounts(&|resource| quota.borrowed(resource)),
        free: amounts(&|resource| quota.free(resource)),
        conditions: vec![within_limit(quota, known, time)],
    }
}

/// Returns the condition [`WITHIN_LIMIT`]; its transition time changes with its status.
fn within_limit(quota: &QuotaUse<'_>, known: &GpuQuota, time: &Time) -> Condition {
    let exceeded: Vec<String> = QuotaResource::ALL
        .into_iter()
        .filter(|resource| quota.free(*resource).is_some_and(|free| free.is_negative()))
        .filter_map(|resource| {
            let limit = quota.spec.limit(resource)?;
            Some(format!(
                "{} {} of {} used",
                resource.as_str(),
                quota_amount(resource, quota.used.get(resource)),
                quota_amount(resource, limit)
            ))
        })
        .collect();
    let (status, reason, message) = if exceeded.is_empty() {
        (
            "True",
            WITHIN_LIMIT,
            "the usage is within the limit".to_owned(),
        )
    } else {
        let message = format!(
            "{}: running pods keep their devices, and no claim is allocated until the usage is below the limit",
            exceeded.join(", ")
        );
        ("False", LIMIT_EXCEEDED, message)
    };
    let mut before = known.status.iter().flat_map(|status| &status.conditions);
    let before = before.find(|before| before.type_ == WITHIN_LIMIT && before.status == status);
    Condition {
        last_transition_time: before.map_or_else(
            || time.clone(),
            |before| before.last_transition_time.clone(),
        ),
        message,
        observed_generation: known.metadata.generation,
        reason: reason.to_owned(),
        status: status.to_owned(),
        type_: WITHIN_LIMIT.to_owned(),
    }
}
