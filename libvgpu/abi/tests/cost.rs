//! What launches cost: averages, kinds, and time that several streams share.

use drava_vgpu_abi::cost::{Cost, FIRST_GUESS_NS, Kind, SELDOM, Sample, Timeline};
use proptest::prelude::*;

fn learned(samples: impl IntoIterator<Item = u64>) -> Cost {
    samples.into_iter().fold(Cost::UNKNOWN, Cost::learn)
}

#[test]
fn an_unknown_kind_is_charged_a_guess_and_always_sampled() {
    assert_eq!(Cost::UNKNOWN.ns(), FIRST_GUESS_NS);
    assert_eq!(Cost::UNKNOWN.weight(), None);
    let seeded = Cost::guess(70_000);
    assert_eq!(
        (seeded.ns(), seeded.samples(), seeded.weight()),
        (70_000, 0, None)
    );
    assert_eq!(
        seeded.learn(10_000).ns(),
        10_000,
        "a sample replaces a guess"
    );
    assert_eq!(learned([5_000; 3]).weight(), None);
    assert_eq!(learned([5_000; 4]).weight(), Some(1));
}

#[test]
fn expensive_or_uneven_kinds_are_sampled_more_often() {
    let weight = |ns| learned([ns; 20]).weight();
    assert_eq!(weight(1_000), Some(1));
    assert_eq!(weight(50_000), Some(10));
    assert_eq!(weight(300_000), Some(SELDOM));
    assert_eq!(weight(60_000_000_000), Some(SELDOM));
    let even = learned([20_000; 64]);
    let uneven = learned((0..64).map(|i| if i % 8 == 0 { 140_000 } else { 3_000 }));
    assert!(uneven.weight() > even.weight(), "{uneven:?} {even:?}");
}

#[test]
fn a_mean_says_little_about_launches_that_differ() {
    assert!(!Cost::UNKNOWN.varies() && !Cost::guess(1_000_000).varies());
    let in_turn = |lengths: [u64; 2]| learned(lengths.into_iter().cycle().take(64));
    assert!(!in_turn([900_000, 1_100_000]).varies());
    assert!(in_turn([100_000, 10_000_000]).varies());
}

#[test]
fn a_changed_cost_is_followed() {
    let mut cost = learned([1_000_000; 100]);
    for _ in 0..100 {
        cost = cost.learn(100_000);
    }
    assert!((99_000..=102_000).contains(&cost.ns()), "{}", cost.ns());
    let doubted = cost.doubted();
    assert_eq!((doubted.ns(), doubted.weight()), (cost.ns(), None));
    assert_eq!(Cost::UNKNOWN.doubted(), Cost::UNKNOWN);
}

#[test]
fn what_events_say_of_a_launch() {
    const US: u64 = 1_000;
    const MS: u64 = 1_000 * US;
    let unknown = Cost::UNKNOWN;
    let even = learned([100 * US; 20]);
    let uneven = learned((0..64).map(|i| if i % 2 == 0 { 100 * US } else { 10 * MS }));
    let table = [
        (
            "behind other work, and still running",
            unknown,
            (100 * US, 0, 0),
            Some(100 * US),
        ),
        (
            "the card waited for the launch",
            even,
            (4_100 * US, 4_000 * US, 0),
            Some(100 * US),
        ),
        ("hardly late", even, (130 * US, 0, 30 * US), Some(130 * US)),
        (
            "late: as it mostly is",
            even,
            (150 * US, 0, 140 * US),
            Some(100 * US),
        ),
        (
            "late, but it cannot have taken longer than that",
            even,
            (60 * US, 0, 50 * US),
            Some(60 * US),
        ),
        (
            "unknown, and late as calls are",
            unknown,
            (20 * US, 2 * US, 15 * US),
            Some(18 * US),
        ),
        (
            "unknown, and the host was interrupted",
            unknown,
            (4 * MS, 0, 4 * MS),
            None,
        ),
        (
            "known, and the host was interrupted",
            even,
            (4 * MS, 0, 4 * MS),
            Some(100 * US),
        ),
        (
            "the short one of two",
            uneven,
            (4_050 * US, 0, 4 * MS),
            Some(50 * US),
        ),
        (
            "either of two",
            uneven,
            (30 * MS, 0, 29 * MS),
            Some(uneven.ns()),
        ),
        (
            "gaps that are longer than the whole",
            even,
            (50 * US, 80 * US, 0),
            Some(0),
        ),
    ];
    for (what, cost, (measured_ns, gap_ns, late_ns), expected) in table {
        let sample = Sample {
            measured_ns,
            gap_ns,
            call_ns: 2 * US,
            late_ns,
        };
        assert_eq!(cost.likely_ns(sample), expected, "{what}");
    }
    let long_call = |cost: Cost, call_ns| {
        cost.likely_ns(Sample {
            measured_ns: 10 * MS,
            gap_ns: 0,
            call_ns,
            late_ns: 0,
        })
    };
    assert_eq!(
        long_call(unknown, 9 * MS),
        Some(MS),
        "loaded first, then launched"
    );
    assert_eq!(
        long_call(even, 9 * MS),
        Some(MS),
        "as near to what is known as can be"
    );
    assert_eq!(long_call(uneven, 9 * MS), Some(10 * MS), "either");
    assert_eq!(
        long_call(unknown, 100 * US),
        Some(10 * MS),
        "no longer than calls take"
    );
}

