//! The plan of a claim from its allocation and config: a pure function.

use drava_api::config::{ComputePolicy, Priority};
use drava_api::obstacle::LimitObstacle;
use drava_dra_driver::prepare::plan::{self, PlanError};
use drava_dra_driver::prepare::{Access, Prepared};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;

use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{
    GPU_UUIDS, POOL, claim, claim_ref, claim_with, config, h100x2, results_of, share_id,
};

fn plan(claim: &ResourceClaim) -> Result<Vec<Prepared>, PlanError> {
    plan::plan(&claim_ref(1), Some(claim), POOL, &h100x2())
}

fn rejection(claim: &ResourceClaim) -> String {
    plan(claim).unwrap_err().to_string()
}

#[test]
fn plans_share_from_capacity_and_config() {
    let config = json!([
        config("FromClass", &json!({"maxPriority": 50}))[0],
        config(
            "FromClaim",
            &json!({"computePolicy": "fixed", "priority": 20})
        )[0],
    ]);
    let devices = plan(&claim_with(1, &[Share(1, "8Gi", "30")], &config)).unwrap();
    let [device] = devices.as_slice() else {
        panic!("{devices:?}")
    };
    let share = device.share().unwrap();
    assert_eq!(
        (device.request.as_str(), device.device.as_str()),
        ("gpu", "gpu-1-vgpu")
    );
    assert_eq!(
        (device.gpu.uuid.as_str(), device.gpu.minor),
        (GPU_UUIDS[1], 1)
    );
    assert_eq!(share.id.as_str(), share_id(1, 0));
    assert_eq!(
        (share.memory_bytes, share.cores, share.slots),
        (8 << 30, 30, 1)
    );
    assert_eq!(
        (share.compute_policy, share.priority),
        (ComputePolicy::Fixed, Priority::try_from(20).unwrap())
    );
}

