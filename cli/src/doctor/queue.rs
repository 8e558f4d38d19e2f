//! Kueue: device classes that it does not count, and pods that it can admit no more.

use std::collections::BTreeMap;

use drava_api::names::class;
use drava_explanation::advice::names_driver;

use super::state::ClusterState;
use super::workload::object;
use super::{Fault, Finding};
use crate::kueue::{Admission, Kueue, is_gated};

/// Message of Kueue about a workload: the class is between the two.
const UNMAPPED: (&str, &str) = ("DeviceClass ", " is not mapped");

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    match &state.kueue {
        Kueue::Unknown => Vec::new(),
        Kueue::NotInstalled => stale_gates(state),
        Kueue::Installed(_) => unmapped_classes(state),
    }
}

/// Finds pods with claims whose gate nothing removes.
fn stale_gates(state: &ClusterState) -> Vec<Finding> {
    let gated = state.pods.iter().filter(|pod| {
        let claims = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.resource_claims.as_ref());
        claims.is_some_and(|claims| !claims.is_empty()) && is_gated(pod)
    });
    gated
        .map(|pod| Finding {
            fault: Fault::KueueMissing,
            object: format!("pod {}", object(&pod.metadata)),
            problem: "the pod waits for its admission by Kueue, which is not installed".to_owned(),
            fix: "install Kueue, or create the pod without its label kueue.x-k8s.io/queue-name"
                .to_owned(),
        })
        .collect()
}

/// Finds classes of drava with workloads that Kueue admits never, because its configuration lacks the class.
fn unmapped_classes(state: &ClusterState) -> Vec<Finding> {
    let Kueue::Installed(workloads) = &state.kueue else {
        return Vec::new();
    };
    let mut classes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for workload in workloads {
        let Admission::Waiting(reason) = workload.admission() else {
            continue;
        };
        let rest = reason.split_once(UNMAPPED.0).map(|(_, rest)| rest);
        if let Some((class, _)) = rest.and_then(|rest| rest.split_once(UNMAPPED.1))
            && is_of_drava(state, class)
        {
            let name = format!("{}/{}", workload.namespace, workload.name);
            classes.entry(class.to_owned()).or_default().push(name);
        }
    }
    let finding = |(class, workloads): (String, Vec<String>)| {
        Finding {
        fault: Fault::KueueClassUnmapped,
        object: format!("deviceclass {class}"),
        problem: format!(
            "Kueue does not count the class, and admits no workload that requests it: {}",
            workloads.join(", ")
        ),
        fix: "add the class to deviceClassMappings of Kueue's configuration, as in deploy/examples/kueue"
            .to_owned(),
    }
    };
    classes.into_iter().map(finding).collect()
}

/// Returns whether a class of the chart, or another with a selector for drava's devices, has the name.
fn is_of_drava(state: &ClusterState, name: &str) -> bool {
    let mut found = state.classes.iter();
    class::ALL.contains(&name)
        || found.any(|class| class.metadata.name.as_deref() == Some(name) && names_driver(class))
}
