//! URLs: `url`, `isURL` and the methods of a URL, as in `k8s.io/apiserver/pkg/cel/library`.
//!
//! Kubernetes parses with Go's `net/url` (RFC 3986, with deviations), which accepts absolute paths and keeps the spelling of
//! host and path. [`parse`] follows it, as the URLs of web browsers (WHATWG) differ in both.

use std::collections::HashMap;

use cel::common::types::{CelBool, CelList, CelMap, CelMapKey, CelString, Type};
use cel::common::value::Val;
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use crate::budget;
use crate::opaque::{Content, Opaque};

mod encoding;
mod parse;

pub(crate) use parse::request_uri_error;
use parse::{Url, parse};

type UrlValue = Opaque<Url>;

impl Content for Url {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("kubernetes.URL");
        &TYPE
    }
}

/// URLs are equal when their texts are.
impl PartialEq for Url {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn url: (CelString) -> Result<UrlValue>)?;
    add_overload!(env, fn is_url: (CelString) -> Result<CelBool>, name = "isURL")?;
    add_member_overload!(env, fn get_scheme: (UrlValue) -> CelString)?;
    add_member_overload!(env, fn get_host: (UrlValue) -> CelString)?;
    add_member_overload!(env, fn get_hostname: (UrlValue) -> CelString)?;
    add_member_overload!(env, fn get_port: (UrlValue) -> CelString)?;
    add_member_overload!(env, fn get_escaped_path: (UrlValue) -> CelString)?;
    add_member_overload!(env, fn get_query: (UrlValue) -> Result<CelMap>)
}

fn url(text: &CelString<'_>) -> Result<UrlValue, ExecutionError> {
    budget::charge_text(text.inner())?;
    let parsed = match request_uri_error(text.inner()) {
        Some(error) => Err(error),
        None => parse(text.inner()),
    };
    parsed.map(Opaque).map_err(|error| {
        let text = format!("URL parse error during conversion from string: {error}");
        ExecutionError::InternalError(text)
    })
}

fn is_url(text: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    budget::charge_text(text.inner())?;
    Ok(request_uri_error(text.inner()).is_none().into())
}

fn get_scheme(this: &UrlValue) -> CelString<'static> {
    this.0.scheme().to_owned().into()
}

fn get_host(this: &UrlValue) -> CelString<'static> {
    this.0.host().to_owned().into()
}

fn get_hostname(this: &UrlValue) -> CelString<'static> {
    this.0.hostname_and_port().0.to_owned().into()
}

fn get_port(this: &UrlValue) -> CelString<'static> {
    this.0.hostname_and_port().1.to_owned().into()
}

fn get_escaped_path(this: &UrlValue) -> CelString<'static> {
    this.0.escaped_path().into()
}

fn get_query(this: &UrlValue) -> Result<CelMap<'static>, ExecutionError> {
    let query = this.0.query();
    budget::charge(query.len() as u64)?;
    let mut values: HashMap<CelMapKey<'static>, Vec<Box<dyn Val>>> = HashMap::new();
    for (key, value) in query {
        let value = Box::new(CelString::from(value)) as Box<dyn Val>;
        values
            .entry(CelMapKey::String(key.into()))
            .or_default()
            .push(value);
    }
    let lists: HashMap<CelMapKey<'static>, Box<dyn Val>> = values
        .into_iter()
        .map(|(key, values)| (key, Box::new(CelList::from(values)) as Box<dyn Val>))
        .collect();
    Ok(CelMap::from(lists))
}
