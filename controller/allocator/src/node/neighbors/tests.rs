//! Pods around a pending one on three nodes in two zones.

use serde_json::{Value, json};

use super::*;
use crate::cluster::Cluster;

fn pod(namespace: &str, app: &str, spec: Value) -> Pod {
    let mut full = json!({"containers": [{"name": "c"}]});
    if let (Some(full), Value::Object(spec)) = (full.as_object_mut(), spec) {
        full.extend(spec);
    }
    let metadata = json!({"name": "p", "namespace": namespace, "labels": {"app": app}});
    serde_json::from_value(json!({"metadata": metadata, "spec": full})).unwrap()
}

fn plain(app: &str) -> Pod {
    pod("team", app, json!({}))
}

fn with_port(port: &Value) -> Pod {
    pod(
        "team",
        "web",
        json!({"containers": [{"name": "c", "ports": [port]}]}),
    )
}

/// Returns a term about pods with this label, merged with `fields`.
fn term(key: &str, app: &str, fields: Value) -> Value {
    let mut term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}});
    if let (Some(term), Value::Object(fields)) = (term.as_object_mut(), fields) {
        term.extend(fields);
    }
    term
}

fn with_affinity(kind: &str, app: &str, terms: &[Value]) -> Pod {
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": terms});
    pod("team", app, json!({"affinity": {kind: required}}))
}

fn with_spread(app: &str, spread: &Value) -> Pod {
    pod("team", app, json!({"topologySpreadConstraints": [spread]}))
}

fn spread(fields: Value) -> Value {
    let mut spread = term(
        "zone",
        "web",
        json!({"whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}),
    );
    if let (Some(spread), Value::Object(fields)) = (spread.as_object_mut(), fields) {
        spread.extend(fields);
    }
    spread
}

/// Returns whether each of these nodes admits the pod beside the others; else the obstacle.
fn verdicts_on<const N: usize>(
    nodes: &[(&str, Value); N],
    pending: &Pod,
    others: &[(&str, Pod)],
) -> [String; N] {
    let mut cluster = Cluster::default();
    for (index, (node, pod)) in others.iter().enumerate() {
        let mut pod = pod.clone();
        pod.metadata.uid = Some(format!("other-{index}"));
        pod.spec.as_mut().unwrap().node_name = Some((*node).to_owned());
        cluster.upsert_pod(&pod);
    }
    for (name, labels) in nodes {
        let node = json!({"metadata": {"name": name, "labels": labels}});
        cluster.upsert_node(&serde_json::from_value(node).unwrap());
    }
    let namespace = json!({"metadata": {"name": "lab", "labels": {"group": "research"}}});
    cluster.upsert_namespace(&serde_json::from_value(namespace).unwrap());
    let demand = PodDemand::of(pending);
    let limits = cluster.neighbor_limits("pending", &demand);
    nodes.each_ref().map(
        |(name, _)| match limits.admit(name, cluster.node(name).unwrap()) {
            Ok(()) => "fits".to_owned(),
            Err(obstacle) => obstacle,
        },
    )
}

/// Returns the verdicts on n1 and n2 in zone a, and n3 in zone b.
fn verdicts(pending: &Pod, others: &[(&str, Pod)]) -> [String; 3] {
    let labels = |name: &str, zone: &str| json!({"host": name, "zone": zone});
    let nodes = [("n1", "a"), ("n2", "a"), ("n3", "b")];
    let nodes = nodes.map(|(name, zone)| (name, labels(name, zone)));
    verdicts_on(&nodes, pending, others)
}

#[test]
fn excludes_nodes_with_used_host_port() {
    let used = with_port(&json!({"containerPort": 80, "hostPort": 80}));
    let conflict = "host port 80 is in use";
    let local = json!({"containerPort": 80, "hostPort": 80, "hostIP": "127.0.0.1"});
    for (port, expected) in [
        (json!({"containerPort": 80, "hostPort": 80}), conflict),
        (local.clone(), conflict),
        (json!({"containerPort": 80, "hostPort": 81}), "fits"),
        (json!({"containerPort": 80}), "fits"),
        (
            json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}),
            "fits",
        ),
    ] {
        let found = verdicts(&with_port(&port), &[("n1", used.clone())]);
        assert_eq!(found, [expected, "fits", "fits"], "{port}");
    }
    let any_of_ipv6 = json!({"containerPort": 80, "hostPort": 80, "hostIP": "::"});
    let found = verdicts(&with_port(&any_of_ipv6), &[("n1", with_port(&local))]);
    assert_eq!(found[0], "fits", "no wildcard for kube-scheduler");
    let other_address = json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"});
    let found = verdicts(&with_port(&local), &[("n1", with_port(&other_address))]);
    assert_eq!(found[0], "fits");
}

