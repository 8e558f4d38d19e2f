//! The search for the pods whose end makes room for another pod. Pure: whether a set of pods is enough is asked of the
//! caller, which simulates it with the allocator.
//!
//! Sets are compared by their highest priority, then by the number of pods, then by age: the newest pods lose the least
//! work. The result is the best set if it is small (at most [`MAX_SUBSETS`] subsets are of its size or smaller), as it is
//! for ten candidates. Otherwise it is a minimal set: no pod of it is unnecessary.

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

/// Returns the best set of candidates that `is_enough`, which must hold for every superset of a set for which it holds.
/// `None` if all candidates are not enough, or no set is better than `bound`.
pub(crate) fn search(
    candidates: &[Candidate],
    bound: Option<&Cost>,
    mut is_enough: impl FnMut(&BTreeSet<String>) -> bool,
) -> Option<Cost> {
    let mut is_enough = |set: &[&Candidate]| {
        let uids = set.iter().flat_map(|candidate| candidate.pods.keys());
        is_enough(&uids.cloned().collect())
    };
    let is_better = |cost: &Cost| bound.is_none_or(|bound| cost < bound);
    if is_enough(&[]) {
        return Some(Cost::of([])).filter(is_better);
    }
    // The lowest priority up to which candidates have to end.
    let priorities: BTreeSet<i32> = candidates.iter().map(|each| each.priority).collect();
    let eligible = priorities.into_iter().find_map(|priority| {
        let up_to: Vec<&Candidate> = candidates
            .iter()
            .filter(|candidate| candidate.priority <= priority)
            .collect();
        is_enough(&up_to).then_some(up_to)
    })?;
    let mut sets = small_subsets(&eligible);
    sets.retain(|set| is_better(&Cost::of(set.iter().copied())));
    sets.sort_by_cached_key(|set| Cost::of(set.iter().copied()));
    let found = match sets.into_iter().find(|set| is_enough(set)) {
        Some(set) => set,
        None => reduced(eligible, &mut is_enough),
    };
    Some(Cost::of(found)).filter(is_better)
}

/// Returns all subsets of up to a size at which they are at most [`MAX_SUBSETS`].
fn small_subsets<'a>(candidates: &[&'a Candidate]) -> Vec<Vec<&'a Candidate>> {
    let mut sets: Vec<Vec<&Candidate>> = Vec::new();
    // Each set with the candidates after its last member.
    let mut largest: Vec<(Vec<&Candidate>, &[&Candidate])> = vec![(Vec::new(), candidates)];
    while !largest.is_empty() && sets.len() + largest.len() <= MAX_SUBSETS {
        sets.extend(largest.iter().map(|(set, _)| set.clone()));
        largest = largest
            .iter()
            .flat_map(|(set, rest)| {
                (0..rest.len()).filter_map(|index| {
                    let (next, after) = rest.get(index..)?.split_first()?;
                    Some(([set.as_slice(), &[*next]].concat(), after))
                })
            })
            .collect();
    }
    sets
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
