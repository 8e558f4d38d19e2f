//! CEL device selectors, as kube-scheduler evaluates them (KEP-4381).
//!
//! An expression sees one variable, `device`, with `driver`, `attributes`, `capacity` and
//! `allowMultipleAllocations`. An unqualified name belongs to the driver's domain; an unknown domain is an empty
//! map, an unknown name in it an error. Whatever cannot be decided fails closed: an expression that does not
//! compile, uses a function that this build lacks, ends in an error or in something other than a bool never
//! selects a device, and says why in the words that kube-scheduler would use.
//!
//! The API server has checked types and cost of every stored expression; this module does not repeat that.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cel::common::ast::{
    CallExpr, EntryExpr, Expr, IdedExpr, LiteralValue, MapExpr, StructExpr, operators,
};
use cel::common::types::CelBool;
use cel::{Context, Env, ExecutionError, Value};

mod functions;
mod values;

pub use values::DeviceValue;

/// Longest expression that the API server stores.
const MAX_EXPRESSION_BYTES: usize = 10 * 1024;

/// Deepest nesting that is evaluated; it bounds the stack that an evaluation takes. Chains of `&&` and `||` nest by
/// the logarithm of their length.
const MAX_NESTING: usize = 40;
/// Enough for any expression that the API server stores, however deeply it nests.
const PARSER_STACK_BYTES: usize = 256 << 20;

/// A compiled selector.
pub struct Selector {
    /// Unlike the address, never used again.
    id: u64,
    source: String,
    program: Result<cel::Program, String>,
    names_driver: bool,
}

impl std::fmt::Debug for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Selector").field(&self.source).finish()
    }
}

/// Why a selector gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression does not compile here.
    #[error("CEL compile error: {0}")]
    Compile(String),
    /// The evaluation failed on a device.
    #[error("CEL runtime error: {0}")]
    Runtime(String),
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Answers of selectors for one device, which never change.
#[derive(Debug, Default)]
pub struct Answers(Mutex<BTreeMap<u64, bool>>);

/// Answers kept for a device.
const ANSWER_LIMIT: usize = 64;

/// Compiles selectors once and evaluates them.
pub struct Selectors {
    env: Arc<Env>,
    compiled: Mutex<BTreeMap<String, Arc<Selector>>>,
}

impl std::fmt::Debug for Selectors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selectors").finish_non_exhaustive()
    }
}

/// Compiled expressions kept; a cluster has a handful of classes, but tenants can write any number of selectors.
const CACHE_LIMIT: usize = 256;

impl Default for Selectors {
    fn default() -> Self {
        Self {
            env: Arc::new(functions::environment()),
            compiled: Mutex::default(),
        }
    }
}

impl Selectors {
    /// The compiled form of `source`; an expression that does not compile yields its error when evaluated.
    pub fn compile(&self, source: &str) -> Arc<Selector> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(selector) = compiled.get(source) {
            return Arc::clone(selector);
        }
        if compiled.len() >= CACHE_LIMIT {
            compiled.clear();
        }
        let selector = Arc::new(self.compile_uncached(source));
        compiled.insert(source.to_owned(), Arc::clone(&selector));
        selector
    }

    fn compile_uncached(&self, source: &str) -> Selector {
        let program = if source.len() > MAX_EXPRESSION_BYTES {
            Err(format!(
                "expression is longer than {MAX_EXPRESSION_BYTES} bytes"
            ))
        } else {
            parse(&self.env, source)
        };
        let names_driver = program
            .as_ref()
            .is_ok_and(|program| names_driver(program.expression()));
        Selector {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            source: source.to_owned(),
            program,
            names_driver,
        }
    }

    /// As [`Self::matches`], for a device whose earlier answers are known.
    ///
    /// # Errors
    /// As [`Self::matches`]; failures are not kept.
    pub fn answer(
        &self,
        selector: &Selector,
        device: &DeviceValue,
        answers: &Answers,
    ) -> Result<bool, SelectorError> {
        let mut known = answers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = known.get(&selector.id) {
            return Ok(*answer);
        }
        let answer = self.matches(selector, device)?;
        if known.len() >= ANSWER_LIMIT {
            known.clear();
        }
        known.insert(selector.id, answer);
        Ok(answer)
    }

    /// Whether `selector` selects `device`.
    ///
    /// # Errors
    /// When the expression does not compile, fails on this device, or yields something other than a bool.
    pub fn matches(
        &self,
        selector: &Selector,
        device: &DeviceValue,
    ) -> Result<bool, SelectorError> {
        let program = selector
            .program
            .as_ref()
            .map_err(|error| SelectorError::Compile(error.clone()))?;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut context = Context::with_env(Arc::clone(&self.env));
            context.add_variable_as_val("device", Box::new(device.clone()));
            let value =
                Value::resolve_val(program.expression(), &context).map_err(runtime_error)?;
            value
                .downcast_ref::<CelBool>()
                .map(|answer| *answer.inner())
                .ok_or_else(|| {
                    SelectorError::Runtime(format!(
                        "CEL result of type {} could not be converted to bool",
                        value.get_type().name()
                    ))
                })
        }));
        outcome.unwrap_or_else(|_| Err(SelectorError::Runtime("the evaluation failed".to_owned())))
    }
}

