//! HTTP server of the console.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::http::header::{self, HeaderName};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use tokio_stream::wrappers::WatchStream;

use super::access::{Guard, Resource};
use super::live::Live;

/// Shortest time between two events about changes; each makes the page read the model.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Headers of all responses. The page may load its own files only, and no site may embed it.
const HEADERS: [(HeaderName, &str); 8] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    // The address contains the secret.
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("permissions-policy"),
        "camera=(), geolocation=(), microphone=()",
    ),
];

/// Returns the server's handler of all requests.
pub(super) fn router(live: Arc<Live>, guard: Guard) -> Router {
    Router::new()
        .fallback(serve)
        .with_state((live, Arc::new(guard)))
}

async fn serve(State((live, guard)): State<(Arc<Live>, Arc<Guard>)>, request: Request) -> Response {
    let checked = guard.check(request.method(), request.uri().path(), request.headers());
    let mut response = match checked {
        Ok(resource) => respond(resource, &live),
        Err(refusal) => (refusal.status(), format!("{refusal}\n")).into_response(),
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn respond(resource: Resource, live: &Live) -> Response {
    match resource {
        Resource::File(file) => {
            ([(header::CONTENT_TYPE, file.media_type)], file.text).into_response()
        }
        Resource::View => (
            [(header::CONTENT_TYPE, "application/json")],
            live.document(),
        )
            .into_response(),
        Resource::Events => {
            // A receiver sees the newest generation only, so changes during the pause are one event.
            let changes = WatchStream::new(live.changes()).then(|generation| async move {
                tokio::time::sleep(MIN_INTERVAL).await;
                Ok::<_, Infallible>(Event::default().data(generation.to_string()))
            });
            Sse::new(changes)
                .keep_alive(KeepAlive::default())
                .into_response()
        }
    }
}
