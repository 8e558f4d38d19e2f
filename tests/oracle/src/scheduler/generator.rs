//! Clusters without devices, near the limit of what a pod may do there.

use serde_json::{Map, Value, json};

use super::Class;
use crate::random::Random;

const ZONES: [&str; 3] = ["a", "b", "c"];
const APPS: [&str; 3] = ["web", "db", "job"];
const NAMESPACES: [&str; 2] = ["team", "lab"];
const KEYS: [&str; 4] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "rack",
    "topology.kubernetes.io/zone",
];

/// Returns case `index` of a class.
#[must_use]
pub fn case(seed: u64, class: Class, index: u64) -> Value {
    let mut random = Random::new(seed, 1000 + class as u64, index);
    let random = &mut random;
    let nodes: Vec<Value> = (0..random.between(2, 5))
        .map(|number| node(random, class, number))
        .collect();
    let count = nodes.len() as u64;
    let bound: Vec<Value> = (0..random.between(0, 7))
        .map(|number| {
            let mut pod = pod(random, class, &format!("bound-{number}"));
            pod["spec"]["nodeName"] = json!(format!("n{}", random.between(0, count - 1)));
            if random.chance(8) {
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            if class == Class::NodeFit && random.chance(50) {
                pod["status"] = resize(random, &pod);
            }
            pod
        })
        .collect();
    let mut pending = pod(random, class, "pending");
    let mut case = json!({
        "nodes": nodes,
        "namespaces": [
            {"metadata": {"name": "team", "labels": {"kubernetes.io/metadata.name": "team", "group": "x"}}},
            {"metadata": {"name": "lab", "labels": {"kubernetes.io/metadata.name": "lab"}}},
        ],
        "bound": bound,
    });
    if class == Class::Volumes {
        let volumes = random.between(1, 2);
        for (key, value) in volumes_of(random, volumes) {
            case[key] = value;
        }
        let used: Vec<Value> = (0..volumes)
            .map(|number| json!({"name": format!("v{number}"), "persistentVolumeClaim": {"claimName": format!("c{number}")}}))
            .collect();
        pending["metadata"]["namespace"] = json!("team");
        pending["spec"]["volumes"] = json!(used);
    }
    case["pod"] = pending;
    case
}

fn node(random: &mut Random, class: Class, number: u64) -> Value {
    let name = format!("n{number}");
    let mut labels = Map::new();
    if random.chance(92) {
        labels.insert("kubernetes.io/hostname".to_owned(), json!(name));
    }
    if random.chance(85) {
        labels.insert(
            "topology.kubernetes.io/zone".to_owned(),
            json!(random.choose(&ZONES)),
        );
    }
    if class == Class::Volumes && random.chance(25) {
        let key = random.choose(&[
            "failure-domain.beta.kubernetes.io/zone",
            "topology.kubernetes.io/region",
        ]);
        labels.insert(key.to_owned(), json!(random.choose(&ZONES)));
    }
    if random.chance(50) {
        labels.insert("rack".to_owned(), json!(random.choose(&["r1", "r2"])));
    }
    if random.chance(50) {
        labels.insert("gpus".to_owned(), json!(random.between(0, 8).to_string()));
    }
    let mut taints = vec![];
    if random.chance(if class == Class::NodeFit { 50 } else { 25 }) {
        for _ in 0..random.between(1, 2) {
            let effect = match class {
                Class::Scores => "PreferNoSchedule",
                _ => random.choose(&["NoSchedule", "NoExecute", "PreferNoSchedule"]),
            };
            taints.push(json!({
                "key": random.choose(&["gpu", "old"]),
                "value": random.choose(&["", "5", "x"]),
                "effect": effect,
            }));
        }
    }
    let mut allocatable = json!({
        "cpu": random.between(4, 8).to_string(), "memory": "8Gi",
        "pods": random.choose(&["2", "5", "110"]),
    });
    if random.chance(30) {
        allocatable["example.com/x"] = json!(random.between(0, 3).to_string());
    }
    json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints, "unschedulable": class == Class::NodeFit && random.chance(8)},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn pod(random: &mut Random, class: Class, name: &str) -> Value {
    let namespace = match random.chance(80) {
        true => "team",
        false => "lab",
    };
    let mut containers = vec![];
    for number in 0..random.between(1, 2) {
        let mut container = json!({"name": format!("c{number}"), "image": "i"});
        if class == Class::NodeFit || random.chance(20) {
            container["resources"] = json!({"requests": requests(random)});
        }
        if class == Class::Neighbors && random.chance(30) {
            container["ports"] = json!([{
                "containerPort": 80,
                "hostPort": random.choose(&[0, 80, 80, 81]),
                "protocol": random.choose(&["TCP", "UDP"]),
                "hostIP": random.choose(&["", "0.0.0.0", "10.0.0.1", "::", "::1"]),
            }]);
        }
        containers.push(container);
    }
    let mut spec = json!({"containers": containers});
    if class == Class::NodeFit {
        if random.chance(30) {
            let mut init =
                json!({"name": "i0", "image": "i", "resources": {"requests": requests(random)}});
            if random.chance(50) {
                init["restartPolicy"] = json!("Always");
            }
            spec["initContainers"] = json!([init]);
        }
        if random.chance(15) {
            spec["overhead"] = json!({"cpu": "250m"});
        }
        if random.chance(15) {
            spec["resources"] = json!({"requests": {"cpu": random.between(1, 6).to_string()}});
        }
        if random.chance(15) {
            spec["nodeSelector"] = json!({"rack": "r1"});
        }
    }
    if random.chance(40) {
        let tolerations: Vec<Value> = (0..random.between(1, 2))
            .map(|_| toleration(random))
            .collect();
        spec["tolerations"] = json!(tolerations);
    }
    let affinity = affinity(random, class);
    if !affinity.is_empty() {
        spec["affinity"] = Value::Object(affinity);
    }
    let spreads = match class {
        Class::Neighbors | Class::Scores => 45,
        Class::NodeFit | Class::Volumes => 0,
    };
    if random.chance(spreads) {
        let constraints: Vec<Value> = (0..random.between(1, 2))
            .map(|_| spread(random, class))
            .collect();
        spec["topologySpreadConstraints"] = json!(constraints);
    }
    json!({
        "metadata": {
            "name": name, "namespace": namespace, "uid": name,
            "labels": {"app": random.choose(&APPS)},
        },
        "spec": spec,
    })
}

fn requests(random: &mut Random) -> Value {
    let mut requests = Map::new();
    if random.chance(80) {
        let cpu = random.choose(&["1", "500m", "2", "3", "0"]);
        requests.insert("cpu".to_owned(), json!(cpu));
    }
    if random.chance(40) {
        let memory = random.choose(&["1Gi", "3Gi", "100M"]);
        requests.insert("memory".to_owned(), json!(memory));
    }
    if random.chance(15) {
        let count = random.between(0, 2).to_string();
        requests.insert("example.com/x".to_owned(), json!(count));
    }
    Value::Object(requests)
}

/// Status of a running pod whose resources kubelet changes.
fn resize(random: &mut Random, pod: &Value) -> Value {
    let mut statuses = |key: &str| -> Vec<Value> {
        let containers = pod["spec"][key].as_array().into_iter().flatten();
        containers
            .map(|container| {
                let mut status = json!({
                    "name": container["name"], "image": "", "imageID": "", "ready": true, "restartCount": 0,
                });
                if random.chance(70) {
                    status["allocatedResources"] = requests(random);
                }
                if random.chance(70) {
                    status["resources"] = json!({"requests": requests(random)});
                }
                status
            })
            .collect()
    };
    let mut status = json!({
        "containerStatuses": statuses("containers"),
        "initContainerStatuses": statuses("initContainers"),
    });
    if random.chance(50) {
        let reason = random.choose(&["Infeasible", "Deferred"]);
        status["conditions"] =
            json!([{"type": "PodResizePending", "status": "True", "reason": reason}]);
    }
    if random.chance(30) {
        status["resources"] = json!({"requests": requests(random)});
        if random.chance(70) {
            status["allocatedResources"] = requests(random);
        }
    }
    status
}

fn toleration(random: &mut Random) -> Value {
    let mut toleration = Map::new();
    let operator = random.choose(&["Exists", "Equal", ""]);
    toleration.insert("operator".to_owned(), json!(operator));
    if operator != "Exists" || random.chance(75) {
        toleration.insert("key".to_owned(), json!(random.choose(&["gpu", "old"])));
    }
    if operator != "Exists" {
        toleration.insert("value".to_owned(), json!(random.choose(&["", "5", "x"])));
    }
    if random.chance(40) {
        let effect = random.choose(&["NoSchedule", "NoExecute", "PreferNoSchedule"]);
        toleration.insert("effect".to_owned(), json!(effect));
    }
    Value::Object(toleration)
}

fn selector(random: &mut Random) -> Value {
    match random.between(0, 9) {
        0 => json!({}),
        1 => json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}),
        2 => json!({"matchExpressions": [{"key": "absent", "operator": "DoesNotExist"}]}),
        _ => json!({"matchLabels": {"app": random.choose(&APPS)}}),
    }
}

