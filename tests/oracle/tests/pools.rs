//! The structured allocator of Kubernetes accepts the pools that the node driver publishes: for each GPU model and mode, it
//! allocates every published device, and devices of one GPU exclude each other as the counters say.

#![expect(
    clippy::unwrap_used,
    reason = "a failure of the harness fails the test"
)]

use std::collections::BTreeMap;
use std::io::Write as _;

use drava_api::node_profile::{GpuSettings, Mode, NodeSettings};
use drava_cluster::Kubernetes;
use drava_dra_driver::gpu_health::HealthByGpu;
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::node::options::{Scheduling, UnhealthyEffect};
use drava_dra_driver::publish::{self, Features, Pool, SliceContent, TaintPolicy};
use drava_nvml::{GpuLibrary as _, Library, Mig, find};
use drava_oracle::program::{self, Program};
use k8s_openapi::api::resource::v1::Device;
use serde_json::{Value, json};
use simulator_machine::description::{A30X2, A100_40X8, H100X2, T4};
use simulator_machine::testing::Machine;

const NODE: &str = "node-a";
const DRIVER: &str = "gpu.drava.dev";

/// Returns the first GPU of a machine.
fn first_gpu(yaml: &str) -> NodeInventory {
    let machine = Machine::start(yaml).unwrap();
    let library = Library::open(&find(machine.root()).unwrap()).unwrap();
    let mut nvml = library.inventory().unwrap();
    nvml.gpus.truncate(1);
    NodeInventory {
        nvml,
        numbers: BTreeMap::new(),
        pcie_roots: BTreeMap::new(),
        foreign_instances: BTreeMap::new(),
        settings: None,
        driver_limits: BTreeMap::new(),
        mps: Ok(()),
        other_owners: drava_dra_driver::gpus::coexistence::OtherOwners::default(),
        retained_totals: BTreeMap::new(),
    }
}

/// Returns the pool of the GPU in a mode, in MIG mode or not.
fn pool(node: &NodeInventory, mode: Mode, is_partitioned: bool) -> Pool {
    let mut node = node.clone();
    let gpu = node.nvml.gpus.first_mut().unwrap();
    if let Mig::Capable { enabled, .. } = &mut gpu.mig {
        *enabled = is_partitioned;
    }
    let settings = GpuSettings {
        mode,
        ..GpuSettings::default()
    };
    node.settings = Some(NodeSettings {
        gpus: BTreeMap::from([(gpu.uuid.to_string(), settings)]),
        ..NodeSettings::default()
    });
    let policy = TaintPolicy {
        scheduling: Scheduling::Native,
        unhealthy: UnhealthyEffect::NoSchedule,
    };
    let (retained, health) = (BTreeMap::new(), HealthByGpu::new());
    publish::desired(NODE, &node, &retained, &health, policy, Features::ALL)
}

fn slices(pool: &Pool) -> Vec<Value> {
    let count = pool.slices.len();
    let slice = |(name, content): (&String, &SliceContent)| {
        let mut spec = json!({
            "driver": DRIVER, "nodeName": NODE,
            "pool": {"name": pool.name, "generation": 1, "resourceSliceCount": count},
        });
        let (field, value) = match content {
            SliceContent::Counters(sets) => ("sharedCounters", json!(sets)),
            SliceContent::Devices(devices) => ("devices", json!(devices)),
        };
        spec.as_object_mut()
            .unwrap()
            .insert(field.to_owned(), value);
        json!({"metadata": {"name": name}, "spec": spec})
    };
    pool.slices.iter().map(slice).collect()
}

fn text(device: &Device, attribute: &str) -> String {
    let attributes = device.attributes.as_ref().unwrap();
    attributes[attribute].string.clone().unwrap()
}

/// Returns an unallocated claim of a device of the same type and profile.
fn claim(number: usize, device: &Device) -> Value {
    let expression = format!(
        "device.attributes['{DRIVER}'].type == '{}' && device.attributes['{DRIVER}'].profile == '{}'",
        text(device, "type"),
        text(device, "profile")
    );
    let capacity = match text(device, "type").as_str() {
        "vgpu" => json!({"requests": {"memory": "1Gi", "cores": "10"}}),
        _ => Value::Null,
    };
    let mut exactly = json!({
        "deviceClassName": "any", "allocationMode": "ExactCount", "count": 1,
        "selectors": [{"cel": {"expression": expression}}],
    });
    if !capacity.is_null() {
        exactly
            .as_object_mut()
            .unwrap()
            .insert("capacity".to_owned(), capacity);
    }
    json!({
        "metadata": {"name": format!("claim-{number}"), "namespace": "default", "uid": format!("uid-{number}")},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    })
}

/// Returns a claim that `device` is allocated to; of a share all memory.
fn allocated(device: &Device, pool: &str) -> Value {
    let mut result =
        json!({"request": "gpu", "driver": DRIVER, "pool": pool, "device": device.name});
    if device.allow_multiple_allocations == Some(true) {
        let fields = result.as_object_mut().unwrap();
        fields.insert(
            "shareID".to_owned(),
            json!("5a5a5a5a-0000-4000-8000-000000000001"),
        );
        let consumed = json!({"memory": "1Gi", "cores": "10", "slots": "1"});
        fields.insert("consumedCapacity".to_owned(), consumed);
    }
    let mut claim = claim(0, device);
    let status = json!({"allocation": {"devices": {"results": [result]}}});
    claim
        .as_object_mut()
        .unwrap()
        .insert("status".to_owned(), status);
    claim
}