#[test]
fn driver_limits_memory_where_it_can_unless_the_class_says_otherwise() {
    let mut inventory = h100x2();
    let [first, second] = [0, 1].map(|index| inventory.nvml.gpus[index].uuid.clone());
    inventory.driver_limits.insert(first, Ok(()));
    let missing = Err(LimitObstacle::NoCgroupV2);
    inventory.driver_limits.insert(second, missing);
    let planned = |gpu: u32, enforcement: &str| {
        let class = config(
            "FromClass",
            &json!({"memory": {"enforcement": enforcement}}),
        );
        let claim = claim_with(1, &[Share(gpu, "8Gi", "0")], &class);
        let devices = plan::plan(&claim_ref(1), Some(&claim), POOL, &inventory);
        let devices = devices.map_err(|error| error.to_string())?;
        Ok(devices[0].share().unwrap().limited_by_driver)
    };
    assert_eq!(planned(0, "auto"), Ok(true));
    assert_eq!(planned(0, "driver"), Ok(true));
    assert_eq!(planned(0, "library"), Ok(false));
    assert_eq!(planned(1, "auto"), Ok(false));
    assert_eq!(planned(1, "library"), Ok(false));
    let refused: String = planned(1, "driver").unwrap_err();
    for part in ["device gpu-1-vgpu", "has no cgroup v2", "memoryEnforcement"] {
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn ignores_results_of_other_drivers() {
    let mut claim = claim(1, &[Whole(0), Whole(1)]);
    let results = results_of(&mut claim);
    results[0].driver = "gpu.nvidia.com".to_owned();
    results[1].request = "gpu/whole".to_owned();
    let devices = plan(&claim).unwrap();
    let [device] = devices.as_slice() else {
        panic!("{devices:?}")
    };
    assert_eq!(
        (device.request.as_str(), device.device.as_str()),
        ("gpu", "gpu-1")
    );
    assert_eq!(device.access, Access::Whole);
}

#[test]
fn plans_admin_access() {
    let mut claim = claim(1, &[Whole(0)]);
    results_of(&mut claim)[0].admin_access = Some(true);
    assert_eq!(plan(&claim).unwrap()[0].access, Access::Admin);
}

#[test]
fn rejects_incomplete_claim_with_missing_field() {
    let valid = || claim(1, &[Share(0, "8Gi", "0")]);
    let with = |change: fn(&mut ResourceClaim)| {
        let mut claim = valid();
        change(&mut claim);
        rejection(&claim)
    };
    let deleted = plan::plan(&claim_ref(1), None, POOL, &h100x2())
        .unwrap_err()
        .to_string();
    assert_eq!(deleted, "not found in the API server");
    let replaced = with(|claim| claim.metadata.uid = Some("other".to_owned()));
    assert!(
        replaced.contains("replaced by a claim of the same name (uid other)"),
        "{replaced}"
    );
    let unallocated = with(|claim| claim.status.as_mut().unwrap().allocation = None);
    assert_eq!(unallocated, "not allocated (status.allocation is empty)");
    let unreserved = with(|claim| claim.status.as_mut().unwrap().reserved_for = None);
    assert_eq!(
        unreserved,
        "not reserved for a pod (status.reservedFor is empty)"
    );
    let elsewhere = plan::plan(&claim_ref(1), Some(&valid()), "node-b/gpus", &h100x2())
        .unwrap_err()
        .to_string();
    assert!(
        elsewhere.contains("no device of pool node-b/gpus"),
        "{elsewhere}"
    );
}

#[test]
fn reports_missing_device_with_present_devices() {
    let mut inventory = h100x2();
    inventory.nvml.gpus.remove(1);
    let claim = claim(1, &[Share(1, "8Gi", "0")]);
    let error = plan::plan(&claim_ref(1), Some(&claim), POOL, &inventory)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(
            "request gpu: device gpu-1-vgpu is not on this node (present: gpu-0, gpu-0-vgpu, \
             25 partitions of gpu-0)"
        ),
        "{error}"
    );
}

#[test]
fn rejects_invalid_amounts_with_field() {
    for (capacity, value, text) in [
        (
            "cores",
            "101",
            "consumedCapacity.cores of device gpu-0-vgpu is 101, expected an integer from 0 to 100",
        ),
        ("cores", "-1", "is -1, expected an integer from 0 to 100"),
        ("cores", "500m", "is 500m, expected"),
        (
            "memory",
            "0",
            "consumedCapacity.memory of device gpu-0-vgpu is 0, expected a positive multiple of 1Mi",
        ),
        (
            "memory",
            "-1Gi",
            "is -1Gi, expected a positive multiple of 1Mi",
        ),
        (
            "memory",
            "1000",
            "is 1000, expected a positive multiple of 1Mi",
        ),
        ("memory", "lots", "is lots, expected"),
        (
            "slots",
            "0",
            "consumedCapacity.slots of device gpu-0-vgpu is 0, expected an integer of at least 1",
        ),
    ] {
        let mut claim = claim(1, &[Share(0, "8Gi", "30")]);
        let consumed = &mut results_of(&mut claim)[0].consumed_capacity;
        let consumed = consumed.as_mut().unwrap();
        consumed.insert(capacity.to_owned(), Quantity(value.to_owned()));
        let error = rejection(&claim);
        assert!(error.contains(text), "{capacity} {value}: {error}");
        assert!(error.contains("request gpu"), "{error}");
    }
}

#[test]
fn names_feature_gate_for_share_without_id_or_capacity() {
    for field in ["shareID", "consumedCapacity"] {
        let mut claim = serde_json::to_value(claim(1, &[Share(0, "8Gi", "30")])).unwrap();
        let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
        result.as_object_mut().unwrap().remove(field);
        let error = rejection(&serde_json::from_value(claim).unwrap());
        assert!(
            error.contains(field) && error.contains("DRAConsumableCapacity"),
            "{error}"
        );
    }
    let mut claim = claim(1, &[Share(0, "8Gi", "30")]);
    results_of(&mut claim)[0].share_id = Some("../../../etc".to_owned());
    assert!(rejection(&claim).contains("invalid shareID \"../../../etc\""));
}

#[test]
fn rejects_config_forbidden_for_claims_with_field() {
    for (fields, text) in [
        (
            json!({"color": "red"}),
            "config field color: unknown field `color`",
        ),
        (
            json!({"memory": {"percent": 0}}),
            "config field memory.percent: 0 is out of range, use 1 to 100",
        ),
        (
            json!({"computePolicy": "none"}),
            "config field computePolicy: not allowed in a claim (only fixed)",
        ),
        (
            json!({"priority": 1}),
            "config field priority: not allowed in a claim (1 exceeds the class's maximum of 0)",
        ),
        (
            json!({"enforcement": "report"}),
            "config field enforcement: not allowed in a claim",
        ),
        (
            json!({"kind": "GpuConfig"}),
            "config is gpu.drava.dev/v1alpha1 GpuConfig",
        ),
    ] {
        let error = rejection(&claim_with(
            1,
            &[Share(0, "8Gi", "30")],
            &config("FromClaim", &fields),
        ));
        assert!(error.contains(text), "{fields}: {error}");
        assert!(error.starts_with("request gpu: config"), "{error}");
    }
}

#[test]
fn rejects_percentage_that_allocator_ignored() {
    let percent = config("FromClaim", &json!({"memory": {"percent": 50}}));
    let whole = rejection(&claim_with(1, &[Share(0, "80Gi", "30")], &percent));
    assert!(whole.contains("instead of 50%"), "{whole}");
    let half = claim_with(1, &[Share(0, "39Gi", "30")], &percent);
    assert_eq!(plan(&half).unwrap().len(), 1);
}

#[test]
fn rejects_share_config_on_whole_gpu() {
    for (source, fields, field) in [
        (
            "FromClaim",
            json!({"computePolicy": "fixed"}),
            "computePolicy",
        ),
        (
            "FromClaim",
            json!({"memory": {"percent": 50}}),
            "memory.percent",
        ),
        (
            "FromClass",
            json!({"memory": {"policy": "spill"}}),
            "memory.policy",
        ),
    ] {
        let error = rejection(&claim_with(1, &[Whole(0)], &config(source, &fields)));
        let expected = format!(
            "config field {field} applies to shares (type vgpu), but device gpu-0 is a whole GPU"
        );
        assert!(error.contains(&expected), "{error}");
    }
}
