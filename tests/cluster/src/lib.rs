//! A real Kubernetes on one machine, for tests and for the demo.
//!
//! [`up`] builds etcd, Kubernetes, containerd, runc, the CNI plugins and Helm from Go modules whose versions are
//! pinned in `go/`, and starts them as one node. The node has its own namespaces (process ids, mounts, network, host
//! name, IPC, cgroups) and its own root file system. Outside the node, the cluster consists of a directory, a cgroup
//! and one loopback port of the API server. Killing the node's init ends all processes in the node; [`down`] then
//! removes the directory and the cgroup.
//!
//! Not supported: several nodes, images from registries, kube-proxy and DNS. Pods reach the API server by the usual
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
    Artifacts, Profile, build_preload, build_programs, build_static, build_workspace, target_dir,
    workspace_root,
};
pub use cluster::{Cluster, DEFAULT_NAME, Machine, NODE_NAME, Options, Status, attach, down, up};
pub use component::Component;
pub use control::{ComponentStatus, Phase};
pub use golang::{build_tools, cache_dir, helm};
pub use host::{HostLock, lock_host};
pub use progress::Progress;
pub use version::Kubernetes;
