//! Names, addresses and paths of the nodes, and the configuration files that contain them.
//!
//! All addresses lie in the nodes' network namespaces, so they cannot collide with the host's.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Number of a node in its cluster; determines its name and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct NodeIndex(u8);

impl NodeIndex {
    /// The node with the control plane.
    pub(crate) const CONTROL_PLANE: Self = Self(0);
    /// Largest number of nodes in a cluster.
    const LIMIT: u8 = 100;

    /// Returns the indices of a cluster's nodes.
    ///
    /// # Errors
    /// If `count` is 0 or above the limit.
    pub(crate) fn all(count: usize) -> Result<Vec<Self>> {
        ensure!(
            (1..=usize::from(Self::LIMIT)).contains(&count),
            "a cluster has 1 to {} nodes, not {count}",
            Self::LIMIT
        );
        Ok((0..Self::LIMIT).take(count).map(Self).collect())
    }

    /// Name of the node: `node-0`, `node-1`, …
    pub(crate) fn name(self) -> String {
        format!("node-{}", self.0)
    }

    /// Address of the node.
    pub(crate) fn address(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 95, 0, self.0.saturating_add(1))
    }

    /// Network address of the node's pods, with [`POD_PREFIX_LENGTH`].
    pub(crate) fn pod_network(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 244, self.0, 0)
    }
}

/// Prefix length of [`NodeIndex::pod_network`].
pub(crate) const POD_PREFIX_LENGTH: u8 = 24;

/// Label that selects nodes for the node driver; defined in `drava_api::names`.
pub(crate) const ENABLED_LABEL: &str = "gpu.drava.dev/enabled";

/// Address of the service `kubernetes`, which the node with the control plane carries.
pub(crate) const SERVICE_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// DNS server of pods. Nothing listens on it, so lookups fail at once.
const DNS_IP: &str = "10.96.0.10";
/// Address range of services.
pub(crate) const SERVICE_RANGE: &str = "10.96.0.0/16";

/// The node's state directory, as seen inside the node.
pub(crate) const STATE_DIR: &str = "/cluster";
/// Configuration files inside the node.
pub(crate) const CONFIG_DIR: &str = "/cluster/config";
/// Keys and certificates inside the node.
pub(crate) const PKI_DIR: &str = "/cluster/pki";
/// Go programs inside the node, one directory per Go module.
pub(crate) const TOOLS_DIR: &str = "/opt/cluster";
/// `PATH` of the node's programs.
pub(crate) const PATH: &str = "/opt/cluster/kubernetes:/opt/cluster/containerd:/opt/cluster/runc:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Cargo's output inside the node.
pub(crate) const BUILD_DIR: &str = "/opt/drava-build";
/// Driver root of the simulated GPU machine inside the node.
pub(crate) const SIMULATED_ROOT: &str = "/opt/drava-sim";
/// etcd's data inside the node.
pub(crate) const ETCD_DIR: &str = "/var/lib/etcd";
/// containerd's socket inside the node.
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// Image of pod sandboxes.
pub(crate) const PAUSE_IMAGE: &str = "localhost/pause:dev";

/// containerd's snapshotter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Snapshotter {
    /// Layers are overlaid.
    Overlayfs,
    /// Layers are copied: slower, but works where the state directory lies on an overlay.
    Native,
}

impl Snapshotter {
    fn name(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Native => "native",
        }
    }
}

/// `KubeletConfiguration`.
pub(crate) fn kubelet() -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": format!("{PKI_DIR}/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": format!("{PKI_DIR}/kubelet-serving.crt"),
        "tlsPrivateKeyFile": format!("{PKI_DIR}/kubelet-serving.key"),
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        // The node's cgroup namespace is rooted at the node's own cgroup.
        "cgroupRoot": "/",
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        // Lowering the score needs CAP_SYS_RESOURCE, which root in a container may lack.
        "oomScoreAdj": 0,
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": "/etc/resolv.conf",
        // The default path lies below /usr, which is the host's and read-only.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // Tests kill containers repeatedly: kubelet restarts them without a growing delay (KEP-4603).
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        // Kubelet repeats a failed prepare with this period. The default of a minute would be most of a test's time.
        "syncFrequency": "10s",
        // A developer's disk may be nearly full; kubelet must not evict pods or remove images for that.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
    })
}

