//! A real Kubernetes on one machine, for tests and for the demo.
//!
//! [`up`] builds etcd, Kubernetes, containerd, runc, the CNI plugins and Helm from Go modules whose versions are
//! pinned in `go/`, and starts them as one or several nodes. A node has its own simulated GPU machine, containerd and
//! kubelet in its own namespaces (process ids, mounts, network, host name, IPC, cgroups) and its own root file system. The
//! first node also runs the control plane and routes between the nodes. Outside the nodes, the cluster consists of a
//! directory, a cgroup and one loopback port of the API server. Killing a node's init ends all processes in the node;
//! [`down`] does so for all nodes and removes the directory and the cgroup.
//!
//! Not supported: images from registries, kube-proxy and DNS. Pods reach the API server by the usual
//! service address; the API server reaches webhooks by their endpoints.

mod cargo;
mod cgroup;
mod cluster;
mod component;
mod config;
mod control;
mod golang;
mod host;
pub mod http;
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
    Artifacts, Profile, build_preload, build_programs, build_static, build_workspace,
    cargo_command, target_dir, workspace_root,
};
pub use cluster::{
    Cluster, DEFAULT_NAME, Machine, Node, NodeStatus, Options, Status, attach, down, up,
};
pub use component::Component;
pub use control::{ComponentStatus, Phase};
pub use golang::{
    build_program, build_tools, cache_dir, helm, kubernetes_source, kueue, prometheus, promtool,
};
pub use host::{HostLock, lock_host};
pub use progress::Progress;
pub use version::Kubernetes;
