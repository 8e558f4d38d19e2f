//! Connection to the API server on which each wait has an end.
//!
//! An API server, or the load balancer before it, can vanish without closing its connections. Kubernetes' own clients notice
//! that by pings of HTTP/2; this client speaks HTTP/1.1. So silence has a limit on every connection: a request without answer
//! fails after it, and a watch ends by itself before it, with a bookmark, and goes on from there on another connection. And
//! unused connections are not kept: each request on a dead one would wait for its time-out, one after the other.

use std::time::Duration;

use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Builder, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt};
use kube::runtime::watcher;
use kube::{Client, Config};
use tower::{BoxError, ServiceBuilder};

/// Time limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until a connection is established.
    connect: Duration,
    /// Until an answer begins. That of a watch begins at once.
    answer: Duration,
    /// After which a connection that delivers nothing is closed. Longer than a watch.
    silence: Duration,
    /// For which a connection without a request is kept.
    idle: Duration,
    /// Length of a watch, seconds. The API server ends it, after a bookmark.
    watch_seconds: u32,
}

impl Limits {
    /// A watch without connection is noticed within half a minute. For programs of which a cluster has few.
    pub const SHORT_WATCHES: Self = Self {
        connect: Duration::from_secs(10),
        answer: Duration::from_secs(35),
        silence: Duration::from_secs(35),
        idle: MAX_IDLE,
        watch_seconds: 25,
    };

    /// For programs on each node: thousands of nodes would repeat short watches hundreds of times per second.
    pub const LONG_WATCHES: Self = Self {
        silence: Duration::from_secs(300),
        // The longest that kube accepts is 294.
        watch_seconds: 290,
        ..Self::SHORT_WATCHES
    };

    /// Returns the configuration of a watch that ends before its silence would close the connection.
    #[must_use]
    pub fn watch(&self) -> watcher::Config {
        watcher::Config::default().timeout(self.watch_seconds)
    }
}

/// Time for which a connection without a request is kept. A program whose requests time out later than that has a new
/// connection after each request without an answer, however many are dead.
pub const MAX_IDLE: Duration = Duration::from_secs(3);

/// Connects to the API server of the pod or of the kubeconfig. The client sends each request once: a repetition may be late, and
/// hides the first answer, such as that of a PodDisruptionBudget (429), behind a time-out.
///
/// # Errors
/// Without a usable service account or kubeconfig.
pub async fn connect(limits: &Limits) -> Result<Client, Box<dyn std::error::Error + Send + Sync>> {
    Ok(client(Config::infer().await?, limits)?)
}

/// Returns a client for plain HTTP without credentials. Each request names its server.
#[must_use]
pub fn without_credentials(limits: &Limits) -> Client {
    let mut connector = TimeoutConnector::new(HttpConnector::new());
    connector.set_connect_timeout(Some(limits.connect));
    connector.set_read_timeout(Some(limits.silence));
    Client::new(pool(limits).build::<_, Body>(connector), "default")
}

/// Returns a client with these limits; kube's own builder has none for the pool.
fn client(config: Config, limits: &Limits) -> kube::Result<Client> {
    if config.proxy_url.is_some() {
        // Names what is missing: this build has no support of proxies.
        return Client::try_from(config);
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp)?);
    connector.set_connect_timeout(Some(limits.connect));
    connector.set_read_timeout(Some(limits.silence));
    // The idle time of a pooled connection is no silence.
    connector.set_reset_reader_on_write(true);
    let pool = pool(limits).build::<_, Body>(connector);
    let answer = limits.answer;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_future(move |response: ResponseFuture| async move {
            match tokio::time::timeout(answer, response).await {
                Ok(answered) => answered.map_err(BoxError::from),
                Err(elapsed) => Err(BoxError::from(elapsed)),
            }
        })
        .service(pool);
    Ok(Client::new(service, config.default_namespace))
}

fn pool(limits: &Limits) -> Builder {
    let mut pool = Builder::new(TokioExecutor::new());
    pool.pool_timer(TokioTimer::new())
        .pool_idle_timeout(limits.idle);
    pool
}

#[cfg(test)]
mod tests;
