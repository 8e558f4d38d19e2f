//! `kubectl drava quota`: what the tenants use of their GpuQuotas.
//!
//! The usage is computed from the claims as the controller computes it, so it is newer than the status of the quotas.

use anyhow::ensure;
use drava_allocator::cluster::QuotaUse;
use drava_allocator::reason::quota_amount;
use drava_api::Quantity;
use drava_api::quota::QuotaResource;
use serde::Serialize;

use drava_explanation::snapshot::Snapshot;
use drava_explanation::table;

/// A quota with its usage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pub(crate) quota: String,
    namespaces: Vec<String>,
    resources: Vec<Resource>,
}

/// Amounts of one resource: memory in bytes, cores in percent of the GPU time of one GPU, devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Resource {
    #[serde(skip)]
    kind: QuotaResource,
    resource: &'static str,
    used: u64,
    /// Part of it that suspended shares have.
    suspended: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    guarantee: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    borrowed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    /// 0 when the limit is exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    free: Option<u64>,
}

impl Report {
    /// Returns whether the quota counts claims of the namespace.
    pub(crate) fn covers(&self, namespace: &str) -> bool {
        self.namespaces.iter().any(|name| name == namespace)
    }
}

/// Returns all quotas.
pub(crate) fn all(snapshot: &Snapshot) -> Vec<Report> {
    let quotas = snapshot.cluster.quotas();
    quotas.map(|quota| report(&quota)).collect()
}

/// Returns the quotas, or the named one.
///
/// # Errors
/// If the named one does not exist.
pub(crate) fn reports(
    snapshot: &Snapshot,
    name: Option<&str>,
    namespace: Option<&str>,
) -> anyhow::Result<Vec<Report>> {
    let quotas = snapshot.cluster.quotas();
    let selected = quotas.filter(|quota| {
        let counts = |namespace| quota.namespaces.iter().any(|counted| counted == namespace);
        name.map_or_else(|| namespace.is_none_or(counts), |name| name == quota.name)
    });
    let reports: Vec<Report> = selected.map(|quota| report(&quota)).collect();
    if let Some(name) = name {
        ensure!(
            !reports.is_empty(),
            "gpuquota {name} does not exist; kubectl get gpuquotas lists them"
        );
    }
    Ok(reports)
}

fn report(quota: &QuotaUse<'_>) -> Report {
    let units = |amount: Quantity| {
        let amount = amount.max(Quantity::ZERO);
        amount.to_u64_rounded_up().unwrap_or(u64::MAX)
    };
    let resource = |kind: QuotaResource| Resource {
        kind,
        resource: kind.as_str(),
        used: units(quota.used.get(kind)),
        suspended: units(quota.suspended.get(kind)),
        guarantee: quota.spec.guarantee(kind).map(units),
        borrowed: quota.borrowed(kind).map(units),
        limit: quota.spec.limit(kind).map(units),
        free: quota.free(kind).map(units),
    };
    Report {
        quota: quota.name.to_owned(),
        namespaces: quota.namespaces.iter().cloned().collect(),
        resources: QuotaResource::ALL.map(resource).into(),
    }
}

/// Formats the quotas as a table.
pub(crate) fn text(reports: &[Report]) -> String {
    if reports.is_empty() {
        return "no GpuQuotas\n".to_owned();
    }
    let header = [
        "QUOTA",
        "RESOURCE",
        "USED",
        "SUSPENDED",
        "GUARANTEE",
        "BORROWED",
        "LIMIT",
        "FREE",
        "NAMESPACES",
    ];
    let rows = reports.iter().flat_map(|report| {
        let resources = report.resources.iter();
        resources.map(|resource| {
            let cell = |value: Option<u64>| {
                value.map_or_else(
                    || "–".to_owned(),
                    |value| quota_amount(resource.kind, Quantity::bytes(value)),
                )
            };
            vec![
                report.quota.clone(),
                resource.resource.to_owned(),
                cell(Some(resource.used)),
                cell(Some(resource.suspended)),
                cell(resource.guarantee),
                cell(resource.borrowed),
                cell(resource.limit),
                cell(resource.free),
                report.namespaces.join(", "),
            ]
        })
    });
    table(&header, rows.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use drava_explanation::fixture::snapshot;

    fn with_quotas() -> Snapshot {
        let mut snapshot = snapshot();
        for (name, spec) in [
            (
                "team-a",
                json!({"namespaces": ["default"], "limit": {"memory": "120Gi"}, "guarantee": {"memory": "100Gi", "devices": 3}}),
            ),
            (
                "unused",
                json!({"namespaces": ["x", "y"], "limit": {"cores": 2000}}),
            ),
        ] {
            let quota = json!({
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec,
            });
            let quota = serde_json::from_value(quota).expect("a quota");
            snapshot.cluster.upsert_quota(&quota);
        }
        snapshot
    }

    #[test]
    fn lists_quotas_with_usage() {
        let reports = reports(&with_quotas(), None, None).expect("reports");
        assert_eq!(
            text(&reports),
            "\
QUOTA    RESOURCE   USED      SUSPENDED   GUARANTEE   BORROWED   LIMIT     FREE     NAMESPACES
team-a   memory     104 GiB   0 B         100 GiB     4 GiB      120 GiB   16 GiB   default
team-a   cores      130%      0%          –           –          –         –        default
team-a   devices    3         0           3           0          –         –        default
unused   memory     0 B       0 B         –           –          –         –        x, y
unused   cores      0%        0%          –           –          2000%     2000%    x, y
unused   devices    0         0           –           –          –         –        x, y
"
        );
    }

    #[test]
    fn selects_quota_by_name() {
        let found = reports(&with_quotas(), Some("team-a"), None).expect("the quota");
        assert_eq!(found.len(), 1);
        let value = serde_json::to_value(&found[0].resources[0]).expect("JSON");
        assert_eq!(
            value,
            json!({
                "resource": "memory", "used": 104_u64 << 30, "suspended": 0, "guarantee": 100_u64 << 30, "borrowed": 4_u64 << 30,
                "limit": 120_u64 << 30, "free": 16_u64 << 30,
            })
        );
        let counting = |namespace| {
            let found = reports(&with_quotas(), None, Some(namespace)).expect("quotas");
            let names = found.iter().map(|report| report.quota.clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!(counting("y"), ["unused"]);
        assert_eq!(counting("other"), [""; 0]);
        let error = reports(&with_quotas(), Some("other"), None).expect_err("no quota");
        assert!(
            error
                .to_string()
                .starts_with("gpuquota other does not exist")
        );
        assert_eq!(text(&[]), "no GpuQuotas\n");
    }
}