fn term(random: &mut Random) -> Value {
    let mut term = json!({"topologyKey": random.choose(&KEYS), "labelSelector": selector(random)});
    match random.between(0, 9) {
        0 => term["namespaces"] = json!([random.choose(&NAMESPACES)]),
        1 => term["namespaceSelector"] = json!({}),
        2 => term["namespaceSelector"] = json!({"matchLabels": {"group": "x"}}),
        _ => {}
    }
    term
}

fn affinity(random: &mut Random, class: Class) -> Map<String, Value> {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
    let mut affinity = Map::new();
    let (required, preferred) = match class {
        Class::NodeFit => (0, 0),
        Class::Neighbors => (25, 10),
        Class::Volumes => (0, 0),
        Class::Scores => (5, 40),
    };
    for kind in ["podAffinity", "podAntiAffinity"] {
        let mut rules = Map::new();
        if random.chance(required) {
            let terms: Vec<Value> = (0..random.between(1, 2)).map(|_| term(random)).collect();
            rules.insert(REQUIRED.to_owned(), json!(terms));
        }
        if random.chance(preferred) {
            let terms: Vec<Value> = (0..random.between(1, 2))
                .map(|_| json!({"weight": random.between(1, 100), "podAffinityTerm": term(random)}))
                .collect();
            rules.insert(PREFERRED.to_owned(), json!(terms));
        }
        if !rules.is_empty() {
            affinity.insert(kind.to_owned(), Value::Object(rules));
        }
    }
    let mut rules = Map::new();
    if class == Class::NodeFit && random.chance(30) {
        let terms: Vec<Value> = (0..random.between(1, 2))
            .map(|_| node_term(random))
            .collect();
        rules.insert(REQUIRED.to_owned(), json!({"nodeSelectorTerms": terms}));
    }
    if random.chance(preferred) {
        let terms: Vec<Value> = (0..random.between(1, 3))
            .map(|_| json!({"weight": random.between(1, 100), "preference": node_term(random)}))
            .collect();
        rules.insert(PREFERRED.to_owned(), json!(terms));
    }
    if !rules.is_empty() {
        affinity.insert("nodeAffinity".to_owned(), Value::Object(rules));
    }
    affinity
}

