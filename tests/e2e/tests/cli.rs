//! `kubectl drava`: translated manifests are accepted; the doctor finds each fault, and nothing in a healthy cluster.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_without_claim;
use drava_e2e::{TestCluster, wait};
use serde_json::{Value, json};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
const SYSTEM: &str = "drava-system";
const NODE: &str = "node-0";
const CONTROLLER: &str = "deployment/drava-controller";

/// Manifests for HAMi, Volcano and NVIDIA's device plugin, and objects without GPUs.
const MANIFESTS: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      schedulerName: hami-scheduler
      containers:
      - name: app
        image: localhost/drava-demo:dev
        resources:
          limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30}
---
apiVersion: v1
kind: Pod
metadata: {name: percentage}
spec:
  containers:
  - name: app
    image: localhost/drava-demo:dev
    resources:
      limits: {nvidia.com/gpu: 2, nvidia.com/gpumem-percentage: 50}
---
apiVersion: v1
kind: Pod
metadata: {name: partition, annotations: {volcano.sh/vgpu-mode: mig}}
spec:
  containers:
  - name: app
    image: localhost/drava-demo:dev
    resources:
      limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000}
---
apiVersion: batch/v1
kind: Job
metadata: {name: whole}
spec:
  template:
    spec:
      restartPolicy: Never
      initContainers:
      - {name: prepare, image: localhost/drava-demo:dev, resources: {limits: {nvidia.com/gpu: 1}}}
      containers:
      - {name: app, image: localhost/drava-demo:dev, resources: {limits: {nvidia.com/gpu: 2}}}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: nightly}
spec:
  schedule: "0 3 * * *"
  jobTemplate:
    spec:
      template:
        spec:
          restartPolicy: Never
          containers:
          - {name: app, image: localhost/drava-demo:dev, resources: {limits: {volcano.sh/vgpu-memory: 1024}}}
---
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: train}
spec:
  minAvailable: 3
  schedulerName: volcano
  plugins: {env: [], svc: []}
  tasks:
  - name: master
    replicas: 1
    template:
      spec:
        restartPolicy: OnFailure
        containers: [{name: main, image: localhost/drava-demo:dev}]
  - name: worker
    replicas: 2
    template:
      spec:
        restartPolicy: OnFailure
        containers:
        - name: main
          image: localhost/drava-demo:dev
          resources:
            limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000, volcano.sh/vgpu-cores: 10}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus}
spec: {hard: {requests.nvidia.com/gpu: 16}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {text: "on"}
"#;

#[test]
fn migrated_manifests_are_accepted() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("migrate")?;
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (old, new) = (directory.join("old.yaml"), directory.join("new.yaml"));
    std::fs::write(&old, MANIFESTS)?;
    let (old, new) = (old.display().to_string(), new.display().to_string());
    let migrated = cluster.drava(&["migrate", "-f", &old])?;
    ensure!(migrated.code == 0, "{migrated:?}");
    std::fs::write(&new, migrated.success()?)?;
    let create = ["create", "--dry-run=server", "-o", "name", "-f", &new];
    let created = tenant.kubectl(&create)?;
    for object in [
        "deployment.apps/web",
        "pod/percentage",
        "pod/partition",
        "job.batch/whole",
        "cronjob.batch/nightly",
        "service/train",
        "job.batch/train-master",
        "job.batch/train-worker",
        "resourcequota/gpus",
        "configmap/settings",
    ] {
        ensure!(created.contains(object), "no {object} in\n{created}");
    }
    let templates = created.matches("resourceclaimtemplate").count();
    ensure!(templates == 6, "{templates} templates in\n{created}");
    let text = std::fs::read_to_string(&new)?;
    // Annotations of the pods stay as they are; drava ignores them.
    for name in [
        "nvidia.com/gpu",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-number",
        "hami-scheduler",
    ] {
        ensure!(!text.contains(name), "{name} is left in\n{text}");
    }
    Ok(())
}

#[test]
fn doctor_finds_nothing_in_healthy_cluster() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.drava_ready()?;
    cluster.wait_for_faults(&[])?;
    let output = cluster.drava(&["doctor"])?;
    ensure!(
        output.code == 0 && output.stdout == "no problems found\n" && output.stderr.is_empty(),
        "{output:?}"
    );
    Ok(())
}

/// Checks that the doctor finds these faults after `inject` and nothing after `repair`, and that the finding of the first
/// fault names the object and the fix.
fn finds(
    cluster: &TestCluster,
    faults: &[&str],
    (object, fix): (&str, &str),
    inject: impl FnOnce() -> Result<()>,
    repair: impl FnOnce() -> Result<()>,
) -> Result<()> {
    cluster.wait_for_faults(&[])?;
    let found = inject().and_then(|()| cluster.wait_for_faults(faults));
    repair()?;
    names(&found?, faults[0], object, fix)?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}

/// Checks that a finding of the fault names the object and the fix.
fn names(findings: &[Value], fault: &str, object: &str, fix: &str) -> Result<()> {
    let has = |finding: &Value, field: &str, text: &str| {
        let value = finding[field].as_str().unwrap_or_default();
        value.contains(text)
    };
    let is_found = findings.iter().any(|finding| {
        finding["fault"] == fault && has(finding, "object", object) && has(finding, "fix", fix)
    });
    ensure!(
        is_found,
        "no {fault} of {object} with {fix:?} in {findings:?}"
    );
    Ok(())
}

fn helm_upgrade(cluster: &TestCluster) -> Result<()> {
    let upgrade = ["-n", SYSTEM, "upgrade", "drava", CHART, "--reuse-values"];
    // Helm 4 applies on the server, where the faults belong to kubectl.
    cluster.helm(upgrade.iter().chain(&["--force-conflicts"]))?;
    Ok(())
}

/// Patches an object of the namespace of drava, or of the cluster.
fn patch(cluster: &TestCluster, object: &[&str], kind: &str, patch: &Value) -> Result<()> {
    let (kind, patch) = (format!("--type={kind}"), patch.to_string());
    let args = [&["-n", SYSTEM, "patch"], object, &[&kind, "-p", &patch]].concat();
    cluster.kubectl(args)?;
    Ok(())
}

/// Removes the rule with this resource from the controller's ClusterRole.
fn remove_rule(cluster: &TestCluster, resource: &str) -> Result<()> {
    let role = cluster.get(&["clusterrole", "drava-controller"])?;
    let rules = role["rules"].as_array().context("rules")?;
    let of_resource = |rule: &Value| {
        let resources = rule["resources"].as_array();
        resources.is_some_and(|all| all.iter().any(|one| one == resource))
    };
    let index = rules.iter().position(of_resource).context("no rule")?;
    let remove = json!([{"op": "remove", "path": format!("/rules/{index}")}]);
    patch(
        cluster,
        &["clusterrole", "drava-controller"],
        "json",
        &remove,
    )
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
            && found.lines().count() == 1,
        "{found}"
    );
    cluster.wait_for_faults(&[])?;
    Ok(())
}
