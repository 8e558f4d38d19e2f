//! ConfigMaps and DaemonSets of device plugins, and the ConfigMap of Volcano's scheduler.

use drava_api::node_profile::GpuNodeProfile;
use drava_api::policy::GpuPolicy;

use super::*;

const DEVICE_CONFIG: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: volcano-vgpu-device-config, namespace: kube-system}
data:
  device-config.yaml: |-
    nvidia:
      resourceCountName: example.com/number
      resourceMemoryName: example.com/memory
      resourceCoreName: example.com/cores
      overwriteEnv: true
      defaultMemory: 2
      gpuMemoryFactor: 512
      deviceSplitCount: 20
      deviceMemoryScaling: 1.5
      deviceCoreScaling: 1
      knownMigGeometries:
      - models: [A100-SXM4-40GB, NVIDIA A30]
        allowedGeometries:
        - - {name: 1g.5gb, memory: 5120, count: 7}
        - - {name: 2g.10gb, memory: 10240, count: 3}
          - {name: 1g.5gb, memory: 5120, count: 1}
"#;

const NODE_CONFIG: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: volcano-vgpu-node-config, namespace: kube-system}
data:
  config.json: |
    {"nodeconfig": [
      {"name": "gpu-1", "operatingmode": "mig", "migstrategy": "none", "filterdevices": {"uuid": ["GPU-1"], "index": [3]}},
      {"name": "gpu-2", "operatingmode": "hami-core", "devicememoryscaling": 1, "devicesplitcount": 4},
      {"name": "gpu-3", "operatingmode": "mps", "preconfigureddevicememory": 100}
    ]}
"#;

fn of_kind<'a>(migration: &'a Migration, kind: &str) -> Vec<&'a Value> {
    let objects = migration.objects.iter();
    objects.filter(|object| object["kind"] == kind).collect()
}

fn report_has(migration: &Migration, text: &str) {
    let report = migration.report_text();
    assert!(report.contains(text), "no {text:?} in\n{report}");
}

#[test]
fn uses_resource_names_of_config_map() {
    let migration = migrated(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{containers: [{{name: app, resources: {{limits: {{example.com/number: 1}}}}}}]}}\n---{DEVICE_CONFIG}"
    ));
    assert_eq!(
        migration.objects[0].pointer("/spec/spec/devices/requests/0/exactly/deviceClassName"),
        Some(&json!("gpu.drava.dev"))
    );
    let values = migration.values.as_ref().expect("values");
    assert_eq!(
        values["compatibility"]["settings"]["shareClass"], "vgpu",
        "the webhook chooses the class that the command does"
    );
    let family = &values["compatibility"]["settings"]["resources"]["families"][0];
    assert_eq!(family["count"], "example.com/number");
    assert_eq!(family["memoryFactor"], 512);
}

#[test]
fn device_config_becomes_profile_of_all_nodes() {
    let migration = migrated(DEVICE_CONFIG);
    assert_eq!(
        of_kind(&migration, "GpuNodeProfile"),
        [&json!({
            "apiVersion": "gpu.drava.dev/v1alpha1",
            "kind": "GpuNodeProfile",
            "metadata": {"name": "migrated-others"},
            "spec": {
                "splitCount": 20,
                "memoryScaling": 1.5,
                "oversubscription": "spill",
                "devices": [
                    {"productName": "NVIDIA A100-SXM4-40GB", "mig": {"profiles": ["1g.5gb", "2g.10gb"]}},
                    {"productName": "NVIDIA A30", "mig": {"profiles": ["1g.5gb", "2g.10gb"]}},
                ],
            },
        })]
    );
    for profile in of_kind(&migration, "GpuNodeProfile") {
        serde_json::from_value::<GpuNodeProfile>(profile.clone()).expect("a profile");
    }
    assert!(!migration.is_refused(), "{}", migration.report_text());
    report_has(
        &migration,
        "changed: ConfigMap kube-system/volcano-vgpu-device-config: data[device-config.yaml].nvidia.overwriteEnv: has no equivalent",
    );
    report_has(&migration, "takes the amounts of memory from the card");
}

