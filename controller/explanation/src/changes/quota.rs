//! Limits of quotas that would have to be raised for a pod to fit.

use drava_allocator::cluster::{Cluster, QuotaUse};
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_api::Quantity;
use drava_api::quota::{GpuQuota, QuotaResource};
use serde::Serialize;

/// A limit to raise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RaisedLimit {
    /// Name of the GpuQuota.
    quota: String,
    /// Field of `spec.limit`.
    resource: &'static str,
    /// The lowest amount that is enough.
    amount: Quantity,
}

impl RaisedLimit {
    /// Formats the change as an instruction.
    pub(super) fn text(&self) -> String {
        let Self {
            quota,
            resource,
            amount,
        } = self;
        format!("raise spec.limit.{resource} of gpuquota {quota} to {amount}")
    }
}

/// Returns the limits that have to be raised; none if the pod does not fit whatever the limits.
pub(super) fn raised_limits(
    cluster: &mut Cluster,
    request: &PodRequest,
    policies: Policies,
) -> Vec<RaisedLimit> {
    let Some(namespace) = request.claims.first().map(|claim| &claim.id.namespace) else {
        return Vec::new();
    };
    let covers = |quota: &QuotaUse<'_>| quota.namespaces.contains(namespace);
    let quotas: Vec<GpuQuota> = cluster
        .quotas()
        .filter(covers)
        .map(|quota| GpuQuota::new(quota.name, quota.spec.clone()))
        .collect();
    if quotas.is_empty() {
        return Vec::new();
    }
    for quota in &quotas {
        let mut unlimited = quota.clone();
        unlimited.spec.limit = None;
        cluster.upsert_quota(&unlimited);
    }
    let mut raised = Vec::new();
    if let Ok(placement) = cluster.decide(request, policies) {
        cluster.assume(&placement);
        raised.extend(cluster.quotas().filter(covers).flat_map(|used| {
            let before = quotas
                .iter()
                .find(|quota| quota.metadata.name.as_deref() == Some(used.name));
            let exceeded = QuotaResource::ALL.into_iter().filter(move |resource| {
                let limit = before.and_then(|quota| quota.spec.limit(*resource));
                limit.is_some_and(|limit| used.used.get(*resource) > limit)
            });
            exceeded.map(move |resource| RaisedLimit {
                quota: used.name.to_owned(),
                resource: resource.as_str(),
                amount: used.used.get(resource),
            })
        }));
        for claim in &request.claims {
            cluster.forget(&(claim.id.namespace.clone(), claim.id.name.clone()));
        }
    }
    for quota in &quotas {
        cluster.upsert_quota(quota);
    }
    raised
}
