//! Objects that vanish while no watch runs are reported.

use kube::runtime::watcher::Event;

use super::*;
use crate::fixture::object;

fn node(name: &str, uid: &str) -> Node {
    object(serde_json::json!({"metadata": {"name": name, "uid": uid}}))
}

fn take(tracker: &mut Tracker, event: Event<Node>) -> Vec<String> {
    tracker
        .take(event, Kind::Nodes, Observation::Node)
        .into_iter()
        .map(|observation| match observation {
            Observation::Node(Change::Applied(node)) => format!("+{}", node.uid().unwrap()),
            Observation::Node(Change::Gone(gone)) => format!("-{}", gone.uid),
            Observation::Listed(_) => "listed".to_owned(),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_new_list_is_compared_with_what_was_known() {
    let mut tracker = Tracker::default();
    assert!(take(&mut tracker, Event::Init).is_empty());
    assert_eq!(
        take(&mut tracker, Event::InitApply(node("a", "a1"))),
        ["+a1"]
    );
    assert_eq!(
        take(&mut tracker, Event::InitApply(node("b", "b1"))),
        ["+b1"]
    );
    assert_eq!(take(&mut tracker, Event::InitDone), ["listed"]);
    assert_eq!(take(&mut tracker, Event::Apply(node("c", "c1"))), ["+c1"]);
    assert_eq!(take(&mut tracker, Event::Delete(node("c", "c1"))), ["-c1"]);
    // The watch breaks; meanwhile b is deleted, and a is deleted and created again.
    assert!(take(&mut tracker, Event::Init).is_empty());
    assert_eq!(
        take(&mut tracker, Event::InitApply(node("a", "a2"))),
        ["-a1", "+a2"]
    );
    assert_eq!(take(&mut tracker, Event::InitDone), ["-b1", "listed"]);
}

#[test]
fn a_list_that_breaks_off_reports_nothing_as_gone() {
    let mut tracker = Tracker::default();
    take(&mut tracker, Event::InitApply(node("a", "a1")));
    take(&mut tracker, Event::InitApply(node("b", "b1")));
    take(&mut tracker, Event::InitDone);
    take(&mut tracker, Event::Init);
    take(&mut tracker, Event::InitApply(node("a", "a1")));
    take(&mut tracker, Event::Init);
    take(&mut tracker, Event::InitApply(node("b", "b1")));
    assert_eq!(take(&mut tracker, Event::InitDone), ["-a1", "listed"]);
}

#[test]
fn what_no_decision_needs_is_dropped() {
    let mut pod: Pod = object(serde_json::json!({
        "metadata": {"name": "p", "managedFields": [{}], "annotations": {"a": "b"}},
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
            "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
            "status": {"phase": "Pending"},
        })
    );
}
