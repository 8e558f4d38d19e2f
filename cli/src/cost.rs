//! `kubectl drava cost`: what claims have requested, used and left idle over a time, with prices.
//!
//! The amounts are those of the node drivers in Prometheus. Shares and whole GPUs count; the metrics do not show how much of a
//! GPU a MIG partition is, so partitions are counted without an amount.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ListParams;
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use drava_explanation::table;

use crate::connection::{Connection, connect};

/// GPUs that a claim has by its guarantee, by model.
const REQUESTED_GPUS: &str = include_str!("cost/requested_gpus.promql");
/// Memory that a claim has, by model, bytes.
const REQUESTED_MEMORY: &str = include_str!("cost/requested_memory.promql");
/// GPUs that a claim keeps busy, by model.
const USED_GPUS: &str = include_str!("cost/used_gpus.promql");
/// Partitions of a claim, by model.
const PARTITIONS: &str = include_str!("cost/partitions.promql");

/// Label of the ConfigMap with the prices of the chart.
const PRICES_LABEL: &str = "gpu.drava.dev/prices=true";
/// Key of the prices in the ConfigMap.
const PRICES_KEY: &str = "prices.yaml";

/// Steps of a time that Prometheus evaluates at most.
const MAX_STEPS: u64 = 2000;
/// Smallest step, seconds.
const MIN_STEP_SECONDS: u64 = 60;

/// Command line of `cost`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Prometheus that scrapes the node drivers: a URL, or NAMESPACE/SERVICE:PORT, which is reached through the API server.
    #[arg(long, value_name = "URL")]
    prometheus: String,

    /// Time until now, such as 12h, 7d or 4w.
    #[arg(long, default_value = "7d", value_parser = seconds)]
    since: u64,

    /// One line for each claim instead of each namespace.
    #[arg(long)]
    claims: bool,

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
    models: BTreeMap<String, Price>,
}

/// Price of GPU time and GPU memory for an hour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Price {
    /// Of the GPU time of one GPU; a share with 30 cores costs 0.3 of it.
    #[serde(default)]
    gpu_hour: f64,
    /// Of a GiB of GPU memory.
    #[serde(default)]
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
        self.models.get(model).copied().unwrap_or(self.any())
    }
}

/// Namespace, claim and model of a value.
type Key = (String, String, String);

/// What Prometheus knows of a time.
#[derive(Debug, Default)]
struct Amounts {
    requested_gpu_seconds: BTreeMap<Key, f64>,
    requested_byte_seconds: BTreeMap<Key, f64>,
    used_gpu_seconds: BTreeMap<Key, f64>,
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

/// Costs of a namespace, or of a claim.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cost {
    namespace: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    requested_gpu_hours: f64,
    used_gpu_hours: f64,
    /// What of the requested time was not used.
    idle_gpu_hours: f64,
    requested_memory_gib_hours: f64,
    /// Hours of MIG partitions, which no other field has.
    partition_hours: f64,
    /// Absent without prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    /// The part of the idle GPU time.
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
    let server = Prometheus::connect(connection, &options.prometheus).await?;
    let amounts = Amounts {
        requested_gpu_seconds: server.seconds(REQUESTED_GPUS, options.since).await?,
        requested_byte_seconds: server.seconds(REQUESTED_MEMORY, options.since).await?,
        used_gpu_seconds: server.seconds(USED_GPUS, options.since).await?,
        partition_seconds: server.seconds(PARTITIONS, options.since).await?,
    };
    let namespace = connection.namespace.as_deref();
    let costs = costs(&amounts, &prices, options.claims, namespace);
    Ok(Report {
        since_seconds: options.since,
        currency: (!prices.is_empty()).then(|| prices.currency.clone()),
        costs,
    })
}

/// Reads a time such as `7d`, seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let failure = || format!("{text:?} is no time; use a number with m, h, d or w, such as 7d");
    let unit = text.chars().next_back().ok_or_else(failure)?;
    let factor = match unit {
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        'w' => 604_800,
        _ => return Err(failure()),
    };
    let number: Option<u64> = text
        .strip_suffix(unit)
        .and_then(|number| number.parse().ok());
    let seconds = number.and_then(|number| number.checked_mul(factor));
    seconds.filter(|seconds| *seconds > 0).ok_or_else(failure)
}

fn parse(text: &str) -> anyhow::Result<Prices> {
    serde_saphyr::from_str(text)
        .context("cannot read the prices; `helm show values` of the chart describes them")
}

