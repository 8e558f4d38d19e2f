//! The condition of a pod whose programs stand still.

use drava_api::names;
use serde_json::json;

use super::super::cluster::TestCluster;
use super::{add_suspendable, add_with, answer, wish};
use crate::fixture::object;

/// Executes the writes of conditions of pods; returns the status and message of each.
fn write_running(cluster: &mut TestCluster) -> Vec<(String, String)> {
    let updates = std::mem::take(&mut cluster.pod_conditions).into_iter();
    let running = updates.filter(|update| update.condition.type_ == names::RUNNING_CONDITION);
    let mut written = Vec::new();
    for update in running {
        let mut pod = cluster.pods[&update.pod.name.unwrap()].clone();
        let condition = update.condition;
        let message = condition.message.clone().unwrap();
        written.push((condition.status.clone(), message));
        let status = pod.status.get_or_insert_default();
        let conditions = status.conditions.get_or_insert_default();
        conditions.retain(|other| other.type_ != condition.type_);
        conditions.push(condition);
        cluster.add_pod(pod);
    }
    written
}

fn runs() -> (String, String) {
    ("True".to_owned(), String::new())
}

fn stands_still(why: &str) -> (String, String) {
    let message = format!("its programs stand still: the share of claim low is suspended {why}");
    ("False".to_owned(), message)
}

#[test]
fn condition_of_pod_says_that_its_programs_stand_still() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.settle();
    assert!(
        write_running(&mut cluster).is_empty(),
        "never suspended, and no gate"
    );
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    cluster.settle();
    let suspended = stands_still("for pod default/urgent");
    assert_eq!(write_running(&mut cluster), [suspended]);
    answer(&mut cluster, "low", "True", "Suspended");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    cluster.bind(("urgent", "n1"));
    cluster.change_leader();
    cluster.settle();
    assert!(write_running(&mut cluster).is_empty(), "it is the same");
    cluster.end("urgent");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
    // The node driver restores the processes.
    cluster.settle();
    let resuming = stands_still("until it has room on its GPU");
    assert_eq!(write_running(&mut cluster), [resuming]);
    answer(&mut cluster, "low", "False", "Resumed");
    cluster.settle();
    assert_eq!(write_running(&mut cluster), [runs()]);
    cluster.settle();
    assert!(write_running(&mut cluster).is_empty(), "once");
}

#[test]
fn condition_says_that_programs_run_when_the_suspension_is_refused() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    wish(&mut cluster, "low", true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    cluster.settle();
    let why = "as its annotation gpu.drava.dev/suspend-requested requests";
    assert_eq!(write_running(&mut cluster), [stands_still(why)]);
    answer(&mut cluster, "low", "False", "SuspendFailed");
    cluster.settle();
    assert_eq!(write_running(&mut cluster), [runs()]);
}

#[test]
fn readiness_gate_is_true_when_the_pod_is_bound() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_with(&mut cluster, "low", "60Gi", 0, |pod| {
        let gates = json!([{"conditionType": names::RUNNING_CONDITION}]);
        pod.spec.as_mut().unwrap().readiness_gates = Some(object(gates));
    });
    cluster.settle();
    assert_eq!(write_running(&mut cluster), [runs()]);
    cluster.change_leader();
    cluster.settle();
    assert!(write_running(&mut cluster).is_empty());
}
