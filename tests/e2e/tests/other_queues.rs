//! Kueue beside drava, and the examples for Volcano and KEDA, checked against the custom resource definitions of those projects.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use drava_cluster::oci::{Image, Layer};
use drava_cluster::{target_dir, workspace_root};
use drava_e2e::{Namespace, TestCluster, go_module, wait};
use serde_json::{Value, json};

/// A definition that is deleted with the value.
struct Definition<'c> {
    cluster: &'c TestCluster,
    file: String,
}

impl<'c> Definition<'c> {
    fn install(cluster: &'c TestCluster, file: &Path) -> Result<Self> {
        let definition = Self {
            cluster,
            file: file.display().to_string(),
        };
        let file = ["-f", &definition.file];
        // The annotation of client-side apply would be too long.
        cluster.kubectl(["apply", "--server-side"].iter().chain(&file))?;
        cluster.wait_for_definition(&file)?;
        Ok(definition)
    }
}

impl Drop for Definition<'_> {
    fn drop(&mut self) {
        let delete = [
            "delete",
            "--ignore-not-found",
            "--timeout=60s",
            "-f",
            &self.file,
        ];
        if let Err(error) = self.cluster.kubectl(delete) {
            eprintln!("cannot delete {}: {error:#}", self.file);
        }
    }
}

/// Source of Kueue, with its chart; `tests/cluster/go/kueue` pins the same.
const KUEUE: (&str, &str) = (
    "sigs.k8s.io/kueue@v0.19.2",
    "h1:mPNzr37u0nwI7ikST5QQl5gg6EgtYOAvC9ZbTgywdN8=",
);
const KUEUE_NAMESPACE: &str = "kueue-system";
const KUEUE_IMAGE: &str = "localhost/kueue";

/// Kueue, which is removed with the value.
struct Kueue<'c>(&'c TestCluster);

impl<'c> Kueue<'c> {
    /// Installs the chart of Kueue with the configuration of the example.
    fn install(cluster: &'c TestCluster) -> Result<Self> {
        let kueue = Self(cluster);
        let image = target_dir().join("images/kueue.tar");
        let mut layer = Layer::default();
        layer.copy("manager", &drava_cluster::kueue()?, 0o755)?;
        Image {
            name: format!("{KUEUE_IMAGE}:test"),
            entrypoint: vec![],
            command: vec![],
            user: "65532:65532".to_owned(),
            labels: Default::default(),
            layer,
        }
        .write(&image)?;
        cluster.kubernetes().load_image(&image)?;
        let example = workspace_root().join("deploy/examples/kueue/configuration.yaml");
        let configuration = fs::read_to_string(example)?;
        // What the chart's own configuration has, too. No other object than a Job is Kueue's.
        let configuration = format!(
            "{configuration}\nhealth: {{healthProbeBindAddress: ':8081'}}\nmetrics: {{bindAddress: ':8443'}}\n\
             webhook: {{port: 9443}}\nleaderElection: {{leaderElect: false}}\nintegrations: {{frameworks: [batch/job]}}\n"
        );
        let values = json!({
            "controllerManager": {
                "featureGates": [{"name": "KueueDRAIntegrationConsumableCapacity", "enabled": true}],
                "manager": {
                    "image": {"repository": KUEUE_IMAGE, "tag": "test", "pullPolicy": "IfNotPresent"},
                    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {}},
                },
                "readinessProbe": {"initialDelaySeconds": 1, "periodSeconds": 1},
            },
            "managerConfig": {"controllerManagerConfigYaml": configuration},
        });
        let file = target_dir().join("images/kueue-values.yaml");
        fs::write(&file, values.to_string())?;
        let (module, sum) = KUEUE;
        let chart = go_module(module, sum)?.join("charts/kueue");
        let (chart, file) = (chart.display().to_string(), file.display().to_string());
        let install = ["install", "kueue", &chart, "-f", &file];
        let namespace = ["-n", KUEUE_NAMESPACE, "--create-namespace"];
        let wait = ["--wait", "--timeout", "3m"];
        cluster.helm(install.into_iter().chain(namespace).chain(wait))?;
        Ok(kueue)
    }
}

impl Drop for Kueue<'_> {
    fn drop(&mut self) {
        let removed = self
            .0
            .helm(["uninstall", "kueue", "-n", KUEUE_NAMESPACE, "--wait"])
            .and_then(|_| {
                self.0
                    .kubectl(["delete", "namespace", KUEUE_NAMESPACE, "--timeout=90s"])
            });
        if let Err(error) = removed {
            eprintln!("cannot remove Kueue: {error:#}");
        }
    }
}

/// Creates a Job of the queue of the example whose pods have a share of this class and memory.
fn queue_job(
    tenant: &Namespace<'_>,
    name: &str,
    pods: u32,
    class: &str,
    memory: &str,
) -> Result<()> {
    tenant.apply(&format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {{deviceClassName: {class}, capacity: {{requests: {{memory: {memory}}}}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}, labels: {{kueue.x-k8s.io/queue-name: research}}}}
spec:
  suspend: true
  parallelism: {pods}
  completions: {pods}
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: {name}}}]
      containers:
      - name: app
        image: localhost/drava-demo:dev
        imagePullPolicy: IfNotPresent
        command: [sleep, infinity]
        resources: {{requests: {{cpu: 10m}}, claims: [{{name: gpu}}]}}
"
    ))
}

