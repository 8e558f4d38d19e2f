//! Semantic versions: `semver`, `isSemver` and their methods, as in `k8s.io/apiserver/pkg/cel/library`.

use std::cmp::Ordering;

use cel::common::types::{CelBool, CelInt, CelString, Type};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use crate::failed;
use crate::opaque::{Content, Opaque};

/// A semantic version; comparisons ignore build metadata.
#[derive(Debug, Clone)]
pub(crate) struct Semver(pub(crate) semver::Version);

pub(crate) type SemverValue = Opaque<Semver>;

impl Semver {
    pub(crate) fn precedence(&self, other: &Self) -> Ordering {
        self.0.cmp_precedence(&other.0)
    }
}

impl PartialEq for Semver {
    fn eq(&self, other: &Self) -> bool {
        self.precedence(other).is_eq()
    }
}

impl Content for Semver {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("kubernetes.Semver");
        &TYPE
    }
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn semver: (CelString) -> Result<SemverValue>)?;
    add_overload!(env, fn semver_normalized: (CelString, CelBool) -> Result<SemverValue>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_overload!(env, fn is_semver_normalized: (CelString, CelBool) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn semver_major: (SemverValue) -> Result<CelInt>, name = "major")?;
    add_member_overload!(env, fn semver_minor: (SemverValue) -> Result<CelInt>, name = "minor")?;
    add_member_overload!(env, fn semver_patch: (SemverValue) -> Result<CelInt>, name = "patch")?;
    add_member_overload!(env, fn semver_greater: (SemverValue, SemverValue) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn semver_less: (SemverValue, SemverValue) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn semver_compare: (SemverValue, SemverValue) -> CelInt, name = "compareTo")
}

fn semver(text: &CelString<'_>) -> Result<SemverValue, ExecutionError> {
    parse_semver(text.inner(), false)
}

fn semver_normalized(
    text: &CelString<'_>,
    normalize: &CelBool,
) -> Result<SemverValue, ExecutionError> {
    parse_semver(text.inner(), *normalize.inner())
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    parse_semver(text.inner(), false).is_ok().into()
}

fn is_semver_normalized(text: &CelString<'_>, normalize: &CelBool) -> CelBool {
    parse_semver(text.inner(), *normalize.inner())
        .is_ok()
        .into()
}

/// Parses strict semver 2.0.0; `normalize` accepts a leading `v`, missing minor and patch, and leading zeros.
fn parse_semver(text: &str, normalize: bool) -> Result<SemverValue, ExecutionError> {
    let normalized = if normalize {
        normalize_semver(text)
    } else {
        text.to_owned()
    };
    semver::Version::parse(&normalized)
        .map(|version| Opaque(Semver(version)))
        .map_err(|error| failed("semver", error))
}

fn normalize_semver(text: &str) -> String {
    let text = text.strip_prefix('v').unwrap_or(text);
    let core_len = text.find(['-', '+']).unwrap_or(text.len());
    let (core, rest) = text.split_at(core_len);
    let mut parts: Vec<_> = core
        .split('.')
        .map(|part| match part.trim_start_matches('0') {
            "" if !part.is_empty() => "0",
            digits => digits,
        })
        .collect();
    while parts.len() < 3 {
        parts.push("0");
    }
    format!("{}{rest}", parts.join("."))
}

fn version_part(part: u64) -> Result<CelInt, ExecutionError> {
    i64::try_from(part)
        .map(CelInt::from)
        .map_err(|error| failed("semver", error))
}

fn semver_major(this: &SemverValue) -> Result<CelInt, ExecutionError> {
    version_part(this.0.0.major)
}

fn semver_minor(this: &SemverValue) -> Result<CelInt, ExecutionError> {
    version_part(this.0.0.minor)
}

fn semver_patch(this: &SemverValue) -> Result<CelInt, ExecutionError> {
    version_part(this.0.0.patch)
}

fn semver_greater(this: &SemverValue, other: &SemverValue) -> CelBool {
    this.0.precedence(&other.0).is_gt().into()
}

fn semver_less(this: &SemverValue, other: &SemverValue) -> CelBool {
    this.0.precedence(&other.0).is_lt().into()
}

fn semver_compare(this: &SemverValue, other: &SemverValue) -> CelInt {
    CelInt::from(this.0.precedence(&other.0) as i64)
}