#[test]
fn a_kind_is_a_function_and_about_a_size() {
    let kernel = |function, x, threads| Kind::kernel(function, [x, 1, 1], [threads, 1, 1]);
    assert_eq!(kernel(7, 1000, 256), kernel(7, 1001, 256));
    assert_eq!(
        kernel(7, 1000, 256),
        Kind::kernel(7, [10, 100, 1], [16, 16, 1])
    );
    let different = [
        kernel(7, 1000, 256),
        kernel(8, 1000, 256),
        kernel(7, 2000, 256),
        kernel(7, 1000, 128),
        kernel(7, 1, 1),
        kernel(7, 2, 1),
        kernel(7, 3, 1),
        Kind::graph(7),
        Kind::fill(1 << 20),
        Kind::copy(1 << 20),
        Kind::fill(1 << 22),
    ];
    for (index, kind) in different.iter().enumerate() {
        assert!(!different[..index].contains(kind), "{index}");
        assert_ne!(kind.number(), 0);
    }
    // A grid too large for any card is some kind, too.
    let _ = Kind::kernel(u64::MAX, [u32::MAX; 3], [u32::MAX; 3]);
}

#[test]
fn time_that_streams_share_counts_once() {
    let mut timeline = Timeline::new();
    assert_eq!(timeline.add(0, 100), 100);
    assert_eq!(timeline.add(50, 150), 50);
    assert_eq!(timeline.add(60, 140), 0);
    assert_eq!(timeline.add(200, 300), 100);
    // Ends last, began first: the gap between the others is new.
    assert_eq!(timeline.add(0, 310), 60);
    assert_eq!(timeline.add(5, 5), 0);
    assert_eq!(timeline.add(9, 5), 0);
}

proptest! {
    #[test]
    fn the_mean_stays_within_what_was_seen_and_its_parts_apart(samples in prop::collection::vec(0..1u64 << 41, 1..200)) {
        let cost = learned(samples.iter().copied());
        let bound = |ns: &u64| (*ns).min((1 << 40) - 1);
        let least = samples.iter().map(bound).min().unwrap_or(0);
        let most = samples.iter().map(bound).max().unwrap_or(0);
        prop_assert!(least <= cost.word() & ((1 << 40) - 1) && cost.word() & ((1 << 40) - 1) <= most);
        prop_assert_eq!(usize::from(cost.samples()), samples.len().min(255));
        prop_assert_eq!(Cost::from_word(cost.word()), cost);
    }

    #[test]
    fn charges_add_up_to_what_was_used(short in 1_000..50_000u64, long in 100_000..5_000_000u64, one_in in 2..20u64) {
        // Every launch sampled before the next is charged, lengths of one kind mixed.
        let mut cost = learned([short]);
        let (mut charged, mut used) = (0u64, 0u64);
        let launches = 20_000;
        for index in 0..launches {
            let ns = if (index * 7919) % one_in == 0 { long } else { short };
            charged += cost.ns();
            used += ns;
            cost = cost.learn(ns);
        }
        // The average forgets, so it is off by at most what it remembers.
        prop_assert!(charged.abs_diff(used) <= 32 * long, "{charged} {used}");
    }

    #[test]
    fn a_timeline_is_a_union(intervals in prop::collection::vec((0..2000u64, 0..60u64), 1..30)) {
        let mut timeline = Timeline::new();
        let mut covered = vec![false; 2100];
        for (start, length) in intervals {
            let range = usize::try_from(start).unwrap_or(0)..usize::try_from(start + length).unwrap_or(0);
            let new = covered[range.clone()].iter().filter(|covered| !**covered).count();
            covered[range].fill(true);
            prop_assert_eq!(timeline.add(start, start + length), new as u64);
        }
    }
}
