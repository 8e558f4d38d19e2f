//! The selection of the controller's allocator.

use anyhow::{Context, Result};
use drava_allocator::cluster::Cluster;
use drava_allocator::placement::{Placement, Policies};
use drava_allocator::pod_request::PodRequest;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::A100;
use crate::objects;
use crate::trace::TraceNode;

const NODE: &str = "node-1";

/// A cluster with one node of A100 40GB GPUs in MIG mode.
#[derive(Debug)]
pub struct MigNode {
    cluster: Cluster,
    policies: Policies,
}

impl MigNode {
    /// Creates the node.
    ///
    /// # Errors
    /// Never for valid numbers.
    pub fn new(gpus: u32, policies: Policies) -> Result<Self> {
        let mut cluster = Cluster::default();
        cluster.upsert_class(object(json!({
            "metadata": {"name": "mig.drava.dev"},
            "spec": {"selectors": [{"cel": {"expression": r#"device.driver == "gpu.drava.dev""#}}]},
        }))?);
        cluster.upsert_node(&objects::node(&TraceNode {
            name: NODE.to_owned(),
            cpu_milli: 1_000_000,
            memory_mib: 1 << 20,
            gpus: gpus.into(),
            model: String::new(),
        })?);
        let counters: Vec<Value> = (0..gpus)
            .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": counters(0..8, 7, 1)}))
            .collect();
        for (name, field, content) in [
            ("counters", "sharedCounters", json!(counters)),
            ("devices", "devices", json!(devices(gpus))),
        ] {
            let pool = json!({"name": "gpus", "generation": 1, "resourceSliceCount": 2});
            let mut spec = json!({"driver": "gpu.drava.dev", "nodeName": NODE, "pool": pool});
            if let Some(spec) = spec.as_object_mut() {
                spec.insert(field.to_owned(), content);
            }
            let metadata = json!({"name": name, "resourceVersion": "1"});
            cluster.upsert_slice(&object(json!({"metadata": metadata, "spec": spec}))?);
        }
        Ok(Self { cluster, policies })
    }

    /// Allocates these partitions of the first GPU, a set of bits.
    ///
    /// # Errors
    /// When they do not exist.
    pub fn occupy(&mut self, layout: u32) -> Result<()> {
        for index in (0..u32::BITS).filter(|index| layout & 1 << index != 0) {
            let result = json!({
                "request": "gpu", "driver": "gpu.drava.dev", "pool": "gpus", "device": format!("gpu-0-mig-{index}"),
            });
            let name = format!("occupied-{index}");
            let claim: ResourceClaim = object(json!({
                "metadata": {"name": name, "namespace": "mig", "uid": name, "resourceVersion": "1"},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "mig.drava.dev"}}]}},
                "status": {"allocation": {"devices": {"results": [result]}}},
            }))?;
            self.cluster.upsert_claim(&claim);
        }
        Ok(())
    }

    /// Selects a device for a request of that profile; `None` if it fits nowhere.
    ///
    /// # Errors
    /// When the request is invalid.
    pub fn place(&mut self, name: &str, profile: usize) -> Result<Option<Placement>> {
        let (profile, ..) = A100[profile];
        let expression = format!(r#"device.attributes["gpu.drava.dev"].profile == "{profile}""#);
        let metadata = |name: &str| json!({"name": name, "namespace": "mig", "uid": name, "resourceVersion": "1"});
        let claim: ResourceClaim = object(json!({
            "metadata": metadata(name),
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
                "deviceClassName": "mig.drava.dev",
                "selectors": [{"cel": {"expression": expression}}],
            }}]}},
        }))?;
        let pod = object(json!({
            "metadata": metadata(name),
            "spec": {
                "containers": [{"name": "main"}],
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            },
        }))?;
        let (classes, selectors) = (&self.cluster.classes, &self.cluster.selectors);
        let request = PodRequest::new(&pod, &[(name, &claim)], classes, selectors)?;
        Ok(self.cluster.decide(&request, self.policies).ok())
    }

    /// Allocates a selected device.
    pub fn allocate(&mut self, placement: &Placement) {
        self.cluster.assume(placement);
    }

    /// Ends the allocation of a request.
    pub fn end(&mut self, name: &str) {
        self.cluster.forget(&("mig".to_owned(), name.to_owned()));
    }
}

/// Returns the device of a placement.
///
/// # Errors
/// When it has none.
pub fn device(placement: &Placement) -> Result<String> {
    let claim = placement.claims.first().context("no claim")?;
    let device = claim.devices.first().context("no device")?;
    Ok(device.device.name.to_string())
}

fn object<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("build an object")
}

fn counters(slices: std::ops::Range<u32>, compute: u32, media: u32) -> Value {
    let memory = slices.map(|slice| (format!("memory-slice-{slice}"), 1));
    let others = [("copy-engines", compute), ("media-extensions", media)];
    let others = others.map(|(name, value)| (name.to_owned(), value));
    let all = memory.chain(others).filter(|(_, value)| *value > 0);
    all.map(|(name, value)| (name, json!({"value": value.to_string()})))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Returns the partitions of the GPUs; the position of a partition among those of its GPU is in its name.
fn devices(gpus: u32) -> Vec<Value> {
    let of_gpu = |gpu: u32| {
        let placements = A100.into_iter().flat_map(|profile| {
            let starts = profile.2.iter();
            starts.map(move |start| (profile, *start))
        });
        placements
            .enumerate()
            .map(move |(index, (profile, start))| {
                let (name, memory, _, size, compute, media) = profile;
                json!({
                    "name": format!("gpu-{gpu}-mig-{index}"),
                    "attributes": {
                        "type": {"string": "mig"},
                        "uuid": {"string": format!("GPU-{gpu}")},
                        "profile": {"string": name},
                    },
                    "capacity": {"memory": {"value": format!("{memory}Mi")}},
                    "consumesCounters": [{
                        "counterSet": format!("gpu-{gpu}"),
                        "counters": counters(start..start + size, compute, media),
                    }],
                })
            })
    };
    (0..gpus).flat_map(of_gpu).collect()
}
