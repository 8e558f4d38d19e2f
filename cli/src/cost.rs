//! `kubectl drava cost`: what claims have requested, used and left idle over a time, with prices.
//!
//! The amounts are those of the node drivers in Prometheus. Shares and whole GPUs count; the metrics do not show how much of a
//! GPU a MIG partition is, so partitions are counted without an amount.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};

use drava_explanation::table;

use crate::connection::{Connection, connect};
use crate::installation;
use crate::prometheus::{Prometheus, Series, Source};
use crate::tenant;
use crate::workload::{Workload, Workloads};

mod opencost;

/// GPUs that a claim has by its guarantee, by model.
const REQUESTED_GPUS: &str = include_str!("cost/requested_gpus.promql");
/// Memory that a claim has, by model, bytes.
const REQUESTED_MEMORY: &str = include_str!("cost/requested_memory.promql");
/// GPUs that a claim keeps busy, by model.
const USED_GPUS: &str = include_str!("cost/used_gpus.promql");
/// Power of a claim, by model: that of its whole GPUs, and of shared GPUs by its part of the GPU time of all shares, W.
const WATTS: &str = include_str!("cost/watts.promql");
/// Partitions of a claim, by model.
const PARTITIONS: &str = include_str!("cost/partitions.promql");

/// Label of the ConfigMap with the prices of the chart.
const PRICES_LABEL: &str = "gpu.drava.dev/prices=true";
/// Workload of the claims whose pods are gone, and whose names tell none.
const UNKNOWN: &str = "-";
/// Key of the prices in the ConfigMap.
const PRICES_KEY: &str = "prices.yaml";

/// Command line of `cost`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    source: Source,

    /// One line for each claim instead of each namespace.
    #[arg(long)]
    claims: bool,

    /// One line for each workload, such as a Deployment. Needs the permission to list pods, and Jobs if pods are of some.
    #[arg(long, conflicts_with = "claims")]
    workloads: bool,

    /// Prices in YAML, with the fields of the chart's `prices`; default: those of the chart in the cluster.
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,
}

/// Prices, as in the chart.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Prices {
    #[serde(default)]
    currency: String,
    /// Of a model without a price of its own.
    #[serde(default)]
    gpu_hour: f64,
    #[serde(default)]
    memory_gib_hour: f64,
    /// By model, as NVML names it.
    #[serde(default)]
    models: BTreeMap<String, ModelPrice>,
}

/// Prices of a model; those that are left out are the prices of all models.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ModelPrice {
    gpu_hour: Option<f64>,
    memory_gib_hour: Option<f64>,
}

/// Price of GPU time and GPU memory for an hour.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Price {
    /// Of the GPU time of one GPU; a share with 30 cores costs 0.3 of it.
    gpu_hour: f64,
    /// Of a GiB of GPU memory.
    memory_gib_hour: f64,
}

impl Prices {
    fn is_empty(&self) -> bool {
        self.any() == Price::default() && self.models.is_empty()
    }

    const fn any(&self) -> Price {
        Price {
            gpu_hour: self.gpu_hour,
            memory_gib_hour: self.memory_gib_hour,
        }
    }

    fn of(&self, model: &str) -> Price {
        let own = self.models.get(model).copied().unwrap_or_default();
        Price {
            gpu_hour: own.gpu_hour.unwrap_or(self.gpu_hour),
            memory_gib_hour: own.memory_gib_hour.unwrap_or(self.memory_gib_hour),
        }
    }
}

/// Namespace, claim and model of a value.
type Key = (String, String, String);

/// What a line is for, beside its namespace.
#[derive(Debug, Clone, Copy)]
enum Grouping<'a> {
    Namespace,
    Workload(&'a Workloads),
    Claim,
}

impl Grouping<'_> {
    /// Returns workload and claim of the line in which a claim counts.
    fn names(self, namespace: &str, claim: &str) -> [Option<String>; 2] {
        match self {
            Self::Namespace => [None, None],
            Self::Workload(workloads) => {
                let found = workloads.find(namespace, claim);
                let name = found.map_or_else(|| UNKNOWN.to_owned(), Workload::reference);
                [Some(name), None]
            }
            Self::Claim => [None, Some(claim.to_owned())],
        }
    }
}

/// What Prometheus knows of a time.
#[derive(Debug, Default)]
struct Amounts {
    requested_gpu_seconds: BTreeMap<Key, f64>,
    requested_byte_seconds: BTreeMap<Key, f64>,
    used_gpu_seconds: BTreeMap<Key, f64>,
    joules: BTreeMap<Key, f64>,
    partition_seconds: BTreeMap<Key, f64>,
}

/// Costs of a time.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    since_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    currency: Option<String>,
    costs: Vec<Cost>,
}

