//! Recorded state of a cluster with any number of nodes, in the format of `kubectl drava dump`.
//!
//! The first node has GPUs in every state; the others are filled by a fixed sequence of pseudo-random numbers.

use serde_json::{Value, json};

const DRIVER: &str = "gpu.drava.dev";
const MIB: u64 = 1 << 20;

/// A model of GPUs.
struct Model {
    name: &'static str,
    mib: u64,
    gpus: usize,
    has_mig: bool,
}

const MODELS: [Model; 4] = [
    Model {
        name: "NVIDIA H100 80GB HBM3",
        mib: 81_559,
        gpus: 8,
        has_mig: true,
    },
    Model {
        name: "NVIDIA A100-SXM4-40GB",
        mib: 40_960,
        gpus: 8,
        has_mig: true,
    },
    Model {
        name: "NVIDIA L40S",
        mib: 46_068,
        gpus: 4,
        has_mig: false,
    },
    Model {
        name: "Tesla T4",
        mib: 15_360,
        gpus: 4,
        has_mig: false,
    },
];

/// Profiles of partitions: name, memory slices, and the start of one of each.
const PROFILES: [(&str, u64, u64); 4] = [
    ("3g.40gb", 4, 0),
    ("2g.20gb", 2, 4),
    ("1g.10gb", 1, 6),
    ("1g.10gb", 1, 7),
];

const TENANTS: [&str; 9] = [
    "research",
    "llm-serving",
    "vision",
    "notebooks",
    "speech",
    "batch-render",
    "risk",
    "recommender",
    "ci",
];

/// What is allocated of a GPU.
enum Use {
    Free,
    Whole,
    /// Memory in percent and guaranteed GPU time of each share.
    Shares(Vec<(u64, u64)>),
    /// Number of partitions, the first of [`PROFILES`].
    Partitions(usize),
}

/// The objects of a dump.
#[derive(Default)]
pub(crate) struct Dump {
    nodes: Vec<Value>,
    slices: Vec<Value>,
    rules: Vec<Value>,
    claims: Vec<Value>,
    pods: Vec<Value>,
    quotas: Vec<Value>,
    reservations: Vec<Value>,
    seed: u64,
}

/// Returns the dump of a cluster.
pub(crate) fn dump(nodes: usize) -> Value {
    let mut dump = Dump {
        seed: 20_261_125,
        ..Dump::default()
    };
    for index in 0..nodes {
        dump.add_node(index);
    }
    dump.add_queue(nodes);
    dump.add_quotas(nodes);
    let class = |name: &str, kind: &str| {
        let expression = format!(
            r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "{kind}""#
        );
        json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}})
    };
    json!({
        "nodes": dump.nodes, "resourceSlices": dump.slices, "deviceTaintRules": dump.rules,
        "deviceClasses": [class("gpu.drava.dev", "gpu"), class("vgpu.drava.dev", "vgpu"), class("mig.drava.dev", "mig")],
        "resourceClaims": dump.claims, "pods": dump.pods, "gpuQuotas": dump.quotas, "resourceClaimTemplates": [],
        "reservations": dump.reservations,
    })
}

impl Dump {
    /// Returns a number below `limit`.
    fn random(&mut self, limit: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % limit
    }

