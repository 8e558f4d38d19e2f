//! What a running node is: written by `up` on the host, read by the node's init and by every later command.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::component::Process;

/// The node, in full. Lives as `plan.json` in the state directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Exact release of Kubernetes.
    pub(crate) kubernetes: String,
    /// Where the simulated machine was read from; none without one.
    pub(crate) machine: Option<PathBuf>,
    /// Loopback port of the host behind which the API server answers. Also tells one start from another.
    pub(crate) api_port: u16,
    /// Name of the cluster's cgroup, below the root of each hierarchy.
    pub(crate) cgroup: String,
    /// Directory of kubectl on the host.
    pub(crate) kubernetes_dir: PathBuf,
    /// Directory of Helm on the host.
    pub(crate) helm_dir: PathBuf,
    /// Directories of the host that the node sees, read-only.
    pub(crate) binds: Vec<Bind>,
    /// What the node's init runs.
    pub(crate) processes: Vec<Process>,
}

/// A directory of the host at a path of the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bind {
    pub(crate) source: PathBuf,
    pub(crate) target: PathBuf,
}
