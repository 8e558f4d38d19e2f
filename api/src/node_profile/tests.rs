use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube_core::{CustomResourceExt as _, Resource as _, ResourceExt as _};
use serde_json::json;

use super::*;
use crate::config::Settings;
use crate::names;

const H100: &str = "NVIDIA H100 80GB HBM3";
const GPUS: [GpuIdentity<'_>; 2] = [
    GpuIdentity {
        uuid: "GPU-a",
        index: 0,
        product_name: H100,
    },
    GpuIdentity {
        uuid: "GPU-b",
        index: 1,
        product_name: H100,
    },
];

fn profile(name: &str, spec: &Value) -> GpuNodeProfile {
    let mut profile = GpuNodeProfile::new(name, serde_json::from_value(spec.clone()).unwrap());
    profile.metadata.generation = Some(1);
    profile
}

fn labels(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    labels.iter().map(owned).collect()
}

/// Returns the settings of both GPUs on a node without labels.
fn settings(spec: &Value) -> [GpuSettings; 2] {
    let settings = NodeSettings::resolve([&profile("a", spec)], &BTreeMap::new(), GPUS);
    GPUS.map(|gpu| settings.gpu(gpu.uuid))
}

#[test]
fn is_cluster_scoped_in_the_group_of_drava() {
    assert_eq!(GpuNodeProfile::api_version(&()), names::API_VERSION);
    let crd = GpuNodeProfile::crd();
    assert_eq!(crd.spec.scope, "Cluster");
    assert_eq!(crd.name_any(), "gpunodeprofiles.gpu.drava.dev");
}

#[test]
fn keeps_defaults_without_matching_profile() {
    let of_pool = profile(
        "a",
        &json!({"nodeSelector": {"pool": "gpu"}, "splitCount": 4}),
    );
    let resolve = |labels| NodeSettings::resolve([&of_pool], &labels, GPUS);
    assert_eq!(resolve(labels(&[("pool", "cpu")])), NodeSettings::default());
    assert_eq!(resolve(labels(&[])).gpu("GPU-a"), GpuSettings::default());
    let selected = resolve(labels(&[("pool", "gpu"), ("zone", "a")]));
    assert_eq!(selected.gpu("GPU-a").split_count, 4);
    assert_eq!(selected.profile, Some(of_pool.to_version()));
}

#[test]
fn applies_first_of_overlapping_profiles_by_name() {
    let profiles = ["c", "a", "b"].map(|name| {
        let split_count = name.bytes().next().unwrap();
        profile(name, &json!({"splitCount": split_count}))
    });
    let resolved = NodeSettings::resolve(&profiles, &BTreeMap::new(), GPUS);
    assert_eq!(resolved.profile.unwrap().name, "a");
    let overridden: Vec<_> = resolved
        .overridden
        .into_iter()
        .map(|other| other.name)
        .collect();
    assert_eq!(overridden, ["b", "c"]);
    assert_eq!(resolved.gpus["GPU-a"].split_count, u32::from(b'a'));
}

#[test]
fn overrides_in_order_by_model_index_and_uuid() {
    let [first, second] = settings(&json!({
        "splitCount": 4, "defaultCores": 10, "mode": "vgpu",
        "devices": [
            {"productName": H100, "splitCount": 5},
            {"index": 1, "splitCount": 6, "mode": "exclusive"},
            {"uuid": "GPU-a", "defaultCores": 20},
            {"uuid": "GPU-c", "splitCount": 7},
        ],
    }));
    assert_eq!(
        (first.split_count, first.default_cores, first.mode),
        (5, 20, Mode::Vgpu)
    );
    assert_eq!(
        (second.split_count, second.default_cores, second.mode),
        (6, 10, Mode::Exclusive)
    );
}

#[test]
fn merges_share_defaults_by_field() {
    let [first, second] = settings(&json!({
        "defaults": {"computePolicy": "fixed", "memory": {"policy": "spill"}},
        "devices": [{"index": 1, "defaults": {"enforcement": "required", "memory": {"policy": "hard"}}}],
    }));
    let first = first.share_defaults();
    assert_eq!(
        (first.compute_policy, first.memory_policy),
        (ComputePolicy::Fixed, MemoryPolicy::Spill)
    );
    let second = second.share_defaults();
    assert_eq!(second.compute_policy, ComputePolicy::Fixed);
    assert_eq!(
        (second.memory_policy, second.enforcement),
        (MemoryPolicy::Hard, Enforcement::Required)
    );
    assert_eq!(GpuSettings::default().share_defaults(), Settings::default());
}

#[test]
fn excludes_by_uuid_index_or_product_name() {
    for (exclude, expected) in [
        (json!({"uuids": ["GPU-a"]}), [true, false]),
        (json!({"indices": [1]}), [false, true]),
        (json!({"productNames": [H100]}), [true, true]),
        (json!({"productNames": ["H100"]}), [false, false]),
    ] {
        let excluded = settings(&json!({"exclude": exclude})).map(|gpu| gpu.is_excluded);
        assert_eq!(excluded, expected, "{exclude}");
    }
}

#[test]
fn oversubscribes_memory_only_with_a_policy() {
    let memory = |spec| {
        let [gpu, _] = settings(&spec);
        let spills = gpu.share_defaults().memory_policy == MemoryPolicy::Spill;
        (gpu.share_memory(1000), gpu.is_oversubscribed(), spills)
    };
    assert_eq!(memory(json!({"memoryScaling": 1.5})), (1000, false, false));
    let spill = json!({"memoryScaling": 1.5, "oversubscription": "spill"});
    assert_eq!(memory(spill), (1500, true, true));
    let best_effort = json!({"memoryScaling": 2, "oversubscription": "bestEffort"});
    assert_eq!(memory(best_effort), (2000, true, false));
    let less = json!({"memoryScaling": 0.5, "oversubscription": "spill"});
    assert_eq!(memory(less), (500, false, false));
}

