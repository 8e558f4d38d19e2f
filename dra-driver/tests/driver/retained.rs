//! Devices that the node does not offer anymore stay published while a claim may use them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_dra_driver::gpu_health::HealthByGpu;
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::publish::diff::{Change, changes};
use drava_dra_driver::publish::retained::PublishedGpus;
use drava_dra_driver::publish::{self, Features, Pool};
use drava_nvml::{ComputeMode, Gpu, GpuUuid, Mig};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{NODE, POOL, claim, h100x2, inventory, results_of};
use crate::publish::{MANAGED, check_limits, desired, devices, first_publication, owner, stored};

fn without_first_gpu() -> NodeInventory {
    let mut inventory = h100x2();
    inventory.nvml.gpus.remove(0);
    inventory
}

/// Returns the pool for `inventory` after `slices` were published.
fn after(slices: &[ResourceSlice], inventory: &NodeInventory, features: Features) -> Pool {
    let published = PublishedGpus::from_slices(slices, POOL);
    let retained = published.retained(inventory);
    publish::desired(
        NODE,
        inventory,
        &retained,
        &HealthByGpu::new(),
        MANAGED,
        features,
    )
}

/// Returns the unhealthy devices and the reasons.
fn unhealthy(pool: &Pool) -> Vec<(&str, &str)> {
    let mut unhealthy = Vec::new();
    for device in pool.devices() {
        let mut taints = device.taints.iter().flatten();
        if let Some(taint) = taints.find(|taint| taint.key == "gpu.drava.dev/unhealthy") {
            unhealthy.push((device.name.as_str(), taint.value.as_deref().unwrap()));
        }
    }
    unhealthy
}

fn untainted(pool: &Pool) -> Vec<Device> {
    let devices = pool.devices().cloned();
    devices
        .map(|device| Device {
            taints: None,
            ..device
        })
        .collect()
}

/// Returns the inventory after a change of the first GPU.
fn with_first_gpu(change: impl FnOnce(&mut Gpu)) -> NodeInventory {
    let mut inventory = h100x2();
    change(&mut inventory.nvml.gpus[0]);
    inventory
}

fn partitioned(gpu: &mut Gpu) {
    if let Mig::Capable {
        enabled, pending, ..
    } = &mut gpu.mig
    {
        (*enabled, *pending) = (true, true);
    }
}

#[test]
fn retains_lost_gpu_with_taint() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let inventory = without_first_gpu();
    let pool = after(&slices, &inventory, Features::ALL);
    assert_eq!(
        unhealthy(&pool),
        [("gpu-0", "lost"), ("gpu-0-vgpu", "lost")]
    );
    assert_eq!(untainted(&pool), untainted(&before));
    let changes = changes(&slices, &pool, &owner());
    assert!(
        matches!(changes.as_slice(), [Change::Update(_)]),
        "counters changed: {changes:?}"
    );

    // The stored slices, with taints, lead to no further change.
    let slices = stored(&slices, &changes);
    let again = after(&slices, &inventory, Features::ALL);
    assert_eq!(publish::diff::changes(&slices, &again, &owner()), []);
}

#[test]
fn replaces_lost_gpu_with_same_minor_number() {
    let slices = first_publication(&desired(&h100x2()));
    let mut inventory = h100x2();
    inventory.nvml.gpus[0].uuid = GpuUuid::new("GPU-11111111-0000-4000-8000-000000000000");
    let pool = after(&slices, &inventory, Features::ALL);
    assert!(unhealthy(&pool).is_empty());
    assert_eq!(pool, desired(&inventory));
}

#[test]
fn retains_only_devices_supported_by_api_server() {
    let slices = first_publication(&desired(&h100x2()));
    let features = Features {
        counters: false,
        ..Features::ALL
    };
    let pool = after(&slices, &without_first_gpu(), features);
    assert_eq!(unhealthy(&pool), [("gpu-0", "lost")]);
    assert!(
        devices(&pool)
            .iter()
            .all(|device| device.consumes_counters.is_none())
    );
    check_limits(&pool);
}

