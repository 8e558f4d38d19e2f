//! Objects that the API server accepts and typed clients cannot read stop nothing else.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::json;

const SYSTEM: &str = "drava-system";

/// A pod whose bookkeeping has a time that few libraries read.
fn pod_with_odd_bookkeeping(name: &str) -> String {
    let entry = json!({
        "manager": "tenant", "operation": "Update", "apiVersion": "v1", "time": "9999-12-31T23:59:59Z",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {"f:labels": {".": {}}}},
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "managedFields": [entry]},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "app", "image": "localhost/drava-demo:dev", "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "infinity"],
            }],
        },
    });
    pod.to_string()
}

/// A claim whose parameters, for another driver, are nested deeper than JSON readers follow.
fn deeply_nested_claim(name: &str) -> String {
    let parameters = format!("{}1{}", r#"{"a":"#.repeat(400), "}".repeat(400));
    format!(
        r#"{{"apiVersion":"resource.k8s.io/v1","kind":"ResourceClaim","metadata":{{"name":"{name}"}},"spec":{{"devices":{{
            "requests":[{{"name":"gpu","exactly":{{"deviceClassName":"vgpu.drava.dev"}}}}],
            "config":[{{"opaque":{{"driver":"other.example.com","parameters":{parameters}}}}}]}}}}}}"#
    )
}

/// Replaces the leading controller, which has read the objects one by one so far, by one that lists them.
fn change_leader(cluster: &TestCluster) -> Result<()> {
    let before = cluster.leader()?;
    cluster.kubectl([
        "delete",
        "pod",
        "-n",
        SYSTEM,
        before.as_str(),
        "--wait=false",
    ])?;
    wait("another leader", || {
        let current = cluster.leader()?;
        Ok((!current.is_empty() && current != before).then_some(()))
    })
}

fn share_runs(tenant: &Namespace<'_>, name: &str) -> Result<()> {
    tenant.apply(&pod_with_share(name, "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running(name)
}

#[test]
fn odd_objects_of_a_tenant_stop_no_allocation() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let odd = cluster.namespace("odd")?;
    let other = cluster.namespace("odd-neighbor")?;
    odd.create(&pod_with_odd_bookkeeping("year-9999"))?;
    odd.create(&deeply_nested_claim("deep"))?;
    share_runs(&other, "watched")?;
    change_leader(&cluster)?;
    share_runs(&other, "listed")?;
    odd.event(
        "deep",
        "ObjectUnreadable: the controller cannot read the object: spec.devices.config[0]",
    )?;
    odd.apply(&pod("user", "resourceClaimName: deep"))?;
    for command in [
        vec!["top"],
        vec!["quota"],
        vec!["explain", "pod", "listed", "-n", other.name()],
    ] {
        cluster
            .drava(&command)?
            .success()
            .with_context(|| format!("kubectl drava {command:?}"))?;
    }
    let explained = cluster.drava(&["explain", "pod", "user", "-n", odd.name()])?;
    ensure!(
        explained.stdout.contains("claim deep cannot be read"),
        "{}",
        explained.stdout
    );
    let findings = cluster.wait_for_faults(&["ObjectUnreadable"])?;
    drava_e2e::doctor::names(&findings, "ObjectUnreadable", "deep", "delete the object")?;
    odd.kubectl(&["delete", "pods,resourceclaims", "--all", "--grace-period=1"])?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}