/// Costs of a namespace, or of a workload or a claim.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cost {
    namespace: String,
    /// Kind and name, or [`UNKNOWN`].
    #[serde(skip_serializing_if = "Option::is_none")]
    workload: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    requested_gpu_hours: f64,
    /// Absent where no GPU time of the claims is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    used_gpu_hours: Option<f64>,
    /// What of the requested time was not used, where that is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_gpu_hours: Option<f64>,
    requested_memory_gib_hours: f64,
    /// Absent where no GPU of the claims reports energy.
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_kilowatt_hours: Option<f64>,
    /// Hours of MIG partitions, which no other field has.
    partition_hours: f64,
    /// Absent without prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    /// The part of the idle GPU time, where that is measured. Absent without prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_cost: Option<f64>,
}

/// Runs `cost`.
///
/// # Errors
/// When Prometheus or the prices cannot be read.
pub(crate) async fn run(connection: &Connection, options: &Options) -> anyhow::Result<Report> {
    let prices = match &options.prices {
        Some(file) => {
            let text = std::fs::read_to_string(file);
            parse(&text.with_context(|| format!("cannot read {}", file.display()))?)?
        }
        None => of_cluster(&connect(connection).await?.0).await?,
    };
    let namespace = connection.namespace.as_deref();
    let workloads = match options.workloads {
        true => Some(Workloads::read(&connect(connection).await?.0, namespace).await?),
        false => None,
    };
    let grouping = match &workloads {
        Some(workloads) => Grouping::Workload(workloads),
        None if options.claims => Grouping::Claim,
        None => Grouping::Namespace,
    };
    let server = options.source.connect(connection).await?;
    let amounts = Amounts {
        requested_gpu_seconds: seconds(&server, REQUESTED_GPUS).await?,
        requested_byte_seconds: seconds(&server, REQUESTED_MEMORY).await?,
        used_gpu_seconds: seconds(&server, USED_GPUS).await?,
        joules: seconds(&server, WATTS).await?,
        partition_seconds: seconds(&server, PARTITIONS).await?,
    };
    let costs = costs(&amounts, &prices, grouping, namespace);
    Ok(Report {
        since_seconds: options.source.since,
        currency: (!prices.is_empty()).then(|| prices.currency.clone()),
        costs,
    })
}

fn parse(text: &str) -> anyhow::Result<Prices> {
    serde_saphyr::from_str(text)
        .context("cannot read the prices; `helm show values` of the chart describes them")
}

/// Returns the prices of the chart; none without them, or where the user may not read them.
async fn of_cluster(client: &Client) -> anyhow::Result<Prices> {
    let (maps, place): (Api<ConfigMap>, _) = match installation::namespace(client).await? {
        Some(namespace) => (
            Api::namespaced(client.clone(), &namespace),
            format!("in namespace {namespace}"),
        ),
        None => (Api::all(client.clone()), "in all namespaces".to_owned()),
    };
    let found = match maps.list(&ListParams::default().labels(PRICES_LABEL)).await {
        Ok(found) => found.items,
        Err(kube::Error::Api(status)) if status.code == 403 => {
            eprintln!("note: you may not list configmaps {place}; set --prices for costs");
            return Ok(Prices::default());
        }
        Err(error) => return Err(tenant::refused(error, &format!("list configmaps {place}"))),
    };
    let namespaces = found
        .iter()
        .filter_map(|map| map.metadata.namespace.as_deref());
    installation::check_one("ConfigMaps with prices", namespaces)?;
    let text = found
        .iter()
        .find_map(|map| map.data.as_ref()?.get(PRICES_KEY));
    text.map_or_else(|| Ok(Prices::default()), |text| parse(text))
}

/// Returns the integral of an expression over the time, by namespace, claim and model.
async fn seconds(server: &Prometheus, expression: &str) -> anyhow::Result<BTreeMap<Key, f64>> {
    let sums = server.over_time("sum_over_time(", expression).await?;
    let key = |of: &Series| (of.label("namespace"), of.label("claim"), of.label("model"));
    let seconds = sums.iter().map(|sum| (key(sum), sum.value * server.step()));
    Ok(seconds.collect())
}

