//! Regular expressions of selectors: `matches`, `find` and `findAll`, in the syntax of RE2.
//!
//! The size of a compiled expression is limited, since a counted repetition of a few characters can need megabytes.

use std::cell::RefCell;
use std::collections::BTreeMap;

use cel::common::types::{CelBool, CelInt, CelList, CelString};
use cel::common::value::Val;
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use regex::{Regex, RegexBuilder};

use crate::budget::{self, MATCHES};

/// Maximum size of a compiled expression, which takes about a millisecond to compile.
const COMPILED_BYTES: usize = 512 << 10;
/// Maximum cached expressions per thread.
const CACHE_LIMIT: usize = 32;

thread_local! {
    static COMPILED: RefCell<BTreeMap<String, Regex>> = const { RefCell::new(BTreeMap::new()) };
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_member_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>, name = MATCHES)?;
    add_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>, name = MATCHES)?;
    add_member_overload!(env, fn find: (CelString, CelString) -> Result<CelString>)?;
    add_member_overload!(env, fn find_all: (CelString, CelString) -> Result<CelList>)?;
    add_member_overload!(env, fn find_at_most: (CelString, CelString, CelInt) -> Result<CelList>, name = "findAll")
}

fn matches(text: &CelString<'_>, pattern: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let regex = compiled("matches", pattern)?;
    Ok(regex.is_match(text.inner()).into())
}

fn find(
    text: &CelString<'_>,
    pattern: &CelString<'_>,
) -> Result<CelString<'static>, ExecutionError> {
    let regex = compiled("find", pattern)?;
    let found = regex.find(text.inner()).map_or("", |found| found.as_str());
    Ok(found.to_owned().into())
}

fn find_all(
    text: &CelString<'_>,
    pattern: &CelString<'_>,
) -> Result<CelList<'static>, ExecutionError> {
    find_at_most(text, pattern, &CelInt::from(-1))
}

/// A negative limit is none.
fn find_at_most(
    text: &CelString<'_>,
    pattern: &CelString<'_>,
    limit: &CelInt,
) -> Result<CelList<'static>, ExecutionError> {
    let regex = compiled("findAll", pattern)?;
    let limit = usize::try_from(*limit.inner()).unwrap_or(usize::MAX);
    let found: Vec<Box<dyn Val>> = regex
        .find_iter(text.inner())
        .take(limit)
        .map(|found| Box::new(CelString::from(found.as_str().to_owned())) as Box<dyn Val>)
        .collect();
    budget::charge(found.len() as u64)?;
    Ok(found.into())
}

fn compiled(function: &str, pattern: &CelString<'_>) -> Result<Regex, ExecutionError> {
    budget::charge_unworked(budget::REGEX_UNITS)?;
    let pattern = pattern.inner();
    COMPILED.with_borrow_mut(|cache| {
        if let Some(regex) = cache.get(pattern) {
            return Ok(regex.clone());
        }
        budget::work(budget::REGEX_UNITS);
        let regex = RegexBuilder::new(&re2(pattern))
            .size_limit(COMPILED_BYTES)
            .build()
            .map_err(|error| {
                ExecutionError::function_error(function, format!("Illegal regex: {error}"))
            })?;
        if cache.len() >= CACHE_LIMIT {
            cache.clear();
        }
        cache.insert(pattern.to_string(), regex.clone());
        Ok(regex)
    })
}

/// Translates the classes that are ASCII in RE2 and Unicode in the `regex` crate.
fn re2(pattern: &str) -> String {
    let mut translated = String::with_capacity(pattern.len());
    let mut rest = pattern.chars();
    while let Some(character) = rest.next() {
        if character != '\\' {
            translated.push(character);
            continue;
        }
        match rest.next() {
            Some('d') => translated.push_str("[0-9]"),
            Some('D') => translated.push_str("[^0-9]"),
            Some('w') => translated.push_str("[0-9A-Za-z_]"),
            Some('W') => translated.push_str("[^0-9A-Za-z_]"),
            Some('s') => translated.push_str(r"[\t\n\f\r ]"),
            Some('S') => translated.push_str(r"[^\t\n\f\r ]"),
            Some('b') => translated.push_str(r"(?-u:\b)"),
            Some(escaped) => translated.extend(['\\', escaped]),
            None => translated.push('\\'),
        }
    }
    translated
}

#[cfg(test)]
mod tests {
    use super::re2;

    #[test]
    fn translates_classes_to_ascii() {
        assert_eq!(re2(r"\d+\\d[\w-]\."), r"[0-9]+\\d[[0-9A-Za-z_]-]\.");
    }
}
