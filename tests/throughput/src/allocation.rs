//! Claims per second that the controller allocates alone, against a bare loop of the same writes.

use std::time::{Duration, Instant};

use anyhow::Result;
use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, concurrently};
use crate::measured::{extent, print, rate};
use crate::objects::{self, Mode, NAMESPACE};
use crate::watched::Watched;

/// Time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(900);

/// Measures both, in turn. kube-scheduler is stopped: pods without the webhook's gate would keep it busy.
pub(crate) async fn measure(plane: &ControlPlane, claims: usize, rounds: usize) -> Result<()> {
    plane.publish(Mode::Managed).await?;
    plane.set_scheduler(false)?;
    let names: Vec<String> = (0..claims).map(|index| format!("pod-{index:05}")).collect();
    for round in 0..rounds {
        let bare = bare_writes(plane, &names).await?;
        let row = json!({
            "measure": "allocation", "round": round, "writer": "bare loop", "claims": claims,
            "nodes": plane.nodes(), "seconds": bare.as_secs_f64(), "perSecond": rate(claims, bare),
        });
        print(&row)?;
        print(&controller_writes(plane, &names, round).await?)?;
    }
    plane.set_scheduler(true)
}

async fn create_claims(plane: &ControlPlane, names: &[String]) -> Result<()> {
    let request = plane.shape().request();
    let claims: Result<Vec<_>> = names
        .iter()
        .map(|name| objects::claim(name, &request))
        .collect();
    plane.create_claims(claims?).await
}

/// Writes finalizer and status of each claim without a decision, beside the same watches as the controller's writes.
async fn bare_writes(plane: &ControlPlane, names: &[String]) -> Result<Duration> {
    create_claims(plane, names).await?;
    let api = Api::<ResourceClaim>::namespaced(plane.client.clone(), NAMESPACE);
    let watched = Watched::start(&plane.client);
    concurrently(names.iter().enumerate(), |(index, name)| {
        let api = api.clone();
        async move {
            let parameters = PatchParams::default();
            let finalizer =
                Patch::Merge(json!({"metadata": {"finalizers": [names::CLAIM_FINALIZER]}}));
            let claim = api.patch(name, &parameters, &finalizer).await?;
            let status = json!({
                "metadata": {"resourceVersion": claim.metadata.resource_version},
                "status": {"allocation": allocation(index % plane.nodes())},
            });
            api.patch_status(name, &parameters, &Patch::Merge(&status))
                .await?;
            Ok(())
        }
    })
    .await?;
    let took = allocated(&watched, names).await?;
    plane.delete(names).await?;
    Ok(took)
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

/// Lets the controller allocate for waiting pods, from its start.
async fn controller_writes(plane: &ControlPlane, names: &[String], round: usize) -> Result<Value> {
    create_claims(plane, names).await?;
    plane.create_pods(names, false).await?;
    let watched = Watched::start(&plane.client);
    let before = plane.usage()?;
    let started = Instant::now();
    let controller = plane.start_controller()?;
    let took = allocated(&watched, names).await?;
    let first = watched.times().allocated.values().min().copied();
    let used = controller.usage()?;
    let after = plane.usage()?;
    drop(controller);
    drop(watched);
    plane.delete(names).await?;
    let api_server = |usage: &std::collections::BTreeMap<String, crate::control_plane::Usage>| {
        usage
            .get("kube-apiserver")
            .map_or(0.0, |usage| usage.cpu_seconds)
    };
    Ok(json!({
        "measure": "allocation", "round": round, "writer": "controller", "claims": names.len(),
        "nodes": plane.nodes(), "seconds": took.as_secs_f64(), "perSecond": rate(names.len(), took),
        "startSeconds": first.map(|first| (first - started).as_secs_f64()),
        "controllerCpuSeconds": used.cpu_seconds, "controllerMib": used.resident_mib,
        "apiServerCpuSeconds": api_server(&after) - api_server(&before),
    }))
}
