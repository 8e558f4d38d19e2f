//! Quotas: which devices a namespace still gets, and what counts.

use serde_json::{Value, json};

use super::partition::partitioned;
use super::{BINPACK, allocate, whole};
use crate::cluster::Cluster;
use crate::fixture::{claim, cluster, pod_request, quota, request, share};

/// Quota of namespace `default`.
fn limited(cluster: &mut Cluster, name: &str, limit: &Value) {
    let spec = json!({"namespaces": ["default"], "limit": limit});
    cluster.upsert_quota(&quota(name, &spec));
}

/// Used memory in MiB, cores and devices of the only quota.
fn used(cluster: &Cluster) -> (u64, u64, u64) {
    let used = cluster.quotas().next().unwrap().used;
    let units = |amount: drava_api::Quantity| amount.to_u64_rounded_up().unwrap();
    (
        units(used.memory) >> 20,
        units(used.cores),
        units(used.devices),
    )
}

#[test]
fn counts_shares_whole_gpus_and_partitions() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    limited(&mut cluster, "q", &json!({}));
    allocate(&mut cluster, &[share("a", "8Gi", "30")], BINPACK).unwrap();
    assert_eq!(used(&cluster), (8 << 10, 30, 1));
    allocate(&mut cluster, &[whole("w")], BINPACK).unwrap();
    assert_eq!(used(&cluster), (88 << 10, 130, 2));
    let mut cluster = partitioned(1);
    limited(&mut cluster, "q", &json!({}));
    let partition =
        json!({"deviceClassName": "mig.drava.dev", "capacity": {"requests": {"memory": "3Gi"}}});
    allocate(&mut cluster, &[request("m", &partition)], BINPACK).unwrap();
    assert_eq!(
        used(&cluster),
        (4864, 0, 1),
        "the capacity of the partition"
    );
}

#[test]
fn counts_no_admin_access_and_no_other_namespace() {
    let mut cluster = cluster(&[("n1", &[80])]);
    limited(&mut cluster, "q", &json!({"devices": 1}));
    let admin = json!({"deviceClassName": "vgpu.drava.dev", "adminAccess": true});
    allocate(&mut cluster, &[request("admin", &admin)], BINPACK).unwrap();
    let mut other = share("other", "8Gi", "0");
    other.metadata.namespace = Some("elsewhere".to_owned());
    allocate(&mut cluster, &[other], BINPACK).unwrap();
    assert_eq!(used(&cluster), (0, 0, 0));
    allocate(&mut cluster, &[share("a", "8Gi", "0")], BINPACK).unwrap();
    allocate(&mut cluster, &[request("admin-2", &admin)], BINPACK).unwrap();
}

#[test]
fn names_first_resource_beyond_limit() {
    let limits = [
        (
            json!({"memory": "7Gi"}),
            "memory 0 B of 7 GiB used, 8 GiB requested",
        ),
        (
            json!({"memory": "8Gi", "cores": 29}),
            "cores 0% of 29% used, 30% requested",
        ),
        (json!({"devices": 0}), "devices 0 of 0 used, 1 requested"),
    ];
    for (limit, text) in limits {
        let mut cluster = cluster(&[("n1", &[80])]);
        limited(&mut cluster, "team-a", &limit);
        assert_eq!(
            allocate(&mut cluster, &[share("a", "8Gi", "30")], BINPACK),
            Err(format!("0/1 nodes: 1 QuotaExceeded (quota team-a: {text})"))
        );
    }
}

#[test]
fn all_quotas_of_namespace_hold() {
    let mut cluster = cluster(&[("n1", &[80])]);
    limited(&mut cluster, "one", &json!({"memory": "20Gi"}));
    limited(&mut cluster, "two", &json!({"memory": "10Gi"}));
    assert!(allocate(&mut cluster, &[share("a", "15Gi", "0")], BINPACK).is_err());
    cluster.remove_quota("two");
    assert!(allocate(&mut cluster, &[share("a", "15Gi", "0")], BINPACK).is_ok());
}

