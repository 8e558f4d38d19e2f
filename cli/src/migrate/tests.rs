//! Manifests as users write them, and what becomes of them.

use drava_compatibility::ShareClass;

use super::*;

mod configs;
mod limits;

/// Settings in which pods without annotation get shares.
fn shares() -> Settings {
    Settings {
        share_class: ShareClass::Vgpu,
        ..Settings::default()
    }
}

fn migrated(yaml: &str) -> Migration {
    run(manifest::parse(yaml).expect("YAML"), &shares())
}

fn output(migration: &Migration) -> String {
    manifest::format(&migration.objects).expect("YAML")
}

fn kinds(migration: &Migration) -> Vec<String> {
    migration.objects.iter().map(describe).collect()
}

#[test]
fn forgets_what_the_server_wrote() {
    let migration = migrated(
        "
apiVersion: v1
kind: List
items:
- apiVersion: apps/v1
  kind: Deployment
  metadata: {name: web, namespace: a, uid: u, resourceVersion: '7', generation: 2, creationTimestamp: '2026-01-01T00:00:00Z', managedFields: []}
  spec: {replicas: 1}
  status: {replicas: 1}
- apiVersion: example.com/v1
  kind: Other
  metadata: {name: o}
  status: {kept: true}
",
    );
    assert_eq!(
        output(&migration),
        "apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  namespace: a
spec:
  replicas: 1
---
apiVersion: example.com/v1
kind: Other
metadata:
  name: o
status:
  kept: true
"
    );
}

#[test]
fn translates_deployment_with_template() {
    let migration = migrated(
        r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: team-a}
spec:
  replicas: 2
  template:
    metadata: {labels: {gpu: "on", version: "1.10"}}
    spec:
      schedulerName: hami-scheduler
      volumes: [{name: c, configMap: {name: c, defaultMode: 0644}}]
      containers:
      - name: app
        image: my/app
        args: ["--flag", "yes", '#no-comment']
        resources:
          limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30}
"#,
    );
    assert_eq!(
        output(&migration),
        r##"apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: gpu-NAME
  namespace: team-a
spec:
  spec:
    devices:
      config:
      - opaque:
          driver: gpu.drava.dev
          parameters:
            apiVersion: gpu.drava.dev/v1alpha1
            computePolicy: fixed
            kind: VgpuConfig
        requests:
        - app
      requests:
      - exactly:
          capacity:
            requests:
              cores: "30"
              memory: 3000Mi
          deviceClassName: vgpu.drava.dev
        name: app
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  namespace: team-a
spec:
  replicas: 2
  template:
    metadata:
      labels:
        gpu: "on"
        version: "1.10"
    spec:
      containers:
      - args:
        - --flag
        - "yes"
        - "#no-comment"
        image: my/app
        name: app
        resources:
          claims:
          - name: gpu
            request: app
      resourceClaims:
      - name: gpu
        resourceClaimTemplateName: gpu-NAME
      volumes:
      - configMap:
          defaultMode: 420
          name: c
        name: c
"##
        .replace(
            "gpu-NAME",
            migration.objects[0]["metadata"]["name"]
                .as_str()
                .expect("name")
        )
    );
    assert_eq!(
        migration.report_text(),
        "changed: Deployment team-a/web: spec.template.spec.schedulerName: scheduler \"hami-scheduler\" is replaced by the default scheduler\n"
    );
    assert!(!migration.is_refused());
    let again = run(migration.objects.clone(), &shares());
    assert_eq!(
        again.objects, migration.objects,
        "a second run changes nothing"
    );
    assert_eq!(again.findings, []);
}

#[test]
fn translates_each_kind_of_workload() {
    let pod = json!({"spec": {"containers": [
        {"name": "app", "resources": {"limits": {"volcano.sh/vgpu-memory": 1024}}},
    ]}});
    for (version, kind, path) in [
        ("v1", "Pod", ""),
        ("v1", "PodTemplate", "/template"),
        ("v1", "ReplicationController", "/spec/template"),
        ("apps/v1", "StatefulSet", "/spec/template"),
        ("apps/v1", "DaemonSet", "/spec/template"),
        ("apps/v1", "ReplicaSet", "/spec/template"),
        ("batch/v1", "Job", "/spec/template"),
        ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template"),
    ] {
        let mut object = pod.clone();
        for name in path.rsplit('/').filter(|name| !name.is_empty()) {
            object = json!({name: object});
        }
        object["apiVersion"] = json!(version);
        object["kind"] = json!(kind);
        object["metadata"] = json!({"name": "w"});
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [object]});
        let migration = run(vec![list], &shares());
        assert_eq!(migration.objects.len(), 2, "{kind}");
        let claim = format!("{path}/spec/containers/0/resources/claims/0/request");
        assert_eq!(
            migration.objects[1].pointer(&claim),
            Some(&json!("app")),
            "{kind}"
        );
    }
}

