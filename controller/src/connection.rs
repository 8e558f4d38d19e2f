//! Connection to the API server on which nothing waits for ever.
//!
//! An API server, or the load balancer before it, can vanish without closing its connections. Kubernetes' own clients notice
//! that by pings of HTTP/2; this client speaks HTTP/1.1. So silence has a limit on every connection: a request without answer
//! fails after it, and a watch ends by itself before it, with a bookmark, and goes on from there on another connection.

use std::time::Duration;

use kube::runtime::watcher;
use kube::{Client, Config};

/// Time after which a connection that delivers nothing is closed. Longer than a watch.
const MAX_SILENCE: Duration = Duration::from_secs(35);
/// Length of a watch, seconds. The API server ends it, after a bookmark.
const WATCH_SECONDS: u32 = 25;

/// Connects to the API server of the pod or of the kubeconfig. The client sends each request once: a repetition would ignore
/// the end of the term, and hide the answer of a PodDisruptionBudget (429) behind a time-out.
///
/// # Errors
/// Without a usable service account or kubeconfig.
pub async fn connect() -> Result<Client, Box<dyn std::error::Error + Send + Sync>> {
    let mut config = Config::infer().await?;
    config.default_retry = false;
    Ok(Client::try_from(limited(config, MAX_SILENCE))?)
}

/// Limits the silence on each connection.
fn limited(mut config: Config, max_silence: Duration) -> Config {
    config.read_timeout = Some(max_silence);
    // The idle time of a pooled connection is no silence.
    config.reset_reader_on_write = true;
    config
}

/// Returns the configuration of a watch.
pub(crate) fn watch() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

#[cfg(test)]
mod tests;
