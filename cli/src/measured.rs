//! What claims use of their GPUs at the moment, by the metrics of the node drivers, which the API server proxies.
//!
//! Memory is a level. GPU time of a share is a counter, so it is known from the second reading on. Whole GPUs have the figures of
//! NVML; of MIG partitions nothing is measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::metric::{Metric, Sample, driver as metric};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time::Instant;

use crate::top::{Access, Burst, Gpu, Measured};
use crate::{installation, natural};

/// Labels of the pods of node drivers.
const DRIVERS: &str = "app.kubernetes.io/name=drava,app.kubernetes.io/component=driver";

/// Name of the port with the metrics.
const PORT: &str = "http";

/// Requests that wait for an answer at the same time.
const IN_FLIGHT: usize = 16;

/// Time for the answer of one node driver.
const LIMIT: Duration = Duration::from_secs(5);

/// Time between the two readings that GPU time needs.
const PAUSE: Duration = Duration::from_secs(3);

/// Oldest reading of which the difference is the GPU time at the moment.
const RECENT: Duration = Duration::from_secs(120);

/// Device of a claim: namespace, claim and device.
type Key = [String; 3];

/// What is measured, by device of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Use(BTreeMap<Key, Measured>);

/// Why nothing or less is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gap {
    /// The user may not read the metrics through the API server.
    Denied(String),
    /// These node drivers do not answer, as a text.
    Failing(String),
}

/// Reads the node drivers.
pub(crate) struct Meter {
    client: Client,
    last: BTreeMap<Key, Counter>,
}

/// GPU time of a share at a reading.
#[derive(Debug, Clone, Copy)]
struct Counter {
    seconds: f64,
    at: Instant,
}

/// What the metrics of a node driver say of a device of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Figures {
    memory: f64,
    time: Time,
    burst: Option<Burst>,
    /// Lent to others.
    lent: Option<f64>,
}

/// GPU time in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum Time {
    #[default]
    Unknown,
    /// Used since the start, seconds.
    Seconds(f64),
    /// Used at the moment.
    Ratio(f64),
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(message) => write!(
                f,
                "what claims use is not shown: you may not read the metrics of the node drivers, subresource pods/proxy in their \
                 namespace: {message}"
            ),
            Self::Failing(error) => write!(f, "what claims use is shown in part: {error}"),
        }
    }
}

impl Use {
    /// Adds what is measured to the claims of GPUs. A suspended share has nothing on its GPU.
    pub(crate) fn add_to(&self, gpus: &mut [Gpu]) {
        for claim in gpus.iter_mut().flat_map(|gpu| &mut gpu.claims) {
            let measured = claim.name.split_once('/').and_then(|(namespace, name)| {
                let key = [namespace, name, claim.device.as_str()];
                self.0.get(&key.map(str::to_owned)).copied()
            });
            claim.measured = match claim.access {
                Access::Suspended => measured.map(|_| Measured {
                    memory: 0,
                    cores: Some(0),
                    burst: None,
                    lends_memory: None,
                }),
                Access::Whole | Access::Share | Access::Partition => measured,
            };
        }
    }
}

/// Returns that claims of pods, of this namespace if it is given, have no figures, after [`Use::add_to`]. Nothing is measured of
/// partitions and suspended shares, and what a companion adds is used by its base.
fn unreported(gpus: &[Gpu], namespace: Option<&str>) -> Option<String> {
    let is_asked_for = |claim: &str| {
        let of = claim.split_once('/').map(|(of, _)| of);
        namespace.is_none() || of == namespace
    };
    let claims = gpus.iter().flat_map(|gpu| {
        let claims = gpu.claims.iter().filter(|claim| {
            let is_metered = matches!(claim.access, Access::Whole | Access::Share);
            let is_used = claim.adds_to.is_none() && !claim.pods.is_empty();
            is_metered && is_used && claim.measured.is_none() && is_asked_for(&claim.name)
        });
        claims.map(|claim| format!("{} on node {}", claim.name, gpu.node))
    });
    // A claim can have several GPUs of a node.
    let claims: BTreeSet<String> = claims.collect();
    let first = claims.first()?;
    let others = match claims.len() - 1 {
        0 => String::new(),
        others => format!(", nor {others} more"),
    };
    Some(format!(
        "what claims use is shown in part: the node drivers do not report claim {first}{others}; they do so a moment after the pod \
         or the node driver starts"
    ))
}

