//! `kubectl drava doctor` finds each fault, and nothing in a healthy cluster.

use anyhow::{Context, Result, ensure};
use drava_e2e::doctor::{finds, names, patch, remove_rule};
use drava_e2e::manifest::pod_without_claim;
use drava_e2e::{TestCluster, wait};
use serde_json::{Value, json};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
const SYSTEM: &str = "drava-system";
const NODE: &str = "node-0";
const CONTROLLER: &str = "deployment/drava-controller";

#[test]
fn doctor_finds_nothing_in_healthy_cluster() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.drava_ready()?;
    cluster.wait_for_faults(&[])?;
    let output = cluster.drava(&["doctor"])?;
    // The NVIDIA driver of the machine limits no memory, which is no fault.
    let mut lines = output.stdout.lines();
    ensure!(
        output.code == 0
            && lines.next() == Some("no problems found")
            && lines
                .all(|line| line.starts_with("note: libvgpu alone limits the memory of shares on "))
            && output.stderr.is_empty(),
        "{output:?}"
    );
    Ok(())
}

fn helm_upgrade(cluster: &TestCluster) -> Result<()> {
    let upgrade = ["-n", SYSTEM, "upgrade", "drava", CHART, "--reuse-values"];
    // Helm 4 applies on the server, where the faults belong to kubectl.
    cluster.helm(upgrade.iter().chain(&["--force-conflicts"]))?;
    Ok(())
}

#[test]
fn doctor_finds_objects_that_helm_upgrade_restores() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.wait_for_faults(&[])?;
    const FIX: &str = "helm upgrade";
    let injected = (|| {
        cluster.kubectl(["delete", "deviceclass", "mig.drava.dev"])?;
        let found = cluster.wait_for_faults(&["ClassMissing"])?;
        names(&found, "ClassMissing", "deviceclass mig.drava.dev", FIX)?;
        let binding = "validatingadmissionpolicybinding";
        cluster.kubectl(["delete", binding, "drava-controller-lease"])?;
        let found = cluster.wait_for_faults(&["ClassMissing", "PolicyMissing"])?;
        names(&found, "PolicyMissing", "drava-controller-lease", FIX)?;
        remove_rule(&cluster, "pods/eviction")?;
        let faults = ["ClassMissing", "PolicyMissing", "PermissionMissing"];
        let found = cluster.wait_for_faults(&faults)?;
        names(
            &found,
            "PermissionMissing",
            "drava-system/drava-controller",
            FIX,
        )
    })();
    helm_upgrade(&cluster)?;
    injected?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}

#[test]
fn doctor_finds_other_version_of_controller() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let image = "controller=localhost/drava-controller:other";
    finds(
        &cluster,
        &["VersionMismatch"],
        ("deployment drava-system/drava-controller", "helm upgrade"),
        || {
            cluster.kubectl(["-n", SYSTEM, "set", "image", CONTROLLER, image])?;
            Ok(())
        },
        || {
            helm_upgrade(&cluster)?;
            cluster.drava_ready()
        },
    )
}

#[test]
fn doctor_finds_missing_controller() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let scale = |replicas: &str| {
        cluster.kubectl(["-n", SYSTEM, "scale", CONTROLLER, replicas])?;
        Ok(())
    };
    finds(
        &cluster,
        &["ControllerUnavailable", "WebhookDown"],
        (
            "deployment drava-system/drava-controller",
            "kubectl describe pods",
        ),
        || scale("--replicas=0"),
        || scale("--replicas=2").and_then(|()| cluster.drava_ready()),
    )
}

#[test]
fn doctor_finds_webhook_without_endpoint() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let select = |component: &str| {
        let selector = json!({"app.kubernetes.io/component": component});
        let change = json!({"spec": {"selector": selector}});
        patch(&cluster, &["service", "drava-webhook"], "merge", &change)
    };
    finds(
        &cluster,
        &["WebhookDown"],
        ("webhookconfiguration drava-webhook", "kubectl get pods"),
        || select("none"),
        || select("controller"),
    )
}

#[test]
fn doctor_finds_webhook_without_certificate() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let configuration = ["mutatingwebhookconfiguration", "drava-webhook"];
    let role = cluster.get(&["clusterrole", "drava-controller"])?;
    finds(
        &cluster,
        &["WebhookUntrusted", "PermissionMissing"],
        ("mutatingwebhookconfiguration drava-webhook", "kubectl logs"),
        || {
            // The controller would write the certificate again.
            remove_rule(&cluster, "mutatingwebhookconfigurations")?;
            let remove = json!([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]);
            patch(&cluster, &configuration, "json", &remove)
        },
        || {
            let rules = json!({"rules": role["rules"]});
            patch(
                &cluster,
                &["clusterrole", "drava-controller"],
                "merge",
                &rules,
            )
        },
    )
}

