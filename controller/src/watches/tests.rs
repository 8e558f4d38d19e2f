//! Reports of deleted objects, and trimmed fields.

use kube::runtime::watcher::Event;

use super::*;
use crate::fixture::object;

fn node(name: &str, uid: &str) -> Node {
    object(serde_json::json!({"metadata": {"name": name, "uid": uid}}))
}

fn observe(tracker: &mut Tracker, event: Event<Node>) -> Vec<String> {
    tracker
        .observe(event, Kind::Nodes, Observation::Node)
        .into_iter()
        .map(|observation| match observation {
            Observation::Node(Change::Applied(node)) => format!("+{}", node.uid().unwrap()),
            Observation::Node(Change::Deleted(node)) => format!("-{}", node.uid),
            Observation::Listed(_) => "listed".to_owned(),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn reports_objects_deleted_between_lists() {
    let mut tracker = Tracker::default();
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
    let mut tracker = Tracker::default();
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
fn drops_unneeded_pod_fields() {
    let mut pod: Pod = object(serde_json::json!({
        "metadata": {"name": "p", "managedFields": [{}], "annotations": {"a": "b", "gpu.drava.dev/gang": "g"}},
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