#[test]
fn node_config_becomes_profile_of_each_node() {
    let migration = migrated(&format!("{DEVICE_CONFIG}---{NODE_CONFIG}"));
    let profiles = of_kind(&migration, "GpuNodeProfile");
    let specs: Vec<&Value> = profiles.iter().map(|profile| &profile["spec"]).collect();
    assert_eq!(
        specs[1..],
        [
            &json!({
                "nodeSelector": {"kubernetes.io/hostname": "gpu-1"}, "mode": "mig",
                "exclude": {"uuids": ["GPU-1"], "indices": [3]},
                "splitCount": 20, "memoryScaling": 1.5, "oversubscription": "spill",
            }),
            &json!({"nodeSelector": {"kubernetes.io/hostname": "gpu-2"}, "splitCount": 4}),
            &json!({
                "nodeSelector": {"kubernetes.io/hostname": "gpu-3"},
                "splitCount": 20, "memoryScaling": 1.5, "oversubscription": "spill",
            }),
        ]
    );
    for profile in &profiles {
        let profile = (*profile).clone();
        serde_json::from_value::<GpuNodeProfile>(profile).expect("a profile");
    }
    // The first name applies on a node that two profiles select.
    let names = |profile: &Value| {
        profile["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    assert!(names(profiles[1]) < names(profiles[0]));
    assert!(migration.is_refused());
    report_has(
        &migration,
        "nodeconfig[2].operatingmode: mode mps has no equivalent",
    );
    report_has(
        &migration,
        "nodeconfig[2].preconfigureddevicememory: has no equivalent",
    );
}

#[test]
fn scheduler_config_becomes_policy() {
    let config = |policy: &str| {
        format!(
            "
apiVersion: v1
kind: ConfigMap
metadata: {{name: volcano-scheduler-configmap}}
data:
  volcano-scheduler.conf: |
    actions: \"enqueue, allocate, backfill\"
    tiers:
    - plugins: [{{name: priority}}]
    - plugins:
      - name: deviceshare
        arguments: {{deviceshare.VGPUEnable: true, deviceshare.SchedulePolicy: {policy}}}
"
        )
    };
    let migration = migrated(&config("spread"));
    let policies = of_kind(&migration, "GpuPolicy");
    assert_eq!(policies[0]["spec"], json!({"gpu": "spread"}));
    serde_json::from_value::<GpuPolicy>(policies[0].clone()).expect("a policy");
    assert!(!migration.is_refused(), "{}", migration.report_text());
    assert!(migrated(&config("random")).is_refused());
}

#[test]
fn refuses_amounts_without_equivalent() {
    let migration = migrated(
        &DEVICE_CONFIG
            .replace("deviceSplitCount: 20", "deviceSplitCount: 5000")
            .replace("deviceMemoryScaling: 1.5", "deviceMemoryScaling: 20"),
    );
    report_has(&migration, "deviceSplitCount: 5000 is no number of shares");
    report_has(&migration, "deviceMemoryScaling: 20 is no multiple");
    assert!(migration.is_refused());
}

#[test]
fn refuses_device_plugin_with_what_replaces_its_flags() {
    let yaml = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: volcano-device-plugin}
spec:
  template:
    spec:
      containers:
      - name: plugin
        image: docker.io/projecthami/volcano-vgpu-device-plugin:v1.9.4
        command: [vgpu-device-plugin, --resource-name=volcano.sh/vgpu-number, --device-split-count=10]
"#;
    let migration = migrated(yaml);
    assert!(migration.is_refused());
    report_has(
        &migration,
        "[--device-split-count=10]: set splitCount in a GpuNodeProfile",
    );
    report_has(
        &migration,
        "[--resource-name=volcano.sh/vgpu-number]: the names are those of",
    );
}

#[test]
fn passes_other_config_maps() {
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {config.json: '{}'}\n";
    let migration = migrated(yaml);
    assert_eq!(migration.findings, []);
    assert_eq!(migration.values, None);
    assert_eq!(migration.objects, manifest::parse(yaml).expect("YAML"));
}
