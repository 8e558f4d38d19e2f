//! What a node profile changes of the offer of a GPU: pure functions.

use std::collections::BTreeMap;

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy};
use drava_api::node_profile::{GpuIdentity, GpuNodeProfile, NodeSettings};
use drava_dra_driver::gpu_health::HealthByGpu;
use drava_dra_driver::gpu_health::state::{Fault, GpuHealth};
use drava_dra_driver::gpus::capacity::UnavailableReason;
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::prepare::{overcommit, plan};
use drava_dra_driver::publish::retained::{PublishedGpus, Reason, Retained};
use drava_dra_driver::publish::{self, Features, Pool};
use drava_nvml::{GpuUuid, Mig};
use k8s_openapi::api::resource::v1::Device;
use serde_json::{Value, json};

use crate::fixture::Allocated::{Partition, Share, Whole};
use crate::fixture::{GPU_UUIDS, NODE, POOL, claim, claim_ref, claim_with, config, h100x2};
use crate::publish::{MANAGED, check_limits, desired, first_publication};

/// Returns the inventory with a profile of this spec.
fn with_profile(mut inventory: NodeInventory, spec: &Value) -> NodeInventory {
    let profile = GpuNodeProfile::new("a", serde_json::from_value(spec.clone()).unwrap());
    let gpus = inventory.nvml.gpus.iter().map(|gpu| GpuIdentity {
        uuid: gpu.uuid.as_str(),
        index: gpu.index,
        product_name: &gpu.name,
    });
    let settings = NodeSettings::resolve([&profile], &BTreeMap::new(), gpus);
    inventory.settings = Some(settings);
    inventory
}

fn names(pool: &Pool) -> Vec<String> {
    pool.devices().map(|device| device.name.clone()).collect()
}

fn device(pool: &Pool, name: &str) -> Device {
    let mut devices = pool.devices();
    devices.find(|device| device.name == name).unwrap().clone()
}

/// Returns the H100s with the first in MIG mode.
fn partitioned() -> NodeInventory {
    let mut inventory = h100x2();
    if let Mig::Capable { enabled, .. } = &mut inventory.nvml.gpus[0].mig {
        *enabled = true;
    }
    inventory
}

#[test]
fn mode_selects_the_devices_of_a_gpu() {
    let spec = |mode| json!({"mode": mode});
    for (mode, expected) in [
        ("auto", vec!["gpu-0", "gpu-0-vgpu", "gpu-1", "gpu-1-vgpu"]),
        ("exclusive", vec!["gpu-0", "gpu-1"]),
        ("vgpu", vec!["gpu-0-vgpu", "gpu-1-vgpu"]),
    ] {
        let inventory = with_profile(h100x2(), &spec(mode));
        let pool = desired(&inventory);
        assert_eq!(names(&pool), expected, "{mode}");
        check_limits(&pool);
        for device in pool.devices() {
            let published = &device.attributes.as_ref().unwrap()["mode"];
            assert_eq!(published.string.as_deref(), Some(mode));
        }
        assert!(pool.unavailable.is_empty(), "{mode}");
    }
    let of_first = |mode| {
        let pool = desired(&with_profile(partitioned(), &spec(mode)));
        let first = names(&pool)
            .into_iter()
            .filter(|name| name.starts_with("gpu-0"));
        (first.count(), pool.unavailable.contains_key(GPU_UUIDS[0]))
    };
    assert_eq!(of_first("auto"), (25, false));
    assert_eq!(of_first("mig"), (25, false));
    assert_eq!(of_first("vgpu"), (0, true));
}

#[test]
fn mig_mode_follows_claims_on_gpus_without_reset() {
    let [mig, dynamic] = ["mig", "dynamic"].map(|mode| {
        let inventory = with_profile(h100x2(), &json!({"mode": mode}));
        let pool = desired(&inventory);
        check_limits(&pool);
        assert!(pool.unavailable.is_empty(), "{mode}");
        let first = names(&pool).into_iter();
        first
            .filter(|name| name.starts_with("gpu-0"))
            .collect::<Vec<_>>()
    });
    assert_eq!(mig.len(), 25);
    assert!(mig.iter().all(|name| name.contains("-mig-")), "{mig:?}");
    assert_eq!(dynamic[..2], ["gpu-0", "gpu-0-vgpu"]);
    assert_eq!(dynamic[2..], mig);
    // The devices are the same in both MIG modes, so a switch changes no slice.
    let of_mode = |inventory| desired(&with_profile(inventory, &json!({"mode": "dynamic"})));
    assert_eq!(of_mode(h100x2()), of_mode(partitioned()));
}

