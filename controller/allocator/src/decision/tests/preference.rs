//! Preferences of pods between nodes on which their devices are free.

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};

use super::BINPACK;
use crate::cluster::Cluster;
use crate::fixture::{cluster, node, object, pod, share, slices};
use crate::pod_request::PodRequest;

fn in_zone(name: &str, zone: &str, taints: &Value) -> Node {
    let mut node = node(name);
    let labels = node.metadata.labels.get_or_insert_default();
    labels.insert("zone".to_owned(), zone.to_owned());
    node.spec = Some(object(json!({"taints": taints})));
    node
}

/// Nodes n1 and n2 in zones a and b; the first one is preferred without a preference.
fn two_zones() -> Cluster {
    let mut cluster = cluster(&[]);
    for (name, zone) in [("n1", "a"), ("n2", "b")] {
        cluster.upsert_node(&in_zone(name, zone, &json!([])));
        for slice in slices(name, &[80]) {
            cluster.upsert_slice(&slice);
        }
    }
    cluster
}

/// A pod with label `app: web` and a share, with these fields in its spec.
fn with(name: &str, spec: &Value) -> Pod {
    let mut pod = pod(name, &["c"]);
    pod.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
    let mut value = serde_json::to_value(&pod).unwrap();
    let fields = value["spec"].as_object_mut().unwrap();
    fields.extend(spec.as_object().unwrap().clone());
    object(value)
}

/// Returns the node of the decision, which is the same by a ranking and by an evaluation of all nodes.
fn chosen(cluster: &Cluster, pod: &Pod) -> String {
    let claim = share("c", "1Gi", "0");
    let request = PodRequest::new(pod, &[("c", &claim)], &cluster.classes, &cluster.selectors);
    let request = request.unwrap();
    let placement = cluster.decide(&request, BINPACK).unwrap();
    assert_eq!(
        cluster.explain(&request, BINPACK).unwrap().node,
        placement.node
    );
    placement.node
}

/// A pod of the application that is bound.
fn bound(name: &str, node: &str, spec: &Value) -> Pod {
    let mut pod = with(name, spec);
    pod.metadata.uid = Some(format!("pod-{name}"));
    pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
    pod
}

fn other_pods(kind: &str, key: &str) -> Value {
    let term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": "web"}}});
    json!({"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 10, "podAffinityTerm": term},
    ]}}})
}

#[test]
fn prefers_nodes_by_affinity() {
    let cluster = two_zones();
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n1");
    let zone_b = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]});
    let affinity = json!({"affinity": {"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": zone_b}],
    }}});
    let pod = with("p", &affinity);
    assert_eq!(chosen(&cluster, &pod), "n2");
    let claim = share("c", "1Gi", "0");
    let request = PodRequest::new(&pod, &[("c", &claim)], &cluster.classes, &cluster.selectors);
    let placement = cluster.decide(&request.unwrap(), BINPACK).unwrap();
    assert_eq!(
        placement.ranking.to_string(),
        "preferred by affinity, spread and taints: score 500, n1 300"
    );
}

#[test]
fn keeps_away_from_pods_or_joins_them_by_preference() {
    let mut cluster = two_zones();
    cluster.upsert_pod(&bound("other", "n1", &json!({})));
    let apart = with("p", &other_pods("podAntiAffinity", "zone"));
    assert_eq!(chosen(&cluster, &apart), "n2");
    cluster.remove_pod("pod-other");
    cluster.upsert_pod(&bound("other", "n2", &json!({})));
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n1");
    assert_eq!(
        chosen(&cluster, &with("p", &other_pods("podAffinity", "zone"))),
        "n2"
    );
    // The preference of the pod that is there counts, too.
    cluster.upsert_pod(&bound("other", "n2", &other_pods("podAffinity", "zone")));
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n2");
    cluster.remove_pod("pod-other");
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n1");
}

#[test]
fn spreads_without_must() {
    let mut cluster = two_zones();
    cluster.upsert_pod(&bound("other", "n1", &json!({})));
    for key in ["zone", "kubernetes.io/hostname"] {
        let spread = json!({"topologySpreadConstraints": [{
            "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": "web"}},
        }]});
        assert_eq!(chosen(&cluster, &with("p", &spread)), "n2", "{key}");
    }
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n1");
}

#[test]
fn avoids_softly_tainted_node() {
    let mut cluster = two_zones();
    let taint = json!({"key": "old", "effect": "PreferNoSchedule"});
    cluster.upsert_node(&in_zone("n1", "a", &json!([taint])));
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n2");
    let tolerates = json!({"tolerations": [{"key": "old", "operator": "Exists"}]});
    assert_eq!(chosen(&cluster, &with("p", &tolerates)), "n1");
    cluster.upsert_node(&in_zone("n1", "a", &json!([])));
    assert_eq!(chosen(&cluster, &with("p", &json!({}))), "n1");
}

#[test]
fn node_without_extended_resource_is_unfit() {
    let mut cluster = two_zones();
    let pod = |resource: &str| {
        let mut pod = with("p", &json!({}));
        let container = &mut pod.spec.as_mut().unwrap().containers[0];
        let requests = container
            .resources
            .as_mut()
            .unwrap()
            .requests
            .as_mut()
            .unwrap();
        requests.insert(resource.to_owned(), object(json!("1")));
        pod
    };
    let decide = |cluster: &Cluster, resource: &str| {
        let claim = share("c", "1Gi", "0");
        let request = PodRequest::new(
            &pod(resource),
            &[("c", &claim)],
            &cluster.classes,
            &cluster.selectors,
        );
        let decided = cluster.decide(&request.unwrap(), BINPACK);
        decided
            .map(|placement| placement.node)
            .map_err(|explanation| explanation.summary())
    };
    let unfit = "0/2 nodes: 2 NodeUnfit (insufficient example.com/rdma)";
    assert_eq!(decide(&cluster, "example.com/rdma"), Err(unfit.to_owned()));
    // A class of another driver may serve it.
    cluster.upsert_class(object(json!({
        "metadata": {"name": "rdma"},
        "spec": {
            "extendedResourceName": "example.com/rdma",
            "selectors": [{"cel": {"expression": "device.driver == 'rdma.example.com'"}}],
        },
    })));
    assert_eq!(decide(&cluster, "example.com/rdma"), Ok("n1".to_owned()));
    assert!(decide(&cluster, "example.com/other").is_err());
}

/// As in package `deviceclass/extendedresourcecache` of `k8s.io/dynamic-resource-allocation` 0.37.2; at equal times the smaller name
/// counts.
#[test]
fn newest_class_of_extended_resource_counts() {
    use crate::claim::Classes as _;
    let mut cluster = two_zones();
    for (name, created) in [
        ("b", Some("2026-01-01T00:00:00Z")),
        ("c", Some("2026-01-01T00:00:00Z")),
        ("a", None),
    ] {
        cluster.upsert_class(object(json!({
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"extendedResourceName": "example.com/gpu"},
        })));
    }
    let class = cluster
        .classes
        .of_extended_resource("example.com/gpu")
        .unwrap();
    assert_eq!(class.metadata.name.as_deref(), Some("b"));
}