impl Meter {
    /// Creates a meter without a reading.
    pub(crate) fn new(client: Client) -> Self {
        let last = BTreeMap::new();
        Self { client, last }
    }

    /// Adds what is measured to the claims of GPUs: a second reading follows the first, so that GPU time is known. Returns why
    /// claims, of this namespace if it is given, have no figures, if some have none.
    pub(crate) async fn add_to(
        &mut self,
        gpus: &mut [Gpu],
        namespace: Option<&str>,
    ) -> Option<String> {
        let is_first = self.last.is_empty();
        let mut read = self.read().await;
        if is_first && !self.last.is_empty() {
            tokio::time::sleep(PAUSE).await;
            read = self.read().await;
        }
        let (measured, gap, drivers) = read;
        measured.add_to(gpus);
        match gap {
            Some(gap) => Some(gap.to_string()),
            None if drivers == 0 => Some(
                "what claims use is not shown: no pod of the node driver runs; `kubectl drava doctor` names the cause"
                    .to_owned(),
            ),
            None => unreported(gpus, namespace),
        }
    }

    /// Reads all node drivers that run. Returns what is measured, the gaps, and the number of node drivers.
    pub(crate) async fn read(&mut self) -> (Use, Option<Gap>, usize) {
        let drivers = match self.drivers().await {
            Ok(drivers) => drivers,
            Err(gap) => return (Use::default(), Some(gap), 0),
        };
        let count = drivers.len();
        let client = &self.client;
        let answers = futures::stream::iter(drivers).map(async |driver| {
            let answer = driver.metrics(client).await;
            (driver.node, answer, Instant::now())
        });
        let answers: Vec<_> = answers.buffer_unordered(IN_FLIGHT).collect().await;
        let (mut found, mut counters) = (BTreeMap::new(), BTreeMap::new());
        let (mut failing, mut denied) = (Vec::new(), None);
        for (node, answer, at) in answers {
            match answer {
                Ok(text) => {
                    for (key, figures) in figures(&text) {
                        let before = self.last.get(&key);
                        found.insert(key.clone(), measured(figures, before, at));
                        if let Time::Seconds(seconds) = figures.time {
                            counters.insert(key, Counter { seconds, at });
                        }
                    }
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    denied = Some(status.message.clone());
                }
                Err(error) => failing.push((node, describe(&error))),
            }
        }
        self.last = counters;
        let gap = denied.map(Gap::Denied).or_else(|| of_failing(failing));
        (Use(found), gap, count)
    }

    async fn drivers(&self) -> Result<Vec<Driver>, Gap> {
        let failing = |error: &dyn std::error::Error| {
            Gap::Failing(format!(
                "cannot list the pods of node drivers: {}",
                describe(error)
            ))
        };
        let namespace = installation::namespace(&self.client).await;
        let pods: Api<Pod> = match namespace.map_err(|error| failing(&error))? {
            Some(namespace) => Api::namespaced(self.client.clone(), &namespace),
            None => Api::all(self.client.clone()),
        };
        let pods = match pods.list(&ListParams::default().labels(DRIVERS)).await {
            Ok(pods) => pods.items,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                return Err(Gap::Denied(status.message.clone()));
            }
            Err(error) => return Err(failing(&error)),
        };
        let namespaces = pods
            .iter()
            .filter_map(|pod| pod.metadata.namespace.as_deref());
        installation::check_one("pods with the labels of node drivers", namespaces)
            .map_err(|error| Gap::Failing(error.to_string()))?;
        Ok(pods.into_iter().filter_map(Driver::of).collect())
    }
}

/// A pod of the node driver that runs.
struct Driver {
    node: String,
    path: String,
}

impl Driver {
    fn of(pod: Pod) -> Option<Self> {
        let is_running = pod.status.is_some_and(|status| {
            status.phase.as_deref() == Some("Running") && status.pod_ip.is_some()
        });
        let spec = pod.spec.filter(|_| is_running)?;
        let ports = spec
            .containers
            .iter()
            .flat_map(|container| &container.ports);
        let port = ports
            .flatten()
            .find(|port| port.name.as_deref() == Some(PORT))?
            .container_port;
        let (namespace, name) = (pod.metadata.namespace?, pod.metadata.name?);
        Some(Self {
            node: spec.node_name?,
            path: format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics"),
        })
    }