/// Returns the costs by namespace, workload or claim; those of one namespace if it is given.
fn costs(
    amounts: &Amounts,
    prices: &Prices,
    grouping: Grouping<'_>,
    namespace: Option<&str>,
) -> Vec<Cost> {
    const HOUR: f64 = 3600.0;
    const GIB: f64 = (1_u64 << 30) as f64;
    const KILOWATT_HOUR: f64 = 1000.0 * HOUR;
    let keys = [
        &amounts.requested_gpu_seconds,
        &amounts.requested_byte_seconds,
        &amounts.used_gpu_seconds,
        &amounts.joules,
        &amounts.partition_seconds,
    ];
    let keys: std::collections::BTreeSet<&Key> =
        keys.into_iter().flat_map(BTreeMap::keys).collect();
    let mut costs: BTreeMap<(&str, [Option<String>; 2]), Cost> = BTreeMap::new();
    for key in keys {
        let (of, claim, model) = key;
        if namespace.is_some_and(|namespace| namespace != of) {
            continue;
        }
        let amount = |of: &BTreeMap<Key, f64>| of.get(key).copied().unwrap_or_default() / HOUR;
        let requested = amount(&amounts.requested_gpu_seconds);
        let used = amounts
            .used_gpu_seconds
            .get(key)
            .map(|seconds| seconds / HOUR);
        let idle = used.map(|used| (requested - used).max(0.0));
        let memory = amount(&amounts.requested_byte_seconds) / GIB;
        let names = grouping.names(of, claim);
        let cost = costs.entry((of, names.clone())).or_insert_with(|| {
            let [workload, claim] = names;
            Cost {
                namespace: of.clone(),
                workload,
                claim,
                ..Cost::default()
            }
        });
        cost.requested_gpu_hours += requested;
        add(&mut cost.used_gpu_hours, used);
        add(&mut cost.idle_gpu_hours, idle);
        cost.requested_memory_gib_hours += memory;
        let joules = amounts.joules.get(key);
        add(
            &mut cost.energy_kilowatt_hours,
            joules.map(|joules| joules / KILOWATT_HOUR),
        );
        cost.partition_hours += amount(&amounts.partition_seconds);
        if !prices.is_empty() {
            let price = prices.of(model);
            let of_time = requested * price.gpu_hour;
            let of_memory = memory * price.memory_gib_hour;
            add(&mut cost.cost, Some(of_time + of_memory));
            add(&mut cost.idle_cost, idle.map(|idle| idle * price.gpu_hour));
        }
    }
    costs.into_values().collect()
}

/// Adds a value, if it is known, to a sum of those that are.
fn add(sum: &mut Option<f64>, value: Option<f64>) {
    if let Some(value) = value {
        *sum.get_or_insert(0.0) += value;
    }
}