    fn add_node(&mut self, index: usize) {
        // Three fifths H100; the first node too.
        let model = &MODELS[[0, 0, 0, 1, 2, 0, 1, 0, 3, 0][index % 10]];
        let node = format!("gpu-{:03}", index + 1);
        let (is_cordoned, is_ready) = (index % 97 == 40, index % 131 != 100);
        let status = if is_ready { "True" } else { "False" };
        self.nodes.push(json!({
            "metadata": {"name": node}, "spec": {"unschedulable": is_cordoned},
            "status": {
                "allocatable": {"cpu": "128", "memory": "1Ti", "pods": "110"},
                "conditions": [{"type": "Ready", "status": status}],
            },
        }));
        let (mut devices, mut counters) = (Vec::new(), Vec::new());
        for gpu in 0..model.gpus {
            let fault = match index {
                0 => (gpu == 6).then_some("xid-79"),
                _ => (self.random(90) == 0).then_some("xid-48"),
            };
            let in_use = self.in_use(index, gpu, model);
            devices.extend(published(model, index, gpu, fault));
            let mut set = json!({"gpu": {"value": "1"}});
            for slice in 0..8 {
                set[format!("slice-{slice}")] = json!({"value": "1"});
            }
            counters.push(json!({"name": format!("gpu-{gpu}"), "counters": set}));
            self.allocate(&node, gpu, model, &in_use);
        }
        let pool =
            json!({"name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": 2});
        for (suffix, content) in [("counters", json!(counters)), ("devices", json!(devices))] {
            let mut spec = json!({"driver": DRIVER, "nodeName": node, "pool": pool});
            let field = if suffix == "counters" {
                "sharedCounters"
            } else {
                "devices"
            };
            spec[field] = content;
            self.slices
                .push(json!({"metadata": {"name": format!("{node}-{suffix}")}, "spec": spec}));
        }
        if index == 0 {
            for device in ["gpu-7", "gpu-7-vgpu"] {
                self.rules.push(json!({
                    "metadata": {"name": format!("drava-cordon-{device}")},
                    "spec": {
                        "deviceSelector": {"driver": DRIVER, "pool": format!("{node}/gpus"), "device": device},
                        "taint": {"key": "gpu.drava.dev/cordoned", "effect": "NoSchedule"},
                    },
                }));
            }
        }
    }

    fn in_use(&mut self, node: usize, gpu: usize, model: &Model) -> Use {
        if node == 0 {
            return match gpu {
                0 => Use::Whole,
                2 => Use::Shares(vec![(40, 50), (25, 20), (20, 0)]),
                // Shares of which some are too small for a label.
                3 => Use::Shares(vec![
                    (42, 40),
                    (14, 10),
                    (8, 10),
                    (5, 5),
                    (3, 0),
                    (2, 0),
                    (1, 5),
                ]),
                4 => Use::Partitions(4),
                _ => Use::Free,
            };
        }
        match self.random(100) {
            0..34 => Use::Whole,
            34..72 => {
                let shares = 1 + self.random(5);
                let share = |dump: &mut Self| {
                    let cores = [0, 10, 15, 20][usize::try_from(dump.random(4)).unwrap()];
                    (8 + dump.random(92 / shares - 7), cores)
                };
                Use::Shares((0..shares).map(|_| share(self)).collect())
            }
            72..82 if model.has_mig => {
                Use::Partitions(1 + usize::try_from(self.random(4)).unwrap())
            }
            _ => Use::Free,
        }
    }

    fn allocate(&mut self, node: &str, gpu: usize, model: &Model, in_use: &Use) {
        match in_use {
            Use::Free => {}
            Use::Whole => self.add_claim(node, &format!("gpu-{gpu}"), "gpu.drava.dev", None),
            Use::Shares(shares) => {
                for (memory, cores) in shares {
                    let mib = model.mib * memory / 100;
                    let amounts = json!({"memory": format!("{mib}Mi"), "cores": cores.to_string(), "slots": "1"});
                    let device = format!("gpu-{gpu}-vgpu");
                    self.add_claim(node, &device, "vgpu.drava.dev", Some(amounts));
                }
            }
            Use::Partitions(count) => {
                for (profile, _, start) in &PROFILES[..*count] {
                    let device = format!("gpu-{gpu}-mig-{}-{start}", profile.replace('.', "-"));
                    self.add_claim(node, &device, "mig.drava.dev", None);
                }
            }
        }
    }

