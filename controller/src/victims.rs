//! The search for the pods whose end makes room for another pod. Pure: whether a set of pods is enough is asked of the
//! caller, which simulates it with the allocator.
//!
//! Sets are compared by their highest priority, then by the number of pods, then by age: the newest pods lose the least
//! work. The result is the best set if it is small (at most [`MAX_SUBSETS`] subsets are of its size or smaller), as it is
//! for ten candidates. Otherwise it is a minimal set: no pod of it is unnecessary. Some sets may be forbidden; of more
//! candidates a set may then be missed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

/// Maximum number of subsets that are compared.
const MAX_SUBSETS: usize = 1024;

/// A pod that can end, or a gang that ends as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// UIDs and times of creation of the pods.
    pub(crate) pods: BTreeMap<String, Timestamp>,
    /// Highest priority of the pods.
    pub(crate) priority: i32,
}

/// Cost of a set of candidates; the lowest is the best.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cost {
    highest_priority: i32,
    pods: usize,
    /// The oldest pod first.
    created: Vec<Reverse<Timestamp>>,
    /// For a deterministic choice.
    uids: BTreeSet<String>,
}

impl Cost {
    /// Returns the cost of a set.
    pub(crate) fn of<'a>(set: impl IntoIterator<Item = &'a Candidate>) -> Self {
        let mut highest_priority = i32::MIN;
        let mut pods = BTreeMap::new();
        for candidate in set {
            highest_priority = highest_priority.max(candidate.priority);
            pods.extend(candidate.pods.iter());
        }
        let mut created: Vec<_> = pods.values().map(|created| **created).collect();
        created.sort_unstable();
        Self {
            highest_priority,
            pods: pods.len(),
            created: created.into_iter().map(Reverse).collect(),
            uids: pods.into_keys().cloned().collect(),
        }
    }

    /// Returns the UIDs of the pods.
    pub(crate) fn into_uids(self) -> BTreeSet<String> {
        self.uids
    }
}

/// Effect of the end of a set of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The pod does not fit.
    TooLittle,
    /// The pod fits, but these pods must not end together.
    Forbidden,
    /// The pod fits.
    Enough,
}

impl From<bool> for Effect {
    fn from(is_enough: bool) -> Self {
        if is_enough {
            Self::Enough
        } else {
            Self::TooLittle
        }
    }
}

/// Returns whether no set of the candidates, apart from the empty one, costs less than `bound`.
pub(crate) fn cannot_beat(candidates: &[Candidate], bound: &Cost) -> bool {
    // A set costs at least as much as each of its members.
    candidates.iter().all(|candidate| {
        candidate.priority > bound.highest_priority || Cost::of([candidate]) >= *bound
    })
}

/// Returns the best set of candidates that is enough. A superset of a set that is enough must be enough or forbidden, one
/// of a forbidden set forbidden. `None` if there is no such set, or none better than `bound`.
pub(crate) fn search<E: Into<Effect>>(
    candidates: &[Candidate],
    bound: Option<&Cost>,
    mut effect: impl FnMut(&BTreeSet<String>) -> E,
) -> Option<Cost> {
    let mut effect = |set: &[&Candidate]| -> Effect {
        let uids = set.iter().flat_map(|candidate| candidate.pods.keys());
        effect(&uids.cloned().collect()).into()
    };
    let is_better = |cost: &Cost| bound.is_none_or(|bound| cost < bound);
    if effect(&[]) == Effect::Enough {
        return Some(Cost::of([])).filter(is_better);
    }
    // The lowest priority up to which candidates have to end.
    let priorities: BTreeSet<i32> = candidates.iter().map(|each| each.priority).collect();
    let priorities = priorities
        .into_iter()
        .take_while(|priority| bound.is_none_or(|bound| *priority <= bound.highest_priority));
    for priority in priorities {
        let up_to = candidates.iter();
        let up_to = up_to.filter(|candidate| candidate.priority <= priority);
        if let Some(found) = best_of(up_to.collect(), priority, bound, &mut effect) {
            return Some(found).filter(is_better);
        }
    }
    None
}