#[test]
fn doctor_finds_node_without_driver_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let taint = |taint: &str| {
        cluster.kubectl(["taint", "node", NODE, taint])?;
        Ok(())
    };
    finds(
        &cluster,
        &["DriverPodMissing"],
        ("node node-0", "driver.tolerations"),
        || {
            taint("example.com/reserved=:NoSchedule")?;
            let select = "app.kubernetes.io/component=driver";
            cluster.kubectl(["-n", SYSTEM, "delete", "pod", "-l", select])?;
            Ok(())
        },
        || taint("example.com/reserved-").and_then(|()| cluster.drava_ready()),
    )
}

#[test]
fn doctor_finds_driver_without_response() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let signal = |name: &str| {
        let signaled = cluster.first_node().signal("drava-dra-driver", name)?;
        ensure!(signaled > 0, "no driver process on the node");
        Ok(())
    };
    finds(
        &cluster,
        &["DriverNotReady"],
        (
            "node node-0",
            "kubectl logs -n drava-system drava-dra-driver-",
        ),
        || signal("STOP"),
        || signal("CONT"),
    )
}

#[test]
fn doctor_finds_device_plugin() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let advertise = |amount: &Value| {
        let resources = json!({"nvidia.com/gpu": amount});
        let status = json!({"status": {"capacity": resources, "allocatable": resources}});
        let node = ["node", NODE, "--subresource=status"];
        patch(&cluster, &node, "merge", &status)
    };
    finds(
        &cluster,
        &["DevicePlugin"],
        ("node node-0", "remove the device plugin"),
        || advertise(&json!("2")),
        || advertise(&Value::Null),
    )
}

#[test]
fn doctor_finds_other_driver_of_same_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("other-driver")?;
    let slices = cluster.get(&["resourceslices"])?;
    let mut devices = slices["items"].as_array().into_iter().flatten();
    let uuid = devices
        .find_map(|slice| slice["spec"]["devices"][0]["attributes"]["uuid"]["string"].as_str())
        .context("no UUID")?;
    let slice = format!(
        "
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {{name: other-driver}}
spec:
  driver: gpu.example.com
  nodeName: {NODE}
  pool: {{name: {NODE}, generation: 1, resourceSliceCount: 1}}
  devices: [{{name: gpu-0, attributes: {{uuid: {{string: {uuid}}}}}}}]
"
    );
    finds(
        &cluster,
        &["OtherDriver"],
        ("node node-0", "remove gpu.example.com from the node"),
        || tenant.apply(&slice),
        || {
            cluster.kubectl(["delete", "resourceslice", "other-driver"])?;
            Ok(())
        },
    )
}

#[test]
fn doctor_finds_pod_that_sees_gpus_without_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("unclaimed")?;
    let container = "    command: [sleep, infinity]\n";
    let env = "    env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]\n";
    let manifest = pod_without_claim("peeks").replacen(container, &format!("{container}{env}"), 1);
    finds(
        &cluster,
        &["UnclaimedAccess"],
        ("pod e2e-unclaimed/peeks", "NVIDIA_VISIBLE_DEVICES=void"),
        || {
            tenant.apply(&manifest)?;
            tenant.running("peeks")
        },
        || tenant.delete_pods(&["peeks"]),
    )
}

#[test]
fn doctor_finds_clock_of_node_ahead() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.wait_for_faults(&[])?;
    let found = wait("doctor finds the skew", || {
        // As kubelet of a node with that clock would write it; kubelet replaces it within 10 s.
        let renew = json!({"spec": {"renewTime": "2100-01-01T00:00:00.000000Z"}}).to_string();
        let lease = ["-n", "kube-node-lease", "patch", "lease", NODE];
        cluster.kubectl(lease.into_iter().chain(["--type=merge", "-p", &renew]))?;
        let output = cluster.drava(&["doctor"])?;
        Ok((output.code == 1).then_some(output.stdout))
    })?;
    ensure!(
        found.starts_with("node node-0: the clock of the node is")
            && found.contains("ahead of the clock of the API server; synchronize the clocks")
            && found
                .lines()
                .filter(|line| !line.starts_with("note: "))
                .count()
                == 1,
        "{found}"
    );
    cluster.wait_for_faults(&[])?;
    Ok(())
}
