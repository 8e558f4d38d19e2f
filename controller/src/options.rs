//! Command line and environment.

use std::net::SocketAddr;
use std::time::Duration;

use drava_allocator::placement::Policies;
use drava_api::config::PlacementPolicy;

/// Allocates ResourceClaims for GPUs shared by drava.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "drava-controller", version)]
pub struct Options {
    /// Namespace of the lease by which one of several replicas becomes the one that allocates.
    #[arg(long, env = "POD_NAMESPACE", default_value = "drava-system")]
    pub namespace: String,

    /// Name under which this replica holds the lease; the pod's name, so that a restarted container takes it back at
    /// once.
    #[arg(long, env = "POD_NAME", default_value_t = format!("drava-controller-{}", uuid::Uuid::new_v4()))]
    pub identity: String,

    /// Address of /healthz and /readyz.
    #[arg(long, env = "DRAVA_LISTEN", default_value = ":8080", value_parser = parse_listen)]
    pub listen: SocketAddr,

    /// How a node is chosen: the fullest (binpack) or the emptiest (spread).
    #[arg(long, env = "DRAVA_NODE_POLICY", default_value = "binpack", value_parser = parse_policy)]
    pub node_policy: PlacementPolicy,

    /// How a card of the node is chosen: the fullest (binpack) or the emptiest (spread).
    #[arg(long, env = "DRAVA_GPU_POLICY", default_value = "binpack", value_parser = parse_policy)]
    pub gpu_policy: PlacementPolicy,

    /// Time after which an allocation that no pod has reserved is released and planned again.
    #[arg(long, env = "DRAVA_RELEASE_UNRESERVED_AFTER", default_value = "60s", value_parser = parse_duration)]
    pub release_unreserved_after: Duration,

    /// Schedulers whose pods are served; repeatable.
    #[arg(
        long,
        env = "DRAVA_SCHEDULER_NAMES",
        value_delimiter = ',',
        default_value = "default-scheduler"
    )]
    pub scheduler_name: Vec<String>,

    /// Form of the log.
    #[arg(long, env = "DRAVA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

impl Options {
    /// Policies between nodes and between cards.
    #[must_use]
    pub const fn policies(&self) -> Policies {
        Policies {
            node: self.node_policy,
            gpu: self.gpu_policy,
        }
    }
}

/// `:8080` or `127.0.0.1:8080`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("0.0.0.0:{port}"),
        None => text.to_owned(),
    };
    full.parse()
        .map_err(|error| format!("{text:?} is no address: {error}; use :8080 or 127.0.0.1:8080"))
}

fn parse_policy(text: &str) -> Result<PlacementPolicy, String> {
    text.parse()
}

/// `90s`, `2m`, `1h` or a number of seconds.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is no duration, use a form like 60s, 2m or 1h"))?;
    let seconds = match text.get(digits.len()..).unwrap_or_default() {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        unit => return Err(format!("unknown unit {unit:?} in {text:?}, use s, m or h")),
    };
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn flags_parse() {
        let options = Options::try_parse_from([
            "drava-controller",
            "--listen=127.0.0.1:9",
            "--node-policy=spread",
            "--release-unreserved-after=2m",
            "--scheduler-name=a",
            "--scheduler-name=b",
        ])
        .unwrap();
        assert_eq!(options.node_policy, PlacementPolicy::Spread);
        assert_eq!(options.gpu_policy, PlacementPolicy::Binpack);
        assert_eq!(options.release_unreserved_after, Duration::from_secs(120));
        assert_eq!(options.scheduler_name, ["a", "b"]);
    }

    #[test]
    fn mistakes_are_explained() {
        for arguments in [
            ["--gpu-policy=tight"],
            ["--release-unreserved-after=1d"],
            ["--listen=8080"],
        ] {
            let error = Options::try_parse_from(["drava-controller"].into_iter().chain(arguments))
                .unwrap_err();
            assert!(error.to_string().contains("use "), "{error}");
        }
    }
}
