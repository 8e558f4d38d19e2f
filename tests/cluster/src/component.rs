//! The components of a node: names, command lines, order of start.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::config::{
    BUILD_DIR, CONFIG_DIR, CONTAINERD_SOCKET, ETCD_DIR, NodeIndex, PKI_DIR, SERVICE_RANGE,
    SIMULATED_ROOT, STATE_DIR, TOOLS_DIR,
};

/// A process that the node's init starts and restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    /// The simulated GPU machine.
    #[serde(rename = "simulator-machine")]
    Simulator,
    /// etcd.
    Etcd,
    /// kube-apiserver.
    KubeApiserver,
    /// kube-controller-manager.
    KubeControllerManager,
    /// kube-scheduler.
    KubeScheduler,
    /// containerd.
    Containerd,
    /// kubelet.
    Kubelet,
}

impl Component {
    /// All components, in the order in which readiness is checked.
    pub const ALL: [Self; 7] = [
        Self::Simulator,
        Self::Etcd,
        Self::Containerd,
        Self::KubeApiserver,
        Self::KubeControllerManager,
        Self::KubeScheduler,
        Self::Kubelet,
    ];

    /// Name of the program, and stem of its log file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Simulator => "simulator-machine",
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeControllerManager => "kube-controller-manager",
            Self::KubeScheduler => "kube-scheduler",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
        }
    }

    /// Components that must be ready before this component starts. The other dependencies retry by themselves.
    fn after(self) -> Vec<Self> {
        match self {
            Self::Simulator | Self::Etcd | Self::Containerd => vec![],
            Self::KubeApiserver => vec![Self::Etcd],
            Self::KubeControllerManager | Self::KubeScheduler => vec![Self::KubeApiserver],
            Self::Kubelet => vec![Self::KubeApiserver, Self::Containerd],
        }
    }

    /// Readiness probe of the component.
    fn probe(self) -> Probe {
        match self {
            Self::Simulator => Probe::Command(vec![
                format!("{BUILD_DIR}/simulator-machine"),
                "ctl".into(),
                format!("--root={SIMULATED_ROOT}"),
                "status".into(),
            ]),
            Self::Etcd => loopback(2379),
            // The API server listens long before it has created the roles that the other components need.
            Self::KubeApiserver => Probe::Command(vec![
                format!("{TOOLS_DIR}/kubernetes/kubectl"),
                format!("--kubeconfig={CONFIG_DIR}/admin.kubeconfig"),
                "get".into(),
                "--raw=/readyz".into(),
            ]),
            Self::KubeControllerManager => loopback(10257),
            Self::KubeScheduler => loopback(10259),
            Self::Containerd => Probe::Unix(CONTAINERD_SOCKET.into()),
            Self::Kubelet => loopback(10248),
        }
    }

    fn program(self) -> String {
        match self {
            Self::Simulator => format!("{BUILD_DIR}/simulator-machine"),
            Self::Etcd => format!("{TOOLS_DIR}/etcd/etcd"),
            Self::Containerd => format!("{TOOLS_DIR}/containerd/containerd"),
            Self::KubeApiserver
            | Self::KubeControllerManager
            | Self::KubeScheduler
            | Self::Kubelet => {
                format!("{TOOLS_DIR}/kubernetes/{}", self.name())
            }
        }
    }

    /// Whether the component runs on `node`: the control plane has one node.
    pub(crate) fn runs_on(self, node: NodeIndex) -> bool {
        match self {
            Self::Simulator | Self::Containerd | Self::Kubelet => true,
            Self::Etcd
            | Self::KubeApiserver
            | Self::KubeControllerManager
            | Self::KubeScheduler => node == NodeIndex::CONTROL_PLANE,
        }
    }

    fn args(self, node: NodeIndex) -> Vec<String> {
        match self {
            Self::Simulator => simulator_machine(),
            Self::Etcd => etcd(),
            Self::KubeApiserver => kube_apiserver(),
            Self::KubeControllerManager => kube_controller_manager(),
            Self::KubeScheduler => vec![
                format!("--config={CONFIG_DIR}/kube-scheduler.json"),
                format!("--authentication-kubeconfig={CONFIG_DIR}/kube-scheduler.kubeconfig"),
                format!("--authorization-kubeconfig={CONFIG_DIR}/kube-scheduler.kubeconfig"),
                "--bind-address=127.0.0.1".into(),
                format!("--tls-cert-file={PKI_DIR}/kube-scheduler-serving.crt"),
                format!("--tls-private-key-file={PKI_DIR}/kube-scheduler-serving.key"),
            ],
            Self::Containerd => vec![format!("--config={CONFIG_DIR}/containerd.toml")],
            Self::Kubelet => vec![
                format!("--config={CONFIG_DIR}/kubelet.json"),
                format!("--kubeconfig={CONFIG_DIR}/kubelet.kubeconfig"),
                format!("--hostname-override={}", node.name()),
                format!("--node-ip={}", node.address()),
                format!("--node-labels={}=true", crate::config::ENABLED_LABEL),
            ],
        }
    }

    /// Arguments that turn the PodGroup API of Kubernetes on.
    fn pod_group_args(self) -> &'static [&'static str] {
        const GATE: &str = "--feature-gates=GenericWorkload=true";
        match self {
            Self::KubeApiserver => &[GATE, "--runtime-config=scheduling.k8s.io/v1beta1=true"],
            Self::KubeControllerManager | Self::KubeScheduler => &[GATE],
            Self::Simulator | Self::Etcd | Self::Containerd | Self::Kubelet => &[],
        }
    }

    /// Returns the process as the node's init runs it.
    #[must_use]
    pub(crate) fn process(self, node: NodeIndex, has_pod_groups: bool) -> Process {
        let mut args = self.args(node);
        if has_pod_groups {
            args.extend(self.pod_group_args().iter().map(|arg| (*arg).to_owned()));
        }
        Process {
            component: self,
            program: self.program().into(),
            args,
            after: self.after(),
            probe: self.probe(),
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Component {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(component) = Self::ALL
            .into_iter()
            .find(|component| component.name() == text)
        {
            return Ok(component);
        }
        bail!(
            "unknown component {text:?}: choose one of {}",
            Self::ALL.map(Self::name).join(", ")
        )
    }
}

/// Command line of a component. Paths are those inside the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) component: Component,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) after: Vec<Component>,
    pub(crate) probe: Probe,
}