/// Returns the prices of the chart; none without them, or where the user may not read them.
async fn of_cluster(client: &Client) -> anyhow::Result<Prices> {
    let all: Api<ConfigMap> = Api::all(client.clone());
    let found = match all.list(&ListParams::default().labels(PRICES_LABEL)).await {
        Ok(found) => found.items,
        Err(kube::Error::Api(status)) if status.code == 403 => {
            eprintln!(
                "note: you may not list configmaps in all namespaces; set --prices for costs"
            );
            return Ok(Prices::default());
        }
        Err(error) => return Err(error).context("cannot list the prices"),
    };
    let text = found
        .iter()
        .find_map(|map| map.data.as_ref()?.get(PRICES_KEY));
    text.map_or_else(|| Ok(Prices::default()), |text| parse(text))
}

/// A Prometheus server.
struct Prometheus {
    client: Client,
    /// Path before that of the HTTP API.
    prefix: String,
}

impl Prometheus {
    async fn connect(connection: &Connection, address: &str) -> anyhow::Result<Self> {
        if address.starts_with("http://") || address.starts_with("https://") {
            let url = address.trim_end_matches('/').parse();
            let config = Config::new(url.with_context(|| format!("cannot read URL {address}"))?);
            let client = Client::try_from(config).context("cannot create a client")?;
            let prefix = String::new();
            return Ok(Self { client, prefix });
        }
        let Some((namespace, service)) = address.split_once('/') else {
            bail!("--prometheus {address} is neither a URL nor NAMESPACE/SERVICE:PORT");
        };
        let (client, _) = connect(connection).await?;
        let prefix = format!("/api/v1/namespaces/{namespace}/services/{service}/proxy");
        Ok(Self { client, prefix })
    }

    /// Returns the integral of an expression over the time until now, by namespace, claim and model.
    async fn seconds(&self, expression: &str, since: u64) -> anyhow::Result<BTreeMap<Key, f64>> {
        let step = step(since);
        let query = format!("sum_over_time(({expression})[{since}s:{step}s]) * {step}");
        let path = format!("{}/api/v1/query?query={}", self.prefix, encoded(&query));
        let request = http::Request::get(path).body(Vec::new())?;
        let response: Value = self.client.request(request).await.context(
            "cannot query Prometheus; for a URL use `kubectl port-forward`, or name NAMESPACE/SERVICE:PORT",
        )?;
        values(&response)
    }
}

/// Returns the step of the evaluation, seconds: a minute, or more for long times.
fn step(since: u64) -> u64 {
    since.div_ceil(MAX_STEPS).max(MIN_STEP_SECONDS)
}

/// Encodes the value of a parameter of a URL.
fn encoded(text: &str) -> String {
    let encoded = text.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    });
    encoded.collect()
}

