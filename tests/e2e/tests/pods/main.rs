//! Pods as people write them: security contexts, kinds of containers, resources, and faults of the node under them.
//!
//! Each test checks the same promise: a container that names the claim sees the memory of the share as that of its GPU, and
//! gets no more.

mod containers;
mod resources;
mod security;
mod state;

use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use drava_e2e::Namespace;
use serde_json::Value;

/// Memory of the shares.
const SHARE_MIB: u64 = 4096;

/// Memory that one program holds: with the contexts of two programs it fits into the share once.
const HELD_MIB: u64 = 2100;

/// A claim template `share` with [`SHARE_MIB`].
const SHARE: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: share}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 4Gi}}}}]}}}
";

/// The program of a container that only waits for `exec`.
const SLEEP: &str = "[sleep, infinity]";

/// The field of a container that names the share.
const USES_SHARE: &str = "resources: {claims: [{name: gpu}]}";

/// Returns a program that holds [`HELD_MIB`].
fn hold() -> String {
    format!("[cuda-probe, alloc, --mib, '{HELD_MIB}', --hold, '36000']")
}

/// Returns a container in YAML flow style. `fields` are further fields.
fn container(name: &str, command: &str, fields: &str) -> String {
    format!(
        "{{name: {name}, image: 'localhost/drava-demo:dev', imagePullPolicy: IfNotPresent, command: {command}, {fields}}}"
    )
}

/// Returns a pod with a claim of the template `share`. `spec` has the other fields in YAML flow style, with the containers.
fn pod(name: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{terminationGracePeriodSeconds: 1, resourceClaims: [{{name: gpu, resourceClaimTemplateName: share}}], {spec}}}}}"
    )
}

/// Creates the template and a pod with the share, and waits until it runs.
fn run(tenant: &Namespace<'_>, name: &str, spec: &str) -> Result<()> {
    tenant.apply(SHARE)?;
    tenant.apply(&pod(name, spec))?;
    tenant.running(name)
}

/// Outcome of an allocation in a container: its report, and whether it was granted.
fn allocate(
    tenant: &Namespace<'_>,
    pod: &str,
    container: &str,
    device: usize,
    mib: u64,
) -> Result<(Value, bool)> {
    let (device, mib) = (device.to_string(), mib.to_string());
    let probe = ["cuda-probe", "alloc", "--device", &device, "--mib", &mib];
    let output = tenant.exec(pod, container, &[&probe[..], &["-o", "json"]].concat())?;
    ensure!(
        output.code == 0 || output.code == 2,
        "{container}: {output:?}"
    );
    let report = serde_json::from_str(&output.stdout);
    let report: Value = report.with_context(|| format!("{container}: {output:?}"))?;
    Ok((report, output.code == 0))
}

/// Checks that a container has exactly the memory of the share on this device, and can use it.
fn is_limited_on(tenant: &Namespace<'_>, pod: &str, container: &str, device: usize) -> Result<()> {
    let (report, granted) = allocate(tenant, pod, container, device, SHARE_MIB + 1)?;
    let is_denied = !granted && report["error"] == "CUDA_ERROR_OUT_OF_MEMORY";
    ensure!(is_denied, "{container} got more than the share: {report}");
    let total = report["before"]["totalBytes"].as_u64();
    ensure!(total == Some(SHARE_MIB << 20), "{container}: {report}");
    let (report, granted) = allocate(tenant, pod, container, device, 64)?;
    ensure!(granted, "{container} cannot use the share: {report}");
    Ok(())
}

/// As [`is_limited_on`], for the only device of a container.
fn is_limited(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<()> {
    is_limited_on(tenant, pod, container, 0)
}

/// Returns the free memory that a container sees, in MiB.
fn free_mib(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<u64> {
    let (report, _) = allocate(tenant, pod, container, 0, 1)?;
    let free = report["before"]["freeBytes"].as_u64();
    Ok(free.context("before.freeBytes")? >> 20)
}

/// Returns the status of a container.
fn status(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<Value> {
    let found = tenant.find("pod", pod)?.context("the pod is gone")?;
    let mut statuses = ["initContainerStatuses", "containerStatuses"]
        .into_iter()
        .filter_map(|kind| found["status"][kind].as_array())
        .flatten();
    let status = statuses.find(|status| status["name"] == container);
    status
        .cloned()
        .with_context(|| format!("no status of container {container}"))
}

/// Returns how often a container was restarted.
fn restarts(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<u64> {
    let count = status(tenant, pod, container)?["restartCount"].as_u64();
    count.context("restartCount")
}

/// Reports a test that this machine or release cannot run.
fn skip(test: &str, reason: &str) -> Result<()> {
    // `eprintln!` would be hidden for a test that passes.
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes())?;
    Ok(())
}
