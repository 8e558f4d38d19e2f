//! Macros of the DRA environment: `cel.bind`, and the comprehensions with two variables (index or key, and value).
//!
//! The `cel` crate evaluates comprehensions with one variable only. So `list.all(i, v, e)` becomes a comprehension over
//! the pairs of index and value, which binds both names where `e` is evaluated.

use std::collections::HashMap;

use cel::common::ast::{
    CallExpr, ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue, MapExpr, operators,
};
use cel::common::types::{CelInt, CelList, CelMap, CelMapKey, DYN_TYPE, Kind, MAP_TYPE};
use cel::common::value::{CowVal, Val};
use cel::parser::{Macro, MacroExprHelper, ParseError};
use cel::{DeclarationError, Env, ExecutionError};

/// Accumulator of the macros, as in the `cel` crate, whose evaluation recognizes it.
const RESULT: &str = "@result";
/// Pair of the iteration.
const ENTRY: &str = "@entry";
/// Returns the pairs of a list or map.
const ENTRIES: &str = "@entries";
/// Returns a map with another entry, or with the entries of another map.
const MAP_INSERT: &str = "@map_insert";

type Expansion = Result<Option<IdedExpr>, ParseError>;

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_macro(Macro::receiver("bind", 3, bind))?;
    env.add_macro(Macro::receiver("all", 3, all))?;
    env.add_macro(Macro::receiver("exists", 3, exists))?;
    env.add_macro(Macro::receiver("existsOne", 3, exists_one))?;
    env.add_macro(Macro::receiver("exists_one", 3, exists_one))?;
    for arguments in [3, 4] {
        env.add_macro(Macro::receiver("transformList", arguments, transform_list))?;
        env.add_macro(Macro::receiver("transformMap", arguments, transform_map))?;
        env.add_macro(Macro::receiver(
            "transformMapEntry",
            arguments,
            transform_map_entry,
        ))?;
    }
    env.add_overload(ENTRIES, ENTRIES, vec![DYN_TYPE], entries)?;
    env.add_overload(
        MAP_INSERT,
        "@map_insert(map,dyn,dyn)",
        vec![MAP_TYPE, DYN_TYPE, DYN_TYPE],
        insert_entry,
    )?;
    env.add_overload(
        MAP_INSERT,
        "@map_insert(map,map)",
        vec![MAP_TYPE, MAP_TYPE],
        insert_map,
    )
}

/// Expands `cel.bind(name, value, expression)`.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    if !matches!(target.as_ref().map(|t| &t.expr), Some(Expr::Ident(name)) if name == "cel") {
        return Ok(None);
    }
    let name = match args.first().map(|arg| (arg.id, &arg.expr)) {
        Some((_, Expr::Ident(name))) => name.clone(),
        Some((id, _)) => {
            return Err(
                helper.new_error(id, "cel.bind() variable names must be simple identifiers")
            );
        }
        None => return Ok(None),
    };
    let (Some(result), Some(value)) = (args.pop(), args.pop()) else {
        return Ok(None);
    };
    args.clear();
    target.take();
    Ok(Some(bound(helper, name, value, result)))
}

/// Returns `result` with the variable `name`: a comprehension over an empty list, whose accumulator is the variable.
fn bound(
    helper: &mut MacroExprHelper<'_>,
    name: String,
    value: IdedExpr,
    result: IdedExpr,
) -> IdedExpr {
    let bind = ComprehensionExpr {
        iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_var: name.clone(),
        accu_init: value,
        loop_cond: boolean(helper, false),
        loop_step: helper.next_expr(Expr::Ident(name)),
        result,
    };
    helper.next_expr(Expr::Comprehension(Box::new(bind)))
}

/// The parts of a call with two variables.
struct TwoVariables {
    range: IdedExpr,
    key: String,
    value: String,
    /// The arguments after the variables.
    arguments: Vec<IdedExpr>,
}

impl TwoVariables {
    fn of(
        helper: &MacroExprHelper<'_>,
        target: &mut Option<IdedExpr>,
        args: &mut Vec<IdedExpr>,
    ) -> Result<Self, ParseError> {
        let mut names = args.drain(..2).map(|argument| match argument.expr {
            Expr::Ident(name) => Ok(name),
            _ => Err(helper.new_error(argument.id, "argument must be a simple name")),
        });
        let missing = || Err(helper.new_error(0, "argument must be a simple name"));
        let key = names.next().unwrap_or_else(missing)?;
        let value = names.next().unwrap_or_else(missing)?;
        drop(names);
        if key == value {
            return Err(helper.new_error(0, format!("duplicate variable name: {key}")));
        }
        Ok(Self {
            range: target.take().unwrap_or_default(),
            key,
            value,
            arguments: std::mem::take(args),
        })
    }

