//! Reports of deleted objects, and trimmed fields.

use kube::runtime::watcher::Event;

use super::*;
use crate::fixture::object;

fn node(name: &str, uid: &str) -> Listed<Node> {
    object(serde_json::json!({"metadata": {"name": name, "uid": uid}}))
}

/// A node with a time that no decoder of times reads.
fn odd_node(name: &str, uid: &str) -> Listed<Node> {
    object(serde_json::json!({
        "metadata": {"name": name, "uid": uid},
        "spec": {"taints": [{"key": "k", "effect": "NoExecute", "timeAdded": "9999-12-31T23:59:59Z"}]},
    }))
}

fn tracker() -> Tracker<Node> {
    Tracker::new(Kind::Nodes, keep, Observation::Node)
}

fn observe(tracker: &mut Tracker<Node>, event: Event<Listed<Node>>) -> Vec<String> {
    tracker
        .observe(event)
        .into_iter()
        .map(|observation| match observation {
            Observation::Node(Change::Applied(node)) => format!("+{}", node.uid().unwrap()),
            Observation::Node(Change::Deleted(node)) => format!("-{}", node.uid),
            Observation::Unreadable(_, node) => format!("?{}", node.metadata.uid.unwrap()),
            Observation::Readable(_, (_, name)) => format!("!{name}"),
            Observation::Listed(_) => "listed".to_owned(),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn reports_objects_deleted_between_lists() {
    let mut tracker = tracker();
    assert!(observe(&mut tracker, Event::Init).is_empty());
    assert_eq!(
        observe(&mut tracker, Event::InitApply(node("a", "a1"))),
        ["+a1"]
    );
    assert_eq!(
        observe(&mut tracker, Event::InitApply(node("b", "b1"))),
        ["+b1"]
    );
    assert_eq!(observe(&mut tracker, Event::InitDone), ["listed"]);
    assert_eq!(
        observe(&mut tracker, Event::Apply(node("c", "c1"))),
        ["+c1"]
    );
    assert_eq!(
        observe(&mut tracker, Event::Delete(node("c", "c1"))),
        ["-c1"]
    );
    // The watch fails; b is deleted, and a is deleted and recreated.
    assert!(observe(&mut tracker, Event::Init).is_empty());
    assert_eq!(
        observe(&mut tracker, Event::InitApply(node("a", "a2"))),
        ["-a1", "+a2"]
    );
    assert_eq!(observe(&mut tracker, Event::InitDone), ["-b1", "listed"]);
}

#[test]
fn reports_no_deletion_after_incomplete_list() {
    let mut tracker = tracker();
    observe(&mut tracker, Event::InitApply(node("a", "a1")));
    observe(&mut tracker, Event::InitApply(node("b", "b1")));
    observe(&mut tracker, Event::InitDone);
    observe(&mut tracker, Event::Init);
    observe(&mut tracker, Event::InitApply(node("a", "a1")));
    observe(&mut tracker, Event::Init);
    observe(&mut tracker, Event::InitApply(node("b", "b1")));
    assert_eq!(observe(&mut tracker, Event::InitDone), ["-a1", "listed"]);
}

#[test]
fn reports_unreadable_objects_beside_the_others() {
    let mut tracker = tracker();
    observe(&mut tracker, Event::Init);
    for (event, expected) in [
        (Event::InitApply(odd_node("a", "a1")), vec!["?a1"]),
        (Event::InitApply(node("b", "b1")), vec!["+b1"]),
        (Event::InitDone, vec!["listed"]),
        (Event::Apply(node("a", "a1")), vec!["!a", "+a1"]),
        (Event::Apply(odd_node("a", "a1")), vec!["?a1"]),
        (Event::Apply(odd_node("b", "b2")), vec!["-b1", "?b2"]),
        (Event::Delete(odd_node("a", "a1")), vec!["!a", "-a1"]),
        (Event::Init, vec![]),
        (Event::InitDone, vec!["!b", "-b2", "listed"]),
    ] {
        assert_eq!(observe(&mut tracker, event), expected);
    }
}

#[test]
fn drops_unneeded_pod_fields() {
    let mut pod: Pod = object(serde_json::json!({
        "metadata": {"name": "p", "annotations": {"a": "b", "gpu.drava.dev/gang": "g"}},
        "spec": {
            "volumes": [{"name": "v"}],
            "containers": [{"name": "c", "image": "i", "env": [{"name": "E"}], "resources": {"requests": {"cpu": "1"}}}],
        },
        "status": {"phase": "Pending", "containerStatuses": []},
    }));
    trim_pod(&mut pod);
    assert_eq!(
        serde_json::to_value(&pod).unwrap(),
        serde_json::json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "annotations": {"gpu.drava.dev/gang": "g"}},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
            "status": {"phase": "Pending"},
        })
    );
}

#[test]
fn keeps_what_decides_about_volumes_and_resizes() {
    let mut volume: PersistentVolume = object(serde_json::json!({
        "metadata": {"name": "v", "labels": {"topology.kubernetes.io/zone": "a", "app": "b"}},
    }));
    volumes::trim_volume(&mut volume);
    let labels = volume.metadata.labels.unwrap();
    assert_eq!(
        labels.into_keys().collect::<Vec<_>>(),
        ["topology.kubernetes.io/zone"]
    );
    let pod = |status: serde_json::Value| -> Pod {
        let mut pod = object(serde_json::json!({"metadata": {"name": "p"}, "status": status}));
        trim_pod(&mut pod);
        pod
    };
    let amounts = serde_json::json!({"cpu": "1"});
    let containers = serde_json::json!([{
        "name": "c", "image": "i", "imageID": "i", "ready": true, "restartCount": 7,
        "allocatedResources": amounts, "resources": {"requests": amounts},
    }]);
    let status = pod(serde_json::json!({"containerStatuses": containers}))
        .status
        .unwrap();
    let kept = &status.container_statuses.unwrap()[0];
    assert_eq!((kept.name.as_str(), kept.restart_count), ("c", 0));
    assert!(kept.allocated_resources.is_some() && kept.resources.is_some());
    let sums = pod(serde_json::json!({
        "containerStatuses": containers, "allocatedResources": amounts,
        "resources": {"requests": amounts},
    }));
    assert_eq!(
        sums.status.unwrap().container_statuses,
        None,
        "the sums of the pod suffice"
    );
}