#[test]
fn dynamic_gpu_is_taken_in_one_way_at_a_time() {
    let inventory = with_profile(h100x2(), &json!({"mode": "dynamic"}));
    let prepare = |number, results: &[_]| {
        plan::plan(
            &claim_ref(number),
            Some(&claim(number, results)),
            POOL,
            &inventory,
        )
        .unwrap()
    };
    let (share, whole) = (prepare(1, &[Share(0, "8Gi", "0")]), prepare(2, &[Whole(0)]));
    let partition = prepare(3, &[Partition(0, "1g.10gb", 6)]);
    for (held, wanted) in [
        (&share, &partition),
        (&partition, &share),
        (&whole, &partition),
        (&partition, &whole),
    ] {
        let (holder, claim) = (claim_ref(8), claim_ref(9));
        let others = [(&holder, held.as_slice())];
        overcommit::check(&claim, wanted, others, &inventory).unwrap_err();
        overcommit::check(&claim, wanted, [], &inventory).unwrap();
    }
}

#[test]
fn mode_that_needs_a_reset_names_the_commands() {
    let ampere = |mode: &str, is_partitioned: bool| {
        let mut inventory = if is_partitioned {
            partitioned()
        } else {
            h100x2()
        };
        inventory.nvml.gpus.truncate(1);
        inventory.nvml.gpus[0].compute_capability.major = 8;
        let inventory = with_profile(inventory, &json!({"mode": mode}));
        let pool = desired(&inventory);
        let reason = pool.unavailable.get(GPU_UUIDS[0]).copied();
        (names(&pool).len(), reason)
    };
    let (for_mig, for_shares) = (
        UnavailableReason::ResetForMig,
        UnavailableReason::ResetForShares,
    );
    assert_eq!(ampere("mig", false), (0, Some(for_mig)));
    assert_eq!(ampere("mig", true), (25, None));
    assert_eq!(ampere("vgpu", true), (0, Some(for_shares)));
    assert_eq!(ampere("vgpu", false), (1, None));
    assert_eq!(ampere("dynamic", false), (2, Some(for_mig)));
    assert_eq!(ampere("dynamic", true), (25, Some(for_shares)));
    assert_eq!(ampere("auto", true), (25, None));
    let text = for_mig.of_gpu("GPU-1");
    assert!(
        text.contains("`nvidia-smi -mig 1 -i GPU-1`")
            && text.contains("`nvidia-smi --gpu-reset -i GPU-1`"),
        "{text}"
    );
}

#[test]
fn publishes_only_pinned_partitions() {
    let spec = json!({"mig": {"layout": [
        {"profile": "3g.40gb", "start": 4}, {"profile": "1g.10gb", "start": 0}, {"profile": "9g.99gb", "start": 0},
    ]}});
    let inventory = with_profile(partitioned(), &spec);
    let pool = desired(&inventory);
    let partitions: Vec<_> = names(&pool)
        .into_iter()
        .filter(|name| name.starts_with("gpu-0"))
        .collect();
    assert_eq!(partitions, ["gpu-0-mig-1g-10gb-0", "gpu-0-mig-3g-40gb-4"]);
    // A held partition that is not pinned stays published, with the reason.
    let slices = first_publication(&desired(&partitioned()));
    let retained = PublishedGpus::from_slices(&slices, POOL).retained(&inventory);
    let reasons = &retained[&GpuUuid::new(GPU_UUIDS[0])].reasons;
    assert_eq!(reasons.len(), 23);
    assert!(
        reasons
            .values()
            .all(|reason| reason.as_str() == "profile-mig-layout" && reason.is_of_profile())
    );
}

#[test]
fn publishes_only_listed_mig_profiles() {
    let spec = json!({"mig": {"profiles": ["1g.10gb", "3g.40gb"]}});
    let pool = desired(&with_profile(partitioned(), &spec));
    let mut profiles: Vec<_> = pool
        .devices()
        .filter_map(|device| device.attributes.as_ref()?["profile"].string.clone())
        .collect();
    profiles.dedup();
    assert_eq!(profiles, ["1g.10gb", "3g.40gb", "none"]);
}

