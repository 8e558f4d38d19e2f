//! List and set functions of Kubernetes: `isSorted`, `sum`, `min`, `max`, `indexOf`, `lastIndexOf` and `sets.*`.

use std::cmp::Ordering;

use cel::common::traits::Iterable;
use cel::common::types::{CelBool, CelInt, DYN_TYPE, LIST_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError};

use crate::budget;

type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_member_overload("isSorted", "list.isSorted()", LIST_TYPE, vec![], is_sorted)?;
    env.add_member_overload("sum", "list.sum()", LIST_TYPE, vec![], sum)?;
    env.add_member_overload("min", "list.min()", LIST_TYPE, vec![], min)?;
    env.add_member_overload("max", "list.max()", LIST_TYPE, vec![], max)?;
    env.add_member_overload(
        "indexOf",
        "list.indexOf(dyn)",
        LIST_TYPE,
        vec![DYN_TYPE],
        index_of,
    )?;
    env.add_member_overload(
        "lastIndexOf",
        "list.lastIndexOf(dyn)",
        LIST_TYPE,
        vec![DYN_TYPE],
        last_index_of,
    )?;
    let lists = || vec![LIST_TYPE, LIST_TYPE];
    env.add_overload("sets.contains", "sets.contains", lists(), sets_contains)?;
    env.add_overload(
        "sets.intersects",
        "sets.intersects",
        lists(),
        sets_intersects,
    )?;
    env.add_overload(
        "sets.equivalent",
        "sets.equivalent",
        lists(),
        sets_equivalent,
    )
}

/// Returns the elements of a list.
fn elements<'a, 'v>(list: &'a (dyn Val + 'v)) -> Result<Vec<&'a (dyn Val + 'v)>, ExecutionError> {
    let iterable: &(dyn Iterable + 'v) =
        list.as_iterable()
            .ok_or_else(|| ExecutionError::UnexpectedType {
                got: list.get_type().name().to_owned(),
                want: "list".to_owned(),
            })?;
    let mut iterator = iterable.iter();
    let mut elements = Vec::new();
    while let Some(element) = iterator.next() {
        elements.push(element);
    }
    budget::charge(elements.len() as u64)?;
    Ok(elements)
}

fn arguments<'b, 'v, const N: usize>(
    args: Vec<CowVal<'b, 'v>>,
) -> Result<[CowVal<'b, 'v>; N], ExecutionError> {
    args.try_into()
        .map_err(|args: Vec<_>| ExecutionError::invalid_argument_count(N, args.len()))
}

/// Returns the order of two elements. As upstream, elements of different types count as equal.
fn compare(function: &str, left: &dyn Val, right: &dyn Val) -> Result<Ordering, ExecutionError> {
    let comparer = left.as_comparer().ok_or_else(|| {
        let types = vec![left.get_type().name().to_owned()];
        ExecutionError::no_such_overload(function, types)
    })?;
    Ok(comparer.compare(right).unwrap_or(Ordering::Equal))
}

fn is_sorted<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = arguments(args)?;
    for pair in elements(list.as_ref())?.windows(2) {
        if let [left, right] = pair
            && compare("isSorted", *left, *right)?.is_gt()
        {
            return Ok(CowVal::owned(CelBool::from(false)));
        }
    }
    Ok(CowVal::owned(CelBool::from(true)))
}

/// The sum of an empty list is the integer 0, which equals the zero of every number type.
fn sum<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = arguments(args)?;
    let elements = elements(list.as_ref())?;
    let Some((first, rest)) = elements.split_first() else {
        return Ok(CowVal::owned(CelInt::from(0)));
    };
    let mut total = first.clone_as_boxed();
    for element in rest {
        let next = total
            .as_adder()
            .ok_or_else(|| {
                let types = vec![total.get_type().name().to_owned()];
                ExecutionError::no_such_overload("sum", types)
            })?
            .add(*element)?
            .into_owned();
        total = next;
    }
    Ok(CowVal::Owned(total))
}

fn min<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    extreme("min", args, Ordering::is_gt)
}

fn max<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    extreme("max", args, Ordering::is_lt)
}

/// Returns the first element that no later one replaces; `replaces` is given the order of both.
fn extreme<'b, 'v>(
    function: &str,
    args: Vec<CowVal<'b, 'v>>,
    replaces: fn(Ordering) -> bool,
) -> Outcome<'b, 'v> {
    let [list] = arguments(args)?;
    let elements = elements(list.as_ref())?;
    let (mut found, rest) = elements
        .split_first()
        .ok_or_else(|| ExecutionError::InternalError(format!("{function} called on empty list")))?;
    for element in rest {
        if replaces(compare(function, *found, *element)?) {
            found = element;
        }
    }
    Ok(CowVal::Owned(found.clone_as_boxed()))
}

fn position<'b, 'v>(
    args: Vec<CowVal<'b, 'v>>,
    find: fn(&[&dyn Val], &dyn Val) -> Option<usize>,
) -> Outcome<'b, 'v> {
    let [list, wanted] = arguments(args)?;
    let found = find(&elements(list.as_ref())?, wanted.as_ref());
    let index = found.and_then(|index| i64::try_from(index).ok());
    Ok(CowVal::owned(CelInt::from(index.unwrap_or(-1))))
}

fn index_of<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    position(args, |list, wanted| {
        list.iter().position(|element| element.equals(wanted))
    })
}

fn last_index_of<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    position(args, |list, wanted| {
        list.iter().rposition(|element| element.equals(wanted))
    })
}

/// Returns whether each element of `part` is in `list`.
fn contains_all(list: &[&dyn Val], part: &[&dyn Val]) -> bool {
    part.iter()
        .all(|wanted| list.iter().any(|element| element.equals(*wanted)))
}

fn sets<'b, 'v>(
    args: Vec<CowVal<'b, 'v>>,
    relation: fn(&[&dyn Val], &[&dyn Val]) -> bool,
) -> Outcome<'b, 'v> {
    let [left, right] = arguments(args)?;
    let (left, right) = (elements(left.as_ref())?, elements(right.as_ref())?);
    budget::charge((left.len() as u64).saturating_mul(right.len() as u64))?;
    Ok(CowVal::owned(CelBool::from(relation(&left, &right))))
}

fn sets_contains<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    sets(args, contains_all)
}

fn sets_equivalent<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    sets(args, |left, right| {
        contains_all(left, right) && contains_all(right, left)
    })
}

fn sets_intersects<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    sets(args, |left, right| {
        left.iter()
            .any(|wanted| right.iter().any(|element| element.equals(*wanted)))
    })
}
