//! API server that answers lists of a dump to a user who may read one namespace.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

/// Starts the server, and returns its kubeconfig. Its threads end with the process of the tests.
pub(crate) fn serve(dump: Value, namespace: &'static str) -> Result<Value> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let dump = Arc::new(dump);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let dump = Arc::clone(&dump);
            thread::spawn(move || respond(stream, &dump, namespace));
        }
    });
    Ok(json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "prod-eu-1",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "prod-eu-1", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
    }))
}

fn respond(stream: TcpStream, dump: &Value, namespace: &str) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).is_err() {
        return;
    }
    let mut header = String::new();
    while reader
        .read_line(&mut header)
        .is_ok_and(|_| !header.trim().is_empty())
    {
        header.clear();
    }
    let target = line.split(' ').nth(1).unwrap_or_default();
    if target.contains("watch=") {
        // Nothing changes.
        thread::sleep(Duration::from_secs(3600));
        return;
    }
    let path = target.split('?').next().unwrap_or_default();
    let own = format!("/namespaces/{namespace}/");
    let (code, body) = match path.split_once(&own) {
        Some((_, plural)) => (200, list(dump, plural, namespace)),
        None => (
            403,
            json!({"kind": "Status", "status": "Failure", "code": 403, "message": "", "reason": "Forbidden"}),
        ),
    };
    let body = body.to_string();
    // The client may have gone.
    let _ = write!(
        reader.into_inner(),
        "HTTP/1.1 {code} -\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
}

fn list(dump: &Value, plural: &str, namespace: &str) -> Value {
    let field = if plural == "resourceclaims" {
        "resourceClaims"
    } else {
        plural
    };
    let items = dump[field].as_array().into_iter().flatten();
    let items: Vec<&Value> = items
        .filter(|item| item["metadata"]["namespace"] == namespace)
        .collect();
    json!({"metadata": {"resourceVersion": "1"}, "items": items})
}
