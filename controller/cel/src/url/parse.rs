//! The parser of Go's `net/url`.

use std::fmt;
use std::net::IpAddr;

use super::super::net::parse_with_zone;
use super::encoding::{Part, decode, encode, is_encoded};

/// Maximum parameters of a query; a query with more has none.
const MAX_PARAMETERS: usize = 10_000;

/// A parsed URL.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Url {
    scheme: String,
    /// What follows the scheme of a URL without a path, such as `mailto:x`.
    opaque: String,
    user: Option<User>,
    /// With port and brackets.
    host: String,
    /// Whether `//` precedes the path: `file:///x` and `file:/x` are different texts.
    has_authority: bool,
    path: Component,
    query: String,
    has_empty_query: bool,
    fragment: Component,
}

#[derive(Debug, Clone)]
struct User {
    name: Vec<u8>,
    password: Option<Vec<u8>>,
}

/// Path or fragment.
#[derive(Debug, Clone, Default)]
struct Component {
    decoded: Vec<u8>,
    /// As written, if that differs from the usual encoding.
    raw: Option<String>,
}

impl Component {
    fn parse(text: &str, part: Part) -> Result<Self, String> {
        let decoded = decode(text, part)?;
        let raw = (encode(&decoded, part) != text).then(|| text.to_owned());
        Ok(Self { decoded, raw })
    }

    fn encoded(&self, part: Part) -> String {
        match &self.raw {
            Some(raw) if is_encoded(raw, part) => raw.clone(),
            _ => encode(&self.decoded, part),
        }
    }
}

/// Returns why `text` is neither an absolute URL nor an absolute path.
pub(in super::super) fn request_uri_error(text: &str) -> Option<String> {
    let error = parse_without_fragment(text, true).err()?;
    Some(format!("parse {text:?}: {error}"))
}

/// Parses a URL.
///
/// # Errors
/// The text of Go.
pub(super) fn parse(text: &str) -> Result<Url, String> {
    let (rest, fragment) = text.split_once('#').unwrap_or((text, ""));
    let url =
        parse_without_fragment(rest, false).map_err(|error| format!("parse {rest:?}: {error}"))?;
    let fragment = Component::parse(fragment, Part::Fragment)
        .map_err(|error| format!("parse {text:?}: {error}"))?;
    Ok(Url { fragment, ..url })
}

/// `is_request` demands an absolute URL or an absolute path.
fn parse_without_fragment(text: &str, is_request: bool) -> Result<Url, String> {
    if text.bytes().any(|byte| byte.is_ascii_control()) {
        return Err("net/url: invalid control character in URL".to_owned());
    }
    if text.is_empty() && is_request {
        return Err("empty url".to_owned());
    }
    let mut url = Url::default();
    if text == "*" {
        url.path.decoded = b"*".to_vec();
        return Ok(url);
    }
    let (scheme, rest) = split_scheme(text)?;
    url.scheme = scheme.to_ascii_lowercase();
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    url.has_empty_query = query.is_empty() && text.ends_with('?');
    query.clone_into(&mut url.query);

    let has_scheme = !url.scheme.is_empty();
    if !rest.starts_with('/') {
        if has_scheme {
            rest.clone_into(&mut url.opaque);
            return Ok(url);
        }
        if is_request {
            return Err("invalid URI for request".to_owned());
        }
        if first_segment(rest).contains(':') {
            return Err("first path segment in URL cannot contain colon".to_owned());
        }
    }
    let may_have_host = has_scheme || !is_request && !rest.starts_with("///");
    let path = match rest.strip_prefix("//").filter(|_| may_have_host) {
        None => rest,
        Some(rest) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            url.parse_authority(authority)?;
            url.has_authority = true;
            path
        }
    };
    url.path = Component::parse(path, Part::Path)?;
    Ok(url)
}

fn first_segment(path: &str) -> &str {
    path.split('/').next().unwrap_or_default()
}

fn split_scheme(text: &str) -> Result<(&str, &str), String> {
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    match text.split_once(':') {
        Some(("", _)) => Err("missing protocol scheme".to_owned()),
        Some((scheme, rest))
            if scheme.bytes().all(is_scheme)
                && scheme.starts_with(|first: char| first.is_ascii_alphabetic()) =>
        {
            Ok((scheme, rest))
        }
        _ => Ok(("", text)),
    }
}

impl Url {
    fn parse_authority(&mut self, authority: &str) -> Result<(), String> {
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        self.host = parse_host(&self.scheme, host)?;
        self.user = user.map(User::parse).transpose()?;
        Ok(())
    }

