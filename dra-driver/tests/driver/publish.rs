//! Published devices and the changes of ResourceSlices.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::obstacle::LimitObstacle;
use drava_dra_driver::gpu_health::HealthByGpu;
use drava_dra_driver::gpus::capacity::{self, UnavailableReason};
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::node::options::{Scheduling, UnhealthyEffect};
use drava_dra_driver::publish::diff::{Change, Owner, changes, dropped, same};
use drava_dra_driver::publish::{self, Features, Pool, SliceContent, TaintPolicy};
use drava_nvml::{ComputeCapability, ComputeMode, GpuUuid, Memory, Mig};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use simulator_machine::description::{BUNDLED, MachineDescription};

use crate::fixture::{NODE, h100x2, inventory, t4};

pub(crate) const MANAGED: TaintPolicy = TaintPolicy {
    scheduling: Scheduling::Managed,
    unhealthy: UnhealthyEffect::NoSchedule,
};

const NATIVE: TaintPolicy = TaintPolicy {
    scheduling: Scheduling::Native,
    ..MANAGED
};

pub(crate) fn owner() -> Owner {
    Owner {
        node: NODE.to_owned(),
        uid: "node-uid".to_owned(),
    }
}

pub(crate) fn desired(inventory: &NodeInventory) -> Pool {
    publish::desired(
        NODE,
        inventory,
        &BTreeMap::new(),
        &HealthByGpu::new(),
        MANAGED,
        Features::ALL,
    )
}

/// Returns the slices of an API server after the first publication.
pub(crate) fn first_publication(pool: &Pool) -> Vec<ResourceSlice> {
    stored(&[], &changes(&[], pool, &owner()))
}

/// Returns the slices sent to an empty API server.
fn sent(pool: &Pool) -> Vec<ResourceSlice> {
    let slice = |change| match change {
        Change::Create(slice) => *slice,
        other => panic!("{other:?}"),
    };
    changes(&[], pool, &owner())
        .into_iter()
        .map(slice)
        .collect()
}

/// Returns the slices of the API server after these changes.
pub(crate) fn stored(before: &[ResourceSlice], changes: &[Change]) -> Vec<ResourceSlice> {
    let mut slices = before.to_vec();
    for change in changes {
        match change {
            Change::Delete { name, .. } => {
                slices.retain(|slice| slice.metadata.name.as_ref() != Some(name))
            }
            Change::Update(new) | Change::Create(new) => {
                slices.retain(|slice| slice.metadata.name != new.metadata.name);
                let mut new = (**new).clone();
                new.metadata.uid = Some(format!("uid-of-{}", new.metadata.name.as_ref().unwrap()));
                for taint in new
                    .spec
                    .devices
                    .iter_mut()
                    .flatten()
                    .flat_map(|device| device.taints.iter_mut().flatten())
                {
                    taint.time_added.get_or_insert(
                        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH),
                    );
                }
                slices.push(new);
            }
        }
    }
    slices
}

#[test]
fn publishes_h100x2_slices() {
    insta::assert_yaml_snapshot!(sent(&desired(&h100x2())));
}

#[test]
fn publishes_t4_slices() {
    insta::assert_yaml_snapshot!(sent(&desired(&t4())));
}

pub(crate) fn devices(pool: &Pool) -> Vec<&Device> {
    pool.devices().collect()
}

#[test]
fn taints_devices_in_managed_mode_only() {
    let pool = publish::desired(
        NODE,
        &h100x2(),
        &BTreeMap::new(),
        &HealthByGpu::new(),
        NATIVE,
        Features::ALL,
    );
    assert!(devices(&pool).iter().all(|device| device.taints.is_none()));
    for device in devices(&desired(&h100x2())) {
        let taints = device.taints.as_ref().unwrap();
        assert_eq!(taints.len(), 1);
        assert_eq!(
            (taints[0].key.as_str(), taints[0].effect.as_str()),
            ("gpu.drava.dev/managed", "NoSchedule")
        );
    }
}

#[test]
fn publishes_same_attribute_keys_on_every_device() {
    let pool = desired(&h100x2());
    let keys: BTreeSet<Vec<&String>> = devices(&pool)
        .iter()
        .map(|device| device.attributes.as_ref().unwrap().keys().collect())
        .collect();
    assert_eq!(keys.len(), 1);
}

#[test]
fn publishes_what_limits_the_memory_of_each_gpu() {
    let mut inventory = h100x2();
    let [first, second] = [0, 1].map(|index| inventory.nvml.gpus[index].uuid.clone());
    inventory.driver_limits.insert(first.clone(), Ok(()));
    let missing = Err(LimitObstacle::NoCgroupV2);
    inventory.driver_limits.insert(second, missing);
    for device in devices(&desired(&inventory)) {
        let attributes = device.attributes.as_ref().unwrap();
        let text = |name: &str| attributes[name].string.as_deref().unwrap();
        let expected = match text("uuid") == first.as_str() {
            true => ("driver", "none"),
            false => ("library", "no-cgroup-v2"),
        };
        let found = (text("memoryEnforcement"), text("memoryEnforcementObstacle"));
        assert_eq!(found, expected, "{}", device.name);
    }
}

