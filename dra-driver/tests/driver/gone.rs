//! Cards that are gone from the node: they stay published while a claim may count on them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_dra_driver::args::Scheduling;
use drava_dra_driver::inventory::NodeInventory;
use drava_dra_driver::publish::diff::{Change, changes};
use drava_dra_driver::publish::gone::PublishedCards;
use drava_dra_driver::publish::{self, Features, Pool};
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use crate::fixture::Result::{Share, Whole};
use crate::fixture::{NODE, POOL, claim, h100x2, inventory};
use crate::publish::{check_limits, desired, devices, first_publication, owner, stored};

fn without_the_first_card() -> NodeInventory {
    let mut inventory = h100x2();
    inventory.gpus.cards.remove(0);
    inventory
}

/// What stays published of `slices` once only `inventory` is left on the node.
fn after_a_loss(slices: &[ResourceSlice], inventory: &NodeInventory, features: Features) -> Pool {
    let published = PublishedCards::of_slices(slices, POOL);
    let gone = published.gone(&inventory.gpus);
    publish::desired(NODE, inventory, &gone, Scheduling::Managed, features)
}

fn unhealthy(pool: &Pool) -> Vec<&str> {
    let is_unhealthy = |device: &&Device| {
        let mut taints = device.taints.iter().flatten();
        taints.any(|taint| taint.key == "gpu.drava.dev/unhealthy")
    };
    let devices = pool.devices().filter(is_unhealthy);
    devices.map(|device| device.name.as_str()).collect()
}

#[test]
fn a_card_that_is_gone_stays_published_as_it_was_with_a_taint() {
    let before = desired(&h100x2());
    let slices = first_publication(&before);
    let inventory = without_the_first_card();
    let pool = after_a_loss(&slices, &inventory, Features::ALL);
    assert_eq!(unhealthy(&pool), ["gpu-0", "gpu-0-vgpu"]);
    let untainted = |pool: &Pool| -> Vec<Device> {
        let devices = pool.devices().cloned();
        devices
            .map(|device| Device {
                taints: None,
                ..device
            })
            .collect()
    };
    assert_eq!(untainted(&pool), untainted(&before));
    let changes = changes(&slices, &pool, &owner());
    assert!(
        matches!(changes.as_slice(), [Change::Update(_)]),
        "counters stay: {changes:?}"
    );

    // The same again from what is stored then, taints and all.
    let slices = stored(&slices, &changes);
    let again = after_a_loss(&slices, &inventory, Features::ALL);
    assert_eq!(publish::diff::changes(&slices, &again, &owner()), []);
}

#[test]
fn another_card_on_the_same_device_file_takes_the_place_of_the_one_that_is_gone() {
    let slices = first_publication(&desired(&h100x2()));
    let mut inventory = h100x2();
    inventory.gpus.cards[0].uuid = GpuUuid::new("GPU-11111111-0000-4000-8000-000000000000");
    let pool = after_a_loss(&slices, &inventory, Features::ALL);
    assert!(unhealthy(&pool).is_empty());
    assert_eq!(pool, desired(&inventory));
}

#[test]
fn of_a_card_that_is_gone_no_more_is_offered_than_the_server_keeps() {
    let slices = first_publication(&desired(&h100x2()));
    let features = Features {
        counters: false,
        ..Features::ALL
    };
    let pool = after_a_loss(&slices, &without_the_first_card(), features);
    assert_eq!(unhealthy(&pool), ["gpu-0"]);
    assert!(
        devices(&pool)
            .iter()
            .all(|device| device.consumes_counters.is_none())
    );
    check_limits(&pool);
}

#[test]
fn of_two_generations_the_newer_counts() {
    let older = first_publication(&desired(&h100x2()));
    let mut slices = first_publication(&desired(&without_the_first_card()));
    for slice in &mut slices {
        slice.spec.pool.generation = 2;
        for device in slice.spec.devices.iter_mut().flatten() {
            device.consumes_counters = None;
        }
    }
    slices.extend(older);
    let nothing_left = inventory(Vec::new());
    let published = PublishedCards::of_slices(&slices, POOL).gone(&nothing_left.gpus);
    let counting: Vec<_> = published
        .values()
        .flat_map(|card| &card.devices)
        .filter(|device| device.consumes_counters.is_some())
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(counting, ["gpu-0", "gpu-0-vgpu"]);
}

#[test]
fn a_card_that_is_gone_may_go_once_its_taint_has_stood_for_a_while() {
    let slices = first_publication(&desired(&h100x2()));
    let inventory = without_the_first_card();
    let mut published = PublishedCards::of_slices(&slices, POOL);
    let gone = published.gone(&inventory.gpus);
    let card = gone.keys().next().unwrap();
    let (now, grace) = (Instant::now(), Duration::from_secs(300));
    assert!(
        !published.may_go(card, now + grace, grace),
        "not tainted yet"
    );
    let pool = publish::desired(NODE, &inventory, &gone, Scheduling::Managed, Features::ALL);
    published.published(&pool, &gone, now);
    assert!(!published.may_go(card, now + grace / 2, grace));
    assert_eq!(published.next_look(now, grace), Some(now + grace));
    // Published once more meanwhile: the time goes on counting.
    published.published(&pool, &gone, now + grace / 2);
    assert!(published.may_go(card, now + grace, grace));
    let later = published.next_look(now + grace, grace).unwrap();
    assert!(
        later > now + grace && later <= now + grace * 2,
        "not at once again"
    );

    // It comes back, and goes again: the time starts anew.
    published.published(&desired(&h100x2()), &BTreeMap::new(), now + grace);
    assert!(published.gone(&h100x2().gpus).is_empty());
    assert_eq!(published.next_look(now, grace), None);
    assert!(!published.may_go(card, now + grace * 2, grace));
}

#[test]
fn a_claim_holds_the_devices_of_this_driver_and_pool_only() {
    let allocated = |claims: &[ResourceClaim]| publish::gone::allocated(claims, POOL);
    let mut elsewhere = claim(2, &[Whole(1)]);
    let results = elsewhere
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap();
    let results = results.devices.as_mut().unwrap().results.as_mut().unwrap();
    results[0].pool = "another/gpus".to_owned();
    let mut others = claim(3, &[Whole(1)]);
    let of_others = others.status.as_mut().unwrap().allocation.as_mut().unwrap();
    let of_others = of_others
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap();
    of_others[0].driver = "gpu.example.com".to_owned();
    let held = allocated(&[claim(1, &[Share(0, "1Gi", "0")]), elsewhere, others]);
    assert_eq!(held, BTreeSet::from(["gpu-0-vgpu".to_owned()]));
}