#[test]
fn writes_refused_objects_unchanged() {
    let yaml = r#"
apiVersion: v1
kind: Pod
metadata: {generateName: p-}
spec:
  containers:
  - name: app
    resources: {limits: {nvidia.com/gpu: "1.5"}}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: j}
spec: {pytorchReplicaSpecs: {Worker: {template: {spec: {containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}}}}}
"#;
    let migration = migrated(yaml);
    assert_eq!(migration.objects, manifest::parse(yaml).expect("YAML"));
    assert!(migration.is_refused());
    assert_eq!(
        migration.report_text(),
        "refused: Pod p-*: spec.containers[0].resources.limits[nvidia.com/gpu]: 1.5 is not a whole number; use one, such as 1\n\
         refused: PyTorchJob j: spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].resources.limits[nvidia.com/gpu]: GPUs in an object of this kind are not translated; replace the resource by a claim in its pod template\n"
    );
}

#[test]
fn passes_other_objects_unchanged() {
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: c\ndata:\n  text: |\n    a: on\n    b: '1'\n---\napiVersion: example.com/v1\nkind: Thing\nmetadata:\n  name: t\nspec:\n  ratio: 0.5\n  size: 1e3\n  on: 'off'\n";
    let migration = migrated(yaml);
    assert_eq!(migration.objects, manifest::parse(yaml).expect("YAML"));
    assert_eq!(migration.findings, []);
    assert_eq!(
        manifest::parse(&output(&migration)).expect("YAML"),
        migration.objects,
        "the output has the same values"
    );
}

#[test]
fn writes_equal_templates_once() {
    let pod = |name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: app, resources: {{limits: {{volcano.sh/vgpu-memory: 1}}}}}}]}}\n"
        )
    };
    let migration = migrated(&(pod("a") + &pod("b")));
    assert_eq!(kinds(&migration)[1..], ["Pod a", "Pod b"]);
    assert_eq!(migration.objects.len(), 3);
}

const JOB: &str = r#"
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: train, namespace: team-a, labels: {team: a}}
spec:
  minAvailable: 3
  schedulerName: volcano
  priorityClassName: high
  queue: research
  maxRetry: 5
  plugins: {env: [], svc: ["--publish-not-ready-addresses=false"]}
  policies: [{event: PodEvicted, action: RestartJob}]
  tasks:
  - name: master
    replicas: 1
    template:
      spec:
        containers: [{name: main, image: my/app}]
        restartPolicy: OnFailure
  - name: worker
    replicas: 3
    template:
      metadata: {annotations: {volcano.sh/vgpu-mode: hami-core}}
      spec:
        containers:
        - {name: main, image: my/app, resources: {limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000, volcano.sh/vgpu-cores: 10}}}
"#;

#[test]
fn translates_volcano_job_to_gang() {
    let migration = migrated(JOB);
    assert_eq!(
        kinds(&migration)
            .iter()
            .map(|kind| kind.split("/gpu-").next().unwrap_or_default())
            .collect::<Vec<_>>(),
        [
            "Service team-a/train",
            "Job team-a/train-master",
            "ResourceClaimTemplate team-a",
            "Job team-a/train-worker",
        ]
    );
    let worker = &migration.objects[3];
    assert_eq!(worker["apiVersion"], "batch/v1");
    assert_eq!(worker["spec"]["completions"], 3);
    assert_eq!(worker["spec"]["parallelism"], 3);
    assert_eq!(worker["spec"]["backoffLimit"], 5);
    for job in [&migration.objects[1], worker] {
        let template = &job["spec"]["template"];
        let annotations = &template["metadata"]["annotations"];
        assert_eq!(annotations["gpu.drava.dev/gang"], "train");
        assert_eq!(annotations["gpu.drava.dev/gang-min"], "3");
        assert_eq!(template["spec"]["priorityClassName"], "high");
        assert_eq!(template["spec"]["schedulerName"], Value::Null);
        assert_eq!(template["spec"]["restartPolicy"], "OnFailure");
        assert_eq!(template["spec"]["subdomain"], "train");
        assert_eq!(
            template["spec"]["containers"][0]["env"][0]["name"],
            "VC_TASK_INDEX"
        );
    }
    assert_eq!(
        migration.objects[0]["spec"]["selector"],
        json!({"gpu.drava.dev/volcano-job": "train"})
    );
    assert!(!migration.is_refused());
    let report = migration.report_text();
    for text in [
        "spec.plugins[svc]: pods have the same host names",
        "spec.tasks[1].template.spec.restartPolicy: becomes OnFailure",
        "spec.tasks: become 2 Jobs",
        "spec.queue: limits and weight of queue \"research\" do not apply",
        "spec.policies: the action RestartJob after PodEvicted does not happen",
    ] {
        assert!(report.contains(text), "{text}\n{report}");
    }
    assert_eq!(report.lines().count(), 5, "{report}");
}