    /// Returns the last argument with both variables.
    fn body(&mut self, helper: &mut MacroExprHelper<'_>) -> IdedExpr {
        let body = self.arguments.pop().unwrap_or_default();
        let value = element(helper, 1);
        let inner = bound(helper, self.value.clone(), value, body);
        let key = element(helper, 0);
        bound(helper, self.key.clone(), key, inner)
    }

    /// Returns `step`, or the accumulator where the filter, if there is one, is false.
    fn filtered(&mut self, helper: &mut MacroExprHelper<'_>, step: IdedExpr) -> IdedExpr {
        if self.arguments.is_empty() {
            return step;
        }
        let filter = self.body(helper);
        let result = ident(helper, RESULT);
        call(helper, operators::CONDITIONAL, vec![filter, step, result])
    }

    fn comprehension(
        self,
        helper: &mut MacroExprHelper<'_>,
        init: Expr,
        condition: IdedExpr,
        step: IdedExpr,
    ) -> ComprehensionExpr {
        ComprehensionExpr {
            iter_range: call(helper, ENTRIES, vec![self.range]),
            iter_var: ENTRY.to_owned(),
            iter_var2: None,
            accu_var: RESULT.to_owned(),
            accu_init: helper.next_expr(init),
            loop_cond: condition,
            loop_step: step,
            result: ident(helper, RESULT),
        }
    }
}

fn ident(helper: &mut MacroExprHelper<'_>, name: &str) -> IdedExpr {
    helper.next_expr(Expr::Ident(name.to_owned()))
}

fn boolean(helper: &mut MacroExprHelper<'_>, value: bool) -> IdedExpr {
    helper.next_expr(Expr::Literal(LiteralValue::Boolean(value.into())))
}

fn integer(helper: &mut MacroExprHelper<'_>, value: i64) -> IdedExpr {
    helper.next_expr(Expr::Literal(LiteralValue::Int(value.into())))
}

fn call(helper: &mut MacroExprHelper<'_>, function: &str, args: Vec<IdedExpr>) -> IdedExpr {
    helper.next_expr(Expr::Call(CallExpr {
        func_name: function.to_owned(),
        target: None,
        args,
    }))
}

/// Returns an element of the current pair.
fn element(helper: &mut MacroExprHelper<'_>, index: i64) -> IdedExpr {
    let pair = ident(helper, ENTRY);
    let index = integer(helper, index);
    call(helper, operators::INDEX, vec![pair, index])
}

fn comprehension(helper: &mut MacroExprHelper<'_>, parts: ComprehensionExpr) -> Expansion {
    Ok(Some(helper.next_expr(Expr::Comprehension(Box::new(parts)))))
}

fn all(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let result = ident(helper, RESULT);
    let condition = call(helper, operators::NOT_STRICTLY_FALSE, vec![result]);
    let step = vec![ident(helper, RESULT), call_parts.body(helper)];
    let step = call(helper, operators::LOGICAL_AND, step);
    let init = Expr::Literal(LiteralValue::Boolean(true.into()));
    let parts = call_parts.comprehension(helper, init, condition, step);
    comprehension(helper, parts)
}

fn exists(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let result = ident(helper, RESULT);
    let not = call(helper, operators::LOGICAL_NOT, vec![result]);
    let condition = call(helper, operators::NOT_STRICTLY_FALSE, vec![not]);
    let step = vec![ident(helper, RESULT), call_parts.body(helper)];
    let step = call(helper, operators::LOGICAL_OR, step);
    let init = Expr::Literal(LiteralValue::Boolean(false.into()));
    let parts = call_parts.comprehension(helper, init, condition, step);
    comprehension(helper, parts)
}

fn exists_one(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let added = vec![ident(helper, RESULT), integer(helper, 1)];
    let added = call(helper, operators::ADD, added);
    let step = call_parts.filtered(helper, added);
    let condition = boolean(helper, true);
    let init = Expr::Literal(LiteralValue::Int(0.into()));
    let mut parts = call_parts.comprehension(helper, init, condition, step);
    let counted = vec![ident(helper, RESULT), integer(helper, 1)];
    parts.result = call(helper, operators::EQUALS, counted);
    comprehension(helper, parts)
}