#[test]
fn reads_published_gpus_from_newest_generation() {
    let older = first_publication(&desired(&h100x2()));
    let mut slices = first_publication(&desired(&without_first_gpu()));
    for slice in &mut slices {
        slice.spec.pool.generation = 2;
        for device in slice.spec.devices.iter_mut().flatten() {
            device.consumes_counters = None;
        }
    }
    slices.extend(older);
    let no_gpus = inventory(Vec::new());
    let published = PublishedGpus::from_slices(&slices, POOL).retained(&no_gpus);
    let counting: Vec<_> = published
        .values()
        .flat_map(|retained| &retained.gpu.devices)
        .filter(|device| device.consumes_counters.is_some())
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(counting, ["gpu-0", "gpu-0-vgpu"]);
}

#[test]
fn withdraws_lost_gpu_after_taint_grace_period() {
    let slices = first_publication(&desired(&h100x2()));
    let inventory = without_first_gpu();
    let mut published = PublishedGpus::from_slices(&slices, POOL);
    let retained = published.retained(&inventory);
    let gpu = retained.values().next().unwrap();
    let (now, grace) = (Instant::now(), Duration::from_secs(300));
    assert!(
        !published.is_grace_over(gpu, now + grace, grace),
        "not tainted yet"
    );
    let pool = |retained| {
        publish::desired(
            NODE,
            &inventory,
            retained,
            &HealthByGpu::new(),
            MANAGED,
            Features::ALL,
        )
    };
    published.set_published(&pool(&retained), &retained, now);
    assert!(!published.is_grace_over(gpu, now + grace / 2, grace));
    assert_eq!(published.next_check(now, grace), Some(now + grace));
    // A second publication does not restart the grace period.
    published.set_published(&pool(&retained), &retained, now + grace / 2);
    assert!(published.is_grace_over(gpu, now + grace, grace));
    let later = published.next_check(now + grace, grace).unwrap();
    assert!(
        later > now + grace && later <= now + grace * 2,
        "retry without a delay"
    );

    // The grace period restarts after the GPU was present.
    published.set_published(&desired(&h100x2()), &BTreeMap::new(), now + grace);
    assert!(published.retained(&h100x2()).is_empty());
    assert_eq!(published.next_check(now, grace), None);
    assert!(!published.is_grace_over(gpu, now + grace * 2, grace));
}

#[test]
fn retains_gpu_in_excluded_mode_with_reason() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let prohibited = |gpu: &mut Gpu| gpu.compute_mode = ComputeMode::Prohibited;
    let prohibited_and_partitioned = |gpu: &mut Gpu| {
        prohibited(gpu);
        partitioned(gpu);
    };
    let reason = "compute-mode-prohibited";
    for inventory in [
        with_first_gpu(prohibited),
        with_first_gpu(prohibited_and_partitioned),
    ] {
        let pool = after(&slices, &inventory, Features::ALL);
        assert_eq!(
            unhealthy(&pool),
            [("gpu-0", reason), ("gpu-0-vgpu", reason)]
        );
        assert_eq!(untainted(&pool), untainted(&before));
        check_limits(&pool);
        let changes = changes(&slices, &pool, &owner());
        assert!(
            matches!(changes.as_slice(), [Change::Update(_)]),
            "counters changed: {changes:?}"
        );
        // A restarted driver publishes the same. In the old mode the devices are as before.
        let stored = stored(&slices, &changes);
        let again = after(&stored, &inventory, Features::ALL);
        assert_eq!(publish::diff::changes(&stored, &again, &owner()), []);
        assert_eq!(after(&stored, &h100x2(), Features::ALL), before);
    }
}

#[test]
fn retains_devices_of_other_mig_mode() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let on = with_first_gpu(partitioned);
    let pool = after(&slices, &on, Features::ALL);
    assert_eq!(
        unhealthy(&pool),
        [("gpu-0", "mig-mode"), ("gpu-0-vgpu", "mig-mode")]
    );
    check_limits(&pool);
    let with_partitions = stored(&slices, &changes(&slices, &pool, &owner()));
    let retained = unhealthy(&pool).len();
    assert_eq!(
        devices(&pool).len() - retained,
        devices(&desired(&on)).len()
    );

    // Back in the old mode, the partitions are retained and the other devices are as before.
    let back = after(&with_partitions, &h100x2(), Features::ALL);
    assert_eq!(unhealthy(&back).len(), devices(&desired(&on)).len() - 2);
    let is_healthy = |device: &&Device| {
        unhealthy(&back)
            .iter()
            .all(|(name, _)| device.name != *name)
    };
    let healthy: Vec<_> = back.devices().filter(is_healthy).cloned().collect();
    assert_eq!(healthy, before.devices().cloned().collect::<Vec<_>>());
    assert!(
        unhealthy(&back)
            .iter()
            .all(|(_, reason)| *reason == "mig-mode-disabled")
    );
    check_limits(&back);
}

