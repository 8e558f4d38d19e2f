//! Description of a running cluster: written by `up` on the host, read by the nodes' inits and by later commands.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::component::Process;
use crate::config::NodeIndex;

/// Complete description of the cluster, stored as `plan.json` in the state directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Exact release of Kubernetes.
    pub(crate) kubernetes: String,
    /// Loopback port of the API server on the host. Distinguishes starts.
    pub(crate) api_port: u16,
    /// Name of the cluster's cgroup below the root of each hierarchy.
    pub(crate) cgroup: String,
    /// Directory of kubectl on the host.
    pub(crate) kubernetes_dir: PathBuf,
    /// Directory of Helm on the host.
    pub(crate) helm_dir: PathBuf,
    /// Directories of the host that every node mounts read-only.
    pub(crate) binds: Vec<Bind>,
    /// The nodes; the first has the control plane.
    pub(crate) nodes: Vec<NodePlan>,
}

impl Plan {
    /// Returns the node `name`.
    pub(crate) fn node(&self, name: &str) -> Option<&NodePlan> {
        self.nodes.iter().find(|node| node.index.name() == name)
    }
}

/// Description of one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodePlan {
    pub(crate) index: NodeIndex,
    /// Path of the machine file; `None` without simulated GPUs.
    pub(crate) machine: Option<PathBuf>,
    /// Processes of the node's init.
    pub(crate) processes: Vec<Process>,
}

/// A directory of the host and its path in the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bind {
    pub(crate) source: PathBuf,
    pub(crate) target: PathBuf,
}
