//! Clocks of the nodes.
//!
//! The kubelet writes the time of its node into its Lease; the API server adds its own time in the managed fields. Their
//! difference is the skew of the node.

use k8s_openapi::api::coordination::v1::Lease;

use super::state::ClusterState;
use super::{Fault, Finding};

/// Largest skew in seconds. The validity of the controller's lease has a margin of 5 s.
const MAX_SKEW_SECONDS: i64 = 5;

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let leases = state.leases.iter().flatten();
    leases
        .filter(|lease| lease.metadata.namespace.as_deref() == Some("kube-node-lease"))
        .filter_map(finding)
        .collect()
}

fn finding(lease: &Lease) -> Option<Finding> {
    let node = lease.metadata.name.as_deref()?;
    let skew = skew_seconds(lease)?;
    (skew.abs() > MAX_SKEW_SECONDS).then(|| Finding {
        fault: Fault::ClockSkew,
        object: format!("node {node}"),
        problem: format!(
            "the clock of the node is {} s {} the clock of the API server",
            skew.abs(),
            if skew > 0 { "ahead of" } else { "behind" }
        ),
        fix: "synchronize the clocks with NTP".to_owned(),
    })
}

/// Returns the time of the writer minus the time of the API server.
fn skew_seconds(lease: &Lease) -> Option<i64> {
    let renewed = lease.spec.as_ref()?.renew_time.as_ref()?.0;
    let fields = lease.metadata.managed_fields.as_ref()?;
    let written = fields
        .iter()
        .filter_map(|entry| Some(entry.time.as_ref()?.0))
        .max()?;
    Some(renewed.as_second() - written.as_second())
}