/// Waits until Kueue counts this amount of a resource for the queue of the example.
fn wait_for_usage(cluster: &TestCluster, resource: &str, amount: &str) -> Result<()> {
    wait(&format!("Kueue counts {amount} of {resource}"), || {
        let queue = cluster.get(&["clusterqueue", "research"])?;
        let flavors = queue["status"]["flavorsUsage"].as_array();
        let mut resources = flavors
            .into_iter()
            .flatten()
            .filter_map(|flavor| flavor["resources"].as_array())
            .flatten();
        let is_counted = |of: &Value| of["name"] == resource && of["total"] == amount;
        Ok(resources.any(is_counted).then_some(()))
    })
}

/// The example runs as its README says: Kueue counts all classes of drava, admits what fits the quota of the queue, and drava
/// allocates what is admitted.
#[test]
fn kueue_admits_jobs_whose_claims_drava_allocates() -> Result<()> {
    const MEMORY: &str = "gpu.drava.dev/memory";
    let cluster = TestCluster::attach()?;
    // Dropped last, so that its webhooks answer while the objects of the tenant are deleted.
    let _kueue = Kueue::install(&cluster)?;
    let tenant = cluster.namespace("kueue")?;
    tenant.example("kueue")?;
    let of = |job: &'static str| ("batch.kubernetes.io/job-name", job);
    let trainers = tenant.wait_for_pods(of("trainer"), 2)?;
    for pod in &trainers {
        ensure!(tenant.total_mib(pod)? == "20480", "no share of 20 GiB");
    }
    wait_for_usage(&cluster, MEMORY, "40Gi")?;

    queue_job(&tenant, "fraction", 1, "fraction.drava.dev", "10Gi")?;
    tenant.wait_for_pods(of("fraction"), 1)?;
    wait_for_usage(&cluster, MEMORY, "50Gi")?;

    // 300 of the 270 GiB that are left: its pods do not exist, so they hold nothing.
    queue_job(&tenant, "large", 15, "vgpu.drava.dev", "20Gi")?;
    let text = wait("Kueue says why the job waits", || {
        let explain = ["explain", "job", "large", "-n", tenant.name()];
        let text = cluster.drava(&explain)?.stdout;
        Ok(text.contains("insufficient unused quota").then_some(text))
    })?;
    ensure!(
        text.contains("suspended by Kueue") && text.contains(MEMORY),
        "{text}"
    );
    let claims = tenant.list("resourceclaims")?;
    ensure!(claims.len() == 3, "claims of suspended pods: {claims:?}");
    cluster.wait_for_faults(&[])?;

    tenant.kubectl(&[
        "delete",
        "job",
        "trainer",
        "fraction",
        "--cascade=foreground",
    ])?;
    wait_for_usage(&cluster, MEMORY, "300Gi")?;
    wait("a pod of the large job runs", || {
        Ok((!tenant.running_pods(of("large"))?.is_empty()).then_some(()))
    })?;
    tenant.kubectl(&["delete", "job", "large", "--cascade=foreground"])?;
    wait_for_usage(&cluster, MEMORY, "0")?;
    let left = ["clusterqueues,resourceflavors", "--all", "--timeout=60s"];
    cluster.kubectl(["delete"].iter().chain(&left))?;
    Ok(())
}

#[test]
fn keda_accepts_its_autoscaler_of_the_example() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("autoscaling")?;
    tenant.example("autoscaling")?;
    tenant.kubectl(&[
        "rollout",
        "status",
        "deployment/inference",
        "--timeout=120s",
    ])?;
    tenant.example_file("autoscaling", "hpa")?;
    let sources = go_module(
        "github.com/kedacore/keda/v2@v2.18.1",
        "h1:h6bRt/IOxxtZpJlHSqhdH/lcInH7Z9obxg/JvWOmGAw=",
    )?;
    let definition = sources.join("config/crd/bases/keda.sh_scaledobjects.yaml");
    let _installed = Definition::install(&cluster, &definition)?;
    let example = workspace_root().join("deploy/examples/autoscaling/scaledobject.yaml");
    let example = fs::read_to_string(&example)?;
    tenant.dry_run(&example)?;
    // The definition does reject what it does not know.
    let broken = example.replacen("minReplicaCount", "minReplicas", 1);
    let rejection = tenant.dry_run(&broken).err().context("accepted")?;
    ensure!(
        format!("{rejection:#}").contains("minReplicas"),
        "{rejection:#}"
    );
    Ok(())
}

#[test]
fn volcano_accepts_manifests_of_its_example() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("volcano")?;
    let sources = go_module(
        "volcano.sh/volcano@v1.15.1",
        "h1:M0iGzhy1dvod2GFy1QiyWdv1jmmNfHW4+2WoRU7CIAk=",
    )?;
    let _installed = [
        "config/crd/volcano/bases/scheduling.volcano.sh_queues.yaml",
        "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml",
    ]
    .map(|file| Definition::install(&cluster, &sources.join(file)))
    .into_iter()
    .collect::<Result<Vec<_>>>()?;
    let example = workspace_root().join("deploy/examples/volcano/volcano.yaml");
    let file = example.display().to_string();
    let created = tenant.kubectl(&["create", "--dry-run=server", "-o", "name", "-f", &file])?;
    for object in [
        "queue.scheduling.volcano.sh/research",
        "job.batch.volcano.sh/training",
    ] {
        ensure!(created.contains(object), "no {object} in {created}");
    }
    // The definitions do reject what they do not know.
    let example = fs::read_to_string(&example)?;
    let broken = example.replacen("spec:\n", "spec:\n  unknownField: 1\n", 1);
    let rejection = tenant.dry_run(&broken).err().context("accepted")?;
    ensure!(
        format!("{rejection:#}").contains("unknownField"),
        "{rejection:#}"
    );
    Ok(())
}
