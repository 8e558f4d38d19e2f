//! Changes that bring the slices of an API server to the desired ones.

use drava_dra_driver::publish::diff::{Change, changes};
use drava_nvml::GpuUuid;
use k8s_openapi::jiff::Timestamp;

use crate::fixture::{h100x2, t4};
use crate::publish::{desired, first_publication, owner, stored};

#[test]
fn skips_unchanged_slices() {
    let pool = desired(&h100x2());
    let mut slices = first_publication(&pool);
    // The server may spell quantities differently.
    for device in slices
        .iter_mut()
        .flat_map(|slice| slice.spec.devices.iter_mut().flatten())
    {
        for capacity in device.capacity.as_mut().unwrap().values_mut() {
            if capacity.value.0 == "100" {
                capacity.value.0 = "100000m".to_owned();
            }
        }
    }
    assert_eq!(changes(&slices, &pool, &owner()), []);
}

#[test]
fn keeps_generation_and_taint_times_on_single_change() {
    let pool = desired(&h100x2());
    let mut slices = first_publication(&pool);
    let devices = slices
        .iter_mut()
        .find(|slice| slice.spec.devices.is_some())
        .unwrap();
    devices.spec.devices.as_mut().unwrap()[0]
        .attributes
        .as_mut()
        .unwrap()
        .clear();
    let changes = changes(&slices, &pool, &owner());
    let [Change::Update(update)] = changes.as_slice() else {
        panic!("{changes:?}")
    };
    assert_eq!(update.spec.pool.generation, 1);
    let taints = update
        .spec
        .devices
        .iter()
        .flatten()
        .flat_map(|device| device.taints.iter().flatten());
    assert!(
        taints
            .map(|taint| taint.time_added.as_ref().unwrap())
            .all(|time| time.0 == Timestamp::UNIX_EPOCH)
    );
}

#[test]
fn increments_generation_on_multiple_changes() {
    let slices = first_publication(&desired(&h100x2()));
    let mut grown = h100x2();
    for minor in 2..10 {
        let mut gpu = grown.nvml.gpus[0].clone();
        gpu.minor = minor;
        gpu.uuid = GpuUuid::new(format!("GPU-00000000-0000-4000-8000-{minor:012}"));
        grown.nvml.gpus.push(gpu);
    }
    let pool = desired(&grown);
    assert_eq!(pool.slices.len(), 3, "ten counter sets need two slices");
    let changes = changes(&slices, &pool, &owner());
    let after = stored(&slices, &changes);
    assert!(
        after
            .iter()
            .all(|slice| slice.spec.pool.generation == 2
                && slice.spec.pool.resource_slice_count == 3)
    );
    assert!(changes.is_sorted_by_key(|change| match change {
        Change::Delete { .. } => 0,
        Change::Update(_) => 1,
        Change::Create(_) => 2,
    }));
}

#[test]
fn deletes_slice_of_earlier_layout() {
    let pool = desired(&t4());
    let mut slices = first_publication(&pool);
    let mut old = slices[0].clone();
    old.metadata.name = Some("old".to_owned());
    old.metadata.uid = Some("old-uid".to_owned());
    slices.push(old);
    let changes = changes(&slices, &pool, &owner());
    assert_eq!(
        changes,
        [Change::Delete {
            name: "old".to_owned(),
            uid: "old-uid".to_owned()
        }]
    );
}

#[test]
fn ignores_generation_of_other_pool() {
    let pool = desired(&t4());
    let mut of_other_pool = first_publication(&pool);
    for slice in &mut of_other_pool {
        slice.spec.pool.name = "another".to_owned();
        slice.spec.pool.generation = 9;
        let name = slice.metadata.name.as_mut().unwrap();
        name.push_str("-of-other-pool");
    }
    let changes = changes(&of_other_pool, &pool, &owner());
    let after = stored(&of_other_pool, &changes);
    assert_eq!(after.len(), 2);
    assert!(after.iter().all(|slice| slice.spec.pool.generation == 1));
}

#[test]
fn repairs_deleted_and_edited_slices() {
    let pool = desired(&h100x2());
    let slices = first_publication(&pool);
    assert_eq!(
        stored(&[], &changes(&[], &pool, &owner())).len(),
        slices.len()
    );

    let half = &slices[..1];
    let repaired = stored(half, &changes(half, &pool, &owner()));
    assert!(
        repaired.iter().all(|slice| slice.spec.pool.generation == 2),
        "old and new slices share a generation"
    );

    let mut edited = slices.clone();
    edited[0].metadata.owner_references = None;
    assert!(matches!(
        changes(&edited, &pool, &owner()).as_slice(),
        [Change::Update(_)]
    ));
}
