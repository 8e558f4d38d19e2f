//! Command line and environment of the node driver.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::gpus::device_files::DeviceFiles;

/// Kubelet DRA plugin and node agent of drava: publishes the GPUs of this node and prepares claims for containers.
#[derive(Debug, Clone, Parser)]
#[command(name = "drava-dra-driver", version)]
pub struct Options {
    /// Name of this node's Node object.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Namespace of the driver.
    #[arg(long, env = "POD_NAMESPACE", default_value = "drava-system")]
    pub namespace: String,

    /// UID of this pod; lets two instances serve concurrently during a rolling update.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,

    /// Allocator of the devices: drava's controller (a taint keeps kube-scheduler off), or kube-scheduler.
    #[arg(long, env = "DRAVA_SCHEDULING", value_enum, default_value_t = Scheduling::Managed)]
    pub scheduling: Scheduling,

    /// How containers with a share load libvgpu.so: through /etc/ld.so.preload, or through stubs that replace libcuda
    /// and libnvidia-ml. Prepared claims keep their delivery.
    #[arg(long, env = "DRAVA_DELIVERY", value_enum, default_value_t = Delivery::Preload)]
    pub delivery: Delivery,

    #[command(flatten)]
    #[expect(
        missing_docs,
        reason = "clap would use a doc comment here as the help of the command"
    )]
    pub paths: Paths,

    /// Address of /healthz, /readyz and /metrics; an empty host means all interfaces.
    #[arg(long, env = "DRAVA_LISTEN", default_value = ":9394")]
    pub listen: Listen,

    /// Show metrics under the names of HAMi and of Volcano's vGPU plugin too.
    #[arg(long, env = "DRAVA_METRIC_ALIASES")]
    pub metric_aliases: bool,

    /// Publish GPUs that a device plugin or another DRA driver offers too.
    #[arg(long, env = "DRAVA_IGNORE_OTHER_OWNERS")]
    pub ignore_other_owners: bool,

    /// Loopback address of /log-filter, which shows (GET) and sets (PUT) the log filter.
    #[arg(long, env = "DRAVA_LOG_FILTER_LISTEN", default_value = "127.0.0.1:9395", value_parser = parse_loopback)]
    pub log_filter_listen: SocketAddr,

    /// RuntimeClasses whose containers get the devices of claims although their handler has the name of a runtime with a kernel
    /// of its own, such as Kata. Pods of other such classes are refused.
    #[arg(long, env = "DRAVA_RUNTIME_CLASSES", value_delimiter = ',')]
    pub runtime_classes: Vec<String>,

    #[command(flatten)]
    #[expect(
        missing_docs,
        reason = "clap would use a doc comment here as the help of the command"
    )]
    pub health: HealthOptions,

    /// Log format. RUST_LOG sets the level.
    #[arg(long, env = "DRAVA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// What to do instead of serving the node.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Tasks besides serving the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Subcommand)]
pub enum Command {
    /// Remove the files of the driver from the node: state, run directory, CDI specs and sockets. Fails while claims have state.
    RemoveFiles,
}

/// Rules of the health of GPUs.
#[derive(Debug, Clone, clap::Args)]
pub struct HealthOptions {
    /// XIDs that do not make a GPU unhealthy, in addition to those of applications.
    #[arg(long, env = "DRAVA_XID_IGNORE", value_delimiter = ',')]
    pub xid_ignore: Vec<u64>,

    /// XIDs that make a GPU unhealthy although they are errors of applications; takes precedence over --xid-ignore.
    #[arg(long, env = "DRAVA_XID_FATAL", value_delimiter = ',')]
    pub xid_fatal: Vec<u64>,

    /// Time without a fatal error after which a GPU that answers is healthy again, such as 90s or 10m.
    #[arg(long, env = "DRAVA_HEALTH_RECOVERY_WINDOW", default_value = "10m", value_parser = parse_duration)]
    pub health_recovery_window: Duration,

    /// Effect of the taint of unhealthy GPUs.
    #[arg(long, env = "DRAVA_UNHEALTHY_EFFECT", value_enum, default_value_t = UnhealthyEffect::NoSchedule)]
    pub unhealthy_effect: UnhealthyEffect,
}

/// Effect of the taint of unhealthy GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UnhealthyEffect {
    /// No new claim is allocated on the GPU.
    #[value(name = "NoSchedule")]
    NoSchedule,
    /// In addition, the pods that use the GPU are evicted.
    #[value(name = "NoExecute")]
    NoExecute,
}

impl UnhealthyEffect {
    /// Returns the effect of the taint.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// Parses an address that only programs in the pod of the driver can reach.
fn parse_loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text
        .parse()
        .map_err(|_| format!("invalid address {text:?}; use 127.0.0.1:PORT"))?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err(format!(
            "{address} is not a loopback address: other pods could change the log; use 127.0.0.1:PORT"
        ))
    }
}

/// Parses `90s`, `10m` or `1h`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let error = || format!("invalid duration {text:?}; use for example 90s, 10m or 1h");
    let (number, unit) = text
        .find(|c: char| !c.is_ascii_digit())
        .and_then(|end| text.split_at_checked(end))
        .ok_or_else(error)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(error()),
    };
    let number: u64 = number.parse().map_err(|_| error())?;
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

