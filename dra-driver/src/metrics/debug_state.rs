//! State of the driver as JSON, for debugging. Pure.
//!
//! The state is served with `/metrics`, so it contains only what `/metrics` and `/readyz` show in another form.

use serde_json::{Value, json};

use super::claim_view::{ClaimEntry, Container, DeviceEntry};
use super::exposition::{Snapshot, access};
use super::telemetry::{GpuEntry, Xid};
use crate::agent::share_metrics::ShareMetrics;
use crate::gpu_health::state::{Fault, GpuHealth, Scope};
use crate::report::conditions::Condition;

/// Returns the state. `unmet` are the unmet conditions with their reasons.
#[must_use]
pub fn state(snapshot: &Snapshot, unmet: &[(Condition, String)]) -> Value {
    let gpus = snapshot.health.keys().chain(snapshot.gpus.keys());
    let gpus: std::collections::BTreeSet<_> = gpus.collect();
    let gpus = gpus.into_iter().map(|uuid| {
        let (entry, health) = (snapshot.gpus.get(uuid), snapshot.health.get(uuid));
        let age = |entry: &GpuEntry| {
            let (_, unix_seconds) = entry.sample.as_ref()?;
            Some(snapshot.now.unix_seconds - unix_seconds)
        };
        json!({
            "uuid": uuid.as_str(),
            "info": entry.and_then(info),
            "sampleAgeSeconds": entry.and_then(age),
            "xids": entry.map(xids),
            "healthy": health.map(GpuHealth::is_healthy),
            "faults": health.map(|health| health.faults().map(fault).collect::<Vec<_>>()),
        })
    });
    let unmet = unmet
        .iter()
        .map(|(condition, reason)| (condition.as_str().to_owned(), json!(reason)));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "unmetConditions": unmet.collect::<serde_json::Map<_, _>>(),
        "gpus": gpus.collect::<Vec<_>>(),
        "claims": snapshot.claims.iter().map(claim).collect::<Vec<_>>(),
        "shares": snapshot.shares.iter().map(share).collect::<Vec<_>>(),
    })
}

fn info(entry: &GpuEntry) -> Option<Value> {
    let info = entry.info.as_ref()?;
    Some(json!({
        "index": info.index,
        "model": info.model,
        "pciBusId": info.pci_bus_id,
        "driverVersion": info.driver_version,
    }))
}

fn xids(entry: &GpuEntry) -> Value {
    let xids = entry.xids.iter().map(|(xid, count)| {
        let number = match xid {
            Xid::Number(number) => number.to_string(),
            Xid::Other => "other".to_owned(),
        };
        (number, json!(count))
    });
    Value::Object(xids.collect())
}

fn fault((scope, fault): (Scope, Fault)) -> Value {
    let slices = match scope {
        Scope::Gpu => None,
        Scope::Slices(slices) => Some(slices.to_string()),
    };
    json!({"slices": slices, "taint": fault.value(), "message": fault.to_string()})
}

fn claim(entry: &ClaimEntry) -> Value {
    let device = |device: &DeviceEntry| {
        let (access, share) = access(device);
        json!({
            "request": device.request,
            "device": device.device,
            "gpu": device.gpu,
            "access": access,
            "share": share,
        })
    };
    let container =
        |container: &Container| json!({"name": container.name, "requests": container.requests});
    let containers = entry.containers.iter().map(|(pod, containers)| {
        let containers = containers.iter().map(container);
        (pod.clone(), Value::Array(containers.collect()))
    });
    json!({
        "namespace": entry.claim.namespace,
        "name": entry.claim.name,
        "uid": entry.claim.uid.as_str(),
        "devices": entry.devices.iter().map(device).collect::<Vec<_>>(),
        "pods": entry.pods,
        "containers": containers.collect::<serde_json::Map<_, _>>(),
    })
}

fn share(share: &ShareMetrics) -> Value {
    json!({
        "claimUid": share.claim.as_str(),
        "share": share.share.as_str(),
        "limitBytes": share.limit_bytes,
        "guaranteedPercent": share.guaranteed_percent,
        "usedBytes": share.figures.used_bytes,
        "registeredProcesses": share.figures.registered,
        "escapedProcesses": share.figures.escaped,
    })
}