impl Report {
    /// Formats the report as a table.
    pub(crate) fn text(&self) -> String {
        if self.costs.is_empty() {
            return "Prometheus has no claims of this time\n".to_owned();
        }
        let has =
            |name: fn(&Cost) -> &Option<String>| self.costs.iter().any(|cost| name(cost).is_some());
        let mut header = vec!["NAMESPACE"];
        header.extend(has(|cost| &cost.workload).then_some("WORKLOAD"));
        header.extend(has(|cost| &cost.claim).then_some("CLAIM"));
        header.extend(["GPU HOURS", "USED", "IDLE", "GIB HOURS", "KWH"]);
        let cost = self
            .currency
            .as_ref()
            .map(|currency| match currency.as_str() {
                "" => ("COST".to_owned(), "IDLE COST".to_owned()),
                currency => (
                    format!("COST ({currency})"),
                    format!("IDLE COST ({currency})"),
                ),
            });
        if let Some((cost, idle)) = &cost {
            header.extend([cost.as_str(), idle.as_str()]);
        }
        let rows = self.costs.iter().map(|cost| {
            let mut row = vec![cost.namespace.clone()];
            row.extend(cost.workload.clone().into_iter().chain(cost.claim.clone()));
            let amounts = [
                Some(cost.requested_gpu_hours),
                cost.used_gpu_hours,
                cost.idle_gpu_hours,
                Some(cost.requested_memory_gib_hours),
                cost.energy_kilowatt_hours,
            ];
            let text = |amount: f64| format!("{amount:.1}");
            row.extend(amounts.map(|amount| amount.map_or_else(|| "-".to_owned(), text)));
            if self.currency.is_some() {
                let money = [cost.cost, cost.idle_cost];
                let text = |money: f64| format!("{money:.2}");
                row.extend(money.map(|money| money.map_or_else(|| "-".to_owned(), text)));
            }
            row
        });
        let mut text = table(&header, rows.collect());
        let partitions: f64 = self.costs.iter().map(|cost| cost.partition_hours).sum();
        if partitions > 0.0 {
            text.push_str(&format!(
                "without {partitions:.1} hours of MIG partitions, whose size the metrics do not show\n"
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(claims: &[(&str, &str, &str, f64)]) -> BTreeMap<Key, f64> {
        let values = claims.iter().map(|(namespace, claim, model, hours)| {
            let key = (*namespace).to_owned();
            (
                (key, (*claim).to_owned(), (*model).to_owned()),
                hours * 3600.0,
            )
        });
        values.collect()
    }

    fn amounts() -> Amounts {
        const GIB: f64 = (1_u64 << 30) as f64;
        Amounts {
            requested_gpu_seconds: of(&[
                ("a", "x", "H100", 10.0),
                ("a", "y", "L4", 4.0),
                ("b", "z", "L4", 0.0),
                // A spatial share.
                ("c", "s", "L4", 2.0),
            ]),
            used_gpu_seconds: of(&[
                ("a", "x", "H100", 4.0),
                ("a", "y", "L4", 5.0),
                ("b", "z", "L4", 2.0),
            ]),
            requested_byte_seconds: of(&[
                ("a", "x", "H100", 80.0 * GIB),
                ("b", "z", "L4", 20.0 * GIB),
            ]),
            // An L4 that reports none.
            joules: of(&[("a", "x", "H100", 500.0)]),
            partition_seconds: of(&[("b", "m", "H100", 3.0)]),
        }
    }

    fn prices() -> Prices {
        parse("{currency: EUR, gpuHour: 1, memoryGibHour: 0.5, models: {H100: {gpuHour: 3}}}")
            .expect("prices")
    }

    #[test]
    fn sums_requested_used_and_idle_time_by_namespace() {
        let report = Report {
            since_seconds: 1,
            currency: Some("EUR".to_owned()),
            costs: costs(&amounts(), &prices(), Grouping::Namespace, None),
        };
        // Idle time of one claim is not the other's; memory of an H100 has the price of all models.
        assert_eq!(
            report.text(),
            "\
NAMESPACE   GPU HOURS   USED   IDLE   GIB HOURS   KWH   COST (EUR)   IDLE COST (EUR)
a           14.0        9.0    6.0    80.0        0.5   74.00        18.00
b           0.0         2.0    0.0    20.0        -     10.00        0.00
c           2.0         -      -      0.0         -     2.00         -
without 3.0 hours of MIG partitions, whose size the metrics do not show
"
        );
    }

    #[test]
    fn lists_claims_of_a_namespace_without_prices() {
        let report = Report {
            since_seconds: 1,
            currency: None,
            costs: costs(&amounts(), &Prices::default(), Grouping::Claim, Some("a")),
        };
        assert_eq!(
            report.text(),
            "\
NAMESPACE   CLAIM   GPU HOURS   USED   IDLE   GIB HOURS   KWH
a           x       10.0        4.0    6.0    80.0        0.5
a           y       4.0         5.0    0.0    0.0         -
"
        );
        let document = serde_json::to_value(&report.costs[0]).expect("JSON");
        assert_eq!(document["idleGpuHours"], 6.0);
        assert_eq!(document.get("cost"), None, "no price, no cost");
    }

    #[test]
    fn sums_claims_of_a_workload() {
        let pod = |name: &str, claim: &str| {
            serde_json::from_value(serde_json::json!({
                "metadata": {
                    "namespace": "a", "name": name, "labels": {"pod-template-hash": "5d9c"},
                    "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d9c", "uid": "u", "controller": true}],
                },
                "spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
                "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": claim}]},
            }))
            .expect("a pod")
        };
        let pods = [pod("web-5d9c-aaaaa", "x"), pod("web-5d9c-bbbbb", "y")];
        let workloads = Workloads::of(&pods, &[]);
        let mut amounts = amounts();
        let gone = of(&[
            ("a", "web-77-ccccc-gpu-abcde", "L4", 1.0),
            ("a", "q", "L4", 7.0),
        ]);
        amounts.requested_gpu_seconds.extend(gone);
        let report = Report {
            since_seconds: 1,
            currency: None,
            costs: costs(
                &amounts,
                &Prices::default(),
                Grouping::Workload(&workloads),
                Some("a"),
            ),
        };
        assert_eq!(
            report.text(),
            "\
NAMESPACE   WORKLOAD         GPU HOURS   USED   IDLE   GIB HOURS   KWH
a           -                7.0         -      -      0.0         -
a           deployment/web   15.0        9.0    6.0    80.0        0.5
"
        );
        let document = serde_json::to_value(&report.costs[1]).expect("JSON");
        assert_eq!(document["workload"], "deployment/web");
        assert_eq!(document.get("claim"), None, "{document}");
    }

    #[test]
    fn refuses_misspelled_prices() {
        for text in ["{gpuHours: 1}", "{models: {H100: {gpu: 1}}}", "[]"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn reads_prices_where_the_chart_writes_them() {
        let chart = include_str!("../../deploy/helm/drava/templates/prices.yaml");
        let (name, value) = PRICES_LABEL.split_once('=').expect("a label");
        assert!(chart.contains(&format!("\n    {name}: \"{value}\"\n")));
        assert!(chart.contains(&format!("\ndata:\n  {PRICES_KEY}: ")));
    }
}
