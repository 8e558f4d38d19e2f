//! The server with a TLS client.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use jiff::Timestamp;
use kube::runtime::watcher::Event;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate::Certificate;
use super::*;
use crate::fixture::{claim, class, pod};

const NAME: &str = "drava-webhook.drava-system.svc";

fn issue() -> Certificate {
    let lifetime = Duration::from_secs(3600);
    Certificate::issue(NAME, Timestamp::now(), lifetime, None).unwrap()
}

struct Server {
    address: SocketAddr,
    certificates: watch::Sender<Option<Arc<ServerConfig>>>,
}

/// Starts a server whose catalog has the claim `a`.
async fn start(certificate: Option<&Certificate>) -> Server {
    let catalog = SharedCatalog::default();
    catalog.write().class(Event::Apply(class()));
    catalog.write().claim(Event::Apply(claim("a", "8Gi")));
    let webhook = Webhook {
        catalog,
        schedulers: ["default-scheduler".to_owned()].into(),
        compatibility: Some(Arc::default()),
        client: None,
    };
    let config = certificate.map(|certificate| certificate.server_config().unwrap());
    let (certificates, current) = watch::channel(config);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listener = TlsListener::start(listener, current).unwrap();
    let address = axum::serve::Listener::local_addr(&listener).unwrap();
    tokio::spawn(axum::serve(listener, router(webhook)).into_future());
    Server {
        address,
        certificates,
    }
}

impl Server {
    async fn connect(&self, trusted: &Certificate) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(trusted.bundle().as_bytes()) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from(NAME).unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
    }
}

/// Sends an object for admission. Returns the field `response`.
async fn review(stream: &mut TlsStream<TcpStream>, path: &str, object: Value) -> Value {
    let body = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "1", "namespace": "default", "operation": "CREATE", "object": object},
    })
    .to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut received = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await.unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&received);
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        if let Some((_, body)) = text.split_once("\r\n\r\n")
            && let Ok(review) = serde_json::from_str::<Value>(body)
        {
            assert_eq!(review["apiVersion"], "admission.k8s.io/v1");
            assert_eq!(review["response"]["uid"], "1");
            return review["response"].clone();
        }
    }
}

fn patch_of(response: &Value) -> Value {
    assert_eq!(response["patchType"], "JSONPatch");
    let patch = BASE64.decode(response["patch"].as_str().unwrap()).unwrap();
    serde_json::from_slice(&patch).unwrap()
}

#[tokio::test]
async fn answers_reviews_over_tls() {
    let certificate = issue();
    let server = start(Some(&certificate)).await;
    let mut stream = server.connect(&certificate).await.unwrap();

    let response = review(&mut stream, "/gate", json!(pod("p", &["a"]))).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(patch_of(&response)[0]["path"], "/spec/schedulingGates");

    let response = review(&mut stream, "/gate", json!(pod("p", &[]))).await;
    assert_eq!(response, json!({"uid": "1", "allowed": true}));

    let parameters = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "x": 1});
    let config = json!([{"opaque": {"driver": "gpu.drava.dev", "parameters": parameters}}]);
    for (object, path) in [
        (
            json!({"spec": {"devices": {"config": config}}}),
            "spec.devices.config[0]",
        ),
        (
            json!({"spec": {"spec": {"devices": {"config": config}}}}),
            "spec.spec.devices.config[0]",
        ),
    ] {
        let response = review(&mut stream, "/config", object).await;
        assert_eq!(response["allowed"], false);
        let message = response["status"]["message"].as_str().unwrap();
        assert!(
            message.starts_with(path) && message.contains("`x`"),
            "{message}"
        );
    }
    let response = review(&mut stream, "/config", json!(claim("a", "8Gi"))).await;
    assert_eq!(response, json!({"uid": "1", "allowed": true}));
}

#[tokio::test]
async fn warns_of_likely_mistakes() {
    let certificate = issue();
    let server = start(Some(&certificate)).await;
    let mut stream = server.connect(&certificate).await.unwrap();
    let response = review(&mut stream, "/config", json!(claim("a", "8000"))).await;
    assert_eq!(response["allowed"], true);
    assert_eq!(
        response["warnings"],
        json!([
            "spec.devices.requests[0].exactly.capacity.requests.memory: 8000 is 8000 bytes; did you mean 8000Mi?"
        ])
    );
    let mut pod = pod("p", &["a"]);
    for container in &mut pod.spec.as_mut().unwrap().containers {
        container.resources = None;
    }
    let response = review(&mut stream, "/gate", json!(pod)).await;
    let warning = response["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with("spec.resourceClaims[0]: no container names claim a"),
        "{warning}"
    );
}

#[tokio::test]
async fn replaces_certificate_without_closing_connections() {
    let (first, second) = (issue(), issue());
    let server = start(Some(&first)).await;
    let mut open = server.connect(&first).await.unwrap();
    server
        .certificates
        .send_replace(Some(second.server_config().unwrap()));
    let mut new = server.connect(&second).await.unwrap();
    assert!(server.connect(&first).await.is_err(), "not served any more");
    for stream in [&mut open, &mut new] {
        let response = review(stream, "/gate", json!(pod("p", &[]))).await;
        assert_eq!(response["allowed"], true);
    }
}

#[tokio::test]
async fn closes_connections_without_certificate() {
    let server = start(None).await;
    assert!(server.connect(&issue()).await.is_err());
}
