//! Compression of a scrape: each series of a share repeats its namespace, claim and UID. Pure.

use std::io::Write as _;

use axum::http::header::ACCEPT_ENCODING;
use axum::http::{HeaderMap, HeaderValue};
use flate2::Compression;
use flate2::write::GzEncoder;

/// `Content-Encoding` of compressed text.
pub(super) const GZIP: HeaderValue = HeaderValue::from_static("gzip");

/// Returns the compressed text; `None` if the client does not accept it. Prometheus does.
pub(super) fn compressed(request: &HeaderMap, text: &str) -> Option<Vec<u8>> {
    if !accepts_gzip(request) {
        return None;
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    // Writing to memory cannot fail.
    encoder.write_all(text.as_bytes()).ok()?;
    encoder.finish().ok()
}

fn accepts_gzip(request: &HeaderMap) -> bool {
    let accepted = request.get_all(ACCEPT_ENCODING).into_iter();
    let mut codings = accepted
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    codings.any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next() == Some("gzip");
        let mut weights = parts.filter_map(|part| part.strip_prefix("q="));
        is_gzip && weights.all(|weight| weight.parse().is_ok_and(|weight: f32| weight > 0.0))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn compresses_only_for_clients_that_accept_gzip() {
        let text = "drava_share_memory_limit_bytes{namespace=\"a\"} 1\n".repeat(100);
        let answer = |accepted: &'static str| {
            let mut request = HeaderMap::new();
            request.insert(ACCEPT_ENCODING, HeaderValue::from_static(accepted));
            compressed(&request, &text)
        };
        for accepted in ["gzip", "br, gzip;q=0.5, *;q=0.1"] {
            let bytes = answer(accepted).unwrap();
            assert!(bytes.len() < text.len() / 10, "{accepted}");
            let mut decoded = String::new();
            GzDecoder::new(&*bytes)
                .read_to_string(&mut decoded)
                .unwrap();
            assert_eq!(decoded, text, "{accepted}");
        }
        for accepted in ["", "identity", "br", "gzip;q=0", "gzip;q=x", "xgzip"] {
            assert_eq!(answer(accepted), None, "{accepted}");
        }
        assert_eq!(compressed(&HeaderMap::new(), &text), None);
    }
}
