//! Usage after events in any order, and the guarantees of tenants.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::cluster::Departure;
use crate::fixture::{cluster, node, object, quota, share, slices};

/// Claim with these devices of node n1 and their memory; `None` is a whole GPU.
fn allocated(namespace: &str, name: &str, devices: &[(&str, Option<&str>)]) -> ResourceClaim {
    let mut claim = share(name, "1Gi", "0");
    claim.metadata.namespace = Some(namespace.to_owned());
    let results: Vec<Value> = devices
        .iter()
        .map(|(device, memory)| {
            let mut result = json!({
                "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device,
            });
            if let Some(memory) = memory {
                result["shareID"] = json!("s");
                result["consumedCapacity"] = json!({"memory": memory, "cores": "10"});
            }
            result
        })
        .collect();
    claim.status = Some(object(
        json!({"allocation": {"devices": {"results": results}}}),
    ));
    claim
}

/// Used memory in GiB and devices by quota.
fn used(cluster: &Cluster) -> BTreeMap<String, (u64, u64)> {
    let units = |amount: Quantity| amount.to_u64_rounded_up().unwrap();
    let quotas = cluster.quotas();
    let used = quotas.map(|quota| {
        let used = (units(quota.used.memory) >> 30, units(quota.used.devices));
        (quota.name.to_owned(), used)
    });
    used.collect()
}

fn names(namespaces: &BTreeSet<String>) -> Vec<&str> {
    namespaces.iter().map(String::as_str).collect()
}

#[test]
fn counts_claims_before_their_devices_are_published() {
    let mut cluster = cluster(&[]);
    cluster.upsert_quota(&quota("q", &json!({"namespaces": ["a"]})));
    let h100 = json!({"namespaces": ["a"], "deviceSelector": {"productNames": ["NVIDIA H100"]}});
    cluster.upsert_quota(&quota("h100", &h100));
    cluster.upsert_claim(&allocated(
        "a",
        "c",
        &[("gpu-0-vgpu", Some("8Gi")), ("gpu-1", None)],
    ));
    let all = |memory, devices| -> BTreeMap<String, (u64, u64)> {
        ["h100", "q"]
            .map(|name| (name.to_owned(), (memory, devices)))
            .into()
    };
    assert_eq!(
        used(&cluster),
        all(8, 2),
        "an unknown model counts everywhere"
    );
    cluster.upsert_node(&node("n1"));
    for slice in slices("n1", &[16, 80]) {
        cluster.upsert_slice(&slice);
    }
    assert_eq!(used(&cluster)["q"], (88, 2));
    assert_eq!(used(&cluster)["h100"], (80, 1), "the share is one of a T4");
    let mut missing = slices("n1", &[16, 80]).remove(0);
    missing.spec.pool.generation = 2;
    cluster.upsert_slice(&missing);
    assert_eq!(cluster.excluded_pools().count(), 1);
    assert_eq!(
        used(&cluster)["q"],
        (88, 2),
        "an excluded pool still counts"
    );
}

#[test]
fn charges_unpublished_devices_as_before() {
    let mut cluster = cluster(&[("n1", &[16, 80])]);
    cluster.upsert_quota(&quota("q", &json!({"namespaces": ["a"]})));
    let h100 = json!({"namespaces": ["a"], "deviceSelector": {"productNames": ["NVIDIA H100"]}});
    cluster.upsert_quota(&quota("h100", &h100));
    cluster.upsert_claim(&allocated("a", "c", &[("gpu-0", None), ("gpu-1", None)]));
    let before = used(&cluster);
    assert_eq!(before["q"], (96, 2));
    assert_eq!(before["h100"], (80, 1));
    for slice in slices("n1", &[16, 80]) {
        cluster.remove_slice(slice.metadata.name.as_deref().unwrap());
    }
    assert_eq!(used(&cluster), before, "the pods go on");
    let mut newer = allocated("a", "c", &[("gpu-0", None), ("gpu-1", None)]);
    newer.metadata.resource_version = Some("9".to_owned());
    cluster.upsert_claim(&newer);
    assert_eq!(used(&cluster), before);
    let claims = [("a".to_owned(), "c".to_owned())].into();
    cluster.presume_gone(&Departure {
        claims,
        ..Departure::default()
    });
    assert_eq!(used(&cluster)["q"], (0, 0));
    cluster.presume_gone(&Departure::default());
    assert_eq!(used(&cluster), before, "a simulation changes nothing");
    cluster.remove_claim(&("a".to_owned(), "c".to_owned()));
    assert_eq!(used(&cluster)["q"], (0, 0));
}

#[test]
fn limits_of_namespace_are_unknown_without_its_labels() {
    let mut cluster = cluster(&[]);
    cluster.upsert_quota(&quota("plain", &json!({"namespaces": ["a"]})));
    assert!(!cluster.has_unknown_limits("new"), "no selector");
    let spec = json!({"namespaceSelector": {"matchLabels": {"team": "a"}}});
    cluster.upsert_quota(&quota("q", &spec));
    assert!(cluster.has_unknown_limits("new"));
    let namespace: Namespace = object(json!({"metadata": {"name": "new"}}));
    assert_eq!(
        names(&cluster.upsert_namespace(&namespace)),
        ["new"],
        "its pods are decided"
    );
    assert!(!cluster.has_unknown_limits("new"));
    cluster.remove_quota("q");
    let policy = object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "p"},
        "spec": {"namespaceSelector": {"matchLabels": {"team": "a"}}},
    }));
    cluster.upsert_policy(&policy);
    assert!(cluster.has_unknown_limits("newer"));
}

