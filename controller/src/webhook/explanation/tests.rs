//! The routes, with an API server that knows two tokens.

use axum::body::Body;
use drava_explanation::fixture::settings;
use http::{Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use serde_json::json;
use tower::ServiceExt;

use super::*;

/// Answers as an API server with one pending pod, `default/big`, which user `alice` may see; `admin` may see everything.
async fn api_server(
    request: Request<kube::client::Body>,
) -> Result<Response<Body>, tower::BoxError> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await?.to_bytes();
    let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
    let answer = match path.as_str() {
        "/apis/authentication.k8s.io/v1/tokenreviews" => {
            let token = sent["spec"]["token"].as_str().unwrap_or_default();
            let user = token.strip_prefix("token-of-");
            let user = user.map(|user| json!({"username": user, "groups": ["g"]}));
            json!({"status": {"authenticated": user.is_some(), "user": user}})
        }
        "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
            let attributes = &sent["spec"]["resourceAttributes"];
            let is_admin = sent["spec"]["user"] == "admin";
            let is_own = sent["spec"]["user"] == "alice" && attributes["namespace"] == "default";
            json!({"spec": {}, "status": {"allowed": is_admin || is_own}})
        }
        "/api/v1/pods" => json!({"metadata": {}, "items": [{
            "metadata": {"name": "big", "namespace": "default", "uid": "big"},
            "spec": {"containers": [{"name": "c"}]},
        }]}),
        _ => json!({"metadata": {}, "items": []}),
    };
    Ok(Response::new(Body::from(answer.to_string())))
}

async fn call(method: &str, uri: &str, token: Option<&str>, body: Value) -> (StatusCode, Value) {
    let client = Client::new(tower::service_fn(api_server), "default");
    let explainer = Explainer::new(client.clone(), settings(), true);
    let mut request = Request::builder().method(method).uri(uri);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Body::from(body.to_string())).unwrap();
    let router = router(explainer, Access::new(client));
    let response = router.oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

const EXPLAIN: &str = "/explain/namespaces/default/pods/big";

#[tokio::test]
async fn explains_to_callers_that_may_see_the_pod() {
    let (status, body) = call("GET", EXPLAIN, Some("token-of-alice"), Value::Null).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert_eq!(body["state"], "NoGpuRequest");
    let missing = EXPLAIN.replace("big", "small");
    let (status, body) = call("GET", &missing, Some("token-of-alice"), Value::Null).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{body}");
}

#[tokio::test]
async fn refuses_callers_without_token_or_permission() {
    for token in [None, Some("forged")] {
        let (status, _) = call("GET", EXPLAIN, token, Value::Null).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    }
    let (status, body) = call("GET", EXPLAIN, Some("token-of-bob"), Value::Null).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(body["message"], "bob may not get pods in namespace default");
    // The answer does not tell whether the pod exists.
    let missing = EXPLAIN.replace("big", "small");
    let (status, _) = call("GET", &missing, Some("token-of-bob"), Value::Null).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn simulates_in_the_namespace_of_the_caller_only() {
    let pod = json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}});
    let alice = Some("token-of-alice");
    let (status, body) = call("POST", "/simulate", alice, pod.clone()).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert_eq!(body["pods"][0]["state"], "noGpuRequest");
    let in_namespace = |namespace: &str| {
        let mut pod = pod.clone();
        pod["metadata"]["namespace"] = json!(namespace);
        pod
    };
    let (status, _) = call("POST", "/simulate", alice, in_namespace("other")).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let list = json!({"kind": "List", "items": [in_namespace("default"), in_namespace("other")]});
    let (status, body) = call("POST", "/simulate", alice, list).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
    let many = json!({"kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"replicas": 1_000_000, "template": {"spec": {"containers": []}}}});
    let (status, body) = call("POST", "/simulate", alice, many).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
}
