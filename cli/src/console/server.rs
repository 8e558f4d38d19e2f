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
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

use super::access::{Guard, Resource};
use super::live::Live;

/// Time between the first events about changes: the first lists complete one by one. It doubles with each event.
const FIRST_INTERVAL: Duration = Duration::from_millis(50);
/// Time between later events; each makes the page read the model.
const INTERVAL: Duration = Duration::from_secs(1);

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
            let events = generations(live.changes()).map(|generation| {
                Ok::<_, Infallible>(Event::default().data(generation.to_string()))
            });
            Sse::new(events)
                .keep_alive(KeepAlive::default())
                .into_response()
        }
    }
}

/// Returns the present generation at once, and later ones after a pause.
fn generations(changes: watch::Receiver<u64>) -> impl Stream<Item = u64> {
    let mut pause = Duration::ZERO;
    // A receiver sees the newest generation only, so changes during the pause are one event.
    WatchStream::new(changes).then(move |generation| {
        let present = pause;
        pause = (2 * pause).clamp(FIRST_INTERVAL, INTERVAL);
        async move {
            if present > Duration::ZERO {
                tokio::time::sleep(present).await;
            }
            generation
        }
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn sends_present_generation_without_pause() {
        let sender = watch::Sender::new(7);
        let mut generations = Box::pin(generations(sender.subscribe()));
        assert_eq!(generations.next().now_or_never(), Some(Some(7)));
        sender.send_replace(8);
        assert_eq!(generations.next().await, Some(8));
    }
}