/// Returns the best set out of `candidates`, whose highest priority is `priority`, or a minimal one if there are too many.
/// `None` if there is none better than `bound`.
fn best_of<'a>(
    candidates: Vec<&'a Candidate>,
    priority: i32,
    bound: Option<&Cost>,
    effect: &mut impl FnMut(&[&'a Candidate]) -> Effect,
) -> Option<Cost> {
    if effect(&candidates) == Effect::TooLittle {
        return None;
    }
    // Every set that is enough has the candidates without which the others are too little.
    let (needed, others) = divided(&candidates, effect);
    let needed_cost = Cost::of(needed.iter().copied());
    if bound.is_some_and(|bound| needed_cost >= *bound) {
        return None;
    }
    let mut best: Option<Cost> = None;
    let mut tried = 0;
    let smallest = needed.len().max(1);
    // Each set with the candidates after its last member.
    let mut sets: Vec<(Vec<&Candidate>, &[&Candidate])> = vec![(needed, &others)];
    for size in smallest.. {
        if sets.iter().any(|(set, _)| set.len() < size) {
            sets = larger(&sets);
        }
        tried += sets.len();
        if tried > MAX_SUBSETS {
            break;
        }
        // A set has at least as many pods as candidates, and sets of lower priority are not enough.
        let is_unbeatable = |cost: &Cost| cost.highest_priority <= priority && cost.pods < size;
        if sets.is_empty() || best.as_ref().or(bound).is_some_and(is_unbeatable) {
            return best;
        }
        let mut by_cost: Vec<(Cost, &[&Candidate])> = sets
            .iter()
            .map(|(set, _)| (Cost::of(set.iter().copied()), set.as_slice()))
            .filter(|(cost, _)| best.as_ref().or(bound).is_none_or(|best| cost < best))
            .collect();
        by_cost.sort_by(|(one, _), (other, _)| one.cmp(other));
        let found = by_cost
            .into_iter()
            .find(|(_, set)| effect(set) == Effect::Enough);
        best = found.map(|(cost, _)| cost).or(best);
    }
    if best.is_some() {
        return best;
    }
    let mut is_enough = |set: &[&'a Candidate]| effect(set) != Effect::TooLittle;
    let minimal = reduced(candidates, &mut is_enough);
    (effect(&minimal) == Effect::Enough).then(|| Cost::of(minimal))
}

/// Divides candidates into those without which the others are too little, and the others.
fn divided<'a>(
    candidates: &[&'a Candidate],
    effect: &mut impl FnMut(&[&'a Candidate]) -> Effect,
) -> (Vec<&'a Candidate>, Vec<&'a Candidate>) {
    let mut index = 0;
    candidates.iter().partition(|_| {
        let mut without = candidates.to_vec();
        without.remove(index);
        index += 1;
        effect(&without) == Effect::TooLittle
    })
}

/// Returns the sets with one candidate more.
fn larger<'s, 'a>(
    sets: &[(Vec<&'a Candidate>, &'s [&'a Candidate])],
) -> Vec<(Vec<&'a Candidate>, &'s [&'a Candidate])> {
    sets.iter()
        .flat_map(|(set, rest)| {
            (0..rest.len()).filter_map(|index| {
                let (next, after) = rest.get(index..)?.split_first()?;
                Some(([set.as_slice(), &[*next]].concat(), after))
            })
        })
        .take(MAX_SUBSETS + 1)
        .collect()
}

/// Removes every candidate from the set that is not needed: the highest priority first, then the most pods, then the oldest.
fn reduced<'a>(
    mut set: Vec<&'a Candidate>,
    is_enough: &mut impl FnMut(&[&'a Candidate]) -> bool,
) -> Vec<&'a Candidate> {
    set.sort_by_key(|candidate| {
        let oldest = candidate.pods.values().min().copied();
        (
            Reverse(candidate.priority),
            Reverse(candidate.pods.len()),
            oldest,
        )
    });
    let mut index = 0;
    while index < set.len() {
        let candidate = set.remove(index);
        if !is_enough(&set) {
            set.insert(index, candidate);
            index += 1;
        }
    }
    set
}

#[cfg(test)]
mod tests;
