//! Time until pods are bound, with the controller and with kube-scheduler alone, in turn.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, Controller, Usage};
use crate::measured::{print, rate};
use crate::watched::Watched;
use drava_planning::objects::{self, Mode};

/// Time limit of a round.
const LIMIT: Duration = Duration::from_secs(1800);

/// Measures both in each round. As many pods are created as asked for, or as fit.
pub(crate) async fn measure(plane: &ControlPlane, pods: usize, rounds: usize) -> Result<()> {
    let pods = pods.min(plane.shape().room(plane.nodes()));
    for round in 0..rounds {
        for mode in [Mode::Managed, Mode::Native] {
            print(&bind(plane, mode, pods, round).await?)?;
        }
    }
    Ok(())
}

async fn bind(plane: &ControlPlane, mode: Mode, pods: usize, round: usize) -> Result<Value> {
    plane.publish(mode).await?;
    let controller = match mode {
        Mode::Managed => Some(plane.start_controller()?),
        Mode::Native => None,
    };
    plane.wait_until_ready(mode, true).await?;
    let names: Vec<String> = (0..pods)
        .map(|index| format!("{}-{round}-{index:05}", name(mode)))
        .collect();
    let request = plane.shape().request();
    let claims: Result<Vec<_>> = names
        .iter()
        .map(|name| objects::claim(name, &request))
        .collect();
    let watched = Watched::start(&plane.client);
    let before = plane.usage()?;
    let controller_before = controller.as_ref().map(Controller::usage);
    let controller_before = controller_before.transpose()?.unwrap_or_default();
    let started = Instant::now();
    plane.create_claims(claims?).await?;
    plane.create_pods(&names, mode == Mode::Managed).await?;
    let created = started.elapsed();
    watched
        .until("all pods are bound", LIMIT, |times| {
            times.bound.len() >= pods
        })
        .await?;
    let took = watched
        .times()
        .bound
        .values()
        .max()
        .map_or(Duration::ZERO, |last| *last - started);
    let after = plane.usage()?;
    let used = controller.as_ref().map(Controller::usage);
    let used = used.transpose()?.unwrap_or_default();
    drop((controller, watched));
    plane.delete(&names).await?;
    let spent = |name: &str| {
        let seconds = |usage: &std::collections::BTreeMap<String, Usage>| {
            usage.get(name).map_or(0.0, |usage| usage.cpu_seconds)
        };
        seconds(&after) - seconds(&before)
    };
    let resident = |name: &str| after.get(name).map_or(0, |usage| usage.resident_mib);
    Ok(json!({
        "measure": plane.shape().name(), "round": round, "mode": name(mode), "nodes": plane.nodes(), "pods": pods,
        "createdSeconds": created.as_secs_f64(), "seconds": took.as_secs_f64(), "perSecond": rate(pods, took),
        "schedulerCpuSeconds": spent("kube-scheduler"),
        "controllerCpuSeconds": used.cpu_seconds - controller_before.cpu_seconds,
        "apiServerCpuSeconds": spent("kube-apiserver"), "etcdCpuSeconds": spent("etcd"),
        "schedulerMib": resident("kube-scheduler"), "controllerMib": used.resident_mib,
    }))
}

const fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Managed => "managed",
        Mode::Native => "native",
    }
}
