//! What the controller recommends, in GpuShareRecommendations.

use drava_api::Quantity;
use drava_api::listed::Listed;
use drava_api::quota::ShareAmounts;
use drava_api::recommendation::GpuShareRecommendation;
use kube::api::ListParams;
use kube::{Api, Client};

use super::{Amount, Recommendation, Workload, capacity, patch};
use crate::tenant;

/// Answer without a recommendation.
pub(super) const NONE: &str = "there is no GpuShareRecommendation: install the chart with recommendations.enabled=true and wait for some \
                               minutes, or name a Prometheus with --prometheus";

/// Lists the recommendations of the cluster, or of a namespace.
///
/// # Errors
/// When they cannot be read, or are not installed.
pub(super) async fn list(
    client: &Client,
    namespace: Option<&str>,
) -> anyhow::Result<Vec<GpuShareRecommendation>> {
    let objects: Api<Listed<GpuShareRecommendation>> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    match objects.list(&ListParams::default()).await {
        Ok(list) => Ok(Listed::split(list.items).0),
        Err(kube::Error::Api(status)) if status.code == 404 => anyhow::bail!("{NONE}"),
        Err(error) => {
            let place = match namespace {
                Some(namespace) => format!("in namespace {namespace}"),
                None => "in all namespaces; with -n, those of one namespace are enough".to_owned(),
            };
            Err(tenant::refused(
                error,
                &format!("list gpusharerecommendations {place}"),
            ))
        }
    }
}

/// Returns the recommendations for workloads that have shares.
pub(super) fn recommendations(objects: &[GpuShareRecommendation]) -> Vec<Recommendation> {
    let recommend = |object: &GpuShareRecommendation| {
        let spec = &object.spec;
        let status = object.status.as_ref().filter(|status| status.shares > 0)?;
        let workload = Workload {
            namespace: object.metadata.namespace.clone()?,
            kind: spec.kind.clone(),
            name: spec.name.clone(),
            claim: spec.claim.clone(),
        };
        let amount = |of: fn(&ShareAmounts) -> Option<u64>| {
            Some(Amount {
                current: of(&status.current)?,
                used: of(&status.used)?,
                recommended: of(&status.request)?,
            })
        };
        let (memory, cores) = (amount(mib), amount(percent));
        let capacity = capacity(memory, cores);
        Some(Recommendation {
            request: spec.request.clone(),
            claims: usize::try_from(status.shares).unwrap_or(usize::MAX),
            observed_hours: status.history.observed_seconds / 3600,
            confidence: Some(status.confidence),
            memory,
            memory_limit: mib(&status.limit),
            cores,
            patch: patch(&workload, &spec.request, &capacity),
            workload,
            capacity,
            notes: status.notes.clone(),
        })
    };
    objects.iter().filter_map(recommend).collect()
}

fn mib(amounts: &ShareAmounts) -> Option<u64> {
    let bytes = amounts.memory.and_then(Quantity::to_u64_rounded_up)?;
    Some(bytes.div_ceil(1 << 20))
}

fn percent(amounts: &ShareAmounts) -> Option<u64> {
    amounts.cores.map(u64::from)
}