    pub(super) fn scheme(&self) -> &str {
        &self.scheme
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Returns the host without brackets, and the port or an empty text.
    pub(super) fn hostname_and_port(&self) -> (&str, &str) {
        let colon = self.host.rfind(':').unwrap_or(self.host.len());
        let (host, port) = match self.host.split_at(colon) {
            (host, port) if is_port_or_empty(port) => (host, port.get(1..).unwrap_or_default()),
            _ => (self.host.as_str(), ""),
        };
        let inner = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        (inner.unwrap_or(host), port)
    }

    pub(super) fn escaped_path(&self) -> String {
        if self.path.decoded == b"*" {
            return "*".to_owned();
        }
        self.path.encoded(Part::Path)
    }

    /// Returns keys and values in their order; invalid parameters are skipped.
    pub(super) fn query(&self) -> Vec<(String, String)> {
        if self.query.split('&').count() > MAX_PARAMETERS {
            return Vec::new();
        }
        let text = |text: &str| {
            let decoded = decode(text, Part::Query).ok()?;
            Some(String::from_utf8_lossy(&decoded).into_owned())
        };
        self.query
            .split('&')
            .filter(|parameter| !parameter.is_empty() && !parameter.contains(';'))
            .filter_map(|parameter| {
                let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
                Some((text(key)?, text(value)?))
            })
            .collect()
    }
}

/// Returns host and port, decoded.
fn parse_host(scheme: &str, host: &str) -> Result<String, String> {
    let port = match host.rfind('[') {
        Some(0) => return parse_address(host),
        Some(_) => return Err("invalid IP-literal".to_owned()),
        // Only `http` and `https` refuse a second colon.
        None if ["http", "https"].contains(&scheme) => host.find(':'),
        None => host.rfind(':'),
    };
    check_port(port.map_or("", |colon| host.split_at(colon).1))?;
    decode_host(host, Part::Host)
}

/// `host` starts with a bracket.
fn parse_address(host: &str) -> Result<String, String> {
    let (address, port) = host
        .strip_prefix('[')
        .and_then(|rest| rest.rsplit_once(']'))
        .ok_or_else(|| "missing ']' in host".to_owned())?;
    check_port(port)?;
    let (address, zone) = address.split_at(address.find("%25").unwrap_or(address.len()));
    let text = decode_host(address, Part::Host)? + &decode_host(zone, Part::Zone)?;
    match parse_with_zone(&text) {
        None => Err(format!(
            "invalid host: ParseAddr({text:?}): unable to parse IP"
        )),
        Some((IpAddr::V4(_), _)) => Err("invalid IP-literal".to_owned()),
        Some((IpAddr::V6(_), _)) => Ok(format!("[{text}]{port}")),
    }
}

fn decode_host(text: &str, part: Part) -> Result<String, String> {
    decode(text, part).map(|decoded| String::from_utf8_lossy(&decoded).into_owned())
}

fn check_port(port: &str) -> Result<(), String> {
    if is_port_or_empty(port) {
        return Ok(());
    }
    Err(format!("invalid port {port:?} after host"))
}

/// Returns whether `text` is a colon with digits, which may be missing, or empty.
fn is_port_or_empty(text: &str) -> bool {
    text.is_empty()
        || text
            .strip_prefix(':')
            .is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

impl User {
    fn parse(text: &str) -> Result<Self, String> {
        let is_allowed =
            |byte: u8| byte.is_ascii_alphanumeric() || b"-._:~!$&'()*+,;=%@".contains(&byte);
        if !text.bytes().all(is_allowed) {
            return Err("net/url: invalid userinfo".to_owned());
        }
        let (name, password) = match text.split_once(':') {
            Some((name, password)) => (name, Some(password)),
            None => (text, None),
        };
        Ok(Self {
            name: decode(name, Part::User)?,
            password: password
                .map(|password| decode(password, Part::User))
                .transpose()?,
        })
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(&self.name, Part::User))?;
        match &self.password {
            Some(password) => write!(f, ":{}", encode(password, Part::User)),
            None => Ok(()),
        }
    }
}

/// The text that Go's `URL.String` returns.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.scheme.is_empty() {
            write!(f, "{}:", self.scheme)?;
        }
        if self.opaque.is_empty() {
            let has_host = !self.host.is_empty() || self.user.is_some();
            if has_host || self.has_authority && !self.path.decoded.is_empty() {
                f.write_str("//")?;
            }
            if let Some(user) = &self.user {
                write!(f, "{user}@")?;
            }
            f.write_str(&encode(self.host.as_bytes(), Part::Host))?;
            f.write_str(&self.escaped_path())?;
        } else {
            f.write_str(&self.opaque)?;
        }
        if self.has_empty_query || !self.query.is_empty() {
            write!(f, "?{}", self.query)?;
        }
        if !self.fragment.decoded.is_empty() {
            write!(f, "#{}", self.fragment.encoded(Part::Fragment))?;
        }
        Ok(())
    }
}
