//! Rotation with a fake API server.

use std::collections::BTreeMap;
use std::sync::Mutex;

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use super::*;
use crate::operate::clock::Clock;

const LIFETIME: Duration = Duration::from_secs(90 * 24 * 3600);
const NAMES: [&str; 3] = [
    "secrets",
    "mutatingwebhookconfigurations",
    "validatingwebhookconfigurations",
];

/// Objects by resource, and the log of writes.
#[derive(Default)]
struct Server {
    objects: BTreeMap<&'static str, Value>,
    writes: Vec<&'static str>,
}

impl Server {
    fn serve(&mut self, method: &Method, path: &str, body: &Value) -> Value {
        let resource = NAMES
            .into_iter()
            .find(|name| path.ends_with(&format!("/{name}/{WEBHOOK_NAME}")))
            .unwrap_or_else(|| panic!("{path}"));
        let object = self.objects.get_mut(resource).unwrap();
        match *method {
            Method::GET => {}
            Method::PUT => {
                *object = body.clone();
                self.writes.push(resource);
            }
            Method::PATCH => {
                let trusted = &body["webhooks"][0]["clientConfig"]["caBundle"];
                object["webhooks"][0]["clientConfig"]["caBundle"] = trusted.clone();
                self.writes.push(resource);
            }
            _ => panic!("{method} {path}"),
        }
        object.clone()
    }

    fn certificate(&self) -> Certificate {
        let secret: Secret = serde_json::from_value(self.objects["secrets"].clone()).unwrap();
        Certificate::of_secret(&secret).unwrap()
    }

    /// Returns the certificates that the API server trusts for the mutating webhook.
    fn trusted(&self) -> Vec<u8> {
        let bundle = &self.objects[NAMES[1]]["webhooks"][0]["clientConfig"]["caBundle"];
        let bundle: ByteString = serde_json::from_value(bundle.clone()).unwrap();
        bundle.0
    }
}

/// A store on a fresh installation.
fn installed() -> (CertificateStore, Arc<Mutex<Server>>) {
    let metadata = json!({"name": WEBHOOK_NAME, "resourceVersion": "1"});
    let configuration = json!({
        "metadata": metadata, "webhooks": [{"name": "a.gpu.drava.dev", "clientConfig": {}}],
    });
    let server = Server {
        objects: [
            (NAMES[0], json!({"metadata": metadata})),
            (NAMES[1], configuration.clone()),
            (NAMES[2], configuration),
        ]
        .into(),
        writes: Vec::new(),
    };
    let server = Arc::new(Mutex::new(server));
    let shared = Arc::clone(&server);
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&shared);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let object = server
                .lock()
                .unwrap()
                .serve(&head.method, head.uri.path(), &body);
            let body = Body::from(object.to_string().into_bytes());
            Ok::<_, tower::BoxError>(Response::new(body))
        }
    });
    let client = Client::new(service, "default");
    (CertificateStore::new(client, "drava-system"), server)
}

fn term() -> Term {
    Term::new(Clock::new(|| Duration::ZERO), Duration::MAX)
}

#[tokio::test(start_paused = true)]
async fn trusts_authority_before_serving_certificate() {
    let (store, server) = installed();
    store.check(LIFETIME, &term()).await.unwrap();
    let mut server = server.lock().unwrap();
    assert_eq!(
        std::mem::take(&mut server.writes),
        [NAMES[1], NAMES[2], NAMES[0]]
    );
    let certificate = server.certificate();
    certificate
        .verify("drava-webhook.drava-system.svc", Timestamp::now())
        .unwrap();
    assert_eq!(server.trusted(), certificate.bundle().as_bytes());
}

#[tokio::test(start_paused = true)]
async fn writes_nothing_while_certificate_is_valid() {
    let (store, server) = installed();
    store.check(LIFETIME, &term()).await.unwrap();
    server.lock().unwrap().writes.clear();
    store.check(LIFETIME, &term()).await.unwrap();
    assert!(server.lock().unwrap().writes.is_empty());
}

#[tokio::test(start_paused = true)]
async fn repairs_trusted_certificates() {
    let (store, server) = installed();
    store.check(LIFETIME, &term()).await.unwrap();
    {
        let mut server = server.lock().unwrap();
        server.writes.clear();
        server.objects.get_mut(NAMES[2]).unwrap()["webhooks"][0]["clientConfig"]["caBundle"] =
            json!("YnJva2Vu");
    }
    store.check(LIFETIME, &term()).await.unwrap();
    assert_eq!(server.lock().unwrap().writes, [NAMES[2]]);
}

#[tokio::test(start_paused = true)]
async fn rotates_certificate_in_last_third_of_lifetime() {
    let (store, server) = installed();
    // Less than a third of the next lifetime.
    store.check(LIFETIME / 4, &term()).await.unwrap();
    let first = server.lock().unwrap().certificate();
    let started = tokio::time::Instant::now();
    store.check(LIFETIME, &term()).await.unwrap();
    assert!(
        started.elapsed() >= PROPAGATION,
        "API servers read the bundle first"
    );
    let server = server.lock().unwrap();
    let second = server.certificate();
    assert_ne!(first.bundle(), second.bundle());
    let trusted = String::from_utf8(server.trusted()).unwrap();
    assert_eq!(trusted, second.bundle());
    assert!(trusted.ends_with(first.bundle().trim_end()), "{trusted}");
}

#[tokio::test(start_paused = true)]
async fn rotates_damaged_certificate() {
    let (store, server) = installed();
    store.check(LIFETIME, &term()).await.unwrap();
    let first = server.lock().unwrap().certificate();
    server.lock().unwrap().objects.get_mut("secrets").unwrap()["data"]["tls.key"] = json!("");
    store.check(LIFETIME, &term()).await.unwrap();
    let second = server.lock().unwrap().certificate();
    assert_ne!(first.bundle(), second.bundle());
}

#[tokio::test(start_paused = true)]
async fn writes_nothing_after_end_of_term() {
    let (store, server) = installed();
    let ended = Term::new(Clock::new(|| Duration::ZERO), Duration::ZERO);
    assert!(store.check(LIFETIME, &ended).await.is_err());
    assert!(server.lock().unwrap().writes.is_empty());
}