impl Selector {
    /// The expression as it was written.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the expression asks for this driver by name, in `device.driver` or as a domain.
    #[must_use]
    pub const fn names_driver(&self) -> bool {
        self.names_driver
    }
}

/// Parses on a thread of its own: parser and tree are recursive, and a text of a tenant must not take the process
/// down, neither by the depth of its nesting nor by a flaw of the parser.
fn parse(env: &Arc<Env>, source: &str) -> Result<cel::Program, String> {
    let (env, source) = (Arc::clone(env), source.to_owned());
    let parsing = std::thread::Builder::new()
        .name("cel-parser".to_owned())
        .stack_size(PARSER_STACK_BYTES)
        .spawn(move || {
            let program = env
                .compile(&source)
                .map_err(|errors| syntax_error(&errors.to_string()))?;
            if nesting(program.expression()) > MAX_NESTING {
                return Err(format!("nested deeper than {MAX_NESTING} levels"));
            }
            match functions::unsupported(&program) {
                Some(name) => Err(format!("undeclared reference to '{name}'")),
                None => Ok(program),
            }
        })
        .map_err(|error| format!("cannot start the parser: {error}"))?;
    parsing
        .join()
        .unwrap_or_else(|_| Err("the parser failed on it".to_owned()))
}

/// Depth of the tree.
fn nesting(expression: &IdedExpr) -> usize {
    1 + children(expression).map(nesting).max().unwrap_or_default()
}

/// Direct subexpressions.
fn children(expression: &IdedExpr) -> impl Iterator<Item = &IdedExpr> {
    let list: Vec<&IdedExpr> = match &expression.expr {
        Expr::Call(call) => call
            .target
            .as_deref()
            .into_iter()
            .chain(&call.args)
            .collect(),
        Expr::Select(select) => vec![&select.operand],
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Comprehension(comprehension) => vec![
            &comprehension.iter_range,
            &comprehension.accu_init,
            &comprehension.loop_cond,
            &comprehension.loop_step,
            &comprehension.result,
        ],
        Expr::Map(MapExpr { entries }) | Expr::Struct(StructExpr { entries, .. }) => entries
            .iter()
            .flat_map(|entry| match &entry.expr {
                EntryExpr::StructField(field) => vec![&field.value],
                EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
            })
            .collect(),
        Expr::Literal(_) | Expr::Ident(_) | Expr::Unspecified => Vec::new(),
    };
    list.into_iter()
}

fn syntax_error(errors: &str) -> String {
    format!("compilation failed: Syntax error: {}", errors.trim())
}

fn runtime_error(error: ExecutionError) -> SelectorError {
    SelectorError::Runtime(match error {
        // The hint is kube-scheduler's own.
        ExecutionError::NoSuchKey(key) => format!(
            "no such key: {key}. consider using CEL optional chaining (.? followed by orValue()) or guarding the \
             check with has() for optional fields"
        ),
        ExecutionError::NoSuchOverload(overload) => {
            format!("no such overload: {}{overload}", overload.function())
        }
        ExecutionError::UndeclaredReference(name) => format!("undeclared reference to '{name}'"),
        other => other.to_string(),
    })
}

/// Whether the expression contains this driver's name as a string, other than to exclude it by
/// `device.driver != "…"`.
fn names_driver(expression: &IdedExpr) -> bool {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => text.inner() == drava_api::names::DRIVER,
        Expr::Call(CallExpr {
            func_name, args, ..
        }) if func_name == operators::NOT_EQUALS => {
            !args.iter().any(is_driver_field) && args.iter().any(names_driver)
        }
        _ => children(expression).any(names_driver),
    }
}

fn is_driver_field(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::Select(select) if select.field == "driver")
}

#[cfg(test)]
mod tests;
