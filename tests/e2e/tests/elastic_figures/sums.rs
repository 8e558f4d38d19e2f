//! What different components count as allocated, compared with the claims.
//!
//! kube-scheduler's own allocator gets the same list of claims, so its answer is due at once. The others are eventually consistent, and
//! none of them says which version of the claims it has seen. They are read until they agree with claims that do not change meanwhile.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::Kubernetes;
use drava_e2e::measurement::report;
use drava_e2e::{Namespace, TestCluster};
use drava_oracle::program::{self, Program};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "gpu-0-vgpu";
const CLASS: &str = "vgpu.drava.dev";
const CONTROLLER_PORT: u16 = 8080;

/// Time after which a component that differs counts as wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a component was compared, and how late it was.
#[derive(Default)]
struct View {
    compared: u64,
    /// Comparisons in which the first answer was that of the claims.
    at_once: u64,
    longest: Duration,
    different: u64,
}

/// Components that count allocated memory or devices.
const KUBE_SCHEDULER: &str = "kube-scheduler's allocator";
const VIEWS: [&str; 5] = [
    "kubectl drava top",
    "GpuQuota",
    "ResourceQuota",
    "/metrics of the device",
    "/metrics of the namespace",
];

pub(crate) struct Sums<'c> {
    cluster: &'c TestCluster,
    tenant: &'c Namespace<'c>,
    /// `None` where Go is missing.
    allocator: Option<Program>,
    views: BTreeMap<&'static str, View>,
}

/// Claims at one moment.
struct Claims {
    all: Value,
    /// Memory of the device that they have, bytes.
    device_bytes: u64,
    /// Memory that those of the namespace have, bytes.
    namespace_bytes: u64,
    /// Claims of the namespace, which ResourceQuotas count.
    count: u64,
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn bytes_of(quantity: &Value) -> Result<u64> {
    let text = quantity.as_str().context("a quantity")?;
    let (number, shift) = match text.trim_end_matches(char::is_alphabetic).len() {
        length if length == text.len() => (text, 0),
        length => match text.split_at(length) {
            (number, "Mi") => (number, 20),
            (number, "Gi") => (number, 30),
            (_, unit) => anyhow::bail!("unit {unit} of {text}"),
        },
    };
    Ok(number.parse::<u64>()? << shift)
}

impl Claims {
    fn read(cluster: &TestCluster, namespace: &str) -> Result<Self> {
        let all = cluster.get(&["resourceclaims", "-A"])?["items"].clone();
        let (mut device_bytes, mut namespace_bytes, mut count) = (0, 0, 0);
        for claim in array(&all) {
            let is_own = claim["metadata"]["namespace"] == namespace;
            count += u64::from(is_own);
            for result in array(&claim["status"]["allocation"]["devices"]["results"]) {
                let bytes = bytes_of(&result["consumedCapacity"]["memory"])?;
                device_bytes += if result["device"] == DEVICE { bytes } else { 0 };
                namespace_bytes += if is_own { bytes } else { 0 };
            }
        }
        Ok(Self {
            all,
            device_bytes,
            namespace_bytes,
            count,
        })
    }
}

impl<'c> Sums<'c> {
    /// Creates quotas that only count.
    pub(crate) fn new(cluster: &'c TestCluster, tenant: &'c Namespace<'c>) -> Result<Self> {
        let name = tenant.name();
        tenant.apply(&format!(
            "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuQuota, metadata: {{name: {name}}}, spec: {{namespaces: [{name}], limit: {{memory: 1000Gi}}}}}}
---
{{apiVersion: v1, kind: ResourceQuota, metadata: {{name: counts}}, spec: {{hard: {{{CLASS}.deviceclass.resource.k8s.io/devices: 100}}}}}}"
        ))?;
        let allocator = match program::missing_prerequisite() {
            None => Some(Program::start(Kubernetes::default())?),
            Some(missing) => {
                eprintln!("kube-scheduler's allocator is not compared: {missing}");
                None
            }
        };
        Ok(Self {
            cluster,
            tenant,
            allocator,
            views: BTreeMap::new(),
        })
    }

    /// Compares kube-scheduler's allocator with the claims as they are.
    pub(crate) fn compare_allocator(&mut self) -> Result<()> {
        let claims = Claims::read(self.cluster, self.tenant.name())?;
        let Some(allocator) = &mut self.allocator else {
            return Ok(());
        };
        let items = |kind| Ok::<_, anyhow::Error>(self.cluster.get(&[kind])?["items"].clone());
        let slices = items("resourceslices")?;
        let devices = array(&slices).flat_map(|slice| array(&slice["spec"]["devices"]));
        let mut devices = devices.filter(|device| device["name"] == DEVICE);
        let Some(device) = devices.next() else {
            // kubelet or the node driver publishes it again.
            return Ok(());
        };
        let total = bytes_of(&device["capacity"]["memory"]["value"])?;
        let is_allocated = |claim: &&Value| !claim["status"]["allocation"].is_null();
        let allocated: Vec<&Value> = array(&claims.all).filter(is_allocated).collect();
        let (nodes, classes) = (items("nodes")?, items("deviceclasses")?);
        let mut fits = |bytes: u64| {
            let answer = allocator.ask(&json!({
                "nodes": nodes, "slices": slices, "classes": classes, "allocated": allocated, "claims": [probe(bytes)],
            }))?;
            let mut nodes = answer.nodes.values();
            Ok::<_, anyhow::Error>(nodes.any(|node| !node.allocations.is_empty()))
        };
        let free = total.saturating_sub(claims.device_bytes) / MIB * MIB;
        let is_same = (free == 0 || fits(free)?) && !fits(free + MIB)?;
        let view = self.views.entry(KUBE_SCHEDULER).or_default();
        view.compared += 1;
        view.at_once += u64::from(is_same);
        view.different += u64::from(!is_same);
        if !is_same {
            eprintln!("kube-scheduler's allocator has other than {free} bytes free");
        }
        Ok(())
    }

