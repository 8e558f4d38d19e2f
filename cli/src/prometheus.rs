//! Queries over a time, of a Prometheus that scrapes the node drivers.

use std::collections::BTreeMap;

use anyhow::{Context, anyhow, bail, ensure};
use kube::{Client, Config};
use serde_json::Value;

use crate::connection::{Connection, connect};
use crate::tenant;

/// Steps of a time that Prometheus evaluates at most.
const MAX_STEPS: u64 = 2000;
/// Smallest step, seconds.
const MIN_STEP_SECONDS: u64 = 60;

/// What is asked, and over which time.
#[derive(Debug, clap::Args)]
pub(crate) struct Source {
    /// Prometheus that scrapes the node drivers: a URL, or NAMESPACE/SERVICE:PORT, which is reached through the API server.
    #[arg(long, value_name = "URL")]
    pub(crate) prometheus: String,

    /// Time until now, such as 12h, 7d or 4w.
    #[arg(long, default_value = "7d", value_parser = seconds)]
    pub(crate) since: u64,
}

impl Source {
    /// Returns the server.
    ///
    /// # Errors
    /// When the address is none, or the API server that leads to it is not known.
    pub(crate) async fn connect(&self, connection: &Connection) -> anyhow::Result<Prometheus> {
        let address = self.prometheus.as_str();
        let since = self.since;
        if address.starts_with("http://") || address.starts_with("https://") {
            let url = address.trim_end_matches('/').parse();
            let config = Config::new(url.with_context(|| format!("cannot read URL {address}"))?);
            let client = Client::try_from(config).context("cannot create a client")?;
            let prefix = String::new();
            return Ok(Prometheus {
                client,
                address: address.to_owned(),
                prefix,
                since,
            });
        }
        let Some((namespace, service)) = address.split_once('/') else {
            bail!("--prometheus {address} is neither a URL nor NAMESPACE/SERVICE:PORT");
        };
        let (client, _) = connect(connection).await?;
        let prefix = format!("/api/v1/namespaces/{namespace}/services/{service}/proxy");
        Ok(Prometheus {
            client,
            address: address.to_owned(),
            prefix,
            since,
        })
    }
}

/// A Prometheus server.
pub(crate) struct Prometheus {
    client: Client,
    /// Its address, as given.
    address: String,
    /// Path before that of the HTTP API.
    prefix: String,
    /// Time until now, seconds.
    since: u64,
}

/// Labels and value of a series of an answer.
#[derive(Debug, PartialEq)]
pub(crate) struct Series {
    labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

impl Series {
    /// Returns the value of a label; empty without it.
    pub(crate) fn label(&self, name: &str) -> String {
        self.labels.get(name).cloned().unwrap_or_default()
    }
}

impl Prometheus {
    /// Returns the time between two evaluations of an expression, seconds: a minute, or more for long times.
    pub(crate) fn step(&self) -> f64 {
        f64::from(u32::try_from(step(self.since)).unwrap_or(u32::MAX))
    }

    /// Applies a function to the values that an expression has had over the time. The function ends where its last argument
    /// starts, such as `max_over_time(`.
    ///
    /// # Errors
    /// When the server does not answer, or cannot evaluate the query.
    pub(crate) async fn over_time(
        &self,
        function: &str,
        expression: &str,
    ) -> anyhow::Result<Vec<Series>> {
        let (since, step) = (self.since, step(self.since));
        let query = format!("{function}({expression})[{since}s:{step}s])");
        let mut parameters = form_urlencoded::Serializer::new(String::new());
        let parameters = parameters.append_pair("query", &query).finish();
        let path = format!("{}/api/v1/query?{parameters}", self.prefix);
        let request = http::Request::get(path).body(Vec::new())?;
        let response: Value = match self.client.request(request).await {
            Ok(response) => response,
            Err(error) => return Err(self.failure(error)),
        };
        series(&response)
    }

    /// Returns the error of a query, in one line.
    fn failure(&self, error: kube::Error) -> anyhow::Error {
        let address = &self.address;
        match &error {
            kube::Error::Api(status) if status.code == 404 && !self.prefix.is_empty() => anyhow!(
                "cannot query Prometheus at {address}: {}; name it as NAMESPACE/SERVICE:PORT: `kubectl get services -A` lists the \
                 services",
                status.message
            ),
            kube::Error::Api(_) => {
                tenant::refused(error, &format!("query Prometheus at {address}"))
            }
            _ => anyhow::Error::new(error).context(
                "cannot query Prometheus; for a URL use `kubectl port-forward`, or name NAMESPACE/SERVICE:PORT",
            ),
        }
    }
}

/// Returns the step of the evaluation, seconds.
fn step(since: u64) -> u64 {
    since.div_ceil(MAX_STEPS).max(MIN_STEP_SECONDS)
}

/// Reads a time such as `7d`, seconds.
pub(crate) fn seconds(text: &str) -> Result<u64, String> {
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

/// Reads the answer to an instant query.
fn series(response: &Value) -> anyhow::Result<Vec<Series>> {
    ensure!(
        response["status"] == "success",
        "Prometheus cannot answer: {}",
        response["error"].as_str().unwrap_or("unknown error")
    );
    let found = response["data"]["result"].as_array();
    let read = |series: &Value| {
        let labels = series["metric"].as_object()?.iter();
        let label = |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.into()));
        Some(Series {
            labels: labels.map(label).collect::<Option<_>>()?,
            value: series["value"][1].as_str()?.parse().ok()?,
        })
    };
    let found = found.context("Prometheus answers without a result")?;
    let series: Option<Vec<Series>> = found.iter().map(read).collect();
    series.context("Prometheus answers with unexpected values")
}

#[cfg(test)]
pub(crate) mod fixture {
    use super::Series;

    /// Returns a series with these labels.
    pub(crate) fn series(labels: &[(&str, &str)], value: f64) -> Series {
        let labels = labels
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Series {
            labels: labels.collect(),
            value,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        let found = json!({"metric": {"namespace": "a", "claim": "x"}, "value": [1, "7200.5"]});
        let answer = json!({"status": "success", "data": {"result": [found]}});
        let expected = fixture::series(&[("namespace", "a"), ("claim", "x")], 7200.5);
        assert_eq!(series(&answer).expect("series"), [expected]);
        let failed = series(&json!({"status": "error", "error": "query timed out"}));
        let text = failed.expect_err("an error").to_string();
        assert_eq!(text, "Prometheus cannot answer: query timed out");
    }
}