/// Returns the device that the allocator of Kubernetes gives to a claim like `wanted`.
fn ask(
    program: &mut Program,
    pool: &Pool,
    held: Option<&Device>,
    wanted: &Device,
) -> Option<String> {
    let question = json!({
        "nodes": [{"metadata": {"name": NODE}}],
        "slices": slices(pool),
        "classes": [{"metadata": {"name": "any"}, "spec": {}}],
        "allocated": held.map(|held| allocated(held, &pool.name)).into_iter().collect::<Vec<_>>(),
        "claims": [claim(1, wanted)],
    });
    let mut answer = program.ask(&question).unwrap();
    let answer = answer.nodes.remove(NODE).unwrap();
    assert_eq!(answer.error, "", "{}", pool.name);
    let mut results = answer
        .allocations
        .into_iter()
        .filter_map(|allocation| allocation.devices);
    results
        .next()?
        .results?
        .into_iter()
        .next()
        .map(|result| result.device)
}

/// Returns the amounts of counters that a device consumes.
fn consumed(device: &Device) -> BTreeMap<&str, u64> {
    let sets = device.consumes_counters.iter().flatten();
    let counters = sets.flat_map(|set| &set.counters);
    counters
        .map(|(name, counter)| (name.as_str(), counter.value.0.parse().unwrap()))
        .collect()
}

fn totals(pool: &Pool) -> BTreeMap<&str, u64> {
    let sets = pool.slices.values().filter_map(|content| match content {
        SliceContent::Counters(sets) => Some(sets),
        SliceContent::Devices(_) => None,
    });
    let counters = sets.flatten().flat_map(|set| &set.counters);
    counters
        .map(|(name, counter)| (name.as_str(), counter.value.0.parse().unwrap()))
        .collect()
}

/// Checks a pool; returns its number of devices.
fn check(program: &mut Program, what: &str, pool: &Pool) -> usize {
    let devices: Vec<&Device> = pool.devices().collect();
    let totals = totals(pool);
    for wanted in &devices {
        let given = ask(program, pool, None, wanted);
        let given = given.unwrap_or_else(|| panic!("{what}: {} is not allocated", wanted.name));
        let given = devices.iter().find(|device| device.name == given).unwrap();
        assert_eq!(text(given, "profile"), text(wanted, "profile"), "{what}");
    }
    // The first placement of each profile under each device.
    let is_first = |device: &&&Device| {
        let mut devices = devices.iter();
        devices
            .find(|other| {
                text(other, "profile") == text(device, "profile")
                    && text(other, "type") == text(device, "type")
            })
            .is_some_and(|first| first.name == device.name)
    };
    for held in &devices {
        for wanted in devices.iter().filter(is_first) {
            let alike = devices.iter().filter(|device| {
                text(device, "profile") == text(wanted, "profile")
                    && text(device, "type") == text(wanted, "type")
            });
            let fits = |device: &&Device| {
                let is_shared =
                    held.name == device.name && held.allow_multiple_allocations == Some(true);
                let (one, other) = (consumed(held), consumed(device));
                let fit = |(name, total): (&&str, &u64)| {
                    one.get(name).unwrap_or(&0) + other.get(name).unwrap_or(&0) <= *total
                };
                is_shared || (held.name != device.name && totals.iter().all(fit))
            };
            let expected = alike.copied().any(|device| fits(&device));
            let given = ask(program, pool, Some(held), wanted);
            assert_eq!(
                given.is_some(),
                expected,
                "{what}: {} beside {}",
                wanted.name,
                held.name
            );
        }
    }
    devices.len()
}

fn check_pools(test: &str, release: Kubernetes) {
    if let Some(reason) = program::missing_prerequisite() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
        return;
    }
    let mut program = Program::start(release).unwrap();
    let modes = [
        Mode::Auto,
        Mode::Exclusive,
        Mode::Vgpu,
        Mode::Mig,
        Mode::Dynamic,
    ];
    for (model, yaml) in [
        ("A30", A30X2),
        ("A100", A100_40X8),
        ("H100", H100X2),
        ("T4", T4),
    ] {
        let node = first_gpu(yaml);
        let is_capable = node
            .nvml
            .gpus
            .iter()
            .any(|gpu| matches!(gpu.mig, Mig::Capable { .. }));
        let mut checked = BTreeMap::new();
        for mode in modes {
            for is_partitioned in [false, true] {
                if is_partitioned && !is_capable {
                    continue;
                }
                let pool = pool(&node, mode, is_partitioned);
                let what = format!("{model}, mode {}, MIG {is_partitioned}", mode.as_str());
                let count = check(&mut program, &what, &pool);
                checked.insert((mode.as_str(), is_partitioned), count);
            }
        }
        assert_eq!(checked[&("auto", false)], 2, "{model}");
        if is_capable {
            assert!(checked[&("auto", true)] > 5, "{model}: {checked:?}");
        }
        if model == "H100" {
            let partitions = checked[&("auto", true)];
            assert_eq!(checked[&("dynamic", false)], partitions + 2);
            assert_eq!(checked[&("mig", false)], partitions);
        }
    }
}

#[test]
fn kubernetes_1_36_accepts_published_pools() {
    check_pools("kubernetes_1_36_accepts_published_pools", Kubernetes::V1_36);
}

#[test]
fn kubernetes_1_37_accepts_published_pools() {
    check_pools("kubernetes_1_37_accepts_published_pools", Kubernetes::V1_37);
}
