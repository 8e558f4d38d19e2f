//! Cost of launches: averages, kinds, and time that several streams share.

use drava_vgpu_abi::cost::{
    Cost, FIRST_GUESS_NS, LaunchKind, MAX_BELIEVED_NS, SAMPLING_INTERVAL, Sample, Timeline,
};
use proptest::prelude::*;

fn learned(samples: impl IntoIterator<Item = u64>) -> Cost {
    samples.into_iter().fold(Cost::UNKNOWN, Cost::learn)
}

#[test]
fn charges_estimate_and_samples_unknown_kind() {
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
fn samples_expensive_and_uneven_kinds_more_often() {
    let weight = |ns| learned([ns; 20]).weight();
    assert_eq!(weight(1_000), Some(1));
    assert_eq!(weight(50_000), Some(10));
    assert_eq!(weight(300_000), Some(SAMPLING_INTERVAL));
    assert_eq!(weight(60_000_000_000), Some(SAMPLING_INTERVAL));
    let even = learned([20_000; 64]);
    let uneven = learned((0..64).map(|i| if i % 8 == 0 { 140_000 } else { 3_000 }));
    assert!(uneven.weight() > even.weight(), "{uneven:?} {even:?}");
}

#[test]
fn reports_variation_of_differing_launches() {
    assert!(!Cost::UNKNOWN.is_variable() && !Cost::guess(1_000_000).is_variable());
    let in_turn = |lengths: [u64; 2]| learned(lengths.into_iter().cycle().take(64));
    assert!(!in_turn([900_000, 1_100_000]).is_variable());
    assert!(in_turn([100_000, 10_000_000]).is_variable());
}

#[test]
fn follows_changed_cost() {
    let mut cost = learned([1_000_000; 100]);
    for _ in 0..100 {
        cost = cost.learn(100_000);
    }
    assert!((99_000..=102_000).contains(&cost.ns()), "{}", cost.ns());
    let marked_stale = cost.marked_stale();
    assert_eq!(
        (marked_stale.ns(), marked_stale.weight()),
        (cost.ns(), None)
    );
    assert_eq!(Cost::UNKNOWN.marked_stale(), Cost::UNKNOWN);
}

#[test]
fn derives_duration_from_events() {
    const US: u64 = 1_000;
    const MS: u64 = 1_000 * US;
    let unknown = Cost::UNKNOWN;
    let even = learned([100 * US; 20]);
    let uneven = learned((0..64).map(|i| if i % 2 == 0 { 100 * US } else { 10 * MS }));
    let table = [
        (
            "queued behind other work, still running",
            unknown,
            (100 * US, 0, 0),
            Some(100 * US),
        ),
        (
            "the GPU waited for the launch",
            even,
            (4_100 * US, 4_000 * US, 0),
            Some(100 * US),
        ),
        (
            "slightly late",
            even,
            (130 * US, 0, 30 * US),
            Some(130 * US),
        ),
        (
            "late, the usual case",
            even,
            (150 * US, 0, 140 * US),
            Some(100 * US),
        ),
        (
            "late, but bounded by the end",
            even,
            (60 * US, 0, 50 * US),
            Some(60 * US),
        ),
        (
            "unknown, and late by the time of a call",
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
            "the shorter of two",
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
        assert_eq!(cost.estimate_ns(sample), expected, "{what}");
    }
    let long_call = |cost: Cost, call_ns| {
        cost.estimate_ns(Sample {
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
        "as near to the estimate as possible"
    );
    assert_eq!(long_call(uneven, 9 * MS), Some(10 * MS), "either");
    assert_eq!(
        long_call(unknown, 100 * US),
        Some(10 * MS),
        "no longer than a call"
    );
}

/// Reproducible pseudorandom numbers.
fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % below.max(1)
    }
}

/// The learned cost of synchronous launches of `ns` nanoseconds. The driver works for `work_us` before it submits a
/// launch; the host interrupts one call in `interrupts` before that, and one in `later` after it.
fn known_after(cost: Cost, ns: u64, work_us: u64, interrupts: u64, later: u64) -> (u64, f64) {
    const LAUNCHES: u64 = 400;
    let mut number = numbers(ns + work_us * 7 + interrupts);
    let (mut cost, mut charged) = (cost, 0);
    for _ in 0..LAUNCHES {
        let interrupted = |number: &mut dyn FnMut(u64) -> u64, one_in: u64| match number(one_in) {
            0 => 200_000 + number(4_000_000),
            _ => 0,
        };
        let before_ns = work_us * (800 + number(400)) + interrupted(&mut number, interrupts);
        let after_ns = 2_000 + interrupted(&mut number, later);
        let event_ns = 3_000 + number(10_000);
        let call_ns = before_ns + after_ns;
        // The second event completes when the launch is over and the event was queued.
        let over_ns = (before_ns + ns).max(call_ns + event_ns);
        let is_late = before_ns + ns <= call_ns + event_ns;
        let sample = Sample {
            measured_ns: over_ns,
            gap_ns: 0,
            call_ns,
            late_ns: if is_late { call_ns + event_ns } else { 0 },
        };
        let taken = cost.estimate_ns(sample);
        charged += taken.unwrap_or(cost.ns());
        cost = taken.map_or(cost, |ns| cost.learn_from(sample, ns));
    }
    (cost.ns(), charged as f64 / (LAUNCHES * ns) as f64)
}

#[test]
fn measures_launch_whatever_its_call_duration() {
    const MS: u64 = 1_000_000;
    let mut seen = Vec::new();
    for ns in [MS / 2, MS, 10 * MS, 20 * MS] {
        for work_us in [2, 100, 300, 450, 600, 1_000, 3_000, 20_000] {
            for (interrupts, later) in [(1_000, 1_000), (10, 100), (3, 20), (5, 5), (20, 3)] {
                // The previous estimate is right, or three times too high.
                for begin in [Cost::UNKNOWN, learned([ns; 20]), learned([3 * ns; 20])] {
                    let (found, charged) = known_after(begin, ns, work_us, interrupts, later);
                    let ratio = found as f64 / ns as f64;
                    let what = (ns, work_us, interrupts, begin.samples());
                    seen.push((ratio, charged, what));
                }
            }
        }
    }
    for (found, charged, what) in seen {
        assert!((0.75..1.35).contains(&found), "{found}: {what:?}");
        assert!((0.75..1.5).contains(&charged), "{charged}: {what:?}");
    }
}

#[test]
fn forgets_variation_of_uniform_launches() {
    const MS: u64 = 1_000_000;
    let mut cost = learned([10 * MS; 5]).learn(60 * MS);
    assert!(cost.deviation() > 8, "{cost:?}");
    // Each waits 20 ms for the driver's call, and every sample includes that.
    let sample = Sample {
        measured_ns: 30 * MS,
        gap_ns: 0,
        call_ns: 20 * MS,
        late_ns: 0,
    };
    let mut charged = 0;
    for _ in 0..100 {
        let taken = cost.estimate_ns(sample).unwrap_or(0);
        charged += taken;
        cost = cost.learn_from(sample, taken);
    }
    assert!((9 * MS..12 * MS).contains(&cost.ns()), "{cost:?}");
    assert!(charged < 100 * 16 * MS, "{charged}");
    // With varying durations a sample may have any value in between.
    let uneven = learned((0..64).map(|i| if i % 2 == 0 { MS } else { 40 * MS }));
    assert_eq!(uneven.estimate_ns(sample), Some(30 * MS));
    assert_eq!(uneven.learn_from(sample, 30 * MS).ns(), uneven.ns());
}

#[test]
fn identifies_kind_by_function_and_size_class() {
    let kernel = |function, x, threads| LaunchKind::kernel(function, [x, 1, 1], [threads, 1, 1]);
    assert_eq!(kernel(7, 1000, 256), kernel(7, 1001, 256));
    assert_eq!(
        kernel(7, 1000, 256),
        LaunchKind::kernel(7, [10, 100, 1], [16, 16, 1])
    );
    let different = [
        kernel(7, 1000, 256),
        kernel(8, 1000, 256),
        kernel(7, 2000, 256),
        kernel(7, 1000, 128),
        kernel(7, 1, 1),
        kernel(7, 2, 1),
        kernel(7, 3, 1),
        LaunchKind::graph(7),
        LaunchKind::fill(1 << 20),
        LaunchKind::copy(1 << 20),
        LaunchKind::fill(1 << 22),
    ];
    for (index, kind) in different.iter().enumerate() {
        assert!(!different[..index].contains(kind), "{index}");
        assert_ne!(kind.number(), 0);
    }
    // A grid too large for any GPU also has a kind.
    let _ = LaunchKind::kernel(u64::MAX, [u32::MAX; 3], [u32::MAX; 3]);
}

#[test]
fn counts_overlapping_streams_once() {
    let mut timeline = Timeline::new();
    assert_eq!(timeline.add(0, 100), 100);
    assert_eq!(timeline.add(50, 150), 50);
    assert_eq!(timeline.add(60, 140), 0);
    assert_eq!(timeline.add(200, 300), 100);
    // Ends last and begins first: only the gap between the other intervals is new.
    assert_eq!(timeline.add(0, 310), 60);
    assert_eq!(timeline.add(5, 5), 0);
    assert_eq!(timeline.add(9, 5), 0);
}

proptest! {
    #[test]
    fn keeps_mean_within_samples_and_fields_separate(samples in prop::collection::vec(0..1u64 << 41, 1..200)) {
        let cost = learned(samples.iter().copied());
        let bound = |ns: &u64| (*ns).min((1 << 40) - 1);
        let least = samples.iter().map(bound).min().unwrap_or(0);
        let most = samples.iter().map(bound).max().unwrap_or(0);
        prop_assert!(least <= cost.word() & ((1 << 40) - 1) && cost.word() & ((1 << 40) - 1) <= most);
        prop_assert_eq!(usize::from(cost.samples()), samples.len().min(255));
        prop_assert_eq!(Cost::from_word(cost.word()), cost);
    }

    #[test]
    fn charges_sum_to_measured_time(short in 1_000..50_000u64, long in 100_000..5_000_000u64, one_in in 2..20u64) {
        // Every launch before the next sample is charged; one kind has mixed durations.
        let mut cost = learned([short]);
        let (mut charged, mut used) = (0u64, 0u64);
        let launches = 20_000;
        for index in 0..launches {
            let ns = if (index * 7919) % one_in == 0 { long } else { short };
            charged += cost.ns();
            used += ns;
            cost = cost.learn(ns);
        }
        // The average has a finite memory, so the error is at most that many launches.
        prop_assert!(charged.abs_diff(used) <= 32 * long, "{charged} {used}");
    }

    #[test]
    fn computes_union_of_intervals(intervals in prop::collection::vec((0..2000u64, 0..60u64), 1..30)) {
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

#[test]
fn believes_at_most_a_second_more_than_known_kind() {
    const MS: u64 = 1_000_000;
    const S: u64 = MAX_BELIEVED_NS;
    assert_eq!(Cost::UNKNOWN.believed_ns(60 * S), S);
    assert_eq!(learned([5 * MS; 10]).believed_ns(60 * S), S + 5 * MS);
    assert_eq!(learned([5 * MS; 10]).believed_ns(6 * MS), 6 * MS);
    assert_eq!(learned([5 * S; 10]).believed_ns(40 * S), 6 * S);
    // Kinds that are not settled.
    assert_eq!(learned([5 * S]).believed_ns(60 * S), 40 * S);
    let varying = learned([S, 9 * S].repeat(8));
    assert!(varying.believed_ns(30 * S) == 30 * S, "{varying:?}");
    // A kind whose launches really become so long is believed after a few of them, but not charged in advance.
    let mut cost = learned([5 * MS; 10]);
    let mut launches = 0;
    while cost.believed_ns(60 * S) < 60 * S {
        cost = if cost.is_settled() {
            cost.marked_stale()
        } else {
            cost.learn(cost.believed_ns(60 * S))
        };
        launches += 1;
    }
    assert!(launches < 20, "{launches}");
    assert_eq!(cost.advance_ns(), S);
}

#[test]
fn keeps_cost_of_unmeasurable_launch() {
    const MS: u64 = 1_000_000;
    let cost = Cost::unmeasurable(3 * MS);
    assert!(cost.is_unmeasurable() && !learned([MS; 10]).is_unmeasurable());
    assert_eq!((cost.ns(), cost.weight()), (3 * MS, Some(1)));
    assert_eq!(cost.marked_stale(), cost);
}
