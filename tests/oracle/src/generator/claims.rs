//! Device classes, and the claims of the pod.

use serde_json::{Map, Value, json};

use super::Mix;
use super::cluster::{SHARE_CORES, SHARE_GIB};
use crate::random::Random;

const IS_OURS: &str = r#"device.driver == "gpu.drava.dev""#;

/// Most devices that the requests of a pod ask for, so that both searches end quickly.
const MAX_DEVICES: u64 = 6;

/// The chart's classes, and one that selects any device of the driver.
pub(super) fn classes(mix: Mix) -> Vec<Value> {
    let partition = mix.partition_type;
    let class = |name: &str, expression: String| {
        json!({
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        })
    };
    let of_type = |name: &str, kind: &str| {
        class(
            &format!("{name}.drava.dev"),
            format!(r#"{IS_OURS} && device.attributes["gpu.drava.dev"].type == "{kind}""#),
        )
    };
    vec![
        of_type("gpu", "gpu"),
        of_type("vgpu", "vgpu"),
        of_type("mig", partition),
        class("any", IS_OURS.to_owned()),
        class(
            "fraction.drava.dev",
            format!(
                r#"{IS_OURS} && device.attributes["gpu.drava.dev"].type in ["vgpu", "{partition}"]"#
            ),
        ),
    ]
}

/// Returns the claims of a pod.
pub(super) fn generate(random: &mut Random, mix: Mix) -> Vec<Value> {
    let mut budget = MAX_DEVICES;
    (0..random.between(mix.claims.min(2), mix.claims))
        .map(|index| claim(random, mix, index, &mut budget))
        .collect()
}

fn claim(random: &mut Random, mix: Mix, index: u64, budget: &mut u64) -> Value {
    // No number is drawn for the other classes, so their cases stay the same.
    if mix.one_gpu > 0 && random.chance(mix.one_gpu) {
        return named(index, &of_one_gpu(random));
    }
    if mix.late_selectors > 0 && random.chance(mix.late_selectors) {
        return named(index, &with_late_selectors(random));
    }
    let requests = if random.chance(mix.several_devices) {
        random.between(1, 3)
    } else {
        1
    };
    let mut names = vec![];
    let requests: Vec<Value> = (0..requests)
        .map(|request| {
            let name = format!("r{request}");
            names.push(name.clone());
            if random.chance(mix.alternatives) {
                let most = *budget;
                let alternatives: Vec<Value> = (0..random.between(1, 3))
                    .map(|alternative| {
                        let mut rest = most;
                        let mut sub = request_body(random, mix, &mut rest);
                        *budget = (*budget).min(rest);
                        let sub_name = format!("s{alternative}");
                        names.push(format!("{name}/{sub_name}"));
                        sub.insert("name".to_owned(), json!(sub_name));
                        Value::Object(sub)
                    })
                    .collect();
                json!({"name": name, "firstAvailable": alternatives})
            } else {
                let mut body = request_body(random, mix, budget);
                if random.chance(mix.admin) {
                    body.insert("adminAccess".to_owned(), json!(true));
                }
                json!({"name": name, "exactly": body})
            }
        })
        .collect();
    let mut devices = json!({"requests": requests});
    if random.chance(mix.constraints) {
        let constraints: Vec<Value> = (0..random.between(1, 2))
            .map(|_| constraint(random, &names))
            .collect();
        devices["constraints"] = json!(constraints);
    }
    named(index, &devices)
}

fn named(index: u64, devices: &Value) -> Value {
    let name = format!("claim-{index}");
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"},
        "spec": {"devices": devices},
    })
}