#[test]
fn reads_scaling_as_exact_hundredths() {
    for (text, of_1000) in [
        ("1", 1000),
        ("1.0", 1000),
        ("0.1", 100),
        ("1.15", 1150),
        ("10", 10_000),
    ] {
        let scaling: Scaling = serde_json::from_str(text).unwrap();
        assert_eq!(scaling.of(1000), of_1000, "{text}");
        let again: Scaling = serde_json::from_value(json!(scaling)).unwrap();
        assert_eq!(again, scaling);
    }
    for text in ["0", "0.09", "10.1", "-1", "\"2\""] {
        assert!(serde_json::from_str::<Scaling>(text).is_err(), "{text}");
    }
}

fn now() -> Time {
    Time(Timestamp::UNIX_EPOCH)
}

fn entry(name: &str, state: NodeState) -> NodeStatus {
    NodeStatus {
        name: name.to_owned(),
        state,
        observed_generation: 1,
        conflicts: Vec::new(),
        waiting: Vec::new(),
    }
}

fn with(status: &GpuNodeProfileStatus, entry: NodeStatus) -> GpuNodeProfileStatus {
    let name = entry.name.clone();
    status.with_node(&name, Some(entry), 1, Some(1000), &now())
}

fn condition(status: &GpuNodeProfileStatus, kind: &str) -> (String, String) {
    let mut conditions = status.conditions.iter();
    let condition = conditions
        .find(|condition| condition.type_ == kind)
        .unwrap();
    (condition.status.clone(), condition.reason.clone())
}

#[test]
fn status_follows_the_entries_of_the_nodes() {
    let status = with(
        &GpuNodeProfileStatus::default(),
        entry("b", NodeState::Applied),
    );
    assert_eq!(
        condition(&status, status::APPLIED),
        ("True".into(), "AllApplied".into())
    );
    assert_eq!(
        condition(&status, status::CONFLICT),
        ("False".into(), "NoOverlap".into())
    );
    assert!(!status.is_outdated("b", Some(&entry("b", NodeState::Applied))));
    assert!(status.is_outdated("b", Some(&entry("b", NodeState::Waiting))));
    assert!(status.is_outdated("b", None) && !status.is_outdated("a", None));

    let status = with(&status, entry("a", NodeState::Waiting));
    assert_eq!(
        condition(&status, status::APPLIED),
        ("False".into(), "DevicesWaiting".into())
    );
    let overlapping = NodeStatus {
        conflicts: vec!["other".to_owned()],
        ..entry("a", NodeState::Conflict)
    };
    let status = with(&status, overlapping);
    let names: Vec<_> = status.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(
        (names.as_slice(), status.node_count),
        (["a", "b"].as_slice(), Some(2))
    );
    assert_eq!(
        condition(&status, status::APPLIED),
        ("False".into(), "OverlappingProfiles".into())
    );
    assert_eq!(
        condition(&status, status::CONFLICT),
        ("True".into(), "OverlappingProfiles".into())
    );

    let status = status.with_node("a", None, 1, None, &now());
    assert_eq!(
        condition(&status, status::APPLIED),
        ("True".into(), "AllApplied".into())
    );
    let status = status.with_node("b", None, 1, None, &now());
    assert_eq!(
        condition(&status, status::APPLIED),
        ("False".into(), "NoNodes".into())
    );
}

#[test]
fn transition_times_change_with_the_status_only() {
    let first = with(
        &GpuNodeProfileStatus::default(),
        entry("a", NodeState::Applied),
    );
    let later = Time(Timestamp::UNIX_EPOCH + k8s_openapi::jiff::SignedDuration::from_secs(60));
    let more = first.with_node("b", Some(entry("b", NodeState::Applied)), 2, None, &later);
    assert!(
        more.conditions
            .iter()
            .all(|condition| condition.last_transition_time == now())
    );
    let waiting = more.with_node("b", Some(entry("b", NodeState::Waiting)), 2, None, &later);
    let changed = waiting
        .conditions
        .iter()
        .filter(|condition| condition.last_transition_time == later);
    assert_eq!(
        changed
            .map(|condition| condition.type_.as_str())
            .collect::<Vec<_>>(),
        [status::APPLIED]
    );
}

#[test]
fn lists_a_bounded_number_of_nodes_and_counts_the_others() {
    let mut status = GpuNodeProfileStatus::default();
    for number in 0..100 {
        let applied = entry(&format!("node-{number:03}"), NodeState::Applied);
        let fits = status.nodes.len() < status::MAX_NODES;
        assert_eq!(status.is_outdated(&applied.name, Some(&applied)), fits);
        status = with(&status, applied);
    }
    assert_eq!(status.nodes.len(), status::MAX_NODES);
    assert_eq!(status.node_count, Some(1000));
    // A node that waits replaces a node with nothing to do.
    let waiting = entry("node-099", NodeState::Waiting);
    assert!(status.is_outdated("node-099", Some(&waiting)));
    let status = with(&status, waiting.clone());
    assert_eq!(status.nodes.len(), status::MAX_NODES);
    assert_eq!(status.node("node-099"), Some(&waiting));
    // It stays listed afterwards.
    let status = with(&status, entry("node-099", NodeState::Applied));
    assert!(status.node("node-099").is_some());
    let size = serde_json::to_vec(&status).unwrap().len();
    assert!(size < 32 << 10, "{size} bytes");
}