#[test]
fn publishes_no_placeholder_for_unknown_place() {
    let mut inventory = h100x2();
    for gpu in &mut inventory.nvml.gpus {
        (gpu.numa_node, gpu.fabric) = (None, None);
    }
    inventory.pcie_roots.clear();
    let pool = desired(&inventory);
    for device in devices(&pool) {
        let attributes = device.attributes.as_ref().unwrap();
        for absent in [
            "resource.kubernetes.io/numaNode",
            "resource.kubernetes.io/pcieRoot",
            "nvlinkDomain",
        ] {
            assert!(!attributes.contains_key(absent), "{} {absent}", device.name);
        }
    }
}

#[test]
fn publishes_unshareable_gpu_as_whole_only() {
    let with = |change: fn(&mut drava_nvml::Gpu)| {
        let mut inventory = t4();
        inventory.nvml.gpus.iter_mut().for_each(change);
        desired(&inventory)
    };
    let names = |pool: &Pool| {
        devices(pool)
            .iter()
            .map(|device| device.name.clone())
            .collect::<Vec<_>>()
    };
    let exclusive = with(|gpu| gpu.compute_mode = ComputeMode::ExclusiveProcess);
    assert_eq!(names(&exclusive), ["gpu-0"]);
    assert!(
        exclusive
            .unavailable
            .values()
            .all(|reason| *reason == UnavailableReason::ExclusiveProcess)
    );
    let mps = with(|gpu| gpu.has_mps_clients = true);
    assert_eq!(names(&mps), ["gpu-0"]);
    assert!(
        mps.unavailable
            .values()
            .all(|reason| *reason == UnavailableReason::Mps)
    );
    let without_memory_size = with(|gpu| gpu.memory = Memory::NotSupported);
    assert_eq!(names(&without_memory_size), ["gpu-0"]);
    let partitioned = with(|gpu| {
        gpu.mig = Mig::Capable {
            enabled: true,
            pending: true,
            profiles: Vec::new(),
        }
    });
    assert!(names(&partitioned).is_empty());
    assert!(
        partitioned
            .unavailable
            .values()
            .all(|reason| *reason == UnavailableReason::NoMigProfiles)
    );
    assert_eq!(partitioned.slices.len(), 1, "an empty pool has one slice");
    let prohibited = with(|gpu| gpu.compute_mode = ComputeMode::Prohibited);
    assert!(names(&prohibited).is_empty());
}

#[test]
fn publishes_no_shares_without_feature_gate() {
    for features in [
        Features {
            counters: false,
            ..Features::ALL
        },
        Features {
            sharing: false,
            ..Features::ALL
        },
    ] {
        let pool = publish::desired(
            NODE,
            &h100x2(),
            &BTreeMap::new(),
            &HealthByGpu::new(),
            MANAGED,
            features,
        );
        let names: Vec<_> = devices(&pool)
            .iter()
            .map(|device| device.name.as_str())
            .collect();
        assert_eq!(names, ["gpu-0", "gpu-1"]);
        assert!(
            devices(&pool)
                .iter()
                .all(|device| device.allow_multiple_allocations.is_none())
        );
    }
    let without_taints = |policy| {
        let features = Features {
            taints: false,
            ..Features::ALL
        };
        publish::desired(
            NODE,
            &h100x2(),
            &BTreeMap::new(),
            &HealthByGpu::new(),
            policy,
            features,
        )
    };
    let pool = without_taints(NATIVE);
    assert_eq!(devices(&pool).len(), 4);
    assert!(devices(&pool).iter().all(|device| device.taints.is_none()));
    let pool = without_taints(MANAGED);
    assert_eq!((devices(&pool).len(), pool.slices.len()), (0, 1));
}

#[test]
fn detects_each_dropped_field() {
    let slices = first_publication(&desired(&h100x2()));
    let sent = slices
        .iter()
        .find(|slice| slice.spec.devices.is_some())
        .unwrap();
    let without = |change: fn(&mut Device)| {
        let mut stored = sent.clone();
        stored.spec.devices.iter_mut().flatten().for_each(change);
        assert!(!same(&stored, sent));
        dropped(sent, &stored)
    };
    assert_eq!(dropped(sent, sent), Features::ALL);
    assert_eq!(
        without(|d| d.taints = None),
        Features {
            taints: false,
            ..Features::ALL
        }
    );
    assert_eq!(
        without(|d| d.consumes_counters = None),
        Features {
            counters: false,
            ..Features::ALL
        }
    );
    assert_eq!(
        without(|d| d.allow_multiple_allocations = None),
        Features {
            sharing: false,
            ..Features::ALL
        }
    );
    let sent = slices
        .iter()
        .find(|slice| slice.spec.shared_counters.is_some())
        .unwrap();
    let mut stored = sent.clone();
    stored.spec.shared_counters = None;
    assert_eq!(
        dropped(sent, &stored),
        Features {
            counters: false,
            ..Features::ALL
        }
    );
}

