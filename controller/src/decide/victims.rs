//! The search for the pods whose end makes room for another pod. Pure: whether a set of pods is enough is asked of the
//! caller, which simulates it with the allocator.
//!
//! Sets are compared by their highest priority, then by the number of pods, then by age: the newest pods lose the least
//! work. The result is the best set if it is small (at most [`MAX_SUBSETS`] subsets are of its size or smaller, and the
//! simulations of as many are not too much work), as it is for ten candidates. Otherwise it is a minimal set: no pod of it is
//! unnecessary. Some sets may be forbidden; of more candidates a set may then be missed.

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
    pub(crate) const fn uids(&self) -> &BTreeSet<String> {
        &self.uids
    }
}

/// The simulations of sets of pods.
pub(crate) trait Simulation {
    /// Returns the effect of the end of pods with these UIDs; `None` if it cannot be told, which ends the search.
    fn effect(&mut self, victims: &BTreeSet<String>) -> Option<Effect>;

    /// Returns whether there may be simulations for the comparison of sets. Those that every search needs do not ask.
    fn may_compare(&self) -> bool;
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

/// Returns how many candidates have to end at least so that there is room for the missing devices, when each makes room for so
/// many; more than there are candidates if all together are too little.
pub(crate) fn fewest(made_room_for: impl Iterator<Item = usize>, missing: usize) -> usize {
    let mut most: Vec<usize> = made_room_for.collect();
    most.sort_unstable_by_key(|devices| Reverse(*devices));
    let mut room = 0_usize;
    let needed = most.iter().take_while(|devices| {
        let is_needed = room < missing;
        room = room.saturating_add(**devices);
        is_needed
    });
    let needed = needed.count();
    if room < missing {
        most.len() + 1
    } else {
        needed
    }
}

/// Returns what every set of the candidates costs at least that has `fewest` of them or more, apart from the empty one. `None`
/// if there are fewer candidates.
pub(crate) fn least_cost(candidates: &[Candidate], fewest: usize) -> Option<Cost> {
    let fewest = fewest.max(1);
    if fewest == 1 {
        // A set costs at least as much as each of its members.
        return candidates.iter().map(|each| Cost::of([each])).min();
    }
    let mut priorities: Vec<i32> = candidates.iter().map(|each| each.priority).collect();
    priorities.sort_unstable();
    let pods = candidates.iter().flat_map(|candidate| &candidate.pods);
    Some(Cost {
        highest_priority: *priorities.get(fewest - 1)?,
        pods: fewest,
        created: newest(pods.map(|(_, created)| *created), fewest),
        uids: BTreeSet::new(),
    })
}

/// Returns what every set of pods costs at least that has `fewest` of these or more, apart from the empty one, whichever pods
/// end together. The pods have their UIDs, priorities and times of creation. `None` if there are fewer pods.
pub(crate) fn least_cost_of_pods(pods: &[(&str, i32, Timestamp)], fewest: usize) -> Option<Cost> {
    let fewest = fewest.max(1);
    let mut priorities: Vec<i32> = pods.iter().map(|(_, priority, _)| *priority).collect();
    priorities.sort_unstable();
    let highest_priority = *priorities.get(fewest - 1)?;
    // A set with a pod of a higher priority costs more.
    let pods = pods
        .iter()
        .filter(|(_, priority, _)| *priority <= highest_priority);
    let only = pods.clone().min_by_key(|(uid, _, at)| (Reverse(*at), *uid));
    let only = only.filter(|_| fewest == 1);
    Some(Cost {
        highest_priority,
        pods: fewest,
        created: newest(pods.map(|(.., created)| *created), fewest),
        uids: only
            .map(|(uid, ..)| (*uid).to_owned())
            .into_iter()
            .collect(),
    })
}

/// Returns the newest times, the oldest of them first.
fn newest(created: impl Iterator<Item = Timestamp>, count: usize) -> Vec<Reverse<Timestamp>> {
    let mut created: Vec<_> = created.map(Reverse).collect();
    created.sort_unstable();
    created.truncate(count);
    created.reverse();
    created
}

/// Returns the best set of candidates that is enough. A superset of a set that is enough must be enough or forbidden, one
/// of a forbidden set forbidden. `None` if there is no such set, or none better than `bound`, or if a simulation cannot tell.
pub(crate) fn search(
    candidates: &[Candidate],
    bound: Option<&Cost>,
    simulation: &mut impl Simulation,
) -> Option<Cost> {
    let is_better = |cost: &Cost| bound.is_none_or(|bound| cost < bound);
    if effect(simulation, &[])? == Effect::Enough {
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
        match best_of(up_to.collect(), priority, bound, simulation)? {
            Found::Best(found) => return Some(found).filter(is_better),
            Found::NoneBetter => {}
        }
    }
    None
}

/// Result of the search among candidates up to a priority.
enum Found {
    Best(Cost),
    NoneBetter,
}

impl From<Option<Cost>> for Found {
    fn from(best: Option<Cost>) -> Self {
        best.map_or(Self::NoneBetter, Self::Best)
    }
}

fn effect(simulation: &mut impl Simulation, set: &[&Candidate]) -> Option<Effect> {
    let uids = set.iter().flat_map(|candidate| candidate.pods.keys());
    simulation.effect(&uids.cloned().collect())
}

/// Returns the best set out of `candidates`, whose highest priority is `priority`, or a minimal one if there are too many.
/// `None` if a simulation cannot tell.
fn best_of(
    candidates: Vec<&Candidate>,
    priority: i32,
    bound: Option<&Cost>,
    simulation: &mut impl Simulation,
) -> Option<Found> {
    if effect(simulation, &candidates)? == Effect::TooLittle {
        return Some(Found::NoneBetter);
    }
    // Every set that is enough has the candidates without which the others are too little.
    let (needed, others) = divided(&candidates, simulation)?;
    let needed_cost = Cost::of(needed.iter().copied());
    if bound.is_some_and(|bound| needed_cost >= *bound) {
        return Some(Found::NoneBetter);
    }
    let mut best: Option<Cost> = None;
    let mut tried = 0;
    let smallest = needed.len().max(1);
    // Each set with the candidates after its last member.
    let mut sets: Vec<(Vec<&Candidate>, &[&Candidate])> = vec![(needed, &others)];
    'sizes: for size in smallest.. {
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
            return Some(best.into());
        }
        let mut by_cost: Vec<(Cost, &[&Candidate])> = sets
            .iter()
            .map(|(set, _)| (Cost::of(set.iter().copied()), set.as_slice()))
            .filter(|(cost, _)| best.as_ref().or(bound).is_none_or(|best| cost < best))
            .collect();
        by_cost.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (cost, set) in by_cost {
            if !simulation.may_compare() {
                break 'sizes;
            }
            if effect(simulation, set)? == Effect::Enough {
                best = Some(cost);
                break;
            }
        }
    }
    if best.is_some() {
        return Some(best.into());
    }
    let minimal = reduced(candidates, simulation)?;
    let is_enough = effect(simulation, &minimal)? == Effect::Enough;
    Some(is_enough.then(|| Cost::of(minimal)).into())
}

/// Divides candidates into those without which the others are too little, and the others. `None` if a simulation cannot tell.
fn divided<'a>(
    candidates: &[&'a Candidate],
    simulation: &mut impl Simulation,
) -> Option<(Vec<&'a Candidate>, Vec<&'a Candidate>)> {
    let (mut needed, mut others) = (Vec::new(), Vec::new());
    for (index, candidate) in candidates.iter().enumerate() {
        let mut without = candidates.to_vec();
        without.remove(index);
        match effect(simulation, &without)? {
            Effect::TooLittle => needed.push(*candidate),
            Effect::Forbidden | Effect::Enough => others.push(*candidate),
        }
    }
    Some((needed, others))
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
/// `None` if a simulation cannot tell.
fn reduced<'a>(
    mut set: Vec<&'a Candidate>,
    simulation: &mut impl Simulation,
) -> Option<Vec<&'a Candidate>> {
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
        if effect(simulation, &set)? == Effect::TooLittle {
            set.insert(index, candidate);
            index += 1;
        }
    }
    Some(set)
}

#[cfg(test)]
mod tests;
