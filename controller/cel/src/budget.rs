//! Bounds the work of one evaluation.
//!
//! The API server limits the estimated cost of a stored expression, which still allows a nested comprehension to run for
//! a third of a second on each device. So [`instrument`] inserts calls that charge the work that can grow beyond the
//! length of the expression: the elements of each comprehension, the sizes of computed strings and lists, and regular
//! expressions. An evaluation that exhausts its budget fails, whatever its value is: an error hidden by `||` or `&&` does
//! not count as a value.
//!
//! Functions of the `cel` crate carry no state, so the budget belongs to the thread during one evaluation: [`measure`] sets it,
//! and returns what was used of it. Charges depend on the device and the expression only, so equal inputs have equal results.

use std::cell::Cell;

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, operators};
use cel::common::types::{CelString, DYN_TYPE};
use cel::common::value::CowVal;
use cel::{DeclarationError, Env, ExecutionError};

/// Name of `matches` in an instrumented expression; the function of the `cel` crate compiles without a limit.
pub(crate) const MATCHES: &str = "@matches";

/// Units of work of one evaluation. A unit is one element of a comprehension or ten bytes of a computed string, about
/// 0.3 µs.
pub const EVALUATION_UNITS: u64 = 50_000;

/// Work of an evaluation that is not costly. Selectors that compare attributes stay below it, so that decisions for them are
/// never suspended.
const CHEAP_UNITS: u64 = 20;

/// Units of one regular expression: it is compiled unless it was used before.
pub(crate) const REGEX_UNITS: u64 = 500;

/// Text of kube-scheduler for an expression beyond its cost limit.
pub const EXCEEDED: &str = "operation cancelled: actual cost limit exceeded";

/// Charges the elements of a comprehension before it runs. The names cannot be written in CEL.
const CHARGE_RANGE: &str = "@charge_range";
/// Charges the size of a result.
const CHARGE_RESULT: &str = "@charge_result";

/// Calls whose results can be larger than the sum of their arguments, or that the evaluation can repeat.
const GROWING: &[&str] = &[
    operators::ADD,
    "flatten",
    "format",
    "join",
    "range",
    "replace",
    "split",
];

thread_local! {
    /// Units left to the evaluation on this thread. `None`: exhausted.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    /// Units of work of the evaluation on this thread; less than its charges when a regular expression was used before.
    static WORK: Cell<u64> = const { Cell::new(0) };
}

/// What an evaluation has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Units of its budget; `None` if it exhausted the budget.
    pub units: Option<u64>,
    /// Units of work; 0 if it was cheap.
    pub work: u64,
}

/// Runs an evaluation with a full budget, and returns its result with what it has used.
pub fn measure<T>(evaluate: impl FnOnce() -> T) -> (T, Used) {
    LEFT.set(Some(EVALUATION_UNITS));
    WORK.set(0);
    let result = evaluate();
    let work = WORK.get();
    let used = Used {
        units: LEFT.get().map(|left| EVALUATION_UNITS - left),
        work: if work > CHEAP_UNITS { work } else { 0 },
    };
    (result, used)
}

/// Takes units from the budget, for work of as many.
///
/// # Errors
/// When the budget is exhausted, by this charge or an earlier one.
pub(crate) fn charge(units: u64) -> Result<(), ExecutionError> {
    charge_unworked(units)?;
    work(units);
    Ok(())
}

/// Counts work that is charged already.
pub(crate) fn work(units: u64) {
    WORK.set(WORK.get().saturating_add(units));
}

/// Takes units from the budget, for work that may have been done before.
///
/// # Errors
/// As [`charge`].
pub(crate) fn charge_unworked(units: u64) -> Result<(), ExecutionError> {
    let left = LEFT.get().and_then(|left| left.checked_sub(units));
    LEFT.set(left);
    left.map(|_| ())
        .ok_or_else(|| ExecutionError::InternalError(EXCEEDED.to_owned()))
}

/// Charges a function that reads all of `text`.
///
/// # Errors
/// As [`charge`].
pub(crate) fn charge_text(text: &str) -> Result<(), ExecutionError> {
    charge(1 + text.len() as u64 / 10)
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_overload(CHARGE_RANGE, CHARGE_RANGE, vec![DYN_TYPE], charge_range)?;
    env.add_overload(CHARGE_RESULT, CHARGE_RESULT, vec![DYN_TYPE], charge_result)
}

fn only<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let [value] = <[CowVal<'b, 'v>; 1]>::try_from(args)
        .map_err(|args| ExecutionError::invalid_argument_count(1, args.len()))?;
    Ok(value)
}

fn charge_range<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let range = only(args)?;
    charge(size(&range).saturating_add(1))?;
    Ok(range)
}

fn charge_result<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let result = only(args)?;
    let units = match result.downcast_ref::<CelString>() {
        Some(text) => (text.inner().len() / 10) as u64,
        None => size(&result),
    };
    charge(units)?;
    Ok(result)
}

/// Returns the number of elements of a list or map.
fn size(value: &CowVal<'_, '_>) -> u64 {
    value.as_sizer().map_or(0, |sizer| {
        u64::try_from(*sizer.size().inner()).unwrap_or_default()
    })
}

/// Inserts the charges into an expression. Without them [`measure`] counts functions only.
pub fn instrument(expression: &mut IdedExpr) {
    match &mut expression.expr {
        Expr::Call(call) => {
            call.target.as_deref_mut().into_iter().for_each(instrument);
            call.args.iter_mut().for_each(instrument);
            if call.func_name == "matches" {
                call.func_name = MATCHES.to_owned();
            }
            // The fast path of the `cel` crate for `map` and `filter` needs this form as it is; its elements are charged
            // by the range.
            let is_append = call.func_name == operators::ADD
                && matches!(call.args.first().map(|arg| &arg.expr), Some(Expr::Ident(name)) if name.starts_with('@'));
            if GROWING.contains(&call.func_name.as_str()) && !is_append {
                wrap(expression, CHARGE_RESULT);
            }
        }
        Expr::Select(select) => instrument(&mut select.operand),
        Expr::List(list) => list.elements.iter_mut().for_each(instrument),
        Expr::Comprehension(comprehension) => {
            for part in [
                &mut comprehension.iter_range,
                &mut comprehension.accu_init,
                &mut comprehension.loop_cond,
                &mut comprehension.loop_step,
                &mut comprehension.result,
            ] {
                instrument(part);
            }
            wrap(&mut comprehension.iter_range, CHARGE_RANGE);
        }
        Expr::Map(map) => entries(map.entries.iter_mut().map(|entry| &mut entry.expr)),
        Expr::Struct(object) => entries(object.entries.iter_mut().map(|entry| &mut entry.expr)),
        Expr::Literal(_) | Expr::Ident(_) | Expr::Unspecified => {}
    }
}

fn entries<'a>(entries: impl Iterator<Item = &'a mut EntryExpr>) {
    for entry in entries {
        match entry {
            EntryExpr::StructField(field) => instrument(&mut field.value),
            EntryExpr::MapEntry(entry) => {
                instrument(&mut entry.key);
                instrument(&mut entry.value);
            }
        }
    }
}

/// Replaces an expression by a call of `function` with it.
fn wrap(expression: &mut IdedExpr, function: &str) {
    let id = expression.id;
    let argument = std::mem::take(expression);
    *expression = IdedExpr {
        id,
        expr: Expr::Call(CallExpr {
            func_name: function.to_owned(),
            target: None,
            args: vec![argument],
        }),
    };
}