#[test]
fn scales_amounts_and_keeps_one_share_within_the_gpu() {
    let spec = json!({
        "memoryScaling": 1.5, "oversubscription": "spill", "coreScaling": 2, "splitCount": 4, "defaultCores": 25,
        "devices": [{"index": 1, "memoryScaling": 0.5, "coreScaling": 0.1}],
    });
    let pool = desired(&with_profile(h100x2(), &spec));
    check_limits(&pool);
    let [first, second] = ["gpu-0-vgpu", "gpu-1-vgpu"].map(|name| {
        let device = device(&pool, name);
        let capacity = device.capacity.unwrap();
        let amounts = ["memory", "cores", "slots"].map(|name| {
            let policy = capacity[name].request_policy.as_ref().unwrap();
            let max = policy.valid_range.as_ref().unwrap().max.as_ref();
            let max = max.map_or("", |max| max.0.as_str());
            let default = policy.default.as_ref().unwrap().0.as_str();
            format!("{} default {default} max {max}", capacity[name].value.0)
        });
        let oversubscribed = device.attributes.unwrap()["oversubscribed"].bool;
        (amounts, oversubscribed)
    });
    assert_eq!(
        first,
        (
            [
                "120720Mi default 80480Mi max 80480Mi",
                "200 default 25 max 100",
                "4 default 1 max ",
            ]
            .map(str::to_owned),
            Some(true)
        )
    );
    assert_eq!(
        second,
        (
            [
                "40240Mi default 40240Mi max 40240Mi",
                "10 default 10 max 10",
                "4 default 1 max ",
            ]
            .map(str::to_owned),
            Some(false)
        )
    );
}

#[test]
fn shares_say_how_much_host_memory_suspended_ones_may_have() {
    let limit = |spec: &Value| {
        let pool = desired(&with_profile(h100x2(), spec));
        ["gpu-0", "gpu-0-vgpu", "gpu-1-vgpu"].map(|name| {
            let attributes = device(&pool, name).attributes.unwrap();
            attributes.get("suspendHostMemoryMib")?.int
        })
    };
    assert_eq!(limit(&json!({"splitCount": 4})), [None; 3]);
    let limited = json!({"suspend": {"hostMemory": "64Gi"}});
    // Whole GPUs are not suspended.
    assert_eq!(limit(&limited), [None, Some(64 << 10), Some(64 << 10)]);
    assert_eq!(retained(&json!({}), &limited), []);
}

/// Returns the retained devices with their reasons after a change from the default settings or those of `before`.
fn retained(before: &Value, after: &Value) -> Vec<(String, String)> {
    let slices = first_publication(&desired(&with_profile(h100x2(), before)));
    let published = PublishedGpus::from_slices(&slices, POOL);
    let retained = published.retained(&with_profile(h100x2(), after));
    let reasons = retained.values().flat_map(|retained| &retained.reasons);
    assert!(reasons.clone().all(|(_, reason)| reason.is_of_profile()));
    reasons
        .map(|(device, reason)| (device.clone(), reason.to_string()))
        .collect()
}

#[test]
fn retains_devices_only_if_the_profile_takes_something() {
    let first = |settings: Value| {
        let mut entry = json!({"index": 0});
        let fields = settings.as_object().unwrap().clone();
        entry.as_object_mut().unwrap().extend(fields);
        json!({"devices": [entry]})
    };
    let default = json!({});
    let larger = first(json!({
        "splitCount": 20, "coreScaling": 2, "defaultCores": 50, "defaults": {"computePolicy": "fixed"},
    }));
    assert_eq!(retained(&default, &larger), []);
    let amounts = "the node profile changes the amounts of the device: ";
    let smaller = first(json!({"splitCount": 4, "memoryScaling": 0.5}));
    let change = "memory 80480 MiB to 40240 MiB, slots 10 to 4";
    assert_eq!(
        retained(&default, &smaller),
        [("gpu-0-vgpu".to_owned(), format!("{amounts}{change}"))]
    );
    // A claim may have selected `oversubscribed == false`.
    let oversubscribed = first(json!({"memoryScaling": 2, "oversubscription": "spill"}));
    let change = "oversubscribed false to true";
    assert_eq!(
        retained(&default, &oversubscribed),
        [("gpu-0-vgpu".to_owned(), format!("{amounts}{change}"))]
    );
    let excluded = json!({"exclude": {"indices": [0]}});
    let devices = |retained: Vec<(String, String)>| -> Vec<String> {
        retained.into_iter().map(|(device, _)| device).collect()
    };
    assert_eq!(
        devices(retained(&default, &excluded)),
        ["gpu-0", "gpu-0-vgpu"]
    );
    assert_eq!(
        devices(retained(&default, &first(json!({"mode": "vgpu"})))),
        ["gpu-0"]
    );
    assert_eq!(devices(retained(&excluded, &default)), [""; 0]);
}

fn published(
    inventory: &NodeInventory,
    retained: &BTreeMap<GpuUuid, Retained>,
    health: &HealthByGpu,
) -> Pool {
    publish::desired(NODE, inventory, retained, health, MANAGED, Features::ALL)
}

