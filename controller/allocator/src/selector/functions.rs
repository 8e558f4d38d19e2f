//! Functions and macros that Kubernetes adds to CEL for device selectors.
//!
//! From Kubernetes' base environment: `quantity`, `semver`, `includes`, the strings and lists extensions, and the functions
//! of [`lists`], [`regex`], [`net`], [`url`] and [`formats`]; the macros are in [`macros`]. The functions of an `authorizer`
//! are missing: device selectors have no such variable.

use cel::common::types::{CelBool, CelDouble, CelInt, CelString, DYN_TYPE};
use cel::common::value::CowVal;
use cel::{
    DeclarationError, Env, ExecutionError, IdedExpr, add_member_overload, add_overload, extensions,
};
use drava_api::Quantity;

use super::opaque::Opaque;
use super::values::{QuantityValue, Semver, SemverValue};
use super::{budget, formats, lists, macros, net, regex, url};

/// Functions of the standard library, its extensions and [`register`].
const KNOWN: &[&str] = &[
    "add",
    "asApproximateFloat",
    "asInteger",
    "bool",
    "bytes",
    "charAt",
    "cidr",
    "compareTo",
    "contains",
    "containsCIDR",
    "containsIP",
    "distinct",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "equivalent",
    "family",
    "find",
    "findAll",
    "flatten",
    "format",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getEscapedPath",
    "getFullYear",
    "getHost",
    "getHostname",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getPort",
    "getQuery",
    "getScheme",
    "getSeconds",
    "hasValue",
    "includes",
    "indexOf",
    "int",
    "intersects",
    "ip",
    "isCIDR",
    "isCanonical",
    "isGlobalUnicast",
    "isGreaterThan",
    "isIP",
    "isInteger",
    "isLessThan",
    "isLinkLocalMulticast",
    "isLinkLocalUnicast",
    "isLoopback",
    "isQuantity",
    "isSemver",
    "isSorted",
    "isURL",
    "isUnspecified",
    "join",
    "lastIndexOf",
    "lists.range",
    "lowerAscii",
    "major",
    "masked",
    "matches",
    "max",
    "min",
    "minor",
    "named",
    "none",
    "of",
    "ofNonZeroValue",
    "optMap",
    "optional.none",
    "optional.of",
    "optional.ofNonZeroValue",
    "or",
    "orValue",
    "patch",
    "prefixLength",
    "quantity",
    "quote",
    "range",
    "replace",
    "reverse",
    "semver",
    "sign",
    "size",
    "slice",
    "sort",
    "split",
    "startsWith",
    "string",
    "sub",
    "substring",
    "sum",
    "timestamp",
    "trim",
    "type",
    "uint",
    "upperAscii",
    "url",
    "validate",
    "value",
];

/// The environment in which selectors are compiled and evaluated.
pub(super) fn environment() -> Env {
    let mut env = Env::stdlib();
    let registered = [
        env.add_extension(extensions::strings),
        env.add_extension(extensions::lists),
        register(&mut env),
        macros::register(&mut env),
        lists::register(&mut env),
        regex::register(&mut env),
        net::register(&mut env),
        url::register(&mut env),
        formats::register(&mut env),
        budget::register(&mut env),
    ];
    debug_assert!(registered.iter().all(Result::is_ok), "{registered:?}");
    env
}

/// Returns a function that the program calls and this environment does not support.
pub(super) fn unsupported(expression: &IdedExpr) -> Option<String> {
    let references = expression.references();
    let mut unknown: Vec<_> = references
        .functions()
        .into_iter()
        .filter(|name| {
            !name.contains(['_', '@', '!', '-'])
                && !KNOWN.contains(name)
                && !formats::FORMATS.iter().any(|format| format.name == *name)
        })
        .map(str::to_owned)
        .collect();
    unknown.sort();
    unknown.into_iter().next()
}

fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn quantity: (CelString) -> Result<QuantityValue>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    add_member_overload!(env, fn quantity_sign: (QuantityValue) -> CelInt, name = "sign")?;
    add_member_overload!(env, fn quantity_is_integer: (QuantityValue) -> CelBool, name = "isInteger")?;
    add_member_overload!(env, fn quantity_as_integer: (QuantityValue) -> Result<CelInt>, name = "asInteger")?;
    add_member_overload!(env, fn quantity_as_float: (QuantityValue) -> CelDouble, name = "asApproximateFloat")?;
    add_member_overload!(env, fn quantity_greater: (QuantityValue, QuantityValue) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn quantity_less: (QuantityValue, QuantityValue) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn quantity_compare: (QuantityValue, QuantityValue) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn quantity_add: (QuantityValue, QuantityValue) -> QuantityValue, name = "add")?;
    add_member_overload!(env, fn quantity_sub: (QuantityValue, QuantityValue) -> QuantityValue, name = "sub")?;
    add_member_overload!(env, fn quantity_add_int: (QuantityValue, CelInt) -> QuantityValue, name = "add")?;
    add_member_overload!(env, fn quantity_sub_int: (QuantityValue, CelInt) -> QuantityValue, name = "sub")?;

    add_overload!(env, fn semver: (CelString) -> Result<SemverValue>)?;
    add_overload!(env, fn semver_normalized: (CelString, CelBool) -> Result<SemverValue>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_overload!(env, fn is_semver_normalized: (CelString, CelBool) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn semver_major: (SemverValue) -> Result<CelInt>, name = "major")?;
    add_member_overload!(env, fn semver_minor: (SemverValue) -> Result<CelInt>, name = "minor")?;
    add_member_overload!(env, fn semver_patch: (SemverValue) -> Result<CelInt>, name = "patch")?;
    add_member_overload!(env, fn semver_greater: (SemverValue, SemverValue) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn semver_less: (SemverValue, SemverValue) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn semver_compare: (SemverValue, SemverValue) -> CelInt, name = "compareTo")?;

    env.add_member_overload(
        "includes",
        "dyn.includes(dyn)",
        DYN_TYPE,
        vec![DYN_TYPE],
        includes,
    )
}

fn failed(function: &str, message: impl ToString) -> ExecutionError {
    ExecutionError::function_error(function, message)
}

fn quantity(text: &CelString<'_>) -> Result<QuantityValue, ExecutionError> {
    text.inner()
        .parse()
        .map(Opaque)
        .map_err(|error: drava_api::quantity::ParseQuantityError| failed("quantity", error))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    text.inner().parse::<Quantity>().is_ok().into()
}

fn quantity_sign(this: &QuantityValue) -> CelInt {
    let sign = match this.0.cmp(&Quantity::ZERO) {
        std::cmp::Ordering::Less => -1,
        std::cmp::Ordering::Equal => 0,
        std::cmp::Ordering::Greater => 1,
    };
    CelInt::from(sign)
}

fn quantity_is_integer(this: &QuantityValue) -> CelBool {
    this.0.to_i64().is_some().into()
}

fn quantity_as_integer(this: &QuantityValue) -> Result<CelInt, ExecutionError> {
    this.0
        .to_i64()
        .map(CelInt::from)
        .ok_or_else(|| failed("asInteger", "cannot convert value to integer"))
}

fn quantity_as_float(this: &QuantityValue) -> CelDouble {
    this.0.to_f64_lossy().into()
}

fn quantity_greater(this: &QuantityValue, other: &QuantityValue) -> CelBool {
    (this.0 > other.0).into()
}

fn quantity_less(this: &QuantityValue, other: &QuantityValue) -> CelBool {
    (this.0 < other.0).into()
}

fn quantity_compare(this: &QuantityValue, other: &QuantityValue) -> CelInt {
    CelInt::from(this.0.cmp(&other.0) as i64)
}

fn quantity_add(this: &QuantityValue, other: &QuantityValue) -> QuantityValue {
    Opaque(this.0 + other.0)
}

fn quantity_sub(this: &QuantityValue, other: &QuantityValue) -> QuantityValue {
    Opaque(this.0 - other.0)
}

fn units(count: CelInt) -> Quantity {
    let magnitude = Quantity::count(count.inner().unsigned_abs());
    if *count.inner() < 0 {
        -magnitude
    } else {
        magnitude
    }
}

fn quantity_add_int(this: &QuantityValue, other: &CelInt) -> QuantityValue {
    Opaque(this.0 + units(*other))
}

fn quantity_sub_int(this: &QuantityValue, other: &CelInt) -> QuantityValue {
    Opaque(this.0 - units(*other))
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

/// `x.includes(y)`: returns whether a list contains a value, or a scalar equals the value (KEP-5491).
fn includes<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let [this, value] = <[CowVal<'b, 'v>; 2]>::try_from(args)
        .map_err(|args| ExecutionError::invalid_argument_count(2, args.len()))?;
    let found = match this.as_container().filter(|_| this.as_iterable().is_some()) {
        Some(container) => container.contains(value.as_ref())?,
        None => this.equals(value.as_ref()),
    };
    Ok(CowVal::owned(CelBool::from(found)))
}