/// Reads the answer to an instant query.
fn values(response: &Value) -> anyhow::Result<BTreeMap<Key, f64>> {
    ensure!(
        response["status"] == "success",
        "Prometheus cannot answer: {}",
        response["error"].as_str().unwrap_or("unknown error")
    );
    let series = response["data"]["result"].as_array();
    let value = |series: &Value| {
        let label = |name: &str| {
            series["metric"][name]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let value: f64 = series["value"][1].as_str()?.parse().ok()?;
        Some(((label("namespace"), label("claim"), label("model")), value))
    };
    let series = series.context("Prometheus answers without a result")?;
    let values: Option<BTreeMap<Key, f64>> = series.iter().map(value).collect();
    values.context("Prometheus answers with unexpected values")
}

/// Returns the costs by namespace, or by claim; those of one namespace if it is given.
fn costs(amounts: &Amounts, prices: &Prices, by_claim: bool, namespace: Option<&str>) -> Vec<Cost> {
    const HOUR: f64 = 3600.0;
    const GIB: f64 = (1_u64 << 30) as f64;
    let keys = [
        &amounts.requested_gpu_seconds,
        &amounts.requested_byte_seconds,
        &amounts.used_gpu_seconds,
        &amounts.partition_seconds,
    ];
    let keys: std::collections::BTreeSet<&Key> =
        keys.into_iter().flat_map(BTreeMap::keys).collect();
    let mut costs: BTreeMap<(&str, &str), Cost> = BTreeMap::new();
    for key in keys {
        let (of, claim, model) = key;
        if namespace.is_some_and(|namespace| namespace != of) {
            continue;
        }
        let amount = |of: &BTreeMap<Key, f64>| of.get(key).copied().unwrap_or_default() / HOUR;
        let requested = amount(&amounts.requested_gpu_seconds);
        let used = amount(&amounts.used_gpu_seconds);
        let idle = (requested - used).max(0.0);
        let memory = amount(&amounts.requested_byte_seconds) / GIB;
        let claim = if by_claim { claim.as_str() } else { "" };
        let cost = costs.entry((of, claim)).or_insert_with(|| Cost {
            namespace: of.clone(),
            claim: by_claim.then(|| claim.to_owned()),
            ..Cost::default()
        });
        cost.requested_gpu_hours += requested;
        cost.used_gpu_hours += used;
        cost.idle_gpu_hours += idle;
        cost.requested_memory_gib_hours += memory;
        cost.partition_hours += amount(&amounts.partition_seconds);
        if !prices.is_empty() {
            let price = prices.of(model);
            let of_time = requested * price.gpu_hour;
            *cost.cost.get_or_insert(0.0) += of_time + memory * price.memory_gib_hour;
            *cost.idle_cost.get_or_insert(0.0) += idle * price.gpu_hour;
        }
    }
    costs.into_values().collect()
}

impl Report {
    /// Formats the report as a table.
    pub(crate) fn text(&self) -> String {
        if self.costs.is_empty() {
            return "Prometheus has no claims of this time\n".to_owned();
        }
        let by_claim = self.costs.iter().any(|cost| cost.claim.is_some());
        let mut header = vec!["NAMESPACE"];
        header.extend(by_claim.then_some("CLAIM"));
        header.extend(["GPU HOURS", "USED", "IDLE", "GIB HOURS"]);
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
            row.extend(cost.claim.clone());
            let amounts = [
                cost.requested_gpu_hours,
                cost.used_gpu_hours,
                cost.idle_gpu_hours,
                cost.requested_memory_gib_hours,
            ];
            row.extend(amounts.map(|hours| format!("{hours:.1}")));
            let money = cost.cost.into_iter().chain(cost.idle_cost);
            row.extend(money.map(|money| format!("{money:.2}")));
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
    use serde_json::json;

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
            costs: costs(&amounts(), &prices(), false, None),
        };
        // Idle time of one claim is not the other's; memory of an H100 is free by its own price.
        assert_eq!(
            report.text(),
            "\
NAMESPACE   GPU HOURS   USED   IDLE   GIB HOURS   COST (EUR)   IDLE COST (EUR)
a           14.0        9.0    6.0    80.0        34.00        18.00
b           0.0         2.0    0.0    20.0        10.00        0.00
without 3.0 hours of MIG partitions, whose size the metrics do not show
"
        );
    }

    #[test]
    fn lists_claims_of_a_namespace_without_prices() {
        let report = Report {
            since_seconds: 1,
            currency: None,
            costs: costs(&amounts(), &Prices::default(), true, Some("a")),
        };
        assert_eq!(
            report.text(),
            "\
NAMESPACE   CLAIM   GPU HOURS   USED   IDLE   GIB HOURS
a           x       10.0        4.0    6.0    80.0
a           y       4.0         5.0    0.0    0.0
"
        );
        let document = serde_json::to_value(&report.costs[0]).expect("JSON");
        assert_eq!(document["idleGpuHours"], 6.0);
        assert_eq!(document.get("cost"), None, "no price, no cost");
    }

    #[test]
    fn refuses_misspelled_prices() {
        for text in ["{gpuHours: 1}", "{models: {H100: {gpu: 1}}}", "[]"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn reads_times() {
        assert_eq!(seconds("7d"), Ok(604_800));
        assert_eq!(seconds("90m"), Ok(5400));
        for text in [
            "",
            "7",
            "d",
            "0d",
            "-1d",
            "1.5h",
            "99999999999999999w",
            "1é",
        ] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!((step(3600), step(604_800)), (60, 303));
    }

    #[test]
    fn reads_answers_of_prometheus() {
        let series = json!({"metric": {"namespace": "a", "claim": "x", "model": "H100"}, "value": [1, "7200.5"]});
        let answer = json!({"status": "success", "data": {"result": [series]}});
        let key = ("a".to_owned(), "x".to_owned(), "H100".to_owned());
        assert_eq!(
            values(&answer).expect("values"),
            BTreeMap::from([(key, 7200.5)])
        );
        let failed = values(&json!({"status": "error", "error": "query timed out"}));
        let text = failed.expect_err("an error").to_string();
        assert_eq!(text, "Prometheus cannot answer: query timed out");
    }
}