pub(crate) fn check_limits(pool: &Pool) {
    let mut names = BTreeSet::new();
    for (name, content) in &pool.slices {
        assert!(name.len() <= 253, "{name}");
        match content {
            SliceContent::Counters(sets) => {
                assert!((1..=8).contains(&sets.len()));
                assert!(
                    sets.iter()
                        .all(|set| (1..=32).contains(&set.counters.len()))
                );
            }
            SliceContent::Devices(devices) => {
                assert!(devices.len() <= 64);
                for device in devices {
                    let (attributes, capacity) = (
                        device.attributes.as_ref().unwrap(),
                        device.capacity.as_ref().unwrap(),
                    );
                    assert!(attributes.len() + capacity.len() <= 32);
                    assert!(device.name.len() <= 63 && names.insert(device.name.clone()));
                    assert!(
                        attributes
                            .values()
                            .filter_map(|value| value.string.as_ref())
                            .all(|text| text.len() <= 64)
                    );
                    for text in attributes
                        .values()
                        .filter_map(|value| value.version.as_ref())
                    {
                        let numbers: Vec<u64> =
                            text.split('.').map(|part| part.parse().unwrap()).collect();
                        assert_eq!(numbers.len(), 3);
                        assert_eq!(
                            *text,
                            format!("{}.{}.{}", numbers[0], numbers[1], numbers[2])
                        );
                    }
                }
            }
        }
    }
    let prefix: BTreeSet<&str> = pool.slices.keys().map(String::as_str).collect();
    assert_eq!(prefix.len(), pool.slices.len());
}

#[test]
fn omits_step_in_range_smaller_than_step() {
    for (mib, has_step) in [(1, false), (2, true)] {
        let mut inventory = t4();
        let gpu = &mut inventory.nvml.gpus[0];
        let reserve = capacity::driver_reserve_bytes(gpu);
        gpu.memory = Memory::Dedicated {
            total_bytes: reserve + (mib << 20),
            reserved_bytes: 0,
            used_bytes: 0,
        };
        let pool = desired(&inventory);
        let shares = pool.devices().find(|device| device.name == "gpu-0-vgpu");
        let memory = &shares.unwrap().capacity.as_ref().unwrap()["memory"];
        let policy = memory.request_policy.as_ref().unwrap();
        let range = policy.valid_range.as_ref().unwrap();
        assert_eq!(range.step.is_some(), has_step, "{mib} MiB: {memory:?}");
    }
}

/// An estimate below the context leaves memory uncharged until the agent corrects it; one far above wastes memory.
#[test]
fn reserves_context_of_every_machine() {
    for (name, yaml) in BUNDLED {
        let machine = MachineDescription::parse(yaml).unwrap();
        for model in machine.models.values() {
            if !model.memory.reported_by_nvml {
                // A GPU without memory of its own has no shares.
                continue;
            }
            let capability = model.compute_capability;
            let gpu = drava_nvml::Gpu {
                multiprocessors: Some(model.compute.multiprocessors),
                compute_capability: ComputeCapability {
                    major: capability.major,
                    minor: capability.minor,
                },
                ..h100x2().nvml.gpus.remove(0)
            };
            let reserve = capacity::driver_reserve_bytes(&gpu);
            let context = model.memory.context_bytes + model.memory.module_bytes;
            assert!(
                (context..2 * context).contains(&reserve),
                "{name}: {} MiB for a context of {} MiB",
                reserve >> 20,
                context >> 20
            );
        }
    }
}

proptest! {
    /// API limits hold for any number of GPUs, and no GPU offers more memory than it has.
    #[test]
    fn respects_api_limits(
        count in 0u32..80,
        node in "[a-z][a-z0-9.-]{0,251}[a-z0-9]",
        total in 0u64..200 << 30,
        reserved in 0u64..2 << 30,
        name in "\\PC{0,80}",
        driver in "\\PC{0,12}",
    ) {
        let template = h100x2().nvml.gpus.remove(0);
        let gpus = (0..count).map(|minor| drava_nvml::Gpu {
            minor,
            index: minor,
            name: name.clone(),
            uuid: GpuUuid::new(format!("GPU-00000000-0000-4000-8000-{minor:012}")),
            memory: Memory::Dedicated { total_bytes: total, reserved_bytes: reserved, used_bytes: 0 },
            ..template.clone()
        });
        let mut inventory = inventory(gpus.collect());
        inventory.nvml.driver_version = driver;
        let pool = publish::desired(&node, &inventory, &BTreeMap::new(), &HealthByGpu::new(), MANAGED, Features::ALL);
        check_limits(&pool);
        for device in pool.devices() {
            let memory = &device.capacity.as_ref().unwrap()["memory"];
            let bytes = memory.value.0.parse::<drava_api::Quantity>().unwrap().to_i64().unwrap();
            prop_assert!(u64::try_from(bytes).unwrap() <= total.saturating_sub(reserved));
            prop_assert_eq!(bytes % (1 << 20), 0);
        }
    }
}