    fn add_claim(&mut self, node: &str, device: &str, class: &str, amounts: Option<Value>) {
        let tenant = TENANTS[usize::try_from(self.random(9).min(self.seed >> 61)).unwrap()];
        let number = self.claims.len();
        let kind = ["train", "serve", "eval", "lab"][usize::try_from(self.random(4)).unwrap()];
        let (claim, pod) = (format!("{kind}-{number}-gpu"), format!("{kind}-{number}"));
        let mut result = json!({"request": "gpu", "driver": DRIVER, "pool": format!("{node}/gpus"), "device": device});
        if let Some(amounts) = amounts {
            result["consumedCapacity"] = amounts;
            result["shareID"] = json!(format!("share-{number}"));
        }
        self.claims.push(json!({
            "metadata": {"name": claim, "namespace": tenant, "uid": format!("claim-{number}")},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": format!("pod-{number}")}],
            },
        }));
        self.pods
            .push(pod_of(&pod, tenant, &claim, Some(node), number));
    }

    fn add_queue(&mut self, nodes: usize) {
        let waiting = if nodes == 1 { 7 } else { 48 };
        for number in 0..waiting {
            // On one node, the last two are further members of the gang.
            let kind = match number {
                5 | 6 if nodes == 1 => 1,
                _ => number % 7,
            };
            let (class, amounts, count) = match kind {
                0 => (
                    "vgpu.drava.dev",
                    json!({"memory": "96Gi", "cores": "50"}),
                    1,
                ),
                1 => ("gpu.drava.dev", Value::Null, 12),
                2 => (
                    "vgpu.drava.dev",
                    json!({"memory": "16Gi", "cores": "120"}),
                    1,
                ),
                3 => ("vgpu.drava.dev", json!({"memory": "4Gi", "cores": "90"}), 1),
                4 => ("vgpu.drava.dev", json!({"memory": "8Gi"}), 1),
                _ => ("vgpu.drava.dev", json!({"memory": "128Gi"}), 1),
            };
            let tenant = if kind == 1 {
                "research"
            } else {
                TENANTS[number * 4 % TENANTS.len()]
            };
            let (claim, pod) = (format!("queued-{number}-gpu"), format!("queued-{number}"));
            let mut exactly = json!({"deviceClassName": class, "count": count});
            if amounts.is_object() {
                exactly["capacity"] = json!({"requests": amounts});
            }
            self.claims.push(json!({
                "metadata": {"name": claim, "namespace": tenant, "uid": format!("queued-claim-{number}")},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
            }));
            let mut pod = pod_of(&pod, tenant, &claim, None, 10_000 + number);
            if kind == 1 {
                pod["metadata"]["annotations"] =
                    json!({"gpu.drava.dev/gang": "train-a", "gpu.drava.dev/gang-min": "2"});
            }
            pod["status"]["conditions"] = json!([{
                "type": "gpu.drava.dev/Allocated", "status": "False", "reason": "GpuUnschedulable",
                "message": condition(kind, nodes),
            }]);
            if kind == 4 {
                pod["spec"]["nodeSelector"] = json!({"topology.kubernetes.io/zone": "east"});
            }
            self.pods.push(pod);
        }
        self.reservations.push(json!({
            "namespace": "research", "pod": "queued-1", "claim": "queued-1-gpu", "purpose": "HeadOfQueue",
            "devices": [{"request": "gpu", "pool": "gpu-001/gpus", "device": "gpu-5"}],
        }));
    }

    fn add_quotas(&mut self, nodes: usize) {
        let scale = u64::try_from(nodes).unwrap();
        for (name, namespaces, limit, guarantee) in [
            ("research", json!(["research"]), (300, 8), Some(200)),
            (
                "serving",
                json!(["llm-serving", "speech"]),
                (160, 10),
                Some(60),
            ),
            ("notebooks", json!(["notebooks", "ci"]), (60, 6), None),
            ("rendering", json!(["batch-render"]), (96, 4), None),
        ] {
            let mut spec = json!({
                "namespaces": namespaces,
                "limit": {"memory": format!("{}Gi", limit.0 * scale), "devices": limit.1 * scale},
            });
            if let Some(guarantee) = guarantee {
                spec["guarantee"] = json!({"memory": format!("{}Gi", guarantee * scale)});
            }
            self.quotas.push(json!({
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec,
            }));
        }
    }
}

