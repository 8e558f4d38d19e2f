//! Requests to servers on loopback.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use anyhow::{Context as _, Result, bail};

/// Returns the body of `path` of the server at `host` (`127.0.0.1:PORT`).
///
/// # Errors
/// When the server does not answer with 200.
pub fn get(host: &str, path: &str) -> Result<String> {
    request(host, "GET", path, "")
}

/// Writes the body of `path` of the server at `host`, and returns the body of its answer.
///
/// # Errors
/// When the server does not answer with 200.
pub fn put(host: &str, path: &str, body: &str) -> Result<String> {
    request(host, "PUT", path, body)
}

/// Creates an object at `path` of the server at `host` from JSON, and returns the body of the answer.
///
/// # Errors
/// When the server does not answer with 201.
pub fn post(host: &str, path: &str, body: &str) -> Result<String> {
    request(host, "POST", path, body)
}

fn request(host: &str, method: &str, path: &str, body: &str) -> Result<String> {
    let mut stream = TcpStream::connect(host).with_context(|| format!("connect to {host}"))?;
    // HTTP 1.0: the body of the answer is not chunked.
    let length = body.len();
    let (kind, status) = match method {
        "POST" => ("Content-Type: application/json\r\n", " 201 "),
        _ => ("", " 200 "),
    };
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {host}\r\n{kind}Content-Length: {length}\r\n\r\n{body}"
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    match response.split_once("\r\n\r\n") {
        Some((head, body)) if head.contains(status) => Ok(body.to_owned()),
        _ => bail!("{host}{path}: {response}"),
    }
}

/// Returns a port of loopback that no program uses.
///
/// # Errors
/// When there is none.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}
