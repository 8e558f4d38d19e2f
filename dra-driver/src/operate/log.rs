//! Log of the driver, whose filter can be changed while the driver runs.
//!
//! `/log-filter` is on a loopback address, because a filter that logs everything slows the driver down:
//! `kubectl port-forward pod/<driver> 9395` and `curl -X PUT --data debug localhost:9395/log-filter`.

use std::io::IsTerminal as _;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use crate::node::options::LogFormat;

/// Filter of the log; clones share it.
#[derive(Debug, Clone)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

/// Starts the log of this process, with the filter of `RUST_LOG` or `info`.
#[must_use]
pub fn start(format: LogFormat) -> LogFilter {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let (filter, handle) = reload::Layer::new(filter);
    let log = tracing_subscriber::registry().with(filter);
    let lines = fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with(lines).init(),
        LogFormat::Json => log.with(lines.json()).init(),
    }
    LogFilter(handle)
}

/// Serves `/log-filter` until `stop`. Without the address the driver runs with the filter that it has.
pub async fn serve(filter: LogFilter, address: SocketAddr, stop: CancellationToken) {
    let listener = match TcpListener::bind(address).await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%address, %error, "cannot listen; the log filter cannot be changed");
            return;
        }
    };
    let served =
        axum::serve(listener, router(filter)).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = served.await {
        tracing::warn!(%address, %error, "cannot serve the log filter");
    }
}

fn router(filter: LogFilter) -> Router {
    Router::new()
        .route("/log-filter", get(show).put(set))
        .with_state(filter)
}

async fn show(State(LogFilter(filter)): State<LogFilter>) -> (StatusCode, String) {
    match filter.with_current(ToString::to_string) {
        Ok(filter) => (StatusCode::OK, format!("{filter}\n")),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

async fn set(State(LogFilter(filter)): State<LogFilter>, text: String) -> (StatusCode, String) {
    let wanted = match EnvFilter::try_new(text.trim()) {
        Ok(wanted) => wanted,
        Err(error) => {
            let text =
                format!("invalid filter: {error}; use for example info,drava_dra_driver=debug\n");
            return (StatusCode::BAD_REQUEST, text);
        }
    };
    let name = wanted.to_string();
    match filter.reload(wanted) {
        Ok(()) => {
            tracing::info!(filter = name, "log filter changed");
            (StatusCode::OK, format!("{name}\n"))
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_the_filter_and_rejects_invalid_ones() {
        let (layer, handle) = reload::Layer::new(EnvFilter::new("info"));
        let _log = tracing_subscriber::registry().with(layer);
        let filter = || State(LogFilter(handle.clone()));
        let (status, text) = set(filter(), "warn,drava_dra_driver=debug\n".to_owned()).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        let (_, shown) = show(filter()).await;
        assert!(shown.contains("drava_dra_driver=debug"), "{shown}");
        let (status, text) = set(filter(), "drava=loud".to_owned()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(
            text.contains("drava_dra_driver=debug"),
            "an example: {text}"
        );
        assert_eq!(show(filter()).await.1, shown);
    }
}