/// Returns what the controller has written in the pod.
fn condition(kind: usize, nodes: usize) -> String {
    match kind {
        0 => format!(
            "0/{nodes} nodes: {nodes} InsufficientMemory (requested memory 96 GiB exceeds the largest GPU)"
        ),
        1 => format!("0/{nodes} nodes: {nodes} InsufficientDevices (12 requested)"),
        2 => "InvalidRequest: request gpu: capacity cores: 120 exceeds 100".to_owned(),
        3 => "WaitingForDeletion: pods that are being deleted have the devices".to_owned(),
        4 => format!("0/{nodes} nodes: {nodes} NodeUnfit (node selector does not match)"),
        _ => format!(
            "0/{nodes} nodes: {nodes} InsufficientMemory (requested memory 128 GiB exceeds the largest GPU)"
        ),
    }
}

/// Returns the devices of a GPU as the node driver publishes them.
fn published(model: &Model, node: usize, gpu: usize, fault: Option<&str>) -> Vec<Value> {
    let consumes = |slices: std::ops::Range<u64>, is_whole: bool| {
        let mut counters = json!({});
        for slice in slices {
            counters[format!("slice-{slice}")] = json!({"value": "1"});
        }
        if is_whole {
            counters["gpu"] = json!({"value": "1"});
        }
        json!([{"counterSet": format!("gpu-{gpu}"), "counters": counters}])
    };
    let device = |name: String, kind: &str, mib: u64, slices: std::ops::Range<u64>| {
        let mut device = json!({
            "name": name,
            "attributes": {
                "type": {"string": kind}, "uuid": {"string": format!("GPU-{node:04x}{gpu:04x}-5d1c")},
                "productName": {"string": model.name},
            },
            "capacity": {"memory": {"value": format!("{mib}Mi")}},
            "consumesCounters": consumes(slices, kind != "mig"),
        });
        if kind != "mig" {
            device["capacity"]["cores"] = json!({"value": "100"});
        }
        if let Some(fault) = fault {
            device["taints"] =
                json!([{"key": "gpu.drava.dev/unhealthy", "value": fault, "effect": "NoExecute"}]);
        }
        device
    };
    let mut vgpu = device(format!("gpu-{gpu}-vgpu"), "vgpu", model.mib, 0..8);
    vgpu["allowMultipleAllocations"] = json!(true);
    vgpu["capacity"]["cores"]["requestPolicy"] =
        json!({"default": "0", "validRange": {"min": "0"}});
    vgpu["capacity"]["slots"] =
        json!({"value": "10", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}});
    let mut devices = vec![device(format!("gpu-{gpu}"), "gpu", model.mib, 0..8), vgpu];
    if model.has_mig {
        devices.extend(PROFILES.map(|(profile, slices, start)| {
            let name = format!("gpu-{gpu}-mig-{}-{start}", profile.replace('.', "-"));
            device(name, "mig", model.mib * slices / 8, start..start + slices)
        }));
    }
    devices
}

fn pod_of(name: &str, namespace: &str, claim: &str, node: Option<&str>, number: usize) -> Value {
    let age = jiff::SignedDuration::from_mins(i64::try_from(number % 700 * 3 + 1).unwrap());
    let created = jiff::Timestamp::now() - age;
    let phase = if node.is_some() { "Running" } else { "Pending" };
    let mut pod = json!({
        "metadata": {
            "name": name, "namespace": namespace, "uid": format!("pod-{number}"),
            "creationTimestamp": format!("{created:.0}"),
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}], "requests": {"cpu": "1"}}}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        },
        "status": {"phase": phase},
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
    }
    pod
}

/// Number of bytes as the page writes it.
pub(crate) const fn h100_bytes() -> u64 {
    81_559 * MIB
}
