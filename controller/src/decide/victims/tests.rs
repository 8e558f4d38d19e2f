//! The search compared with brute force, on GPUs of random size with random pods.

use proptest::prelude::*;

use super::*;

/// Simulates by a rule for the UIDs of the pods that end.
struct ByRule<F> {
    is_enough: F,
    may_compare: bool,
}

impl<F: FnMut(&BTreeSet<String>) -> bool> Simulation for ByRule<F> {
    fn effect(&mut self, victims: &BTreeSet<String>) -> Option<Effect> {
        Some(match (self.is_enough)(victims) {
            true => Effect::Enough,
            false => Effect::TooLittle,
        })
    }

    fn may_compare(&self) -> bool {
        self.may_compare
    }
}

fn search(
    candidates: &[Candidate],
    bound: Option<&Cost>,
    is_enough: impl FnMut(&BTreeSet<String>) -> bool,
) -> Option<Cost> {
    let mut simulation = ByRule {
        is_enough,
        may_compare: true,
    };
    super::search(candidates, bound, &mut simulation)
}

fn candidate(uid: usize, priority: i32, second: i64) -> Candidate {
    let created = Timestamp::from_second(second).unwrap();
    Candidate {
        pods: [(format!("pod-{uid:02}"), created)].into(),
        priority,
    }
}

fn pods_of(candidates: &[Candidate]) -> Vec<(&str, i32, Timestamp)> {
    let mut all = Vec::new();
    for each in candidates {
        let pods = each.pods.iter();
        all.extend(pods.map(|(uid, created)| (uid.as_str(), each.priority, *created)));
    }
    all
}

/// Returns the best set by comparing all sets.
fn brute_force(
    candidates: &[Candidate],
    is_enough: impl Fn(&BTreeSet<String>) -> bool,
) -> Option<Cost> {
    (0..1_u32 << candidates.len())
        .map(|mask| {
            let chosen = candidates.iter().enumerate();
            Cost::of(
                chosen
                    .filter(|(index, _)| mask >> index & 1 == 1)
                    .map(|(_, each)| each),
            )
        })
        .filter(|cost| is_enough(&cost.uids))
        .min()
}

/// Memory of each candidate on one of two GPUs; a request fits when one GPU has enough free memory.
fn is_enough(memory: &[(usize, u64)], request: u64) -> impl Fn(&BTreeSet<String>) -> bool {
    move |ended| {
        (0..2).any(|gpu| {
            let used: u64 = memory
                .iter()
                .enumerate()
                .filter(|(uid, (of, _))| *of == gpu && !ended.contains(&format!("pod-{uid:02}")))
                .map(|(_, (_, memory))| memory)
                .sum();
            used + request <= 80
        })
    }
}

proptest! {
    #[test]
    fn finds_best_victims_of_brute_force(
        pods in prop::collection::vec((0..2_usize, 1..40_u64, -2..3_i32, 0..4_i64), 0..9),
        request in 1..90_u64,
    ) {
        let candidates: Vec<Candidate> = pods
            .iter()
            .enumerate()
            .map(|(uid, (_, _, priority, second))| candidate(uid, *priority, *second))
            .collect();
        let memory: Vec<_> = pods.iter().map(|(gpu, memory, ..)| (*gpu, *memory)).collect();
        let is_enough = is_enough(&memory, request);
        let expected = brute_force(&candidates, &is_enough);
        prop_assert_eq!(search(&candidates, None, &is_enough), expected.clone());
        if let Some(expected) = &expected {
            prop_assert_eq!(search(&candidates, Some(expected), &is_enough), None, "not better");
            for fewest in 0..=expected.pods {
                let least = least_cost(&candidates, fewest);
                let is_least = least.is_some_and(|least| least <= *expected);
                prop_assert!(expected.pods == 0 || is_least, "no set costs less");
                let least = least_cost_of_pods(&pods_of(&candidates), fewest);
                let is_least = least.is_some_and(|least| least <= *expected);
                prop_assert!(expected.pods == 0 || is_least, "no set of the pods costs less");
            }
        }
        // Beyond the limit of subsets: no unnecessary victim, and the lowest possible priority.
        let all: Vec<&Candidate> = candidates.iter().collect();
        let enough = |set: &[&Candidate]| is_enough(&Cost::of(set.iter().copied()).uids);
        if enough(&all) {
            let mut simulation = ByRule { is_enough: &is_enough, may_compare: false };
            let set = reduced(all, &mut simulation).unwrap();
            prop_assert!(enough(&set));
            for index in 0..set.len() {
                let mut fewer = set.clone();
                fewer.remove(index);
                prop_assert!(!enough(&fewer), "{:?} is unnecessary", set[index]);
            }
            let highest = set.iter().map(|each| each.priority).max();
            prop_assert_eq!(highest.unwrap_or(i32::MIN), expected.unwrap().highest_priority);
        }
    }
}