    /// Compares all components with the claims, which do not change meanwhile. Returns how many differ.
    pub(crate) fn compare(&mut self) -> Result<u64> {
        self.compare_allocator()?;
        let claims = Claims::read(self.cluster, self.tenant.name())?;
        let mut wrong = 0;
        for name in VIEWS {
            let expected = match name {
                "ResourceQuota" => claims.count,
                "GpuQuota" | "/metrics of the namespace" => claims.namespace_bytes,
                _ => claims.device_bytes,
            };
            let (begun, mut reads) = (Instant::now(), 0);
            let is_same = loop {
                let found = self.read(name)?;
                reads += 1;
                if found == Some(expected) {
                    break true;
                }
                if begun.elapsed() >= PATIENCE {
                    eprintln!("{name} has {found:?} instead of {expected}");
                    break false;
                }
                std::thread::sleep(Duration::from_millis(50));
            };
            let view = self.views.entry(name).or_default();
            view.compared += 1;
            view.at_once += u64::from(is_same && reads == 1);
            view.different += u64::from(!is_same);
            if reads > 1 {
                view.longest = view.longest.max(begun.elapsed());
            }
            wrong += u64::from(!is_same);
        }
        let after = Claims::read(self.cluster, self.tenant.name())?;
        ensure!(
            (after.device_bytes, after.count) == (claims.device_bytes, claims.count),
            "the claims have changed during the comparison"
        );
        Ok(wrong)
    }

    /// Returns what a component counts; `None` if it says nothing at the moment.
    fn read(&self, view: &str) -> Result<Option<u64>> {
        let name = self.tenant.name();
        let metric = |prefix: &str| -> Result<Option<u64>> {
            let leader = self.cluster.leader()?;
            let path = format!(
                "/api/v1/namespaces/drava-system/pods/{leader}:{CONTROLLER_PORT}/proxy/metrics"
            );
            // A leader that was killed does not answer.
            let Ok(text) = self.cluster.kubectl(["get", "--raw", &path]) else {
                return Ok(None);
            };
            let line = text.lines().find(|line| line.starts_with(prefix));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "an amount of memory"
            )]
            Ok(value.map(|value| value as u64))
        };
        Ok(match view {
            "kubectl drava top" => super::planned(self.cluster).ok(),
            "GpuQuota" => {
                let quota = self.cluster.get(&["gpuquota", name])?;
                bytes_of(&quota["status"]["used"]["memory"]).ok()
            }
            "ResourceQuota" => {
                let quota = self.tenant.find("resourcequota", "counts")?;
                let quota = quota.context("no ResourceQuota")?;
                let used = &quota["status"]["used"];
                let devices = &used[format!("{CLASS}.deviceclass.resource.k8s.io/devices")];
                devices.as_str().and_then(|text| text.parse().ok())
            }
            "/metrics of the namespace" => metric(&format!(
                "drava_namespace_allocated_memory_bytes{{namespace=\"{name}\"}}"
            ))?,
            _ => {
                let node = self.cluster.get(&["nodes"])?;
                let node = node["items"][0]["metadata"]["name"].as_str();
                let node = node.context("a node")?;
                metric(&format!(
                    "drava_device_allocated{{node=\"{node}\",device=\"{DEVICE}\",capacity=\"memory\"}}"
                ))?
            }
        })
    }

    /// Reports the figures, and removes the quota of the cluster.
    pub(crate) fn report(self) -> Result<()> {
        for (name, view) in &self.views {
            report(
                "sums",
                json!({
                    "by": name,
                    "compared": view.compared,
                    "atOnce": view.at_once,
                    "longestMs": view.longest.as_secs_f64() * 1000.0,
                    "different": view.different,
                }),
            )?;
        }
        self.cluster.kubectl([
            "delete",
            "gpuquota",
            self.tenant.name(),
            "--ignore-not-found",
        ])?;
        Ok(())
    }

    /// Returns how many comparisons have found a difference.
    pub(crate) fn different(&self) -> u64 {
        self.views.values().map(|view| view.different).sum()
    }
}

/// A claim for memory of the device, which no controller sees.
fn probe(bytes: u64) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "probe", "namespace": "default", "uid": "probe"},
        "spec": {"devices": {"requests": [{
            "name": "gpu",
            "exactly": {
                "deviceClassName": CLASS,
                "allocationMode": "ExactCount",
                "count": 1,
                "capacity": {"requests": {"memory": bytes.to_string(), "cores": "0"}},
                "selectors": [{"cel": {"expression": "device.attributes['gpu.drava.dev'].index == 0"}}],
                "tolerations": [{"operator": "Exists"}],
            },
        }]}},
    })
}

#[test]
fn reads_quantities() -> Result<()> {
    for (text, bytes) in [("5", 5), ("2Mi", 2 << 20), ("20Gi", 20 << 30)] {
        ensure!(bytes_of(&json!(text))? == bytes, "{text}");
    }
    ensure!(bytes_of(&json!("2G")).is_err(), "another unit");
    Ok(())
}
