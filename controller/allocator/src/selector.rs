//! CEL device selectors, as kube-scheduler evaluates them (KEP-4381).
//!
//! The only variable of an expression is `device`, with `driver`, `attributes`, `capacity` and
//! `allowMultipleAllocations`. An unqualified name belongs to the driver's domain. An unknown domain is an empty map; an
//! unknown name in a domain is an error. Failures select no device: an expression that does not compile, calls an
//! unsupported function, or returns an error or a value other than a bool. Error texts follow kube-scheduler.
//!
//! The API server checks types and cost of every stored expression; this module does not.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cel::common::ast::{EntryExpr, Expr, IdedExpr, MapExpr, StructExpr};
use cel::common::types::CelBool;
use cel::{Context, Env, ExecutionError, Value};

use crate::steps;
use crate::turn::Turn;

mod cache;
mod driver_match;
mod reads;
mod values;

pub use driver_match::DriverMatch;
use reads::reads_gpu;
pub use values::DeviceValue;

/// Maximum expression length in the API.
const MAX_EXPRESSION_BYTES: usize = 10 * 1024;

/// Maximum nesting depth, which bounds the stack of an evaluation. Chains of `&&` and `||` nest by the logarithm of
/// their length.
const MAX_NESTING: usize = 40;
/// Sufficient for any nesting within [`MAX_EXPRESSION_BYTES`].
const PARSER_STACK_BYTES: usize = 256 << 20;

/// A compiled selector.
pub struct Selector {
    /// Unique; an address could be reused.
    id: u64,
    source: String,
    /// With the charges of [`drava_cel::instrument`].
    program: Result<IdedExpr, String>,
    driver_match: DriverMatch,
    /// Whether it may read what differs from GPU to GPU.
    reads_gpu: bool,
    /// Units of work of all expensive evaluations.
    spent_units: AtomicU64,
}

impl std::fmt::Debug for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Selector").field(&self.source).finish()
    }
}

/// A selector equals itself only: another one with the same expression has a budget of its own.
impl PartialEq for Selector {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// Why a selector cannot be evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression does not compile.
    #[error("CEL compile error: {0}")]
    Compile(String),
    /// The evaluation failed on a device.
    #[error("CEL runtime error: {0}")]
    Runtime(String),
    /// The decision goes on in another turn, see [`crate::turn`].
    #[error("the evaluation is suspended")]
    Suspended,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Cached results of selectors for one device; `None` for one that fails.
#[derive(Debug, Default)]
pub struct MatchCache(Mutex<BTreeMap<u64, Option<bool>>>);

/// Maximum cached results per device: those of the mix of requests, and of pods.
pub(crate) const MATCH_LIMIT: usize = 256;

impl MatchCache {
    /// Returns the known result.
    pub(crate) fn get(&self, selector: &Selector) -> Option<Option<bool>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&selector.id).copied()
    }

    /// Notes a result.
    pub(crate) fn set(&self, selector: &Selector, result: Option<bool>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MATCH_LIMIT {
            known.clear();
        }
        known.insert(selector.id, result);
    }
}

/// An evaluation beyond these units is expensive. Selectors that are written for devices stay far below.
const EXPENSIVE_UNITS: u64 = 2_000;
/// Units of all expensive evaluations of one selector, about 2 s. The selector fails on every device after that: a
/// tenant's expression must not occupy the allocator for `EVALUATION_UNITS` on each device of the cluster.
const SELECTOR_UNITS: u64 = 5_000_000;

/// Compiles selectors, caches them, and evaluates them.
pub struct Selectors {
    env: Arc<Env>,
    compiled: Mutex<cache::Compiled>,
}

impl std::fmt::Debug for Selectors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selectors").finish_non_exhaustive()
    }
}

impl Default for Selectors {
    fn default() -> Self {
        Self {
            env: Arc::new(drava_cel::environment()),
            compiled: Mutex::default(),
        }
    }
}