#[test]
fn reports_volcano_job_without_gpu() {
    let migration = migrated(
        "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nmetadata: {name: cpu}\nspec: {minAvailable: 1, tasks: [{replicas: 1, template: {spec: {restartPolicy: Never, containers: [{name: a}]}}}]}\n",
    );
    assert_eq!(kinds(&migration), ["Job cpu"]);
    let annotations = migration.objects[0].pointer("/spec/template/metadata/annotations");
    assert_eq!(annotations, None, "one pod is no gang");
    assert_eq!(
        migration.report_text(),
        "changed: Job cpu: the job requests no GPU; drava orders its pods only as members of a gang, and has no queue for CPU and memory\n"
    );
}

#[test]
fn refuses_volcano_job_without_equivalent() {
    for (spec, text) in [
        (
            "{minAvailable: 3, tasks: [{replicas: 2, template: {spec: {containers: []}}}]}",
            "spec.minAvailable: 3 exceeds the 2 pods of the job",
        ),
        (
            "{plugins: {ssh: []}, tasks: [{template: {spec: {containers: []}}}]}",
            "spec.plugins[ssh]: the plugin has no equivalent",
        ),
        (
            "{tasks: [{template: {spec: {containers: []}}, dependsOn: {name: [a]}}]}",
            "unknown field `dependsOn`",
        ),
        ("{tasks: []}", "spec.tasks: the job has no task"),
        (
            "{tasks: [{template: {}}]}",
            "spec.tasks[0].template: the task has no pod template",
        ),
        (
            "{tasks: [{template: {metadata: {labels: x}, spec: {containers: x}}}]}",
            "spec.tasks[0].template.spec.containers: the pod is malformed",
        ),
    ] {
        let yaml = format!(
            "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nmetadata: {{name: j}}\nspec: {spec}\n"
        );
        let migration = migrated(&yaml);
        assert!(migration.is_refused(), "{spec}");
        assert_eq!(migration.objects, manifest::parse(&yaml).expect("YAML"));
        assert!(
            migration.report_text().contains(text),
            "{}",
            migration.report_text()
        );
    }
}

#[test]
fn converts_quota_by_number() {
    let migration = migrated(
        "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: q}\nspec: {hard: {requests.nvidia.com/gpu: 16, limits.cpu: 8}}\n",
    );
    assert_eq!(
        migration.objects[0]["spec"]["hard"],
        json!({
            "limits.cpu": 8,
            "gpu.drava.dev.deviceclass.resource.k8s.io/devices": 16,
            "vgpu.drava.dev.deviceclass.resource.k8s.io/devices": 16,
            "mig.drava.dev.deviceclass.resource.k8s.io/devices": 16,
            "fraction.drava.dev.deviceclass.resource.k8s.io/devices": 16,
        })
    );
    assert_eq!(migration.findings.len(), 1);
    assert!(!migration.is_refused());
}

