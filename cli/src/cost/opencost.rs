//! Costs as OpenCost's plugins for custom costs return them: the message `CustomCostResponse` of
//! `protos/customcost/messages.proto` (OpenCost at commit 160ab890), in the JSON mapping of Protocol Buffers, where an absent
//! field is empty.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{Cost, Report};

/// `CustomCostResponse`.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CustomCostResponse {
    cost_source: &'static str,
    domain: &'static str,
    version: &'static str,
    currency: String,
    /// In the form of RFC 3339.
    start: String,
    end: String,
    costs: Vec<CustomCost>,
}

/// `CustomCost`: one for each namespace, workload or claim. The names of the fields are those of FOCUS.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct CustomCost {
    /// What FOCUS has no field for.
    metadata: BTreeMap<&'static str, String>,
    account_name: String,
    charge_category: &'static str,
    description: &'static str,
    resource_name: String,
    resource_type: &'static str,
    /// Unique among all times.
    id: String,
    provider_id: String,
    billed_cost: f64,
    list_cost: f64,
    /// GPU hours that were requested.
    usage_quantity: f64,
    usage_unit: &'static str,
    labels: BTreeMap<&'static str, String>,
}

impl Report {
    /// Returns the costs of the time until `end` for OpenCost.
    ///
    /// # Errors
    /// Without prices: OpenCost has no costs in hours.
    pub(crate) fn opencost(&self, end: Timestamp) -> anyhow::Result<CustomCostResponse> {
        let currency = self
            .currency
            .clone()
            .context("OpenCost needs prices: set prices of the chart, or --prices")?;
        ensure!(
            !currency.is_empty(),
            "OpenCost needs the currency of the prices, such as EUR: set prices.currency"
        );
        let since = SignedDuration::try_from(std::time::Duration::from_secs(self.since_seconds))?;
        let start = end.checked_sub(since).context("--since is too long")?;
        Ok(CustomCostResponse {
            cost_source: "gpu",
            domain: "drava",
            version: "v1",
            currency,
            start: start.to_string(),
            end: end.to_string(),
            costs: self
                .costs
                .iter()
                .map(|cost| cost.opencost(start, end))
                .collect(),
        })
    }
}

impl Cost {
    fn opencost(&self, start: Timestamp, end: Timestamp) -> CustomCost {
        let cost = self.cost.unwrap_or_default();
        let within = |name: &str| format!("{}/{name}", self.namespace);
        let (name, kind, resource) = match (&self.claim, &self.workload) {
            (Some(claim), _) => (claim, "ResourceClaim", within(claim)),
            (None, Some(workload)) => (workload, "Workload", within(workload)),
            (None, None) => (&self.namespace, "Namespace", self.namespace.clone()),
        };
        let mut labels = BTreeMap::from([("namespace", self.namespace.clone())]);
        labels.extend(self.claim.clone().map(|claim| ("claim", claim)));
        labels.extend(self.workload.clone().map(|name| ("workload", name)));
        let mut metadata = BTreeMap::from([
            (
                "memoryGibHours",
                self.requested_memory_gib_hours.to_string(),
            ),
            ("partitionHours", self.partition_hours.to_string()),
        ]);
        let measured = [
            ("usedGpuHours", self.used_gpu_hours),
            ("idleGpuHours", self.idle_gpu_hours),
            ("idleCost", self.idle_cost),
            ("energyKwh", self.energy_kilowatt_hours),
        ];
        let measured = measured.into_iter();
        metadata.extend(measured.filter_map(|(name, amount)| Some((name, amount?.to_string()))));
        CustomCost {
            metadata,
            account_name: self.namespace.clone(),
            charge_category: "Usage",
            description: "GPU time and GPU memory",
            resource_name: name.clone(),
            resource_type: kind,
            id: format!("{resource}/{}/{}", start.as_second(), end.as_second()),
            provider_id: resource,
            billed_cost: cost,
            list_cost: cost,
            usage_quantity: self.requested_gpu_hours,
            usage_unit: "GPU-Hours",
            labels,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(currency: Option<&str>, claim: Option<&str>) -> Report {
        Report {
            since_seconds: 7200,
            currency: currency.map(str::to_owned),
            costs: vec![Cost {
                namespace: "research".to_owned(),
                workload: None,
                claim: claim.map(str::to_owned),
                requested_gpu_hours: 4.0,
                used_gpu_hours: Some(3.0),
                idle_gpu_hours: Some(1.0),
                requested_memory_gib_hours: 80.5,
                energy_kilowatt_hours: Some(1.5),
                partition_hours: 0.0,
                cost: Some(12.25),
                idle_cost: Some(2.5),
            }],
        }
    }

    fn end() -> Timestamp {
        "2026-01-02T03:00:00Z".parse().expect("a time")
    }

    #[test]
    fn writes_response_in_json_of_protocol_buffers() {
        let response = report(Some("EUR"), Some("trainer")).opencost(end());
        let document = serde_json::to_value(response.expect("a response")).expect("JSON");
        assert_eq!(
            document,
            serde_json::json!({
                "costSource": "gpu",
                "domain": "drava",
                "version": "v1",
                "currency": "EUR",
                "start": "2026-01-02T01:00:00Z",
                "end": "2026-01-02T03:00:00Z",
                "costs": [{
                    "metadata": {
                        "usedGpuHours": "3",
                        "idleGpuHours": "1",
                        "idleCost": "2.5",
                        "memoryGibHours": "80.5",
                        "partitionHours": "0",
                        "energyKwh": "1.5",
                    },
                    "accountName": "research",
                    "chargeCategory": "Usage",
                    "description": "GPU time and GPU memory",
                    "resourceName": "trainer",
                    "resourceType": "ResourceClaim",
                    "id": "research/trainer/1767315600/1767322800",
                    "providerId": "research/trainer",
                    "billedCost": 12.25,
                    "listCost": 12.25,
                    "usageQuantity": 4.0,
                    "usageUnit": "GPU-Hours",
                    "labels": {"namespace": "research", "claim": "trainer"},
                }],
            })
        );
    }

    #[test]
    fn names_workloads_as_resources() {
        let mut report = report(Some("EUR"), None);
        report.costs[0].workload = Some("deployment/chat".to_owned());
        let response = report.opencost(end()).expect("a response");
        let cost = &response.costs[0];
        assert_eq!(
            [
                cost.resource_name.as_str(),
                cost.resource_type,
                &cost.provider_id
            ],
            ["deployment/chat", "Workload", "research/deployment/chat"]
        );
        assert_eq!(cost.labels["workload"], "deployment/chat");
    }

    #[test]
    fn names_namespaces_as_resources() {
        let response = report(Some("EUR"), None)
            .opencost(end())
            .expect("a response");
        let cost = &response.costs[0];
        assert_eq!(
            (cost.resource_name.as_str(), cost.resource_type),
            ("research", "Namespace")
        );
        assert_eq!(cost.provider_id, "research");
        assert_eq!(cost.labels.get("claim"), None);
    }

    #[test]
    fn refuses_costs_without_prices_or_currency() {
        for (currency, text) in [(None, "needs prices"), (Some(""), "needs the currency")] {
            let error = report(currency, None)
                .opencost(end())
                .expect_err("no response");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