#[test]
fn counts_fewest_victims() {
    assert_eq!(fewest([1, 4, 2].into_iter(), 0), 0);
    assert_eq!(fewest([1, 4, 2].into_iter(), 4), 1);
    assert_eq!(fewest([1, 4, 2].into_iter(), 5), 2);
    assert_eq!(fewest([1, 4, 2].into_iter(), 8), 4, "more than there are");
    let candidates = [
        candidate(0, 2, 10),
        candidate(1, 1, 30),
        candidate(2, 1, 20),
    ];
    let second = |second| Reverse(candidate(0, 0, second).pods["pod-00"]);
    let least = least_cost(&candidates, 2).unwrap();
    assert_eq!((least.highest_priority, least.pods), (1, 2));
    assert_eq!(least.created, [second(20), second(30)]);
    assert_eq!(least_cost(&candidates, 4), None);
    let pods = pods_of(&candidates);
    assert_eq!(
        least_cost_of_pods(&pods, 1),
        Some(Cost::of([&candidates[1]])),
        "the newest of the lowest priority"
    );
    assert_eq!(least_cost_of_pods(&pods, 4), None);
}

#[test]
fn prefers_lower_priority_to_fewer_victims() {
    let candidates = [candidate(0, 5, 0), candidate(1, 1, 0), candidate(2, 1, 0)];
    // One pod of priority 5 has as much memory as both pods of priority 1.
    let memory = [(0, 60), (1, 30), (1, 30)];
    let best = search(&candidates, None, is_enough(&memory, 70)).unwrap();
    assert_eq!(best.uids().len(), 2, "both pods of priority 1");
}

#[test]
fn prefers_newest_of_equal_victims() {
    let candidates = [
        candidate(0, 1, 10),
        candidate(1, 1, 30),
        candidate(2, 1, 20),
    ];
    let memory = [(0, 20), (0, 20), (0, 20)];
    let enough = |ended: &BTreeSet<String>| is_enough(&memory, 30)(ended) && !ended.is_empty();
    // The other GPU is as full.
    let both = |ended: &BTreeSet<String>| enough(ended) && ended.len() == 1;
    let best = search(&candidates, None, |ended| both(ended) || ended.len() > 1).unwrap();
    assert_eq!(best.uids(), &["pod-01".to_owned()].into());
}

#[test]
fn ends_gang_as_a_whole() {
    let of_pods = |names: &[&str]| Candidate {
        pods: names
            .iter()
            .map(|name| ((*name).to_owned(), Timestamp::MIN))
            .collect(),
        priority: 1,
    };
    let best = search(&[of_pods(&["a", "b"]), of_pods(&["c"])], None, |ended| {
        ended.contains("a") || ended.contains("c")
    });
    assert_eq!(best.unwrap().uids(), &["c".to_owned()].into());
    let best = search(&[of_pods(&["a", "b"])], None, |ended| ended.contains("a"));
    assert_eq!(best.unwrap().uids().len(), 2);
}

#[test]
fn ends_no_pod_without_need_or_use() {
    let candidates = [candidate(0, 1, 0)];
    assert_eq!(search(&candidates, None, |_| true).unwrap().pods, 0);
    assert_eq!(search(&candidates, None, |_| false), None);
}

#[test]
fn searches_few_sets_when_all_candidates_are_needed() {
    let candidates: Vec<Candidate> = (0..20).map(|uid| candidate(uid, 0, 0)).collect();
    let mut searched = 0;
    let best = search(&candidates, None, |ended: &BTreeSet<String>| {
        searched += 1;
        ended.len() == 20
    });
    assert_eq!(best.unwrap().uids().len(), 20);
    assert_eq!(searched, 23, "none, all, all but one each, the needed ones");
}

#[test]
fn finds_best_of_many_candidates_beside_needed_one() {
    // Of 2^20 sets, 19 pairs have the needed one.
    let ages = (0..20_i64).rev().enumerate();
    let candidates: Vec<Candidate> = ages
        .map(|(uid, second)| candidate(uid, 0, second))
        .collect();
    let best = search(&candidates, None, |ended: &BTreeSet<String>| {
        ended.contains("pod-19") && ended.len() > 1
    });
    let expected = ["pod-00".to_owned(), "pod-19".to_owned()];
    assert_eq!(best.unwrap().uids(), &expected.into());
}

#[test]
fn finds_minimal_set_without_comparisons() {
    let candidates: Vec<Candidate> = (0..8).map(|uid| candidate(uid, 0, 0)).collect();
    let mut simulated = 0;
    let mut simulation = ByRule {
        is_enough: |ended: &BTreeSet<String>| {
            simulated += 1;
            ended.len() >= 3
        },
        may_compare: false,
    };
    let found = super::search(&candidates, None, &mut simulation).unwrap();
    assert_eq!(found.uids().len(), 3);
    assert_eq!(simulated, 19, "none, all, and twice all but one each");
}

#[test]
fn ends_with_simulation_that_cannot_tell() {
    struct Unknown(usize);
    impl Simulation for Unknown {
        fn effect(&mut self, victims: &BTreeSet<String>) -> Option<Effect> {
            self.0 += 1;
            victims.is_empty().then_some(Effect::TooLittle)
        }

        fn may_compare(&self) -> bool {
            true
        }
    }
    let candidates: Vec<Candidate> = (0..8).map(|uid| candidate(uid, 0, 0)).collect();
    let mut simulation = Unknown(0);
    assert_eq!(super::search(&candidates, None, &mut simulation), None);
    assert_eq!(simulation.0, 2, "none, and all");
}