#[test]
fn excludes_domain_by_anti_affinity_of_either_pod() {
    let excluded = "pod anti-affinity excludes the node";
    let shy = with_affinity("podAntiAffinity", "web", &[term("zone", "web", json!({}))]);
    let found = verdicts(&shy, &[("n1", plain("web"))]);
    assert_eq!(found, [excluded, excluded, "fits"]);
    let found = verdicts(&plain("web"), &[("n3", shy.clone())]);
    assert_eq!(found, ["fits", "fits", excluded], "of the other pod");
    assert_eq!(verdicts(&shy, &[("n1", plain("batch"))])[0], "fits");
}

#[test]
fn anti_affinity_is_limited_to_namespaces() {
    let excluded = "pod anti-affinity excludes the node";
    let in_lab = pod("lab", "web", json!({}));
    for (fields, expected) in [
        (json!({}), "fits"),
        (json!({"namespaces": ["lab"]}), excluded),
        (json!({"namespaceSelector": {}}), excluded),
        (
            json!({"namespaceSelector": {"matchLabels": {"group": "research"}}}),
            excluded,
        ),
        (
            json!({"namespaceSelector": {"matchLabels": {"group": "sales"}}}),
            "fits",
        ),
    ] {
        let rule = term("host", "web", fields.clone());
        let pending = with_affinity("podAntiAffinity", "web", &[rule]);
        let found = verdicts(&pending, &[("n1", in_lab.clone())]);
        assert_eq!(found, [expected, "fits", "fits"], "{fields}");
    }
}

#[test]
fn requires_domain_of_pods_with_affinity() {
    let excluded = "pod affinity does not match";
    let follower = with_affinity("podAffinity", "web", &[term("zone", "cache", json!({}))]);
    let found = verdicts(&follower, &[("n3", plain("cache"))]);
    assert_eq!(found, [excluded, excluded, "fits"]);
    assert_eq!(verdicts(&follower, &[]), [excluded; 3]);
    // The first pod of a group that keeps together can run anywhere.
    let first = with_affinity("podAffinity", "web", &[term("zone", "web", json!({}))]);
    assert_eq!(verdicts(&first, &[]), ["fits"; 3]);
    let found = verdicts(&first, &[("n1", plain("web"))]);
    assert_eq!(found, ["fits", "fits", excluded]);
}

#[test]
fn friend_counts_on_node_with_required_label() {
    let nodes = [("n0", json!({})), ("n1", json!({"rack": "r"}))];
    let first = with_affinity("podAffinity", "web", &[term("rack", "web", json!({}))]);
    let found = verdicts_on(&nodes, &first, &[("n0", plain("web"))]);
    let excluded = "pod affinity does not match";
    assert_eq!(
        found,
        [excluded, "fits"],
        "the pod is the first one of a rack"
    );
}

#[test]
fn spread_with_empty_selector_counts_no_pod() {
    let pending = with_spread("web", &spread(json!({"labelSelector": {}})));
    assert_eq!(verdicts(&pending, &[("n1", plain("web"))]), ["fits"; 3]);
}

#[test]
fn keeps_skew_of_topology_spread() {
    let excluded = "topology spread over zone does not allow the node";
    let pending = with_spread("web", &spread(json!({})));
    assert_eq!(verdicts(&pending, &[]), ["fits"; 3]);
    let one = [("n1", plain("web"))];
    assert_eq!(verdicts(&pending, &one), [excluded, excluded, "fits"]);
    let even = [("n1", plain("web")), ("n3", plain("web"))];
    assert_eq!(verdicts(&pending, &even), ["fits"; 3]);
    let relaxed = with_spread("web", &spread(json!({"maxSkew": 2})));
    assert_eq!(verdicts(&relaxed, &one), ["fits"; 3]);
    let advisory = with_spread(
        "web",
        &spread(json!({"whenUnsatisfiable": "ScheduleAnyway"})),
    );
    assert_eq!(verdicts(&advisory, &one), ["fits"; 3]);
    let domains = with_spread("web", &spread(json!({"minDomains": 3})));
    assert_eq!(verdicts(&domains, &even), [excluded; 3]);
    let host = with_spread("web", &spread(json!({"topologyKey": "rack"})));
    let lacks_key = "topology spread over rack does not allow the node";
    assert_eq!(verdicts(&host, &[]), [lacks_key; 3]);
}

#[test]
fn spread_counts_eligible_nodes_and_live_pods() {
    let one = [("n1", plain("web"))];
    let mut pinned = with_spread("web", &spread(json!({})));
    pinned.spec.as_mut().unwrap().node_selector =
        Some(BTreeMap::from([("zone".to_owned(), "a".to_owned())]));
    let found = verdicts(&pinned, &one);
    assert_eq!(found[..2], ["fits", "fits"], "zone b is no domain");
    let mut ending = plain("web");
    ending.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let pending = with_spread("web", &spread(json!({})));
    assert_eq!(verdicts(&pending, &[("n1", ending)]), ["fits"; 3]);
}