/// Readiness probe.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Probe {
    /// The address accepts connections.
    Tcp(SocketAddr),
    /// The socket accepts connections.
    Unix(PathBuf),
    /// The program succeeds.
    Command(Vec<String>),
}

fn loopback(port: u16) -> Probe {
    Probe::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
}

fn simulator_machine() -> Vec<String> {
    vec![
        "serve".into(),
        format!("--machine={STATE_DIR}/machine.yaml"),
        format!("--root={SIMULATED_ROOT}"),
        format!("--libs={BUILD_DIR}"),
        "--fabric-manager".into(),
    ]
}

fn etcd() -> Vec<String> {
    vec![
        format!("--data-dir={ETCD_DIR}"),
        "--listen-client-urls=https://127.0.0.1:2379".into(),
        "--advertise-client-urls=https://127.0.0.1:2379".into(),
        "--listen-peer-urls=https://127.0.0.1:2380".into(),
        format!("--cert-file={PKI_DIR}/etcd.crt"),
        format!("--key-file={PKI_DIR}/etcd.key"),
        "--client-cert-auth".into(),
        format!("--trusted-ca-file={PKI_DIR}/ca.crt"),
        format!("--peer-cert-file={PKI_DIR}/etcd.crt"),
        format!("--peer-key-file={PKI_DIR}/etcd.key"),
        "--peer-client-cert-auth".into(),
        format!("--peer-trusted-ca-file={PKI_DIR}/ca.crt"),
        // etcd's data does not outlive a crash of the machine, so waiting for the disk would only slow the tests.
        "--unsafe-no-fsync".into(),
    ]
}

