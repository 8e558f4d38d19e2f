//! Fixed names, addresses and paths of the node, and the configuration files that contain them.
//!
//! All addresses lie in the node's network namespace, so they cannot collide with the host's.

use serde_json::{Value, json};

/// Name of the node.
pub const NODE_NAME: &str = "node-0";
/// Label that selects nodes for the node driver; defined in `drava_api::names`.
pub(crate) const ENABLED_LABEL: &str = "gpu.drava.dev/enabled";

/// Address of the node.
pub(crate) const NODE_IP: &str = "10.95.0.1";
/// Address of the service `kubernetes`, which the node carries.
pub(crate) const SERVICE_IP: &str = "10.96.0.1";
/// DNS server of pods. Nothing listens on it, so lookups fail at once.
const DNS_IP: &str = "10.96.0.10";
/// Address range of services.
pub(crate) const SERVICE_RANGE: &str = "10.96.0.0/16";
/// Address range of pods.
const POD_RANGE: &str = "10.244.0.0/16";

/// The cluster's state directory, as seen inside the node.
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
        // The node's cgroup namespace is rooted at the cluster's cgroup.
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

/// `KubeSchedulerConfiguration`.
pub(crate) fn kube_scheduler() -> Value {
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": false},
        "clientConnection": {"kubeconfig": format!("{CONFIG_DIR}/kube-scheduler.kubeconfig")},
    })
}

/// CNI configuration of the pod network: one bridge in the node.
pub(crate) fn cni() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "hairpinMode": true,
            "ipMasq": false,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_RANGE}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }],
    })
}

/// containerd's configuration; `runc` is the runtime's path inside the node.
pub(crate) fn containerd(snapshotter: Snapshotter, runc: &str) -> String {
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

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

/// `/etc/hosts` of the node.
pub(crate) fn hosts() -> String {
    format!(
        "127.0.0.1 localhost\n{NODE_IP} {NODE_NAME}\n{SERVICE_IP} kubernetes.default.svc kubernetes\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

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