fn transform_list(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let transformed = call_parts.body(helper);
    let item = helper.next_expr(Expr::List(ListExpr::new(vec![transformed])));
    let appended = vec![ident(helper, RESULT), item];
    let appended = call(helper, operators::ADD, appended);
    let step = call_parts.filtered(helper, appended);
    let condition = boolean(helper, true);
    let init = Expr::List(ListExpr::new(Vec::new()));
    let parts = call_parts.comprehension(helper, init, condition, step);
    comprehension(helper, parts)
}

fn transform_map(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let transformed = call_parts.body(helper);
    let entry = vec![ident(helper, RESULT), element(helper, 0), transformed];
    let inserted = call(helper, MAP_INSERT, entry);
    map_comprehension(helper, call_parts, inserted)
}

fn transform_map_entry(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    let mut call_parts = TwoVariables::of(helper, target, args)?;
    let transformed = call_parts.body(helper);
    let inserted = vec![ident(helper, RESULT), transformed];
    let inserted = call(helper, MAP_INSERT, inserted);
    map_comprehension(helper, call_parts, inserted)
}

fn map_comprehension(
    helper: &mut MacroExprHelper<'_>,
    mut call_parts: TwoVariables,
    inserted: IdedExpr,
) -> Expansion {
    let step = call_parts.filtered(helper, inserted);
    let condition = boolean(helper, true);
    let init = Expr::Map(MapExpr {
        entries: Vec::new(),
    });
    let parts = call_parts.comprehension(helper, init, condition, step);
    comprehension(helper, parts)
}

type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

fn arguments<'b, 'v, const N: usize>(
    args: Vec<CowVal<'b, 'v>>,
) -> Result<[CowVal<'b, 'v>; N], ExecutionError> {
    args.try_into()
        .map_err(|args: Vec<_>| ExecutionError::invalid_argument_count(N, args.len()))
}

/// Returns `[[0, a], [1, b]]` of `[a, b]`, and `[[k, v]]` of `{k: v}`.
fn entries<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [range] = arguments(args)?;
    let pairs = pairs(range.as_ref())?
        .into_iter()
        .map(|(key, value)| Box::new(CelList::from(vec![key, value])) as Box<dyn Val + 'v>)
        .collect::<Vec<_>>();
    Ok(CowVal::owned(CelList::from(pairs)))
}

type Pair<'v> = (Box<dyn Val + 'v>, Box<dyn Val + 'v>);

fn pairs<'v>(range: &(dyn Val + 'v)) -> Result<Vec<Pair<'v>>, ExecutionError> {
    let unexpected =
        || ExecutionError::no_such_overload("@iter", vec![range.get_type().name().to_owned()]);
    let is_map = range.get_type().kind() == Kind::Map;
    let mut elements = range.as_iterable().ok_or_else(unexpected)?.iter();
    let mut pairs: Vec<Pair<'v>> = Vec::new();
    while let Some(element) = elements.next() {
        if is_map {
            let values = range.as_indexer().ok_or_else(unexpected)?;
            let value = values.get(element)?.into_owned();
            pairs.push((element.clone_as_boxed(), value));
        } else {
            let index = i64::try_from(pairs.len()).unwrap_or(i64::MAX);
            pairs.push((Box::new(CelInt::from(index)), element.clone_as_boxed()));
        }
    }
    Ok(pairs)
}

fn insert_entry<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [map, key, value] = arguments(args)?;
    let added = vec![(key.into_owned(), value.into_owned())];
    inserted(map.as_ref(), added)
}

fn insert_map<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [map, other] = arguments(args)?;
    inserted(map.as_ref(), pairs(other.as_ref())?)
}

fn inserted<'b, 'v>(map: &(dyn Val + 'v), added: Vec<Pair<'v>>) -> Outcome<'b, 'v> {
    let mut all: HashMap<CelMapKey<'v>, Box<dyn Val + 'v>> = HashMap::new();
    let known = pairs(map)?;
    super::budget::charge(known.len() as u64)?;
    for (key, value) in known {
        all.insert(CelMapKey::try_from(key)?, value);
    }
    for (key, value) in added {
        if map
            .as_container()
            .is_some_and(|map| map.contains(key.as_ref()) == Ok(true))
        {
            let text = cel::Value::try_from(key.as_ref())
                .map_or_else(|_| String::new(), |key| format!("{key:?}"));
            return Err(ExecutionError::InternalError(format!(
                "insert failed: key {text} already exists"
            )));
        }
        all.insert(CelMapKey::try_from(key)?, value);
    }
    Ok(CowVal::owned(CelMap::from(all)))
}
