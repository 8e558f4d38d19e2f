//! `helm uninstall`: refused while a claim has GPUs; nothing is left afterwards. Runs last: the cluster has no drava then.

use anyhow::{Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};

/// Kinds with objects of the chart.
const KINDS: [&str; 16] = [
    "roles",
    "rolebindings",
    "clusterroles",
    "clusterrolebindings",
    "deviceclasses",
    "mutatingadmissionpolicies",
    "mutatingadmissionpolicybindings",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
    "mutatingwebhookconfigurations",
    "validatingwebhookconfigurations",
    "daemonsets",
    "deployments",
    "jobs",
    "secrets",
    "serviceaccounts",
];

#[test]
fn uninstall_waits_for_claims_and_leaves_nothing() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("uninstall")?;
    tenant.apply(&pod_with_share("user", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("user")?;
    // No GPU has so much memory: the pod stays gated.
    tenant.apply(&pod_with_share(
        "gated",
        "vgpu.drava.dev",
        "{memory: 1000Gi}",
    ))?;
    tenant.event("gated", "GpuUnschedulable")?;
    let claim = tenant.claim_of("user")?;

    let arguments = [
        "uninstall",
        "drava",
        "--namespace",
        "drava-system",
        "--wait",
    ];
    let refused = cluster.helm(arguments);
    let error = refused.err().map(|error| format!("{error:#}"));
    let error = error.unwrap_or_default();
    let named = format!("{}/{claim} (pods user)", tenant.name());
    ensure!(
        error.contains(&named) && error.contains("drava-uninstall-check"),
        "uninstalled in spite of a claim: {error}"
    );
    cluster.drava_ready()?;
    ensure!(
        tenant.total_mib("user")? == "1024",
        "the pod lost its share"
    );

    tenant.delete_pods(&["user"])?;
    wait("the claim is gone", || {
        Ok(tenant
            .find("resourceclaim", &claim)?
            .is_none()
            .then_some(()))
    })?;
    // A rule that keeps a GPU out of allocation is drava's, too.
    // Kubernetes 1.36 has no such rules.
    let cordoned = cluster.drava(&["cordon", "node-0/gpu-1"])?;
    cluster.helm(arguments)?;

    if cordoned.code == 0 {
        let rules = cluster.kubectl(["get", "devicetaintrules", "-o", "name"])?;
        ensure!(rules.is_empty(), "left: {rules}");
    }
    for kind in KINDS {
        let left = cluster.kubectl([
            "get",
            kind,
            "-A",
            "-o",
            "name",
            "-l",
            "app.kubernetes.io/instance=drava",
        ])?;
        ensure!(left.is_empty(), "left of {kind}: {left}");
    }
    let slices = cluster.kubectl([
        "get",
        "resourceslices",
        "-o",
        "name",
        "--field-selector",
        "spec.driver=gpu.drava.dev",
    ])?;
    ensure!(slices.is_empty(), "left: {slices}");
    let leases = cluster.kubectl(["get", "leases", "-n", "drava-system", "-o", "name"])?;
    ensure!(leases.is_empty(), "left: {leases}");
    let leaders = cluster.kubectl(["get", "gpucontrollerleaders", "-o", "name"])?;
    ensure!(leaders.is_empty(), "left: {leaders}");
    let gates = tenant.kubectl(&[
        "get",
        "pod",
        "gated",
        "-o",
        "jsonpath={.spec.schedulingGates}",
    ])?;
    ensure!(gates.is_empty(), "the pod is still gated: {gates}");
    // The finalizer that the admission policy added is one of Kubernetes.
    let unallocated = tenant.claim_of("gated")?;
    tenant.delete_pods(&["gated"])?;
    wait("the claim that was never allocated is gone", || {
        let found = tenant.find("resourceclaim", &unallocated)?;
        Ok(found.is_none().then_some(()))
    })?;
    for directory in [
        "/var/run/cdi",
        "/var/lib/kubelet/plugins_registry",
        "/var/lib/kubelet/plugins",
        "/var/lib",
        "/run",
    ] {
        let files = cluster.on_node("ls", &["-A", directory])?;
        ensure!(!files.contains("drava"), "left in {directory}: {files}");
    }
    Ok(())
}