#[test]
fn quota_of_model_leaves_other_models() {
    let mut cluster = cluster(&[("n1", &[16, 80])]);
    let spec = json!({
        "namespaces": ["default"], "limit": {"devices": 1}, "deviceSelector": {"productNames": ["NVIDIA H100"]},
    });
    cluster.upsert_quota(&quota("h100", &spec));
    assert_eq!(
        allocate(&mut cluster, &[share("a", "20Gi", "0")], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
    let device = allocate(&mut cluster, &[share("b", "4Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        device,
        ["n1/gpu-0-vgpu"],
        "binpack prefers the H100, whose quota is used up"
    );
    let error = allocate(&mut cluster, &[share("c", "20Gi", "0")], BINPACK).unwrap_err();
    assert!(
        error.contains("quota h100: devices 1 of 1 used, 1 requested"),
        "{error}"
    );
}

#[test]
fn sums_devices_of_a_pod() {
    let mut cluster = cluster(&[("n1", &[80, 80, 80])]);
    limited(&mut cluster, "q", &json!({"memory": "20Gi"}));
    let several = |name: &str, count: u64, memory: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "count": count, "capacity": {"requests": {"memory": memory}}}),
        )
    };
    let error = allocate(&mut cluster, &[several("a", 3, "8Gi")], BINPACK).unwrap_err();
    assert!(
        error.contains("memory 0 B of 20 GiB used, 24 GiB requested"),
        "{error}"
    );
    assert!(allocate(&mut cluster, &[several("b", 2, "8Gi")], BINPACK).is_ok());
    let two_claims = [share("c", "2Gi", "0"), share("d", "3Gi", "0")];
    assert!(allocate(&mut cluster, &two_claims, BINPACK).is_err());
}

#[test]
fn limits_each_claim_alone() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let spec =
        json!({"namespaces": ["default"], "claim": {"max": {"memory": "8Gi", "devices": 1}}});
    cluster.upsert_quota(&quota("q", &spec));
    let error = allocate(&mut cluster, &[share("a", "9Gi", "0")], BINPACK).unwrap_err();
    assert!(
        error.contains("quota q: memory 9 GiB requested by one claim, 8 GiB allowed"),
        "{error}"
    );
    let two_claims = [share("a", "8Gi", "0"), share("b", "8Gi", "0")];
    assert!(allocate(&mut cluster, &two_claims, BINPACK).is_ok());
    let two_requests = claim(
        "c",
        &json!({"requests": [
            {"name": "x", "exactly": {"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "1Gi"}}}},
            {"name": "y", "exactly": {"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "1Gi"}}}},
        ]}),
    );
    let error = allocate(&mut cluster, &[two_requests], BINPACK).unwrap_err();
    assert!(
        error.contains("devices 2 requested by one claim, 1 allowed"),
        "{error}"
    );
}

#[test]
fn gives_share_without_amounts_the_default() {
    let mut cluster = cluster(&[("n1", &[16])]);
    let spec = |memory: &str| json!({"namespaces": ["default"], "claim": {"default": {"memory": memory, "cores": 10}}});
    cluster.upsert_quota(&quota("q", &spec("4Gi")));
    let unsized_request = |name: &str| request(name, &json!({"deviceClassName": "vgpu.drava.dev"}));
    allocate(&mut cluster, &[unsized_request("a")], BINPACK).unwrap();
    assert_eq!(used(&cluster), (4 << 10, 10, 1));
    allocate(&mut cluster, &[share("b", "1Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        used(&cluster),
        (5 << 10, 10, 2),
        "a request with amounts keeps them"
    );
    cluster.upsert_quota(&quota("q", &spec("64Gi")));
    let error = allocate(&mut cluster, &[unsized_request("c")], BINPACK).unwrap_err();
    assert!(
        error.contains("InsufficientMemory (most free memory 11 GiB"),
        "at most the GPU: {error}"
    );
}

#[test]
fn equal_claims_with_other_defaults_are_decided_on_their_own() {
    let mut cluster = cluster(&[("n1", &[16]), ("n2", &[80])]);
    for (namespace, memory) in [("default", "4Gi"), ("other", "40Gi")] {
        let spec = json!({"namespaces": [namespace], "claim": {"default": {"memory": memory, "cores": 0}}});
        cluster.upsert_quota(&quota(namespace, &spec));
    }
    let used = pod_request(&cluster, &[share("used", "8Gi", "0")]);
    let used = cluster.decide_on("n1", &used, BINPACK).unwrap();
    cluster.assume(&used);
    let own = request("own", &json!({"deviceClassName": "vgpu.drava.dev"}));
    let mut other = own.clone();
    other.metadata.namespace = Some("other".to_owned());
    let node_for = |claim| {
        let request = pod_request(&cluster, &[claim]);
        cluster.decide(&request, BINPACK).unwrap().node
    };
    assert_eq!(node_for(other), "n2", "8 GiB are free on n1");
    assert_eq!(node_for(own), "n1");
}

#[test]
fn quota_precedes_lack_of_devices() {
    let mut cluster = cluster(&[("n1", &[80])]);
    limited(&mut cluster, "q", &json!({"devices": 1}));
    allocate(&mut cluster, &[whole("w")], BINPACK).unwrap();
    let request = pod_request(&cluster, &[share("a", "1Gi", "0")]);
    let explanation = cluster.decide(&request, BINPACK).unwrap_err();
    assert!(explanation.is_quota_only(), "{}", explanation.summary());
    cluster.remove_quota("q");
    let explanation = cluster.decide(&request, BINPACK).unwrap_err();
    assert!(!explanation.is_quota_only(), "{}", explanation.summary());
}