#[test]
fn publishes_retained_device_as_before_with_taint() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let after = with_profile(h100x2(), &json!({"splitCount": 4, "mode": "vgpu"}));
    let retained = PublishedGpus::from_slices(&slices, POOL).retained(&after);
    let pool = published(&after, &retained, &HealthByGpu::new());
    check_limits(&pool);
    assert_eq!(names(&pool), names(&before));
    for (name, reason) in [("gpu-0", "profile-mode"), ("gpu-0-vgpu", "profile-amounts")] {
        let mut kept = device(&pool, name);
        let taints = kept.taints.take().unwrap();
        let unhealthy = taints
            .iter()
            .find(|taint| taint.key == "gpu.drava.dev/unhealthy");
        assert_eq!(unhealthy.unwrap().value.as_deref(), Some(reason));
        let published = Device {
            taints: None,
            ..device(&before, name)
        };
        assert_eq!(kept, published);
    }
    let reason = retained[&GpuUuid::new(GPU_UUIDS[0])].reason("gpu-0");
    assert_eq!(
        reason,
        Some(&Reason::Unavailable(UnavailableReason::ProfileMode))
    );
}

#[test]
fn fault_of_the_gpu_comes_before_the_profile() {
    let slices = first_publication(&desired(&h100x2()));
    let after = with_profile(h100x2(), &json!({"splitCount": 4}));
    let retained = PublishedGpus::from_slices(&slices, POOL).retained(&after);
    let fault = GpuHealth {
        gpu: Some(Fault::Xid(79)),
        ..GpuHealth::default()
    };
    let health = HealthByGpu::from([(GpuUuid::new(GPU_UUIDS[0]), fault)]);
    let pool = published(&after, &retained, &health);
    let reasons = ["gpu-0-vgpu", "gpu-1-vgpu"].map(|name| {
        let taints = device(&pool, name).taints.unwrap();
        let unhealthy = taints
            .iter()
            .find(|taint| taint.key == "gpu.drava.dev/unhealthy");
        unhealthy.unwrap().value.clone().unwrap()
    });
    assert_eq!(reasons, ["xid-79", "profile-amounts"]);
    let unhealthy: Vec<_> = pool.unhealthy.keys().collect();
    assert_eq!(unhealthy, ["gpu-0", "gpu-0-vgpu"]);
}

#[test]
fn prepares_claims_of_withheld_and_reduced_devices() {
    let devices = |number, results: &[_], inventory| {
        let claim = claim(number, results);
        plan::plan(&claim_ref(number), Some(&claim), POOL, inventory).unwrap()
    };
    let excluded = with_profile(h100x2(), &json!({"exclude": {"indices": [0]}}));
    for allocated in [Whole(0), Share(0, "70Gi", "0")] {
        let wanted = devices(1, &[allocated], &excluded);
        assert_eq!(
            overcommit::check(&claim_ref(1), &wanted, [], &excluded),
            Ok(())
        );
    }
    // The claim was allocated before the change; the device is published as before.
    let mut reduced = with_profile(h100x2(), &json!({"memoryScaling": 0.5}));
    let wanted = devices(1, &[Share(0, "70Gi", "0")], &reduced);
    let conflict = overcommit::check(&claim_ref(1), &wanted, [], &reduced).unwrap_err();
    assert!(conflict.to_string().contains("of 40240 MiB"), "{conflict}");
    let published = PublishedGpus::from_slices(&first_publication(&desired(&h100x2())), POOL);
    for (uuid, retained) in published.retained(&reduced) {
        let totals = retained.share_totals().unwrap();
        reduced.retained_totals.insert(uuid, totals);
    }
    assert_eq!(
        overcommit::check(&claim_ref(1), &wanted, [], &reduced),
        Ok(())
    );
}

#[test]
fn share_options_come_from_profile_class_and_claim() {
    let inventory = with_profile(
        h100x2(),
        &json!({
            "memoryScaling": 2, "oversubscription": "spill",
            "defaults": {"computePolicy": "none", "enforcement": "required"},
        }),
    );
    let options = |config: &Value| {
        let claim = claim_with(1, &[Share(0, "1Gi", "10")], config);
        let devices = plan::plan(&claim_ref(1), Some(&claim), POOL, &inventory).unwrap();
        let share = devices[0].share().unwrap();
        (share.compute_policy, share.memory_policy, share.enforcement)
    };
    assert_eq!(
        options(&json!([])),
        (
            ComputePolicy::None,
            MemoryPolicy::Spill,
            Enforcement::Required
        )
    );
    let of_class = config(
        "FromClass",
        &json!({"memory": {"policy": "hard"}, "enforcement": "report"}),
    );
    assert_eq!(
        options(&of_class),
        (ComputePolicy::None, MemoryPolicy::Hard, Enforcement::Report)
    );
    let of_claim = config("FromClaim", &json!({"computePolicy": "fixed"}));
    assert_eq!(options(&of_claim).0, ComputePolicy::Fixed);
    // The options of shares do not concern a whole GPU.
    let whole = claim(1, &[Whole(0)]);
    assert!(plan::plan(&claim_ref(1), Some(&whole), POOL, &inventory).is_ok());
}
