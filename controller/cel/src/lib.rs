//! What Kubernetes adds to CEL for device selectors, for the crate `cel`: the functions and macros of its base environment
//! (`k8s.io/apiserver/pkg/cel`), and a bound on the work of an evaluation.
//!
//! | | |
//! |---|---|
//! | [`environment`] | the standard library with quantities, versions, lists, sets, regular expressions, IP addresses, URLs, named formats, comprehensions with two variables |
//! | [`unsupported`] | a function that an expression calls and the environment lacks |
//! | [`instrument`], [`measure`] | charges of an expression, and what an evaluation has used of its budget |
//! | [`quantity`](quantity()), [`version`](version()) | values for variables |
//!
//! The functions of an `authorizer` are missing: device selectors have no such variable. Types and costs are not checked before
//! an evaluation; the API server does that for every expression that it stores.
//!
//! ```
//! use std::sync::Arc;
//!
//! let env = Arc::new(drava_cel::environment());
//! let program = env.compile("quantity('8Gi').isGreaterThan(quantity('8G')) && ip('10.0.0.1').family() == 4").unwrap();
//! let mut expression = program.expression().clone();
//! assert_eq!(drava_cel::unsupported(&expression), None);
//! drava_cel::instrument(&mut expression);
//! let context = cel::Context::with_env(env);
//! let (value, used) = drava_cel::measure(|| cel::Value::resolve_val(&expression, &context).unwrap());
//! assert!(*value.downcast_ref::<cel::common::types::CelBool>().unwrap().inner());
//! assert!(used.units.unwrap() < drava_cel::EVALUATION_UNITS);
//! ```

#![forbid(unsafe_code)]

use cel::common::types::{CelBool, DYN_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError, IdedExpr, extensions};

mod budget;
mod formats;
mod lists;
mod macros;
mod net;
mod opaque;
mod quantity;
mod regex;
mod url;
mod version;

pub use budget::{EVALUATION_UNITS, EXCEEDED, Used, instrument, measure};

/// Functions of the standard library, its extensions and this crate.
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

/// Returns the environment in which expressions are compiled and evaluated.
#[must_use]
pub fn environment() -> Env {
    let mut env = Env::stdlib();
    let registered = [
        env.add_extension(extensions::strings),
        env.add_extension(extensions::lists),
        quantity::register(&mut env),
        version::register(&mut env),
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

/// Returns a quantity as the value of a variable.
#[must_use]
pub fn quantity(value: drava_api::Quantity) -> Box<dyn Val> {
    Box::new(opaque::Opaque(value))
}

/// Returns a version as the value of a variable.
#[must_use]
pub fn version(value: semver::Version) -> Box<dyn Val> {
    Box::new(opaque::Opaque(version::Semver(value)))
}

/// Returns a function that the expression calls and [`environment`] does not have.
#[must_use]
pub fn unsupported(expression: &IdedExpr) -> Option<String> {
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
    env.add_member_overload(
        "includes",
        "dyn.includes(dyn)",
        DYN_TYPE,
        vec![DYN_TYPE],
        includes,
    )
}

pub(crate) fn failed(function: &str, message: impl ToString) -> ExecutionError {
    ExecutionError::function_error(function, message)
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