#[test]
fn refuses_limits_without_equivalent() {
    for (yaml, field) in [
        (
            "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: q}\nspec: {hard: {limits.nvidia.com/gpumem: 1, requests.nvidia.com/gpu: 1}}\n",
            "spec.hard[limits.nvidia.com/gpumem]",
        ),
        (
            "apiVersion: v1\nkind: LimitRange\nmetadata: {name: l}\nspec: {limits: [{type: Container, max: {nvidia.com/gpu: 1}}]}\n",
            "spec.limits[0].max[nvidia.com/gpu]",
        ),
        (
            "apiVersion: scheduling.volcano.sh/v1beta1\nkind: Queue\nmetadata: {name: q}\nspec: {capability: {volcano.sh/vgpu-memory: 1}}\n",
            "spec.capability[volcano.sh/vgpu-memory]",
        ),
        (
            "apiVersion: scheduling.volcano.sh/v1beta1\nkind: Queue\nmetadata: {name: q, annotations: {volcano.sh/card.quota: '{}'}}\n",
            "metadata.annotations[volcano.sh/card.quota]",
        ),
        (
            "apiVersion: kueue.x-k8s.io/v1beta1\nkind: ClusterQueue\nmetadata: {name: q}\nspec: {resourceGroups: [{coveredResources: [cpu, nvidia.com/gpu]}]}\n",
            "spec.resourceGroups[0].coveredResources[nvidia.com/gpu]",
        ),
    ] {
        let migration = migrated(yaml);
        assert!(migration.is_refused(), "{yaml}");
        assert_eq!(
            migration.objects,
            manifest::parse(yaml).expect("YAML"),
            "nothing vanishes"
        );
        assert!(
            migration.report_text().contains(&format!("{field}: ")),
            "{}",
            migration.report_text()
        );
    }
}

#[test]
fn passes_limits_of_other_resources() {
    let yaml = "apiVersion: scheduling.volcano.sh/v1beta1\nkind: Queue\nmetadata: {name: q}\nspec: {weight: 1, capability: {cpu: 8}}\n";
    let migration = migrated(yaml);
    assert_eq!(migration.findings, []);
}

#[test]
fn strips_control_characters_from_report() {
    let migration = migrated(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: \"a\\u001b[31m\"}\nspec: {containers: [{name: app, resources: {limits: {nvidia.com/gpu: x}}}]}\n",
    );
    assert!(!migration.report_text().contains('\u{1b}'));
}

#[test]
fn rejects_documents_without_object() {
    let error = manifest::parse("- a\n").expect_err("a list is no object");
    assert!(error.to_string().contains("expected a Kubernetes object"));
    assert!(manifest::parse("a: [").is_err());
}

#[test]
fn reads_manifests_of_directory_in_order() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).expect("a file");
    };
    let error = manifest::read(directory.path()).expect_err("an empty directory");
    let error = format!("{error:#}");
    assert!(
        error.contains(&directory.path().display().to_string()),
        "{error}"
    );
    write("README.md", "no manifest: [");
    write("b.yml", "kind: B\n---\nkind: C\n");
    write("a.yaml", "kind: A\n");
    write("d.json", "{\"kind\": \"D\"}");
    std::fs::create_dir(directory.path().join("e.yaml")).expect("a directory");
    let documents = manifest::read(directory.path()).expect("manifests");
    let kinds: Vec<_> = documents.iter().map(|document| &document["kind"]).collect();
    assert_eq!(kinds, ["A", "B", "C", "D"]);
    write("f.yaml", "a: [");
    let error = format!(
        "{:#}",
        manifest::read(directory.path()).expect_err("no YAML")
    );
    assert!(error.contains("f.yaml"), "{error}");
}

#[test]
fn quotes_text_that_starts_with_a_tab() {
    let objects = [json!({
        "kind": "ConfigMap", "metadata": {"name": "c"},
        "data": {"Makefile": "\tcc x.c\n\tld x.o\n", "script": "a\n\tb\n", "list": ["\t"]},
    })];
    let text = manifest::format(&objects).expect("YAML");
    assert!(
        text.contains(r#"Makefile: "\tcc x.c\n\tld x.o\n""#),
        "{text}"
    );
    assert!(text.contains("script: |"), "blocks stay legible: {text}");
    assert_eq!(manifest::parse(&text).expect("YAML"), objects);
}

#[test]
fn reads_json_objects_without_separators() {
    let read = |text: &str| manifest::parse(text).expect("objects");
    let (a, b) = (json!({"kind": "A", "x": "---"}), json!({"kind": "B"}));
    let both = [a.clone(), b.clone()];
    assert_eq!(read(&format!("{a}\n{b}\n")), both);
    assert_eq!(read(&format!("{a}{b}")), both);
    assert_eq!(read(&format!("{a}\n---\n{b}\n")), both);
    assert_eq!(read("{kind: B}\n"), [b], "YAML in braces");
    assert!(manifest::parse("{\"kind\": ").is_err());
}