#[test]
fn taints_only_devices_excluded_by_new_mode() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let exclusive = with_first_gpu(|gpu| gpu.compute_mode = ComputeMode::ExclusiveProcess);
    let pool = after(&slices, &exclusive, Features::ALL);
    let reason = "compute-mode-exclusive-process";
    assert_eq!(unhealthy(&pool), [("gpu-0-vgpu", reason)]);
    // Besides, the whole GPU says why it has no spatial shares. The device of the shares stays as it was published.
    let mut expected = untainted(&before);
    let of_gpu = expected.iter_mut().filter(|one| one.name == "gpu-0");
    for device in of_gpu {
        let attributes = device.attributes.as_mut().unwrap();
        let obstacle = attributes.get_mut("spatialObstacle").unwrap();
        assert_eq!(
            obstacle.string.replace(reason.to_owned()).as_deref(),
            Some("none")
        );
    }
    assert_eq!(untainted(&pool), expected);
    check_limits(&pool);

    // Each device has its own grace period over two modes.
    let mut published = PublishedGpus::from_slices(&slices, POOL);
    let (now, grace) = (Instant::now(), Duration::from_secs(300));
    let mut publish_at = |inventory: &NodeInventory, now| {
        let retained = published.retained(inventory);
        let pool = publish::desired(
            NODE,
            inventory,
            &retained,
            &HealthByGpu::new(),
            MANAGED,
            Features::ALL,
        );
        published.set_published(&pool, &retained, now);
        let gpu = retained.values().next().unwrap();
        published.is_grace_over(gpu, now, grace)
    };
    assert!(!publish_at(&exclusive, now));
    assert!(publish_at(&exclusive, now + grace));
    let partitioned = with_first_gpu(partitioned);
    assert!(
        !publish_at(&partitioned, now + grace),
        "the whole GPU was excluded just now"
    );
    assert!(publish_at(&partitioned, now + grace * 2));
}

#[test]
fn keeps_counters_of_both_modes_while_retained() {
    let slices = first_publication(&desired(&h100x2()));
    let inventory = with_first_gpu(|gpu| {
        gpu.compute_mode = ComputeMode::ExclusiveProcess;
        // Without known MIG profiles, only one counter remains.
        gpu.mig = Mig::NotCapable;
    });
    let pool = after(&slices, &inventory, Features::ALL);
    let consumed: BTreeSet<_> = pool
        .devices()
        .filter(|device| device.name.starts_with("gpu-0"))
        .map(|device| {
            let consumed = device.consumes_counters.as_ref().unwrap();
            let names: Vec<_> = consumed[0].counters.keys().cloned().collect();
            (consumed[0].counter_set.clone(), names)
        })
        .collect();
    // The whole GPU and the retained shares exclude each other.
    let all = pool.slices.values().find_map(|content| match content {
        publish::SliceContent::Counters(sets) => sets.iter().find(|set| set.name == "gpu-0"),
        publish::SliceContent::Devices(_) => None,
    });
    let all: Vec<_> = all.unwrap().counters.keys().cloned().collect();
    assert!(all.contains(&"gpu".to_owned()) && all.contains(&"memory-slice-0".to_owned()));
    assert_eq!(consumed, BTreeSet::from([("gpu-0".to_owned(), all)]));
}

#[test]
fn republishes_gpu_with_new_minor_number() {
    let slices = first_publication(&desired(&h100x2()));
    let moved = with_first_gpu(|gpu| {
        gpu.minor = 7;
        partitioned(gpu);
    });
    let pool = after(&slices, &moved, Features::ALL);
    assert_eq!(pool, desired(&moved));
}

#[test]
fn counts_allocated_devices_of_own_driver_and_pool_only() {
    let allocated = |claims: &[ResourceClaim]| publish::retained::allocated(claims, POOL);
    let mut elsewhere = claim(2, &[Whole(1)]);
    results_of(&mut elsewhere)[0].pool = "another/gpus".to_owned();
    let mut others = claim(3, &[Whole(1)]);
    results_of(&mut others)[0].driver = "gpu.example.com".to_owned();
    let held = allocated(&[claim(1, &[Share(0, "1Gi", "0")]), elsewhere, others]);
    assert_eq!(held, BTreeSet::from(["gpu-0-vgpu".to_owned()]));
}