#[test]
fn follows_labels_of_namespaces() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let spec = json!({"namespaceSelector": {"matchLabels": {"team": "a"}}});
    cluster.upsert_claim(&allocated("ns", "c", &[("gpu-0-vgpu", Some("8Gi"))]));
    let namespace = |team: &str| -> Namespace {
        object(json!({"metadata": {"name": "ns", "labels": {"team": team}}}))
    };
    assert!(
        cluster.upsert_namespace(&namespace("a")).is_empty(),
        "no quota"
    );
    assert_eq!(names(&cluster.upsert_quota(&quota("q", &spec))), ["ns"]);
    assert_eq!(used(&cluster)["q"], (8, 1));
    assert!(
        cluster.upsert_namespace(&namespace("a")).is_empty(),
        "unchanged"
    );
    assert_eq!(names(&cluster.upsert_namespace(&namespace("b"))), ["ns"]);
    assert_eq!(used(&cluster)["q"], (0, 0));
    cluster.upsert_namespace(&namespace("a"));
    assert_eq!(names(&cluster.remove_namespace("ns")), ["ns"]);
    assert_eq!(used(&cluster)["q"], (0, 0));
}

#[test]
fn finds_borrowers_with_their_guaranteed_amounts() {
    let mut cluster = cluster(&[("n1", &[80])]);
    for (name, guarantee) in [("a", "10Gi"), ("b", "10Gi"), ("c", "30Gi")] {
        let spec = json!({"namespaces": [name], "guarantee": {"memory": guarantee}});
        cluster.upsert_quota(&quota(name, &spec));
    }
    for (namespace, name, memory) in [("b", "b1", "10Gi"), ("b", "b2", "5Gi"), ("c", "c1", "20Gi")]
    {
        cluster.upsert_claim(&allocated(namespace, name, &[("gpu-0-vgpu", Some(memory))]));
    }
    assert_eq!(names(&cluster.borrowers("a")), ["b"]);
    assert!(cluster.borrowers("b").is_empty(), "not the own tenant");
    assert!(cluster.borrowers("x").is_empty(), "without guarantee");
    let floors = cluster.floors("a");
    let mut keeps = |gone: &[(&str, &str)]| {
        let gone = gone
            .iter()
            .map(|(namespace, name)| ((*namespace).to_owned(), (*name).to_owned()));
        let claims = gone.collect();
        cluster.presume_gone(&Departure {
            claims,
            ..Departure::default()
        });
        cluster.keeps(&floors)
    };
    assert!(keeps(&[("b", "b2")]));
    assert!(!keeps(&[("b", "b1")]), "5 of guaranteed 10 GiB remain");
    assert!(!keeps(&[("c", "c1")]), "within its guarantee");
    assert!(keeps(&[]));
}

proptest! {
    /// The sums after any changes are those of the claims that exist.
    #[test]
    fn sums_equal_those_of_existing_claims(
        changes in prop::collection::vec((0..2_usize, 0..6_usize, 0..40_u64, any::<bool>()), 0..40),
    ) {
        let mut cluster = cluster(&[("n1", &[80, 80])]);
        for namespace in ["a", "b"] {
            cluster.upsert_quota(&quota(namespace, &json!({"namespaces": [namespace]})));
        }
        let mut expected: BTreeMap<(usize, usize), u64> = BTreeMap::new();
        for (version, (tenant, index, gib, is_gone)) in changes.into_iter().enumerate() {
            let (namespace, name) = (["a", "b"][tenant], format!("c{index}"));
            if gib == 0 {
                cluster.remove_claim(&(namespace.to_owned(), name));
                expected.remove(&(tenant, index));
                continue;
            }
            let memory = format!("{gib}Gi");
            let devices = [("gpu-0-vgpu", Some(memory.as_str()))];
            let mut claim = allocated(namespace, &name, &devices);
            claim.metadata.resource_version = Some((version + 2).to_string());
            cluster.upsert_claim(&claim);
            expected.insert((tenant, index), gib);
            if is_gone {
                let claims = [(namespace.to_owned(), name)].into();
                cluster.presume_gone(&Departure { claims, ..Departure::default() });
                cluster.presume_gone(&Departure::default());
            }
        }
        for (tenant, namespace) in ["a", "b"].into_iter().enumerate() {
            let mut of_tenant = expected.iter().filter(|((of, _), _)| *of == tenant);
            let count = of_tenant.clone().count() as u64;
            let sum: u64 = of_tenant.by_ref().map(|(_, gib)| gib).sum();
            prop_assert_eq!(used(&cluster)[namespace], (sum, count));
        }
    }
}
