//! The connection of a replica to the model of the API server.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request as HttpRequest, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use super::{Request, Server};

impl Server {
    /// Returns how long a request or a response takes; a few take longer than the time-outs of the writes.
    fn latency(&mut self) -> Duration {
        let is_slow = self.is_faulty && self.random.chance(3);
        let limit = if is_slow { 6000 } else { 150 };
        Duration::from_millis(self.random.below(limit) as u64)
    }
}

/// Returns the connection of a replica to the server.
pub(in super::super) fn service(
    replica: usize,
    server: &Arc<Mutex<Server>>,
) -> impl tower::Service<
    HttpRequest<Body>,
    Response = Response<Body>,
    Error = tower::BoxError,
    Future: Send + 'static,
> + Send
+ 'static {
    let server = Arc::clone(server);
    tower::service_fn(move |request: HttpRequest<Body>| {
        let server = Arc::clone(&server);
        async move {
            let (head, body) = request.into_parts();
            let wants_metadata = crate::fixture::wants_metadata(&head.headers);
            let bytes = body.collect().await?.to_bytes();
            let query = head.uri.query().unwrap_or_default();
            let request = Request {
                is_dry_run: query.contains("dryRun=All"),
                path: head.uri.path().to_owned(),
                method: head.method,
                body: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
            };
            let latency = server.lock().unwrap().latency();
            tokio::time::sleep(latency).await;
            while server.lock().unwrap().stopped.contains(&replica) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let (status, mut body) = server.lock().unwrap().serve(replica, &request)?;
            if wants_metadata && status.is_success() {
                body = crate::fixture::metadata_of(&body);
            }
            let latency = server.lock().unwrap().latency();
            tokio::time::sleep(latency).await;
            while server.lock().unwrap().stopped.contains(&replica) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let response = Response::builder()
                .status(status)
                .body(Body::from(serde_json::to_vec(&body)?))?;
            Ok(response)
        }
    })
}
