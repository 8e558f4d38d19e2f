//! Which requests the console answers.
//!
//! Any program and any web page of the machine can connect to a port on loopback. A request is answered if it reads
//! (GET, HEAD), its path starts with the secret of this run, its `Host` names loopback (so that no domain of an attacker can
//! be pointed at the port, DNS rebinding), and no other site has sent it.

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, Method, StatusCode};
use uuid::Uuid;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resource {
    /// A file of the page.
    File(File),
    /// The model as JSON.
    View,
    /// Stream of events about changes of the model.
    Events,
}

/// File of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct File {
    /// Name in the address.
    name: &'static str,
    pub(super) media_type: &'static str,
    pub(super) text: &'static str,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Files of the page.
const FILES: [File; 6] = [
    File {
        name: "",
        media_type: "text/html; charset=utf-8",
        text: include_str!("page/index.html"),
    },
    File {
        name: "console.css",
        media_type: "text/css; charset=utf-8",
        text: include_str!("page/console.css"),
    },
    File {
        name: "elements.js",
        media_type: SCRIPT,
        text: include_str!("page/elements.js"),
    },
    File {
        name: "gpus.js",
        media_type: SCRIPT,
        text: include_str!("page/gpus.js"),
    },
    File {
        name: "tables.js",
        media_type: SCRIPT,
        text: include_str!("page/tables.js"),
    },
    File {
        name: "console.js",
        media_type: SCRIPT,
        text: include_str!("page/console.js"),
    },
];

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the console only reads: use GET")]
    Method,
    #[error("the Host header is not that of loopback")]
    Host,
    #[error("the request comes from another site")]
    Origin,
    #[error("not found; open the address that kubectl drava console printed")]
    Path,
}

impl Refusal {
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host | Self::Origin => StatusCode::FORBIDDEN,
            Self::Path => StatusCode::NOT_FOUND,
        }
    }
}

/// The secret of this run.
#[derive(Debug, Clone)]
pub(super) struct Guard {
    token: String,
}

impl Guard {
    /// Creates a secret with 122 random bits.
    pub(super) fn new() -> Self {
        Self {
            token: Uuid::new_v4().simple().to_string(),
        }
    }

    /// First element of the path of every request.
    pub(super) fn token(&self) -> &str {
        &self.token
    }

    /// Decides on a request.
    ///
    /// # Errors
    /// Why it is refused.
    pub(super) fn check(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Resource, Refusal> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            return Err(Refusal::Method);
        }
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
        let host = text(HOST).ok_or(Refusal::Host)?;
        if !is_loopback(host) {
            return Err(Refusal::Host);
        }
        if text(ORIGIN).is_some_and(|origin| origin != format!("http://{host}")) {
            return Err(Refusal::Origin);
        }
        let site = headers.get("sec-fetch-site");
        if site.is_some_and(|site| site != "same-origin" && site != "none") {
            return Err(Refusal::Origin);
        }
        let rest = path.strip_prefix('/').unwrap_or_default();
        let (token, name) = rest.split_once('/').ok_or(Refusal::Path)?;
        if !is_equal(token.as_bytes(), self.token.as_bytes()) {
            return Err(Refusal::Path);
        }
        match name {
            "view.json" => Ok(Resource::View),
            "events" => Ok(Resource::Events),
            _ => {
                let file = FILES.iter().find(|file| file.name == name);
                file.map(|file| Resource::File(*file)).ok_or(Refusal::Path)
            }
        }
    }
}

/// Returns whether a `Host` header names loopback, with any port: a port can be forwarded, as by `ssh -L`.
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    matches!(name, "127.0.0.1" | "localhost" | "[::1]")
}

/// Compares without a hint in the time that it takes about the position of a difference.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let differences = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &Method, path: &str, headers: &[(&str, &str)]) -> Result<Resource, Refusal> {
        let guard = Guard {
            token: "secret".to_owned(),
        };
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: axum::http::HeaderName = name.parse().unwrap();
            map.insert(name, value.parse().unwrap());
        }
        guard.check(method, path, &map)
    }

    #[test]
    fn answers_reads_with_secret_on_loopback() {
        for host in [
            "127.0.0.1:8001",
            "localhost:80",
            "[::1]:9",
            "localhost",
            "[::1]",
        ] {
            assert_eq!(
                check(&Method::GET, "/secret/", &[("host", host)]),
                Ok(Resource::File(FILES[0])),
                "{host}"
            );
        }
        let host = ("host", "127.0.0.1:1");
        let files = FILES.map(|file| (file.name, Resource::File(file)));
        let others = [("view.json", Resource::View), ("events", Resource::Events)];
        for (name, resource) in files.into_iter().chain(others) {
            let path = format!("/secret/{name}");
            let headers = [
                host,
                ("origin", "http://127.0.0.1:1"),
                ("sec-fetch-site", "same-origin"),
            ];
            assert_eq!(check(&Method::GET, &path, &headers), Ok(resource));
            assert_eq!(check(&Method::HEAD, &path, &[host]), Ok(resource));
        }
    }

    #[test]
    fn refuses_other_methods() {
        for method in [
            Method::POST,
            Method::PUT,
            Method::PATCH,
            Method::DELETE,
            Method::OPTIONS,
        ] {
            let result = check(&method, "/secret/", &[("host", "localhost:1")]);
            assert_eq!(result, Err(Refusal::Method), "{method}");
        }
    }

    #[test]
    fn refuses_hosts_of_dns_rebinding() {
        for host in [
            "attacker.example:8001",
            "127.0.0.1.attacker.example:1",
            "localhost.attacker.example",
            "10.0.0.1:1",
            "",
        ] {
            assert_eq!(
                check(&Method::GET, "/secret/", &[("host", host)]),
                Err(Refusal::Host),
                "{host}"
            );
        }
        assert_eq!(check(&Method::GET, "/secret/", &[]), Err(Refusal::Host));
    }

    #[test]
    fn refuses_requests_of_other_sites() {
        for header in [
            ("origin", "http://attacker.example"),
            ("origin", "null"),
            ("origin", "http://127.0.0.1:2"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            let headers = [("host", "127.0.0.1:1"), header];
            assert_eq!(
                check(&Method::GET, "/secret/view.json", &headers),
                Err(Refusal::Origin),
                "{header:?}"
            );
        }
    }

    #[test]
    fn refuses_paths_without_secret() {
        for path in [
            "/",
            "",
            "/view.json",
            "/secre/",
            "/secrets/",
            "/secret",
            "/other/view.json",
            "/secret/../x",
            "/secret/x",
        ] {
            assert_eq!(
                check(&Method::GET, path, &[("host", "localhost:1")]),
                Err(Refusal::Path),
                "{path}"
            );
        }
    }

    #[test]
    fn selects_another_secret_for_each_run() {
        let (one, other) = (Guard::new(), Guard::new());
        assert_eq!(one.token().len(), 32);
        assert_ne!(one.token(), other.token());
    }
}
