//! `kubectl drava dump`: the state on which decisions depend, for `simulate` and `console`, or with `--support` what a
//! maintainer needs to understand a fault, without the pods of tenants.
//!
//! For support, only the pods of drava are included; Secrets and ConfigMaps are not read. Claims are included, because they
//! hold the allocations.

use std::path::Path;

use anyhow::Context as _;
use drava_explanation::snapshot::Objects;
use serde_json::{Value, json};

use crate::doctor::{self, ClusterState};

/// Reads a dump.
pub(crate) fn read(file: &Path) -> anyhow::Result<Objects> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is no output of `kubectl drava dump`", file.display()))
}

/// Returns the objects that drava's decisions depend on, with the findings of the doctor.
pub(crate) fn for_support(state: &ClusterState) -> Value {
    let namespace = state.namespace();
    let pods: Vec<_> = state
        .pods
        .iter()
        .filter(|pod| pod.metadata.namespace.as_deref() == Some(namespace))
        .collect();
    let leases: Vec<_> = state
        .leases
        .iter()
        .flatten()
        .filter(|lease| {
            matches!(lease.metadata.namespace.as_deref(), Some(of) if of == namespace || of == "kube-node-lease")
        })
        .collect();
    let events: Vec<_> = state
        .events
        .iter()
        .flatten()
        .filter(|event| {
            let component = event.reporting_component.as_deref();
            event.metadata.namespace.as_deref() == Some(namespace)
                || component.is_some_and(|component| component.starts_with("drava-"))
        })
        .collect();
    let mut dump = json!({
        "kubectlDrava": env!("CARGO_PKG_VERSION"),
        "time": state.now.map(|now| now.to_string()),
        "diagnosis": doctor::diagnose(state),
        "nodes": state.nodes,
        "resourceSlices": state.slices,
        "deviceClasses": state.classes,
        "resourceClaims": state.claims,
        "daemonSets": state.daemon_sets,
        "deployments": state.deployments,
        "pods": pods,
        "leases": leases,
        "events": events,
        "admissionPolicies": state.policies,
        "admissionPolicyBindings": state.bindings,
    });
    strip(&mut dump);
    dump
}

/// Removes fields that are long and without use: who set which field, and what kubectl applied last.
fn strip(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.remove("managedFields");
            members.remove("kubectl.kubernetes.io/last-applied-configuration");
            members.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::healthy;

    #[test]
    fn dumps_own_pods_without_those_of_tenants() {
        let dump = for_support(&healthy());
        let names = |list: &str| -> Vec<String> {
            let items = dump[list].as_array().into_iter().flatten();
            items
                .filter_map(|item| item["metadata"]["name"].as_str())
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(names("pods"), ["drava-dra-driver-x"]);
        assert_eq!(names("resourceClaims"), ["c"]);
        assert_eq!(names("leases"), ["drava-controller", "n1"]);
        assert_eq!(dump["diagnosis"]["findings"], json!([]));
        let text = dump.to_string();
        assert!(!text.contains("NVIDIA_VISIBLE_DEVICES"), "{text}");
        assert!(!text.contains("managedFields"), "{text}");
    }
}
