//! The node's fixed names, addresses and paths, and the configuration files written with them.
//!
//! All addresses live in the node's own network namespace, so they cannot collide with the host's.

use serde_json::{Value, json};

/// Name of the one node.
pub const NODE_NAME: &str = "node-0";
/// Label that selects nodes for the driver; `drava_api::names` is its home.
pub(crate) const ENABLED_LABEL: &str = "gpu.drava.dev/enabled";

/// Address of the node.
pub(crate) const NODE_IP: &str = "10.95.0.1";
/// Address of the service `kubernetes`, which the node itself carries.
pub(crate) const SERVICE_IP: &str = "10.96.0.1";
/// Address that pods are told to ask for names; nothing answers there, so lookups fail at once.
const DNS_IP: &str = "10.96.0.10";
/// Addresses of services.
pub(crate) const SERVICE_RANGE: &str = "10.96.0.0/16";
/// Addresses of pods.
const POD_RANGE: &str = "10.244.0.0/16";

/// The cluster's state directory, as seen inside the node.
pub(crate) const STATE_DIR: &str = "/cluster";
/// Configuration files inside the node.
pub(crate) const CONFIG_DIR: &str = "/cluster/config";
/// Keys and certificates inside the node.
pub(crate) const PKI_DIR: &str = "/cluster/pki";
/// The Go programs inside the node, one directory per Go module.
pub(crate) const TOOLS_DIR: &str = "/opt/cluster";
/// Where the node's programs look for others.
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

/// How containers' root file systems are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Snapshotter {
    /// Layers are stacked.
    Overlayfs,
    /// Layers are copied: slower, but works where the state directory itself lies on an overlay.
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
        // The node's cgroup namespace begins at the cluster's own cgroup.
        "cgroupRoot": "/",
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        // Lowering it needs CAP_SYS_RESOURCE, which root in a container may lack.
        "oomScoreAdj": 0,
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": "/etc/resolv.conf",
        // The usual place lies below /usr, which is the host's and read-only.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // Containers are killed here on purpose and again and again: they come back at once (KEP-4603).
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        // A developer's disk may be nearly full; the cluster neither evicts nor collects for that.
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

/// The pod network: one bridge in the node.
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

/// The same configuration with injection by CDI switched on or off.
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
    fn the_label_is_the_one_that_the_chart_selects() {
        assert_eq!(ENABLED_LABEL, drava_api::names::ENABLED_LABEL);
    }

    #[test]
    fn containerd_injects_devices_and_uses_the_chosen_snapshotter() {
        let text = containerd(Snapshotter::Native, "/opt/cluster/runc/runc");
        assert!(text.contains("enable_cdi = true") && text.contains("\"/var/run/cdi\""));
        assert!(
            text.contains("snapshotter = \"native\"")
                && text.contains("BinaryName = \"/opt/cluster/runc/runc\"")
        );
    }

    #[test]
    fn injection_is_switched_off_and_on_again() {
        let on = containerd(Snapshotter::Overlayfs, "/runc");
        let off = containerd_with_cdi(&on, false);
        assert!(off.contains("enable_cdi = false") && !off.contains("enable_cdi = true"));
        assert_eq!(containerd_with_cdi(&off, true), on);
    }

    #[test]
    fn kubelet_asks_the_api_server_who_may_call_it() {
        let kubelet = kubelet();
        assert_eq!(kubelet["authorization"]["mode"], "Webhook");
        assert_eq!(kubelet["authentication"]["anonymous"]["enabled"], false);
    }
}
