//! `kubectl drava doctor`: faults of an installation that can be seen in the API, each with its fix.
//!
//! [`fetch`] reads the cluster with the user's permissions; the checks are functions of the [`ClusterState`]. A healthy
//! cluster has no finding, but may have notes on what could be better. What cannot be read is listed as unchecked, because it is no fault of the cluster.

use std::fmt;

use drava_explanation::printable;
use serde::Serialize;

mod access;
mod admission;
mod class_config;
mod clock;
mod device;
pub(crate) mod fetch;
mod installation;
mod node;
mod queue;
mod selector;
mod state;
mod suspension;
mod walls;
mod workload;

pub(crate) use state::ClusterState;

/// A fault with its fix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    fault: Fault,
    /// Kind, namespace and name.
    object: String,
    problem: String,
    fix: String,
}

macro_rules! faults {
    ($($name:ident: $meaning:literal;)*) => {
        /// Stable code of a fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        enum Fault {
            $(#[doc = $meaning] $name,)*
        }

        impl Fault {
            /// All faults with their meaning.
            const ALL: &[(Self, &'static str)] = &[$((Self::$name, $meaning)),*];
        }
    };
}

faults! {
    ServerTooOld: "Kubernetes is too old for the scheduling mode.";
    NotInstalled: "The cluster has no DaemonSet of the node driver.";
    ControllerUnavailable: "No replica of the controller is available.";
    NoLeader: "No replica of the controller holds a current lease.";
    VersionMismatch: "Components of drava have different versions.";
    ClassMissing: "A device class of the chart does not exist.";
    PolicyMissing: "An admission policy or its binding does not exist.";
    PermissionMissing: "A service account of drava lacks a permission.";
    WebhookDown: "A webhook of drava has no ready endpoint.";
    WebhookUntrusted: "A webhook of drava has no valid trusted certificate.";
    KubeletTooOld: "The kubelet of a GPU node is too old.";
    DriverPodMissing: "A selected node runs no pod of the node driver.";
    DriverNotReady: "The node driver of a node is not ready.";
    DriverRootWrong: "The driver root has no NVIDIA libraries.";
    StateDirNoexec: "The state directory of a node is on a file system without execution.";
    RecordsNewer: "A newer node driver wrote records of claims that this one cannot read.";
    NotPublished: "The node driver is ready, but its node has no ResourceSlice.";
    DevicePlugin: "A device plugin offers GPUs of a node of drava.";
    OtherDriver: "Another DRA driver publishes the same GPUs.";
    FieldsDropped: "The API server drops fields of ResourceSlices, because a feature gate is off.";
    PoolExcluded: "The ResourceSlices of a node are inconsistent.";
    ObjectUnreadable: "An object has a value that drava cannot read.";
    GpuUnhealthy: "A GPU is unhealthy.";
    DeviceUnavailable: "The mode of a GPU or its node profile excludes a device that claims hold.";
    ForeignInstance: "MIG instances that drava did not create exclude partitions.";
    NotEnforced: "The limits of a claim are not enforced.";
    StateMissing: "The node lacks state of a prepared claim.";
    PrepareFailed: "The kubelet cannot prepare the claims of a pod.";
    StaleSocket: "The kubelet calls a socket of the node driver that no process serves.";
    UvmMissing: "A node has no device file of unified memory.";
    CdiOff: "CDI is off in the container runtime of a node.";
    NvidiaDefaultRuntime: "The default runtime of a node gives all GPUs to pods without a claim.";
    RuntimeUnchecked: "The configuration of the container runtime of a node is not at a known path.";
    UnclaimedAccess: "A pod without a claim sees the GPUs of its node.";
    PlaceholderSelector: "A selector compares an attribute with a value that no GPU publishes.";
    KueueMissing: "A pod waits for Kueue, which is not installed.";
    KueueClassUnmapped: "Kueue does not count a device class of drava, and admits no workload that requests it.";
    ClassConfigInvalid: "The config of a device class is invalid, or has no effect.";
    DriverLimitMissing: "A device class requires that the NVIDIA driver limits memory, and the driver of a node cannot.";
    SpatialMissing: "A device class requires shares of the multiprocessors, and a GPU can have none.";
    NotSuspendable: "A share that may be suspended by its config cannot be.";
    ClockSkew: "The clock of a node differs from the clock of the API server.";
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.object, self.problem, self.fix)
    }
}

/// Result of all checks.
#[derive(Debug, Serialize)]
pub(crate) struct Diagnosis {
    findings: Vec<Finding>,
    /// What is no fault, and could be better.
    notes: Vec<String>,
    /// What could not be read, and why.
    unchecked: Vec<String>,
}

/// Runs all checks.
pub(crate) fn diagnose(state: &ClusterState) -> Diagnosis {
    let mut findings = installation::check(state);
    let mut notes = Vec::new();
    // Without an installation, all other checks would report its absence.
    if state.driver().is_some() {
        findings.extend(access::check(state));
        findings.extend(admission::check(state));
        findings.extend(node::check(state));
        findings.extend(device::check(state));
        findings.extend(workload::check(state));
        findings.extend(selector::check(state));
        findings.extend(queue::check(state));
        findings.extend(class_config::check(state));
        findings.extend(walls::check(state));
        notes.extend(walls::notes(state));
        findings.extend(suspension::check(state));
        findings.extend(clock::check(state));
    }
    findings.sort();
    findings.dedup();
    Diagnosis {
        findings,
        notes,
        unchecked: state.unchecked.clone(),
    }
}

impl Diagnosis {
    pub(crate) fn is_healthy(&self) -> bool {
        self.findings.is_empty()
    }

    /// Formats the findings as text, one per line.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            text.push_str(&printable(&finding.to_string()));
            text.push('\n');
        }
        if self.findings.is_empty() {
            text.push_str("no problems found\n");
        }
        for note in &self.notes {
            text.push_str(&printable(&format!("note: {note}")));
            text.push('\n');
        }
        for unchecked in &self.unchecked {
            text.push_str(&format!("not checked: {unchecked}\n"));
        }
        text
    }
}

/// Returns the codes of the faults with their meaning, for the help.
pub(crate) fn fault_table() -> String {
    Fault::ALL
        .iter()
        .map(|(fault, meaning)| format!("  {:<22} {meaning}\n", format!("{fault:?}")))
        .collect()
}

#[cfg(test)]
pub(crate) mod tests;