/// Requests for one device each, nearly always of one GPU.
fn of_one_gpu(random: &mut Random) -> Value {
    let small = random.between(1, 4);
    let large = random.between(0, 2);
    let mut profiles: Vec<&str> = (0..small).map(|_| "1g").collect();
    for _ in 0..large {
        let position = random.between(0, profiles.len() as u64);
        profiles.insert(usize::try_from(position).unwrap_or_default(), "2g");
    }
    let requests: Vec<Value> = profiles
        .iter()
        .enumerate()
        .map(|(request, profile)| {
            let expression =
                format!(r#"device.attributes["gpu.drava.dev"].profile == "{profile}""#);
            json!({"name": format!("r{request}"), "exactly": {
                "deviceClassName": "mig.drava.dev", "allocationMode": "ExactCount", "count": 1,
                "selectors": [{"cel": {"expression": expression}}],
            }})
        })
        .collect();
    let attribute = random.choose(&[
        "gpu.drava.dev/uuid",
        "gpu.drava.dev/uuid",
        "gpu.drava.dev/index",
    ]);
    json!({"requests": requests, "constraints": [{"matchAttribute": attribute}]})
}

/// A request for several devices of any GPU, and others that select some of the first GPUs.
fn with_late_selectors(random: &mut Random) -> Value {
    let (class, capacity) = match random.chance(60) {
        true => ("gpu.drava.dev", Value::Null),
        // Two of them do not fit on most GPUs.
        false => ("vgpu.drava.dev", json!({"requests": {"memory": "10Gi"}})),
    };
    let request = |name: String, count: u64, expression: String| {
        let mut body = json!({
            "deviceClassName": class, "allocationMode": "ExactCount", "count": count,
            "selectors": [{"cel": {"expression": expression}}],
        });
        if !capacity.is_null() {
            body["capacity"] = capacity.clone();
        }
        json!({"name": name, "exactly": body})
    };
    let mut requests = vec![request(
        "r0".to_owned(),
        random.between(1, 4),
        "true".to_owned(),
    )];
    for late in 1..=random.between(1, 3) {
        let most = random.between(0, 3);
        let expression = match random.between(0, 9) {
            0 => "false".to_owned(),
            1..=4 => format!(r#"device.attributes["gpu.drava.dev"].index == {most}"#),
            _ => format!(r#"device.attributes["gpu.drava.dev"].index <= {most}"#),
        };
        requests.push(request(format!("r{late}"), 1, expression));
    }
    json!({"requests": requests})
}

fn request_body(random: &mut Random, mix: Mix, budget: &mut u64) -> Map<String, Value> {
    let class = if random.chance(mix.partitions / 2) {
        random.choose(&["mig.drava.dev", "fraction.drava.dev", "any"])
    } else {
        random.choose(&[
            "vgpu.drava.dev",
            "vgpu.drava.dev",
            "gpu.drava.dev",
            "fraction.drava.dev",
            "any",
        ])
    };
    let mut body = Map::new();
    body.insert("deviceClassName".to_owned(), json!(class));
    if random.chance(mix.all) {
        body.insert("allocationMode".to_owned(), json!("All"));
    } else {
        let wanted = if random.chance(mix.several_devices) {
            random.between(1, 4)
        } else {
            1
        };
        let count = wanted.min((*budget).max(1));
        *budget = budget.saturating_sub(count);
        body.insert("allocationMode".to_owned(), json!("ExactCount"));
        body.insert("count".to_owned(), json!(count));
    }
    if random.chance(75) {
        let mut requests = Map::new();
        if random.chance(85) {
            let amount = random.choose(&[
                "1Gi", "2Gi", "3Gi", "4Gi", "5Gi", "1025Mi", "8Gi", "12Gi", "16Gi",
            ]);
            let amount = if random.chance(50) {
                amount.to_owned()
            } else {
                format!("{}Gi", random.choose(&SHARE_GIB))
            };
            requests.insert(mix.memory.to_owned(), json!(amount));
        }
        if random.chance(50) {
            let cores = if random.chance(20) {
                random.choose(&["25", "500m", "99.5", "60"]).to_owned()
            } else {
                random.choose(&SHARE_CORES).to_string()
            };
            requests.insert("cores".to_owned(), json!(cores));
        }
        if random.chance(8) {
            requests.insert("slots".to_owned(), json!(random.between(1, 3).to_string()));
        }
        // Amounts that our allocator rejects.
        if random.chance(1) {
            requests.insert(mix.memory.to_owned(), json!("0"));
        }
        if random.chance(1) {
            requests.insert("cores".to_owned(), json!("150"));
        }
        body.insert("capacity".to_owned(), json!({"requests": requests}));
    }
    if random.chance(mix.selectors) {
        let expressions: Vec<Value> = (0..random.between(1, 2))
            .map(|_| json!({"cel": {"expression": selector(random, mix)}}))
            .collect();
        body.insert("selectors".to_owned(), json!(expressions));
    }
    if random.chance(mix.taints) {
        let tolerations: Vec<Value> = (0..random.between(1, 2))
            .map(|_| toleration(random))
            .collect();
        body.insert("tolerations".to_owned(), json!(tolerations));
    }
    body
}

fn selector(random: &mut Random, mix: Mix) -> String {
    let memory = mix.memory;
    if random.chance(mix.failing_selectors) {
        return random
            .choose(&[
                // Missing on some devices.
                r#"device.attributes["resource.kubernetes.io"].numaNode == 0"#,
                r#"device.capacity["gpu.drava.dev"].slots.compareTo(quantity("2")) >= 0"#,
                // Missing on all devices.
                r#"device.attributes["gpu.drava.dev"].absent == "x""#,
                r#"device.attributes["gpu.drava.dev"].index == "x""#,
            ])
            .to_owned();
    }
    match random.between(0, 10) {
        0 => format!(
            r#"device.capacity["gpu.drava.dev"].{memory}.compareTo(quantity("{}Gi")) >= 0"#,
            random.choose(&[4, 8, 12, 16])
        ),
        1 => format!(r#"device.attributes["gpu.drava.dev"].index == {}"#, random.between(0, 2)),
        2 => format!(r#"device.attributes["gpu.drava.dev"].index != {}"#, random.between(0, 2)),
        3 => r#"device.attributes["gpu.drava.dev"].productName.startsWith("NVIDIA")"#.to_owned(),
        4 => r#"device.attributes["gpu.drava.dev"].driverVersion.isGreaterThan(semver("575.0.0"))"#.to_owned(),
        5 => "device.allowMultipleAllocations".to_owned(),
        6 => r#"device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 0"#.to_owned(),
        7 => r#""resource.kubernetes.io" in device.attributes && device.attributes["gpu.drava.dev"].type != "gpu""#.to_owned(),
        8 => r#"cel.bind(gpu, device.attributes["gpu.drava.dev"], gpu.profile in ["1g", "none"] || gpu.index > 0)"#.to_owned(),
        9 => r#"device.attributes["gpu.drava.dev"].oversubscribed == false"#.to_owned(),
        _ => r#"["a", "b"].exists(x, device.attributes["gpu.drava.dev"].type.startsWith(x)) || device.attributes["gpu.drava.dev"].uuid.matches("GPU-[1-3]$")"#.to_owned(),
    }
}

fn toleration(random: &mut Random) -> Value {
    let mut toleration = Map::new();
    let operator = random.choose(&["Exists", "Equal"]);
    toleration.insert("operator".to_owned(), json!(operator));
    if operator == "Equal" || random.chance(75) {
        let key = random.choose(&["gpu.drava.dev/unhealthy", "example.com/reserved"]);
        toleration.insert("key".to_owned(), json!(key));
    }
    if operator == "Equal" {
        toleration.insert("value".to_owned(), json!(random.choose(&["", "a", "b"])));
    }
    if random.chance(40) {
        let effect = random.choose(&["NoSchedule", "NoExecute"]);
        toleration.insert("effect".to_owned(), json!(effect));
    }
    Value::Object(toleration)
}

fn constraint(random: &mut Random, names: &[String]) -> Value {
    let rule = random.choose(&["matchAttribute", "distinctAttribute"]);
    let attribute = random.choose(&[
        "gpu.drava.dev/uuid",
        "gpu.drava.dev/uuid",
        "gpu.drava.dev/productName",
        "gpu.drava.dev/driverVersion",
        "gpu.drava.dev/index",
        "gpu.drava.dev/oversubscribed",
        "resource.kubernetes.io/numaNode",
        "resource.kubernetes.io/pcieRoot",
    ]);
    let mut constraint = json!({rule: attribute});
    if random.chance(35) {
        let named: Vec<&String> = names.iter().filter(|_| random.chance(60)).collect();
        if !named.is_empty() {
            constraint["requests"] = json!(named);
        }
    }
    constraint
}
