//! Claims per second that the controller allocates alone, against bare loops of writes and against another controller.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, concurrently};
use crate::measured::{extent, print, rate};
use crate::watched::Watched;
use drava_planning::objects::{self, Mode, NAMESPACE};

/// Time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(900);

/// Time after the last allocation whose work is counted as well: events, and what watches deliver.
const DRAIN: Duration = Duration::from_secs(5);

/// What a bare loop writes for each claim.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    /// Finalizer, then status.
    Two,
    /// The status: the admission policy has added the finalizer.
    One,
}

/// Processor time of the control plane.
#[derive(Clone, Copy)]
struct Spent {
    api_server: f64,
    etcd: f64,
}

impl Spent {
    fn so_far(plane: &ControlPlane) -> Result<Self> {
        let usage = plane.usage()?;
        let of = |name: &str| usage.get(name).map_or(0.0, |usage| usage.cpu_seconds);
        Ok(Self {
            api_server: of("kube-apiserver"),
            etcd: of("etcd"),
        })
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            api_server: self.api_server - earlier.api_server,
            etcd: self.etcd - earlier.etcd,
        }
    }

    const fn total(self) -> f64 {
        self.api_server + self.etcd
    }
}

/// Measures all writers, in turn; `base` without the admission policy, which it does not know. kube-scheduler is stopped: pods
/// without the webhook's gate would keep it busy.
pub(crate) async fn measure(
    plane: &ControlPlane,
    base: Option<&Path>,
    claims: usize,
    rounds: usize,
) -> Result<()> {
    plane.publish(Mode::Managed).await?;
    plane.set_scheduler(false)?;
    let names: Vec<String> = (0..claims).map(|index| format!("pod-{index:05}")).collect();
    for round in 0..rounds {
        plane.set_policy(false).await?;
        let writer = "bare loop, two writes";
        print(&bare_writes(plane, &names, (round, writer), Writes::Two).await?)?;
        if let Some(base) = base {
            let writer = base.file_name().unwrap_or_default().to_string_lossy();
            print(&controller_writes(plane, base, &names, (round, &writer)).await?)?;
        }
        plane.set_policy(true).await?;
        let writer = "bare loop, one write";
        print(&bare_writes(plane, &names, (round, writer), Writes::One).await?)?;
        let program = plane.controller();
        print(&controller_writes(plane, program, &names, (round, "controller")).await?)?;
    }
    plane.set_policy(false).await?;
    plane.set_scheduler(true)
}

/// Creates the claims, and returns the processor time of the control plane.
async fn create_claims(plane: &ControlPlane, names: &[String]) -> Result<Spent> {
    let request = plane.shape().request();
    let claims: Result<Vec<_>> = names
        .iter()
        .map(|name| objects::claim(name, &request))
        .collect();
    let before = Spent::so_far(plane)?;
    plane.create_claims(claims?).await?;
    Ok(Spent::so_far(plane)?.since(before))
}

/// Writes each claim without a decision, beside the same watches as the controller's writes.
async fn bare_writes(
    plane: &ControlPlane,
    names: &[String],
    (round, writer): (usize, &str),
    writes: Writes,
) -> Result<Value> {
    let creation = create_claims(plane, names).await?;
    let api = Api::<ResourceClaim>::namespaced(plane.client.clone(), NAMESPACE);
    let watched = Watched::start(&plane.client);
    let before = Spent::so_far(plane)?;
    concurrently(names.iter().enumerate(), |(index, name)| {
        let api = api.clone();
        async move {
            let parameters = PatchParams::default();
            let mut status = json!({"status": {"allocation": allocation(index % plane.nodes())}});
            if writes == Writes::Two {
                let finalizer =
                    Patch::Merge(json!({"metadata": {"finalizers": [names::CLAIM_FINALIZER]}}));
                let claim = api.patch(name, &parameters, &finalizer).await?;
                let version = claim.metadata.resource_version;
                status["metadata"] = json!({"resourceVersion": version});
            }
            api.patch_status(name, &parameters, &Patch::Merge(&status))
                .await?;
            Ok(())
        }
    })
    .await?;
    let took = allocated(&watched, names).await?;
    tokio::time::sleep(DRAIN).await;
    let spent = Spent::so_far(plane)?.since(before);
    plane.delete(names).await?;
    Ok(row(
        plane,
        names.len(),
        (round, writer),
        took,
        (creation, spent),
        0.0,
    ))
}

fn row(
    plane: &ControlPlane,
    claims: usize,
    (round, writer): (usize, &str),
    took: Duration,
    (creation, spent): (Spent, Spent),
    controller: f64,
) -> Value {
    let of_claim = |seconds: f64| 1e3 / rate(claims, Duration::from_secs_f64(seconds.max(0.0)));
    json!({
        "measure": "allocation", "round": round, "writer": writer, "claims": claims, "nodes": plane.nodes(),
        "seconds": took.as_secs_f64(), "perSecond": rate(claims, took),
        "controllerCpuSeconds": controller, "apiServerCpuSeconds": spent.api_server, "etcdCpuSeconds": spent.etcd,
        "cpuMsPerClaim": of_claim(controller + spent.total()),
        "creationCpuMsPerClaim": of_claim(creation.total()),
    })
}

/// Returns the time from the first to the last allocation, once all claims have one.
async fn allocated(watched: &Watched, names: &[String]) -> Result<Duration> {
    watched
        .until("all claims are allocated", LIMIT, |times| {
            times.allocated.len() >= names.len()
        })
        .await?;
    Ok(extent(watched.times().allocated.values()))
}

/// An allocation like that of the controller.
fn allocation(node: usize) -> Value {
    let name = objects::node_name(node);
    json!({
        "devices": {"results": [{
            "request": "gpu", "driver": names::DRIVER, "pool": format!("{name}/gpus"), "device": "gpu-0-vgpu",
            "consumedCapacity": {"memory": "8Gi", "cores": "5", "slots": "1"},
            "shareID": "3c9a5f0e-5b0f-4d57-8d8b-3d6f1f0f7a11",
            "tolerations": [{"key": names::MANAGED_TAINT, "operator": "Exists", "effect": "NoSchedule"}],
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [name]},
        ]}]},
    })
}

/// Lets a controller allocate for waiting pods, from its start.
async fn controller_writes(
    plane: &ControlPlane,
    program: &Path,
    names: &[String],
    (round, writer): (usize, &str),
) -> Result<Value> {
    let creation = create_claims(plane, names).await?;
    plane.create_pods(names, false).await?;
    let watched = Watched::start(&plane.client);
    let before = Spent::so_far(plane)?;
    let started = Instant::now();
    let controller = plane.start_program(program)?;
    let took = allocated(&watched, names).await?;
    let first = watched.times().allocated.values().min().copied();
    tokio::time::sleep(DRAIN).await;
    let used = controller.usage()?;
    let spent = Spent::so_far(plane)?.since(before);
    let events = watched.times().events.len();
    drop(controller);
    drop(watched);
    plane.delete(names).await?;
    let times = (creation, spent);
    let mut row = row(
        plane,
        names.len(),
        (round, writer),
        took,
        times,
        used.cpu_seconds,
    );
    row["startSeconds"] = json!(first.map(|first| (first - started).as_secs_f64()));
    row["controllerMib"] = json!(used.resident_mib);
    row["events"] = json!(events);
    Ok(row)
}
