//! HTTP endpoints `/healthz` and `/readyz`.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;

use crate::report::conditions::Conditions;

/// Returns the router. `/healthz` always answers 200; `/readyz` answers 503 with the unmet conditions.
pub fn router(conditions: Conditions) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(conditions)
}

async fn readyz(State(conditions): State<Conditions>) -> (StatusCode, String) {
    let unmet = conditions.unmet();
    if unmet.is_empty() {
        return (StatusCode::OK, "ready\n".to_owned());
    }
    let lines = unmet
        .into_iter()
        .map(|(condition, reason)| format!("{condition}: {reason}\n"));
    (StatusCode::SERVICE_UNAVAILABLE, lines.collect())
}