/// Directories of the driver. `driver_root_mount`, `dev_root_mount`, `dev_char_dir` and `artifacts_dir` are paths inside this
/// container; the others are paths on the node that are mounted into this container under the same name.
#[derive(Debug, Clone, clap::Args)]
pub struct Paths {
    /// Root directory of kubelet.
    #[arg(long, env = "DRAVA_KUBELET_DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,

    /// Directory of CDI specs that the container runtime reads.
    #[arg(long, env = "DRAVA_CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Directory of persistent state: claim records, limits pages, installed artifacts.
    #[arg(long, env = "DRAVA_STATE_DIR", default_value = "/var/lib/drava")]
    pub state_dir: PathBuf,

    /// Directory of state that a reboot may delete: usage regions.
    #[arg(long, env = "DRAVA_RUN_DIR", default_value = "/run/drava")]
    pub run_dir: PathBuf,

    /// Root of the NVIDIA driver's user-space files on the node; `/run/nvidia/driver` with the GPU operator.
    #[arg(long, env = "DRAVA_DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// Path of the driver root inside this container.
    #[arg(long, env = "DRAVA_DRIVER_ROOT_MOUNT", default_value = "/driver-root")]
    pub driver_root_mount: PathBuf,

    /// Root of the tree with `/dev` on the node, where the driver root has no device files; `/` on GKE. Default: the driver
    /// root.
    #[arg(long, env = "DRAVA_DEV_ROOT")]
    pub dev_root: Option<PathBuf>,

    /// Path of the device root inside this container.
    #[arg(long, env = "DRAVA_DEV_ROOT_MOUNT", default_value = "/dev-root")]
    pub dev_root_mount: PathBuf,

    /// `/dev/char` of the node inside this container, for the links that systemd needs. Default: no links.
    #[arg(long, env = "DRAVA_DEV_CHAR_DIR")]
    pub dev_char_dir: Option<PathBuf>,

    /// Directory of this image with libvgpu.so and drava-cdi-hook.
    #[arg(long, env = "DRAVA_ARTIFACTS_DIR", default_value = "/opt/drava")]
    pub artifacts_dir: PathBuf,
}

impl Paths {
    /// Returns the device root: its path in this container and on the node; `None` where the driver root is the device root.
    #[must_use]
    pub fn device_root(&self) -> Option<(PathBuf, PathBuf)> {
        let on_node = self
            .dev_root
            .clone()
            .filter(|root| *root != self.driver_root)?;
        Some((self.dev_root_mount.clone(), on_node))
    }

    /// Returns the device files of the node, for a pod with its own `/dev`.
    #[must_use]
    pub fn device_files(&self) -> DeviceFiles {
        let of_driver = || (self.driver_root_mount.clone(), self.driver_root.clone());
        let (mount, on_node) = self.device_root().unwrap_or_else(of_driver);
        DeviceFiles {
            dev: mount.join("dev"),
            dev_on_node: on_node.join("dev"),
            own_dev: PathBuf::from("/dev"),
            char_dir: self.dev_char_dir.clone(),
        }
    }
}

/// Allocator of the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scheduling {
    /// drava's controller; every device has the taint `gpu.drava.dev/managed`.
    Managed,
    /// kube-scheduler; no taint.
    Native,
}

/// Delivery of libvgpu.so to containers with a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Delivery {
    /// `/etc/ld.so.preload`.
    Preload,
    /// Stubs that replace libraries of the NVIDIA driver.
    Shim,
}

/// Log format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Listen address: `ADDRESS:PORT`, or `:PORT` for all interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(port) = text.strip_prefix(':') {
            let port = port
                .parse()
                .map_err(|_| format!("invalid port {port:?}; use 0 to 65535"))?;
            return Ok(Self(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))));
        }
        text.parse()
            .map(Self)
            .map_err(|_| format!("invalid address {text:?}; use ADDRESS:PORT or :PORT"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_match_the_chart() {
        let options = Options::try_parse_from(["drava-dra-driver", "--node-name", "a"]).unwrap();
        assert_eq!(options.paths.state_dir, PathBuf::from("/var/lib/drava"));
        assert_eq!(options.scheduling, Scheduling::Managed);
        assert_eq!(options.delivery, Delivery::Preload);
        assert_eq!(options.listen.0.port(), 9394);
    }

    #[test]
    fn rejects_unknown_delivery_and_lists_the_values() {
        let parse = |value| {
            Options::try_parse_from(["drava-dra-driver", "--node-name", "a", "--delivery", value])
        };
        assert_eq!(parse("shim").unwrap().delivery, Delivery::Shim);
        let error = parse("both").unwrap_err().to_string();
        for part in ["'both'", "--delivery", "preload, shim"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn changes_of_the_log_filter_need_loopback() {
        assert_eq!(
            parse_loopback("127.0.0.1:1"),
            Ok(([127, 0, 0, 1], 1).into())
        );
        for (bad, text) in [("0.0.0.0:1", "not a loopback"), (":1", "invalid address")] {
            assert!(parse_loopback(bad).unwrap_err().contains(text), "{bad}");
        }
    }

    #[test]
    fn parses_listen_addresses() {
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
        assert!(
            ":http"
                .parse::<Listen>()
                .unwrap_err()
                .contains("invalid port")
        );
    }
}