fn kube_apiserver() -> Vec<String> {
    vec![
        "--etcd-servers=https://127.0.0.1:2379".into(),
        format!("--etcd-cafile={PKI_DIR}/ca.crt"),
        format!("--etcd-certfile={PKI_DIR}/etcd-client.crt"),
        format!("--etcd-keyfile={PKI_DIR}/etcd-client.key"),
        "--bind-address=0.0.0.0".into(),
        // Port of the service `kubernetes`: the node carries the service's address, so pods need no kube-proxy.
        "--secure-port=443".into(),
        format!("--advertise-address={}", NodeIndex::CONTROL_PLANE.address()),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        format!("--tls-cert-file={PKI_DIR}/kube-apiserver.crt"),
        format!("--tls-private-key-file={PKI_DIR}/kube-apiserver.key"),
        format!("--client-ca-file={PKI_DIR}/ca.crt"),
        "--anonymous-auth=false".into(),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        "--allow-privileged=true".into(),
        format!("--kubelet-certificate-authority={PKI_DIR}/ca.crt"),
        format!("--kubelet-client-certificate={PKI_DIR}/kube-apiserver-kubelet-client.crt"),
        format!("--kubelet-client-key={PKI_DIR}/kube-apiserver-kubelet-client.key"),
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={PKI_DIR}/service-account.pub"),
        format!("--service-account-signing-key-file={PKI_DIR}/service-account.key"),
        // Without kube-proxy, webhooks are reached at their endpoints instead of their service addresses.
        "--enable-aggregator-routing=true".into(),
    ]
}

fn kube_controller_manager() -> Vec<String> {
    vec![
        format!("--kubeconfig={CONFIG_DIR}/kube-controller-manager.kubeconfig"),
        format!("--authentication-kubeconfig={CONFIG_DIR}/kube-controller-manager.kubeconfig"),
        format!("--authorization-kubeconfig={CONFIG_DIR}/kube-controller-manager.kubeconfig"),
        "--bind-address=127.0.0.1".into(),
        format!("--tls-cert-file={PKI_DIR}/kube-controller-manager-serving.crt"),
        format!("--tls-private-key-file={PKI_DIR}/kube-controller-manager-serving.key"),
        "--use-service-account-credentials=true".into(),
        format!("--service-account-private-key-file={PKI_DIR}/service-account.key"),
        format!("--root-ca-file={PKI_DIR}/ca.crt"),
        format!("--cluster-signing-cert-file={PKI_DIR}/ca.crt"),
        format!("--cluster-signing-key-file={PKI_DIR}/ca.key"),
        "--leader-elect=false".into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_component_names() {
        for component in Component::ALL {
            assert_eq!(component.name().parse::<Component>().unwrap(), component);
            assert_eq!(
                serde_json::to_string(&component).unwrap(),
                format!("{:?}", component.name())
            );
        }
        let message = "kube-proxy".parse::<Component>().unwrap_err().to_string();
        assert!(
            message.contains("kube-proxy") && message.contains("kubelet"),
            "{message}"
        );
    }

    #[test]
    fn start_order_has_no_cycle() {
        fn depth(component: Component) -> usize {
            component
                .after()
                .into_iter()
                .map(|earlier| 1 + depth(earlier))
                .max()
                .unwrap_or(0)
        }
        assert_eq!(Component::ALL.map(depth).into_iter().max(), Some(2));
    }

    #[test]
    fn api_server_requires_certificate_or_service_account() {
        let api_server = kube_apiserver();
        assert!(api_server.contains(&"--anonymous-auth=false".to_owned()));
        assert!(api_server.contains(&"--authorization-mode=Node,RBAC".to_owned()));
        assert!(
            !api_server
                .iter()
                .any(|arg| arg.starts_with("--token-auth-file"))
        );
        assert!(etcd().contains(&"--client-cert-auth".to_owned()));
    }
}
