//! A real Kubernetes on one machine, for tests and for the demo.
//!
//! [`up`] builds etcd, Kubernetes, containerd, runc, the CNI plugins and Helm from Go modules whose versions are
//! pinned in `go/`, and starts them as one node. The node has namespaces of its own (process ids, mounts, network, host
//! name, IPC, cgroups) and a root file system of its own, so it sees nothing of the user's and the user sees nothing of
//! it but a directory, a cgroup and one loopback port, behind which the API server answers. Killing the node's init ends
//! everything in it; [`down`] then removes the directory and the cgroup.
//!
//! What it does not do: several nodes, images from registries, kube-proxy and DNS. Pods reach the API server by the usual
//! service address; the API server reaches webhooks by their endpoints.

mod cargo;
mod cgroup;
mod cluster;
mod component;
mod config;
mod control;
mod golang;
mod host;
mod kubeconfig;
pub mod node;
pub mod oci;
mod pki;
mod plan;
pub mod prerequisite;
pub mod process;
mod progress;
mod state;
mod version;

pub use cargo::{
    Built, Profile, build_preload, build_programs, build_static, build_workspace, target_dir,
    workspace_root,
};
pub use cluster::{Cluster, DEFAULT_NAME, Machine, NODE_NAME, Options, Status, attach, down, up};
pub use component::Component;
pub use control::{ComponentStatus, Phase};
pub use golang::{build_tools, cache_dir, helm};
pub use host::{HostLock, lock_host};
pub use progress::Progress;
pub use version::Kubernetes;