/// `KubeSchedulerConfiguration` with this limit of requests per second.
pub(crate) fn kube_scheduler(qps: u32) -> Value {
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": false},
        "clientConnection": {
            "kubeconfig": format!("{CONFIG_DIR}/kube-scheduler.kubeconfig"),
            "qps": qps,
            "burst": qps.saturating_mul(2),
        },
    })
}

/// CNI configuration of the pod network: one bridge in the node.
pub(crate) fn cni(node: NodeIndex) -> Value {
    let subnet = format!("{}/{POD_PREFIX_LENGTH}", node.pod_network());
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "hairpinMode": true,
            "ipMasq": false,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }],
    })
}

/// containerd's configuration; `runc` is the runtime's path inside the node.
pub(crate) fn containerd(snapshotter: Snapshotter, runc: &str) -> String {
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
# Without it, containerd runs, and no pod: it ends instead, and is started again. Its watches need inotify instances, which tests beside
# it may have used up for a moment.
required_plugins = ["io.containerd.grpc.v1.cri"]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "{snapshotter}"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
# Root in a container may lack CAP_SYS_RESOURCE, which lowering a score needs.
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{TOOLS_DIR}/cni"]
conf_dir = "{CONFIG_DIR}/cni"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"#,
        snapshotter = snapshotter.name()
    )
}

/// Returns containerd's configuration with CDI enabled or disabled.
pub(crate) fn containerd_with_cdi(text: &str, enabled: bool) -> String {
    text.replace(&cdi_setting(!enabled), &cdi_setting(enabled))
}

fn cdi_setting(enabled: bool) -> String {
    format!("enable_cdi = {enabled}")
}

/// `/etc/hosts` of the nodes.
pub(crate) fn hosts(nodes: impl IntoIterator<Item = NodeIndex>) -> String {
    let nodes: String = nodes
        .into_iter()
        .map(|node| format!("{} {}\n", node.address(), node.name()))
        .collect();
    format!("127.0.0.1 localhost\n{nodes}{SERVICE_IP} kubernetes.default.svc kubernetes\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_distinct_names_and_addresses() {
        let nodes = NodeIndex::all(2).unwrap();
        assert_eq!(nodes.first(), Some(&NodeIndex::CONTROL_PLANE));
        assert_eq!(
            hosts(nodes.clone()),
            "127.0.0.1 localhost\n10.95.0.1 node-0\n10.95.0.2 node-1\n10.96.0.1 kubernetes.default.svc kubernetes\n"
        );
        let subnets = nodes.into_iter().map(|node| {
            cni(node)["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]
                .as_str()
                .map(str::to_owned)
        });
        let subnets: Vec<_> = subnets.flatten().collect();
        assert_eq!(subnets, ["10.244.0.0/24", "10.244.1.0/24"]);
    }

    #[test]
    fn rejects_clusters_without_nodes_or_with_too_many() {
        for count in [0, 101] {
            let message = NodeIndex::all(count).unwrap_err().to_string();
            assert!(message.contains("1 to 100 nodes"), "{message}");
        }
        assert_eq!(NodeIndex::all(100).unwrap().len(), 100);
    }

    #[test]
    fn label_matches_chart_selector() {
        assert_eq!(ENABLED_LABEL, drava_api::names::ENABLED_LABEL);
    }

    #[test]
    fn containerd_config_enables_cdi_and_sets_snapshotter() {
        let text = containerd(Snapshotter::Native, "/opt/cluster/runc/runc");
        assert!(text.contains("enable_cdi = true") && text.contains("\"/var/run/cdi\""));
        assert!(
            text.contains("snapshotter = \"native\"")
                && text.contains("BinaryName = \"/opt/cluster/runc/runc\"")
        );
    }

    #[test]
    fn disables_and_enables_cdi() {
        let on = containerd(Snapshotter::Overlayfs, "/runc");
        let off = containerd_with_cdi(&on, false);
        assert!(off.contains("enable_cdi = false") && !off.contains("enable_cdi = true"));
        assert_eq!(containerd_with_cdi(&off, true), on);
    }

    #[test]
    fn kubelet_authorizes_through_api_server() {
        let kubelet = kubelet();
        assert_eq!(kubelet["authorization"]["mode"], "Webhook");
        assert_eq!(kubelet["authentication"]["anonymous"]["enabled"], false);
    }
}
