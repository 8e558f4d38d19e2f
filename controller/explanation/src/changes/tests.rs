//! Each suggestion is applied to the cluster, and the pod fits.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::quota::GpuQuota;

use super::*;
use crate::fixture::{slices, snapshot};

const POLICIES: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
};

/// Returns the pod `big`, which needs 60 GiB where 56 GiB are free, with its claim.
fn big(snapshot: &Snapshot) -> (Pod, Vec<(String, ResourceClaim)>) {
    let is_big = |name: &Option<String>| name.as_deref() == Some("big");
    let pod = snapshot.pods.iter().find(|pod| is_big(&pod.metadata.name));
    let mut claims = snapshot.claims.iter();
    let claim = claims.find(|claim| is_big(&claim.metadata.name));
    let claims = vec![("gpu".to_owned(), claim.unwrap().clone())];
    (pod.unwrap().clone(), claims)
}

fn fits(snapshot: &Snapshot, pod: &Pod, claims: &[(String, ResourceClaim)]) -> bool {
    let request = request(&snapshot.cluster, pod, claims).unwrap();
    snapshot.cluster.decide(&request, POLICIES).is_ok()
}

#[test]
fn pod_fits_after_each_change() {
    let mut snapshot = snapshot();
    let (pod, claims) = big(&snapshot);
    assert!(!fits(&snapshot, &pod, &claims));
    let changes = find(&mut snapshot, &pod, &claims, POLICIES);
    let texts: Vec<String> = changes.iter().map(Change::text).collect();
    assert_eq!(
        texts,
        [
            "request at most 57344Mi of memory (claim gpu, request gpu)",
            "end default/a-pod (priority 0) on node n1",
            // Its claim has no record of it.
            "end default/b (priority 0) on node n1",
        ]
    );
    assert!(!fits(&snapshot, &pod, &claims), "the trials are undone");
    let mut smaller = claims.clone();
    set_memory(&mut smaller[0].1, 57_344);
    assert!(fits(&snapshot, &pod, &smaller));
    set_memory(&mut smaller[0].1, 57_345);
    assert!(!fits(&snapshot, &pod, &smaller), "the largest amount");
    let released = ("default".to_owned(), "a".to_owned());
    snapshot.cluster.remove_claim(&released);
    assert!(fits(&snapshot, &pod, &claims));
}

#[test]
fn suggests_nothing_for_impossible_request() {
    let mut snapshot = snapshot();
    let (pod, mut claims) = big(&snapshot);
    let spec = claims[0].1.spec.as_mut().unwrap();
    let requests = spec.devices.as_mut().unwrap().requests.as_mut().unwrap();
    requests[0].exactly.as_mut().unwrap().count = Some(5);
    assert_eq!(find(&mut snapshot, &pod, &claims, POLICIES), []);
}

#[test]
fn pod_fits_after_raising_limits_of_quotas() {
    let mut snapshot = snapshot();
    let quota = |name: &str, limit: serde_json::Value| {
        let spec = serde_json::json!({"namespaces": ["default"], "limit": limit});
        GpuQuota::new(name, serde_json::from_value(spec).unwrap())
    };
    let limits = [
        quota("devices", serde_json::json!({"devices": 3})),
        quota(
            "memory",
            serde_json::json!({"memory": "104Gi", "cores": 500}),
        ),
    ];
    for quota in &limits {
        snapshot.cluster.upsert_quota(quota);
    }
    let (mut pod, mut claims) = big(&snapshot);
    pod.metadata.uid = Some("feasible".to_owned());
    set_memory(&mut claims[0].1, 1024);
    assert!(!fits(&snapshot, &pod, &claims));
    let changes = find(&mut snapshot, &pod, &claims, POLICIES);
    let text = changes.last().unwrap().text();
    assert_eq!(
        text,
        "raise spec.limit.devices of gpuquota devices to 4, and raise spec.limit.memory of gpuquota memory to 105Gi"
    );
    assert!(!fits(&snapshot, &pod, &claims), "the trial is undone");
    snapshot
        .cluster
        .upsert_quota(&quota("devices", serde_json::json!({"devices": 4})));
    assert!(!fits(&snapshot, &pod, &claims), "both are needed");
    snapshot
        .cluster
        .upsert_quota(&quota("memory", serde_json::json!({"memory": "105Gi"})));
    assert!(fits(&snapshot, &pod, &claims));
}

#[test]
fn counts_pods_of_other_namespaces() {
    let ending = |pod: &str| Ending {
        priority: 0,
        pod: pod.to_owned(),
    };
    let text = |pods: &[&str]| {
        let mut change = Change::EndPods {
            node: "n1".to_owned(),
            pods: pods.iter().map(|pod| ending(pod)).collect(),
        };
        change.hide_other_namespaces("a");
        change.text()
    };
    assert_eq!(
        text(&["b/x", "a/p", "c/y"]),
        "end a/p (priority 0), 2 pods of other namespaces on node n1"
    );
    assert_eq!(
        text(&["b/x"]),
        "end a pod of another namespace (priority 0) on node n1"
    );
}

#[test]
fn work_grows_no_faster_than_the_cluster() {
    // One node more for each two pods, which use a claim each.
    let steps_with = |pods: usize| {
        let mut snapshot = snapshot();
        let of = |name: &str| {
            let pod = snapshot
                .pods
                .iter()
                .find(|pod| pod.metadata.name.as_deref() == Some(name));
            pod.unwrap().clone()
        };
        let user = of("a-pod");
        let claims = snapshot.claims.iter();
        let claim = claims
            .clone()
            .find(|claim| claim.metadata.name.as_deref() == Some("a"));
        let claim = claim.unwrap().clone();
        let (pod, requested) = big(&snapshot);
        for index in 0..pods {
            for mut slice in slices() {
                let name = slice.metadata.name.unwrap();
                slice.metadata.name = Some(format!("{name}-{}", index / 2 + 10));
                slice.spec.node_name = Some(format!("n{}", index / 2 + 10));
                slice.spec.pool.name = format!("n{}/gpus", index / 2 + 10);
                snapshot.cluster.upsert_slice(&slice);
            }
            let uid = format!("user-{index}");
            let mut user = user.clone();
            user.metadata.name = Some(uid.clone());
            user.metadata.uid = Some(uid.clone());
            let mut claim = claim.clone();
            claim.metadata.name = Some(format!("claim-{index}"));
            let status = claim.status.as_mut().unwrap();
            for consumer in status.reserved_for.iter_mut().flatten() {
                consumer.name.clone_from(&uid);
                consumer.uid.clone_from(&uid);
            }
            let pool = format!("n{}/gpus", index / 2 + 10);
            let devices = status
                .allocation
                .as_mut()
                .unwrap()
                .devices
                .as_mut()
                .unwrap();
            devices.results.as_mut().unwrap()[0].pool = pool;
            snapshot.cluster.upsert_claim(&claim);
            snapshot.claims.push(claim);
            snapshot.pods.push(user);
        }
        let find = || find(&mut snapshot, &pod, &requested, POLICIES);
        let (steps, changes) = drava_allocator::steps::of(find);
        assert!(!changes.is_empty());
        steps
    };
    let (small, large) = (steps_with(100), steps_with(200));
    assert!(small >= 100, "{small} steps for 100 claims");
    assert!(
        large <= 2 * small + 2,
        "{small} steps, {large} at twice the size"
    );
}
