//! State of a claim on the node under a running pod: deleted files, and forced deletion while the node driver is down.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::{TestCluster, wait};
use serde_json::json;

use super::{SLEEP, USES_SHARE, container, hold, is_limited, restarts, run};

#[test]
fn deleted_cdi_spec_of_running_pod_is_restored() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("deleted-spec")?;
    let node = cluster.first_node();
    run(
        &tenant,
        "app",
        &format!("containers: [{}]", container("app", SLEEP, USES_SHARE)),
    )?;
    let uid = tenant.allocated_claim_of("app")?.uid;
    let spec = format!("/var/run/cdi/gpu.drava.dev-claim-{uid}.json");
    let bases = node.run("sh", &["-c", "ls /var/run/cdi/gpu.drava.dev-base-share*"])?;
    let base = bases
        .lines()
        .next()
        .context("no base of shares")?
        .to_owned();
    for (number, file) in (1..).zip([spec, base]) {
        let before = node.run("cat", &[&file])?;
        node.run("rm", &[&file])?;
        // The container that kubelet starts now needs the spec.
        ensure!(node.signal_pod("app", "KILL")? > 0, "no process of the pod");
        wait(&format!("the node driver restores {file}"), || {
            let after = node.run("cat", &[&file]).ok();
            Ok(after.filter(|after| *after == before).map(drop))
        })?;
        wait("the container was restarted", || {
            Ok((restarts(&tenant, "app", "app")? >= number).then_some(()))
        })?;
        tenant.running("app")?;
        is_limited(&tenant, "app", "app")?;
    }
    tenant.delete_pods(&["app"])?;
    node.wait_until_clean()
}

const SYSTEM: &str = "drava-system";
const DRIVER: &str = "daemonset/drava-dra-driver";

#[test]
fn forced_deletion_without_driver_leaves_no_state() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("driver-down")?;
    let node = cluster.first_node();
    run(
        &tenant,
        "app",
        &format!("containers: [{}]", container("app", &hold(), USES_SHARE)),
    )?;
    let claim = tenant.claim_of("app")?;
    let uid = tenant.allocated_claim_of("app")?.uid;

    // No node has the label.
    let select = |value: serde_json::Value| {
        let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"e2e.drava.dev/none": value}}}}});
        cluster.kubectl([
            "-n",
            SYSTEM,
            "patch",
            DRIVER,
            "--type=merge",
            "-p",
            &patch.to_string(),
        ])
    };
    select(json!("true"))?;
    let deleted = (|| {
        wait("no node driver runs", || {
            let driver = [
                "pods",
                "-n",
                SYSTEM,
                "-l",
                "app.kubernetes.io/component=driver",
            ];
            let pods = cluster.get(&driver)?;
            Ok(pods["items"]
                .as_array()
                .context("items")?
                .is_empty()
                .then_some(()))
        })?;
        tenant.kubectl(&["delete", "pod", "app", "--grace-period=0", "--force"])?;
        let patch = r#"{"metadata": {"finalizers": null}}"#;
        wait("the claim is gone", || {
            if tenant.find("resourceclaim", &claim)?.is_none() {
                return Ok(Some(()));
            }
            // Kubernetes may remove the claim meanwhile.
            let _ = tenant.kubectl(&[
                "patch",
                "resourceclaim",
                &claim,
                "--type=merge",
                "-p",
                patch,
            ]);
            tenant.kubectl(&[
                "delete",
                "resourceclaim",
                &claim,
                "--ignore-not-found",
                "--wait=false",
            ])?;
            Ok(None)
        })?;
        let record = format!("/var/lib/drava/claims/{uid}.json");
        node.run("test", &["-f", &record])
            .context("the record was removed without the driver")
    })();
    select(serde_json::Value::Null)?;
    cluster.drava_ready()?;
    deleted?;
    node.wait_until_clean()?;
    // The whole GPU can be used again.
    run(
        &tenant,
        "next",
        &format!("containers: [{}]", container("app", SLEEP, USES_SHARE)),
    )?;
    is_limited(&tenant, "next", "app")
}
