//! Command line and environment of the node driver.
//!
//! Parsed once in `main`; the rest of the driver sees [`Paths`] and single values, never the whole.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

/// Kubelet DRA plugin and node agent of drava: publishes this node's GPUs and prepares claims for containers.
#[derive(Debug, Clone, Parser)]
#[command(name = "drava-dra-driver", version)]
pub struct Args {
    /// Name of the Node object of this node.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Namespace that this driver runs in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "drava-system")]
    pub namespace: String,

    /// UID of this pod. With it two instances can serve side by side during a rolling update.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,

    /// Who allocates: drava's controller (devices carry a taint that keeps kube-scheduler off), or kube-scheduler.
    #[arg(long, env = "SCHEDULING", value_enum, default_value_t = Scheduling::Managed)]
    pub scheduling: Scheduling,

    /// How containers with a share get libvgpu.so: the loader preloads it into every program, or stubs in the place of
    /// libcuda and libnvidia-ml lead to it. Claims that are prepared already keep what they have.
    #[arg(long, env = "DELIVERY", value_enum, default_value_t = Delivery::Preload)]
    pub delivery: Delivery,

    #[command(flatten)]
    #[expect(
        missing_docs,
        reason = "documented at the type; text here would become the help of the command"
    )]
    pub paths: Paths,

    /// Address that serves /healthz and /readyz; an empty host means all.
    #[arg(long, env = "LISTEN", default_value = ":9394")]
    pub listen: Listen,

    /// How log lines look. RUST_LOG selects what is logged.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Directories that the driver works in. All but `driver_root_mount` and `artifacts_dir` are paths on the node that
/// this process sees under the same name.
#[derive(Debug, Clone, clap::Args)]
pub struct Paths {
    /// kubelet's root directory.
    #[arg(long, env = "KUBELET_DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,

    /// Directory from which the container runtime reads CDI specs.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Directory for what must survive a reboot: records, limits pages, installed artifacts.
    #[arg(long, env = "STATE_DIR", default_value = "/var/lib/drava")]
    pub state_dir: PathBuf,

    /// Directory for what need not survive a reboot: the usage regions.
    #[arg(long, env = "RUN_DIR", default_value = "/run/drava")]
    pub run_dir: PathBuf,

    /// Root of the GPU driver's user-space files on the node; `/run/nvidia/driver` under the GPU operator.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// Where this process sees the driver root.
    #[arg(long, env = "DRIVER_ROOT_MOUNT", default_value = "/driver-root")]
    pub driver_root_mount: PathBuf,

    /// Directory of this image that holds libvgpu.so and drava-cdi-hook.
    #[arg(long, env = "ARTIFACTS_DIR", default_value = "/opt/drava")]
    pub artifacts_dir: PathBuf,
}

/// Who allocates devices to claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scheduling {
    /// drava's controller; every device carries the taint `gpu.drava.dev/managed`.
    Managed,
    /// kube-scheduler; no taint.
    Native,
}

/// How containers with a share get libvgpu.so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Delivery {
    /// By `/etc/ld.so.preload`.
    Preload,
    /// By stubs of the driver's libraries.
    Shim,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Address to listen on, `host:port` or `:port` for all interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(port) = text.strip_prefix(':') {
            let port = port.parse().map_err(|_| format!("{port:?} is no port"))?;
            return Ok(Self(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))));
        }
        text.parse()
            .map(Self)
            .map_err(|_| format!("{text:?} is no address, use ADDRESS:PORT or :PORT"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_paths_of_the_chart() {
        let args = Args::try_parse_from(["drava-dra-driver", "--node-name", "a"]).unwrap();
        assert_eq!(args.paths.state_dir, PathBuf::from("/var/lib/drava"));
        assert_eq!(args.scheduling, Scheduling::Managed);
        assert_eq!(args.delivery, Delivery::Preload);
        assert_eq!(args.listen.0.port(), 9394);
    }

    #[test]
    fn another_delivery_is_refused_with_those_that_there_are() {
        let parse = |value| {
            Args::try_parse_from(["drava-dra-driver", "--node-name", "a", "--delivery", value])
        };
        assert_eq!(parse("shim").unwrap().delivery, Delivery::Shim);
        let error = parse("both").unwrap_err().to_string();
        for part in ["'both'", "--delivery", "preload, shim"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn listen_addresses() {
        assert_eq!(
            "127.0.0.1:1".parse(),
            Ok(Listen(([127, 0, 0, 1], 1).into()))
        );
        assert_eq!(":80".parse::<Listen>().unwrap().0.port(), 80);
        assert!(
            "localhost"
                .parse::<Listen>()
                .unwrap_err()
                .contains("ADDRESS:PORT")
        );
        assert!(":http".parse::<Listen>().unwrap_err().contains("no port"));
    }
}
