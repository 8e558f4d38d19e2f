//! Command-line options and their environment variables.

use std::net::SocketAddr;
use std::time::Duration;

use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_compatibility::Settings;

/// Allocates ResourceClaims for the GPUs of the drava driver.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "drava-controller", version)]
pub struct Options {
    /// Namespace of the Lease that elects the allocating replica.
    #[arg(long, env = "POD_NAMESPACE", default_value = "drava-system")]
    pub namespace: String,

    /// Identity of this replica in the Lease. With the pod name a restarted container reacquires the Lease at once.
    #[arg(long, env = "POD_NAME", default_value_t = format!("drava-controller-{}", uuid::Uuid::new_v4()))]
    pub identity: String,

    /// Listen address of /healthz, /readyz and /metrics.
    #[arg(long, env = "DRAVA_LISTEN", default_value = ":8080", value_parser = parse_listen)]
    pub listen: SocketAddr,

    /// Policy between nodes: prefer the fullest (binpack) or the emptiest (spread).
    #[arg(long, env = "DRAVA_NODE_POLICY", default_value = "binpack")]
    pub node_policy: NodePlacementPolicy,

    /// Policy between the GPUs of a node: prefer the fullest (binpack) or the emptiest (spread).
    #[arg(long, env = "DRAVA_GPU_POLICY", default_value = "binpack")]
    pub gpu_policy: GpuPlacementPolicy,

    /// Time after which an unreserved allocation is released and its pod is scheduled again.
    #[arg(long, env = "DRAVA_RELEASE_UNRESERVED_AFTER", default_value = "60s", value_parser = parse_duration)]
    pub release_unreserved_after: Duration,

    /// Whether pods are evicted for pods of higher priority that need their devices.
    #[arg(long, env = "DRAVA_PREEMPTION", default_value_t = true, action = clap::ArgAction::Set)]
    pub preemption: bool,

    /// Whether the leader reads the metrics of the node drivers, and writes GpuShareRecommendations.
    #[arg(long, env = "DRAVA_RECOMMENDATIONS", default_value_t = false, action = clap::ArgAction::Set)]
    pub recommendations: bool,

    /// Name of a scheduler whose pods are served; repeatable.
    #[arg(
        long,
        env = "DRAVA_SCHEDULER_NAMES",
        value_delimiter = ',',
        default_value = "default-scheduler"
    )]
    pub scheduler_name: Vec<String>,

    /// Listen address of the admission webhook; without it no webhook is served.
    #[arg(long, env = "DRAVA_WEBHOOK_LISTEN", value_parser = parse_listen)]
    pub webhook_listen: Option<SocketAddr>,

    /// Lifetime of the webhook's certificate, which the leader rotates after two thirds of it; without it another program
    /// writes the Secret drava-webhook.
    #[arg(long, env = "DRAVA_WEBHOOK_CERTIFICATE_LIFETIME", value_parser = parse_duration)]
    pub webhook_certificate_lifetime: Option<Duration>,

    /// Settings of the translation of extended resources into claims, as JSON; without them no pod is translated.
    #[arg(long, env = "DRAVA_COMPATIBILITY", value_parser = parse_compatibility)]
    pub compatibility: Option<Settings>,

    /// Log format.
    #[arg(long, env = "DRAVA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// Pod as JSON that removes the files of the node driver from a node, for `uninstall clean`; empty: the files stay.
    #[arg(long, env = "DRAVA_NODE_CLEANUP_POD", default_value = "", hide = true)]
    pub node_cleanup_pod: String,

    /// What to do instead of allocating.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Tasks besides allocating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Subcommand)]
pub enum Command {
    /// Hooks of `helm uninstall`.
    #[command(subcommand)]
    Uninstall(UninstallTask),
}

/// Hooks of `helm uninstall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Subcommand)]
pub enum UninstallTask {
    /// Fail while claims have GPUs of drava: their pods could not end without the node driver.
    Check,
    /// Remove the gates of pending pods, the files of the driver on the nodes, the ResourceSlices and the Lease.
    Clean,
}

/// Log format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Text lines.
    Text,
    /// One JSON object per line.
    Json,
}

impl Options {
    /// Returns the placement policies.
    #[must_use]
    pub const fn policies(&self) -> Policies {
        Policies {
            node: self.node_policy,
            gpu: self.gpu_policy,
        }
    }
}

/// Parses `:8080` or `127.0.0.1:8080`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("0.0.0.0:{port}"),
        None => text.to_owned(),
    };
    full.parse().map_err(|error| {
        format!("{text:?} is not an address: {error}; use :8080 or 127.0.0.1:8080")
    })
}

fn parse_compatibility(text: &str) -> Result<Settings, String> {
    serde_json::from_str(text).map_err(|error| {
        format!("not the settings of a translation: {error}; use {{}} for the defaults")
    })
}

/// Parses `90s`, `2m`, `1h` or a number of seconds.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is not a duration; use for example 60s, 2m or 1h"))?;
    let seconds = match text.get(digits.len()..).unwrap_or_default() {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        unit => return Err(format!("unknown unit {unit:?} in {text:?}; use s, m or h")),
    };
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn parses_options() {
        let options = Options::try_parse_from([
            "drava-controller",
            "--listen=127.0.0.1:9",
            "--node-policy=spread",
            "--release-unreserved-after=2m",
            "--webhook-listen=:9443",
            "--webhook-certificate-lifetime=2160h",
            "--scheduler-name=a",
            "--scheduler-name=b",
        ])
        .unwrap();
        assert_eq!(options.node_policy, NodePlacementPolicy::Spread);
        assert_eq!(options.gpu_policy, GpuPlacementPolicy::Binpack);
        assert_eq!(options.release_unreserved_after, Duration::from_secs(120));
        assert_eq!(options.scheduler_name, ["a", "b"]);
        assert_eq!(options.webhook_listen, Some(([0, 0, 0, 0], 9443).into()));
        assert_eq!(
            options.webhook_certificate_lifetime,
            Some(Duration::from_secs(90 * 24 * 3600))
        );
    }

    #[test]
    fn explains_invalid_values() {
        for arguments in [
            ["--gpu-policy=tight"],
            ["--release-unreserved-after=1d"],
            ["--listen=8080"],
            ["--compatibility={\"shareClass\": \"whole\"}"],
        ] {
            let error = Options::try_parse_from(["drava-controller"].into_iter().chain(arguments))
                .unwrap_err();
            assert!(error.to_string().contains("use "), "{error}");
        }
    }
}