    async fn metrics(&self, client: &Client) -> Result<String, kube::Error> {
        let request = http::Request::get(&self.path)
            .body(Vec::new())
            .map_err(kube::Error::HttpError)?;
        match tokio::time::timeout(LIMIT, client.request_text(request)).await {
            Ok(answer) => answer,
            Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
        }
    }
}

/// Names the first of the node drivers that do not answer.
fn of_failing(mut failing: Vec<(String, String)>) -> Option<Gap> {
    failing.sort_by(|one, other| natural::compare(&one.0, &other.0));
    let (node, error) = failing.first()?;
    let others = match failing.len() - 1 {
        0 => String::new(),
        others => format!(", nor of {others} more nodes"),
    };
    Some(Gap::Failing(format!(
        "cannot read the metrics of the node driver of {node}{others}: {error}"
    )))
}

/// Returns what the figures mean, with the GPU time since the reading before.
fn measured(figures: Figures, before: Option<&Counter>, at: Instant) -> Measured {
    let ratio = match figures.time {
        Time::Unknown => None,
        Time::Ratio(ratio) => Some(ratio),
        Time::Seconds(seconds) => before.and_then(|before| {
            let elapsed = at.saturating_duration_since(before.at);
            let used = seconds - before.seconds;
            // A counter that falls is of another share with the same names.
            let is_known = elapsed > Duration::ZERO && elapsed <= RECENT && used >= 0.0;
            is_known.then(|| used / elapsed.as_secs_f64())
        }),
    };
    Measured {
        memory: whole(figures.memory),
        // The counter follows the use by up to a lease, so that a part of the time before may be in it.
        cores: ratio.map(|ratio| whole(ratio * 100.0).min(100)),
        burst: figures.burst,
        lends_memory: figures.lent.map(whole),
    }
}

/// Rounds a figure.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the conversion saturates, and figures are not negative"
)]
fn whole(figure: f64) -> u64 {
    figure.round() as u64
}

/// Metrics with the figures.
const FIGURES: [Metric; 7] = [
    metric::SHARE_MEMORY_USED_BYTES,
    metric::SHARE_MEMORY_LIMIT_BYTES,
    metric::SHARE_BURST_BYTES,
    metric::SHARE_LENT_BYTES,
    metric::SHARE_GPU_TIME_SECONDS,
    metric::GPU_MEMORY_USED_BYTES,
    metric::GPU_UTILIZATION_RATIO,
];

/// Reads the metrics of a node driver.
fn figures(text: &str) -> BTreeMap<Key, Figures> {
    let mut devices = Vec::new();
    let mut values = BTreeMap::new();
    for sample in text.lines().filter_map(Sample::read) {
        if sample.name == metric::CLAIM_DEVICE_INFO.name {
            devices.push(sample);
        } else if let Some(metric) = FIGURES.iter().find(|metric| metric.name == sample.name) {
            let labels = metric.labels.iter().map(|name| sample.label(name));
            values.insert((metric.name, labels.collect::<Vec<_>>()), sample.value);
        }
    }
    let devices = devices.into_iter().filter_map(|device| {
        let labels = |metric: &Metric| metric.labels.iter().map(|name| device.label(name));
        let value = |metric: &Metric| {
            values
                .get(&(metric.name, labels(metric).collect()))
                .copied()
        };
        let (memory, time, burst) = match device.label("access").as_str() {
            "share" => (
                value(&metric::SHARE_MEMORY_USED_BYTES)?,
                value(&metric::SHARE_GPU_TIME_SECONDS).map(Time::Seconds),
                value(&metric::SHARE_MEMORY_LIMIT_BYTES).zip(value(&metric::SHARE_BURST_BYTES)),
            ),
            "whole" => (
                value(&metric::GPU_MEMORY_USED_BYTES)?,
                value(&metric::GPU_UTILIZATION_RATIO).map(Time::Ratio),
                None,
            ),
            _ => return None,
        };
        let key = ["namespace", "claim", "device"].map(|name| device.label(name));
        let figures = Figures {
            memory,
            time: time.unwrap_or_default(),
            burst: burst.map(|(limit, lent)| Burst {
                memory_limit: whole(limit),
                lent_memory: whole(lent),
            }),
            lent: value(&metric::SHARE_LENT_BYTES),
        };
        Some((key, figures))
    });
    devices.collect()
}

#[cfg(test)]
mod tests;