fn node_term(random: &mut Random) -> Value {
    if random.chance(8) {
        return json!({});
    }
    if random.chance(15) {
        let name = format!("n{}", random.between(0, 4));
        return json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]});
    }
    let expression = match random.between(0, 5) {
        0 => json!({"key": "gpus", "operator": "Gt", "values": [random.between(0, 8).to_string()]}),
        1 => json!({"key": "gpus", "operator": "Lt", "values": [random.between(0, 8).to_string()]}),
        2 => json!({"key": "rack", "operator": random.choose(&["Exists", "DoesNotExist"])}),
        3 => json!({"key": "topology.kubernetes.io/zone", "operator": "NotIn", "values": ["a"]}),
        _ => {
            json!({"key": "topology.kubernetes.io/zone", "operator": "In", "values": [random.choose(&ZONES), "c"]})
        }
    };
    json!({"matchExpressions": [expression]})
}

fn spread(random: &mut Random, class: Class) -> Value {
    let is_soft = match class {
        Class::Scores => random.chance(85),
        _ => random.chance(20),
    };
    let mut spread = json!({
        "maxSkew": random.between(1, 3), "topologyKey": random.choose(&KEYS),
        "whenUnsatisfiable": if is_soft { "ScheduleAnyway" } else { "DoNotSchedule" },
        "labelSelector": selector(random),
    });
    if !is_soft && random.chance(25) {
        spread["minDomains"] = json!(random.between(1, 4));
    }
    if random.chance(30) {
        spread["nodeTaintsPolicy"] = json!(random.choose(&["Honor", "Ignore"]));
    }
    if random.chance(30) {
        spread["nodeAffinityPolicy"] = json!(random.choose(&["Honor", "Ignore"]));
    }
    spread
}

/// Volumes with the claims that they are bound to.
fn volumes_of(random: &mut Random, count: u64) -> Map<String, Value> {
    let mut objects = Map::new();
    let mut claims = vec![];
    let mut volumes = vec![];
    for number in 0..count {
        claims.push(json!({
            "metadata": {"name": format!("c{number}"), "namespace": "team"},
            "spec": {"volumeName": format!("v{number}")},
        }));
        let mut labels = Map::new();
        for key in [
            "topology.kubernetes.io/zone",
            "topology.kubernetes.io/region",
            "failure-domain.beta.kubernetes.io/zone",
        ] {
            if random.chance(35) {
                let value = random.choose(&["a", "b", "a__b", "b__", "a__c"]);
                labels.insert(key.to_owned(), json!(value));
            }
        }
        volumes.push(
            json!({"metadata": {"name": format!("v{number}"), "labels": labels}, "spec": {}}),
        );
    }
    objects.insert("volumeClaims".to_owned(), json!(claims));
    objects.insert("volumes".to_owned(), json!(volumes));
    objects
}
