//! `kubectl drava`: translated manifests and settings are accepted; drain evicts.

use anyhow::{Result, ensure};
use drava_e2e::{TestCluster, wait};
use serde_json::Value;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
const NODE: &str = "node-0";

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
fn drain_evicts_and_uncordon_allows_again() -> Result<()> {
    let cluster = TestCluster::attach()?;
    if !cluster.has_taint_rules("drain_evicts_and_uncordon_allows_again")? {
        return Ok(());
    }
    let tenant = cluster.namespace("drain")?;
    tenant.example("deployment")?;
    let rollout = [
        "rollout",
        "status",
        "deployment/inference",
        "--timeout=120s",
    ];
    tenant.kubectl(&rollout)?;
    let names = || -> Result<Vec<String>> {
        let pods = tenant.list("pods")?;
        let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
        Ok(pods.iter().filter_map(name).collect())
    };
    let before = names()?;
    let drained = cluster.drava(&["drain", NODE]).and_then(|output| {
        ensure!(output.code == 0, "{output:?}");
        // The Deployment creates the pods again, which find no GPU.
        let pod = wait("new pods instead of the evicted ones", || {
            let present = names()?;
            let is_old = |pod: &String| before.contains(pod);
            let new = present.iter().find(|pod| !is_old(pod)).cloned();
            Ok(new.filter(|_| !present.iter().any(is_old)))
        })?;
        tenant.event(&pod, "Tainted")
    });
    let uncordoned = cluster.drava(&["uncordon", NODE])?;
    drained?;
    ensure!(uncordoned.code == 0, "{uncordoned:?}");
    tenant.kubectl(&rollout)?;
    Ok(())
}

/// ConfigMaps of Volcano's vGPU device plugin and of its scheduler, and limits of a tenant.
const CONFIGS: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: volcano-vgpu-device-config, namespace: kube-system}
data:
  device-config.yaml: |-
    nvidia:
      resourceCountName: volcano.sh/vgpu-number
      resourceMemoryName: volcano.sh/vgpu-memory
      resourceCoreName: volcano.sh/vgpu-cores
      deviceSplitCount: 10
      deviceMemoryScaling: 1.5
      knownMigGeometries:
      - models: [A100-SXM4-40GB]
        allowedGeometries:
        - - {name: 1g.5gb, memory: 5120, count: 7}
        - - {name: 3g.20gb, memory: 20480, count: 2}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: volcano-vgpu-node-config, namespace: kube-system}
data:
  config.json: |
    {"nodeconfig": [
      {"name": "gpu-1", "operatingmode": "mig", "filterdevices": {"uuid": ["GPU-1"], "index": [3]}},
      {"name": "gpu-2", "operatingmode": "hami-core", "devicesplitcount": 4}
    ]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: volcano-scheduler-configmap, namespace: volcano-system}
data:
  volcano-scheduler.conf: |
    actions: "enqueue, allocate, backfill"
    tiers:
    - plugins:
      - name: deviceshare
        arguments: {deviceshare.VGPUEnable: true, deviceshare.SchedulePolicy: binpack}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus, namespace: default}
spec: {hard: {requests.nvidia.com/gpu: 8, limits.nvidia.com/gpumem: 40960}}
---
apiVersion: v1
kind: LimitRange
metadata: {name: gpus, namespace: default}
spec: {limits: [{type: Container, max: {nvidia.com/gpu: 2, nvidia.com/gpumem: 3000}}]}
"#;

#[test]
fn migrated_configs_are_accepted() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = |name: &str| directory.join(name).display().to_string();
    let (old, new, values) = (
        path("configs.yaml"),
        path("profiles.yaml"),
        path("values.yaml"),
    );
    std::fs::write(&old, CONFIGS)?;
    let migrated = cluster.drava(&["migrate", "-f", &old, "--values", &values])?;
    std::fs::write(&new, migrated.success()?)?;
    let create = ["create", "--dry-run=server", "-o", "name", "-f", &new];
    let created = cluster.kubectl(create)?;
    for object in [
        "gpunodeprofile.gpu.drava.dev/migrated-others",
        "gpunodeprofile.gpu.drava.dev/migrated-node-gpu-1",
        "gpunodeprofile.gpu.drava.dev/migrated-node-gpu-2",
        "gpupolicy.gpu.drava.dev/migrated",
        "gpuquota.gpu.drava.dev/default-gpus",
        "gpuquota.gpu.drava.dev/default-gpus-claims",
    ] {
        ensure!(created.contains(object), "no {object} in\n{created}");
    }
    // The chart accepts the values.
    cluster.helm(["template", "drava", CHART, "-f", &values])?;
    Ok(())
}