impl Selectors {
    /// Compiles `source`. `owner` is the namespace of the claim, empty for a cluster-scoped object: the cache is limited for
    /// each owner, so that a tenant with many expressions does not displace those of the others. The error of an expression
    /// that does not compile is returned by the evaluation.
    pub fn compile(&self, owner: &str, source: &str) -> Arc<Selector> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.get(owner, source, || self.compile_uncached(source))
    }

    fn compile_uncached(&self, source: &str) -> Selector {
        let (program, driver_match, reads_gpu) = if source.len() > MAX_EXPRESSION_BYTES {
            let error = format!("expression is longer than {MAX_EXPRESSION_BYTES} bytes");
            (Err(error), DriverMatch::of_text(source), true)
        } else {
            parse(&self.env, source)
        };
        Selector {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            source: source.to_owned(),
            program,
            driver_match,
            reads_gpu,
            spent_units: AtomicU64::new(0),
        }
    }

    /// As [`Self::matches`], with a cache of the device's results.
    ///
    /// # Errors
    /// As [`Self::matches`]; their texts are not cached.
    pub fn matches_cached(
        &self,
        selector: &Selector,
        device: impl FnOnce() -> DeviceValue,
        cache: &MatchCache,
        turn: &mut Turn,
    ) -> Result<bool, SelectorError> {
        if let Some(Some(matched)) = cache.get(selector) {
            return Ok(matched);
        }
        steps::count(1);
        let matched = self.matches(selector, &device(), turn)?;
        cache.set(selector, Some(matched));
        Ok(matched)
    }

    /// Returns whether `selector` selects `device`.
    ///
    /// # Errors
    /// When the expression does not compile, fails on the device, or does not return a bool, and when the turn is over.
    pub fn matches(
        &self,
        selector: &Selector,
        device: &DeviceValue,
        turn: &mut Turn,
    ) -> Result<bool, SelectorError> {
        let program = selector
            .program
            .as_ref()
            .map_err(|error| SelectorError::Compile(error.clone()))?;
        let exceeded = || SelectorError::Runtime(drava_cel::EXCEEDED.to_owned());
        if selector.spent_units.load(Ordering::Relaxed) > SELECTOR_UNITS {
            return Err(exceeded());
        }
        if turn.is_out_of_selectors() {
            return Err(SelectorError::Suspended);
        }
        let (outcome, used) = drava_cel::measure(|| {
            catch_unwind(AssertUnwindSafe(|| self.evaluate(program, device))).unwrap_or_else(|_| {
                Err(SelectorError::Runtime("the evaluation panicked".to_owned()))
            })
        });
        turn.charge(used.work);
        let units = used.units.unwrap_or(drava_cel::EVALUATION_UNITS);
        if units > EXPENSIVE_UNITS {
            selector.spent_units.fetch_add(units, Ordering::Relaxed);
        }
        // An operator may have absorbed the error of the exhausted budget.
        used.units.map_or_else(|| Err(exceeded()), |_| outcome)
    }

    fn evaluate(&self, program: &IdedExpr, device: &DeviceValue) -> Result<bool, SelectorError> {
        let mut context = Context::with_env(Arc::clone(&self.env));
        context.add_variable_as_val("device", Box::new(device.clone()));
        let value = Value::resolve_val(program, &context).map_err(runtime_error)?;
        value
            .downcast_ref::<CelBool>()
            .map(|matched| *matched.inner())
            .ok_or_else(|| {
                SelectorError::Runtime(format!(
                    "CEL result of type {} could not be converted to bool",
                    value.get_type().name()
                ))
            })
    }
}

impl Selector {
    /// Returns the source of the expression.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns why the expression does not compile.
    #[must_use]
    pub fn compile_error(&self) -> Option<String> {
        let error = self.program.as_ref().err()?;
        Some(SelectorError::Compile(error.clone()).to_string())
    }

    /// Returns whether the expression may read what differs from GPU to GPU. Otherwise it selects all devices of a shape or none.
    pub(crate) const fn reads_gpu(&self) -> bool {
        self.reads_gpu
    }

    /// Returns which drivers' devices the expression can select.
    #[must_use]
    pub const fn driver_match(&self) -> DriverMatch {
        self.driver_match
    }
}

/// Parses on a separate thread: parser and tree are recursive, and neither deep nesting nor a panic of the parser in a
/// tenant's expression must stop the process.
fn parse(env: &Arc<Env>, source: &str) -> (Result<IdedExpr, String>, DriverMatch, bool) {
    let env = Arc::clone(env);
    let text = source.to_owned();
    let parsing = std::thread::Builder::new()
        .name("cel-parser".to_owned())
        .stack_size(PARSER_STACK_BYTES)
        .spawn(move || {
            let program = match env.compile(&text) {
                Ok(program) => program,
                Err(errors) => {
                    let error = syntax_error(&errors.to_string());
                    return (Err(error), DriverMatch::of_text(&text), true);
                }
            };
            let driver_match = DriverMatch::of(program.expression());
            let depth = nesting(program.expression());
            let reads_gpu = depth > MAX_NESTING || reads_gpu(program.expression());
            let checked = if depth > MAX_NESTING {
                Err(format!("nested deeper than {MAX_NESTING} levels"))
            } else {
                match drava_cel::unsupported(program.expression()) {
                    Some(name) => Err(format!("undeclared reference to '{name}'")),
                    None => {
                        let mut expression = program.expression().clone();
                        drava_cel::instrument(&mut expression);
                        Ok(expression)
                    }
                }
            };
            (checked, driver_match, reads_gpu)
        });
    let failed = |error: String| (Err(error), DriverMatch::of_text(source), true);
    match parsing.map(std::thread::JoinHandle::join) {
        Ok(Ok(parsed)) => parsed,
        Ok(Err(_)) => failed("the parser panicked".to_owned()),
        Err(error) => failed(format!("cannot start the parser: {error}")),
    }
}

/// Returns the depth of the tree.
fn nesting(expression: &IdedExpr) -> usize {
    1 + children(expression).map(nesting).max().unwrap_or_default()
}

/// Returns the direct subexpressions.
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
        // The hint is that of kube-scheduler.
        ExecutionError::NoSuchKey(key) => format!(
            "no such key: {key}. consider using CEL optional chaining (.? followed by orValue()) or guarding the \
             check with has() for optional fields"
        ),
        ExecutionError::NoSuchOverload(overload) => {
            format!("no such overload: {}{overload}", overload.function())
        }
        ExecutionError::InternalError(text) => text,
        ExecutionError::IndexOutOfBounds(Value::Int(index)) => {
            format!("index out of bounds: {index}")
        }
        ExecutionError::FunctionError { function, message }
            if message.starts_with("string parse error") =>
        {
            format!("type conversion error from 'string' to '{function}'")
        }
        ExecutionError::FunctionError { function, message }
            if ["charAt", "indexOf", "lastIndexOf", "substring"].contains(&function.as_str()) =>
        {
            message
        }
        ExecutionError::UndeclaredReference(name) => format!("undeclared reference to '{name}'"),
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests;
