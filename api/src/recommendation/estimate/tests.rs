use k8s_openapi::jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;
const HOUR: u64 = 3600;

fn at(hours: u64) -> Time {
    let start: Timestamp = "2026-01-05T00:00:00Z".parse().unwrap();
    Time(start + SignedDuration::from_hours(i64::try_from(hours).unwrap()))
}

fn reading(memory_bytes: u64, ratio: f64) -> Reading {
    Reading {
        memory_bytes,
        denied_at_bytes: None,
        gpu_time: vec![ratio],
        elapsed_seconds: HOUR,
    }
}

fn share(memory_bytes: u64, cores: u8) -> ShareAmounts {
    ShareAmounts {
        memory: Some(Quantity::bytes(memory_bytes)),
        cores: Some(cores),
    }
}

/// A history of readings with an hour between them.
fn history(readings: impl IntoIterator<Item = Reading>) -> UsageHistory {
    let mut history = UsageHistory::default();
    for (hour, reading) in (0..).zip(readings) {
        history.add(&at(hour), &reading);
    }
    history
}

fn memory(amounts: ShareAmounts) -> u64 {
    amounts.memory.unwrap().to_u64_rounded_up().unwrap()
}

#[test]
fn recommends_what_was_used_with_margins() {
    let constant = history((0..10 * 24).map(|_| reading(4 * GIB, 0.1)));
    let found = status(2, share(10 * GIB, 40), constant);
    // 4.6 GiB is 4710.4 MiB, and with a tenth more for ten days 5181.44 MiB.
    assert_eq!(memory(found.request), 4736 << 20);
    assert_eq!(memory(found.limit), 5248 << 20);
    assert_eq!(found.request.cores, Some(15));
    assert_eq!(found.confidence, Confidence::High);
    assert_eq!(found.notes, []);
    assert_eq!(
        (found.shares, memory(found.used), found.used.cores),
        (2, 4 * GIB, Some(10))
    );
}

#[test]
fn little_is_known_of_short_times() {
    let short = status(1, share(10 * GIB, 0), history([reading(GIB, 0.0)]));
    assert_eq!(short.confidence, Confidence::Low);
    assert_eq!(short.notes, [Note::ShortTime]);
    assert_eq!(memory(short.request), 1280 << 20);
    assert_eq!(memory(short.limit), 2432 << 20, "twice as much");
    assert_eq!(short.request.cores, None, "best effort stays so");
    let days = history((0..25).map(|_| reading(GIB, 0.0)));
    let found = status(1, share(10 * GIB, 40), days);
    assert_eq!(found.confidence, Confidence::Medium);
    assert_eq!(found.request.cores, Some(CORES_STEP), "an idle guarantee");
    let nothing = status(1, share(10 * GIB, 40), UsageHistory::default());
    assert_eq!(nothing.request, ShareAmounts::default());
    let unused = status(1, share(10 * GIB, 40), history([reading(0, 0.0)]));
    assert_eq!(unused.request.memory, None, "no program has run");
}

#[test]
fn memory_of_programs_that_take_all_stays() {
    let all = status(1, share(10 * GIB, 40), history([reading(9 * GIB, 0.39)]));
    assert_eq!(memory(all.request), 10 * GIB);
    assert_eq!(
        all.notes,
        [
            Note::AllMemoryWasUsed,
            Note::AllTimeWasUsed,
            Note::ShortTime
        ]
    );
    assert_eq!(all.request.cores, Some(45));
    // The share had more when it used that.
    let lowered = status(1, share(4 * GIB, 40), history([reading(9 * GIB, 0.0)]));
    assert_eq!(memory(lowered.request), 10_624 << 20);
    assert_eq!(lowered.notes, [Note::ShortTime]);
}

#[test]
fn denied_memory_counts_as_a_fifth_more_than_the_limit() {
    let denied = Reading {
        denied_at_bytes: Some(10 * GIB),
        ..reading(9 * GIB, 0.0)
    };
    let found = status(1, share(10 * GIB, 0), history([denied]));
    // 12 GiB with a margin of 15%.
    assert_eq!(memory(found.request), 14_208 << 20);
    assert_eq!(found.notes, [Note::MemoryWasDenied, Note::ShortTime]);
    let small = Reading {
        denied_at_bytes: Some(10 << 20),
        ..reading(0, 0.0)
    };
    let peak = &history([small]).memory_peaks[0];
    assert_eq!((peak.bytes, peak.is_denied), (110 << 20, true));
}

#[test]
fn a_peak_is_forgotten_after_days() {
    let peak_then = |days: u64| {
        let later = (0..days * 24).map(|_| reading(GIB, 0.0));
        let peak = (0..24).map(|_| reading(8 * GIB, 0.9));
        let found = status(1, share(16 * GIB, 40), history(peak.chain(later)));
        (memory(found.request), found.used.cores.unwrap())
    };
    assert_eq!(peak_then(2), (9472 << 20, 90));
    // Its weight is less than a tenth of all.
    assert_eq!(peak_then(4), (1280 << 20, 0));
    let long = history((0..100 * 24).map(|hour| reading(GIB, f64::from(hour % 50) / 50.0)));
    assert_eq!(long.memory_peaks.len(), 8);
    assert!(long.gpu_time.len() <= 50);
    let weights: f64 = long
        .gpu_time
        .iter()
        .map(|bucket| bucket.weight_seconds)
        .sum();
    // The sum of a series: an hour divided by what is lost in one.
    assert!(
        (weights - 3600.0 / (1.0 - weight(3600.0))).abs() < 100.0,
        "{weights}"
    );
}

/// A day without readings is no day of low use, and a clock that goes back loses nothing.
#[test]
fn pauses_and_clocks_that_go_back_are_harmless() {
    let mut history = UsageHistory::default();
    history.add(&at(0), &reading(4 * GIB, 0.5));
    history.add(&at(1000), &reading(2 * GIB, 0.5));
    let starts: Vec<_> = history.memory_peaks.iter().map(|day| &day.start).collect();
    assert_eq!(starts, [&at(0), &at(1000)]);
    history.add(&at(900), &reading(3 * GIB, 0.5));
    assert_eq!(history.memory_peaks[1].bytes, 3 * GIB);
    assert_eq!(history.observed_seconds, 3 * HOUR);
}

#[test]
fn history_goes_on_from_the_status() {
    let readings = |from: u64| (0..).zip((from..from + 60).map(|hour| reading(hour * GIB, 0.3)));
    let whole = history((0..120).map(|hour| reading(hour * GIB, 0.3)));
    let written = status(1, share(GIB, 40), history(readings(0).map(|(_, one)| one)));
    let text = serde_json::to_string(&written).unwrap();
    let mut read: GpuShareRecommendationStatus = serde_json::from_str(&text).unwrap();
    for (hour, reading) in readings(60) {
        read.history.add(&at(60 + hour), &reading);
    }
    assert_eq!(read.history, whole);
}

/// A workload with a daily curve, less of it on two days of the week, and noise, by the numbers of a generator.
struct Curve {
    base: f64,
    swing: f64,
    phase: f64,
    first_day: u64,
    random: u64,
}

impl Curve {
    fn new(seed: u64) -> Self {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || uniform(&mut random);
        let (base, swing, phase, first_day) = (next(), next(), next(), next());
        Self {
            base: 1.0 + 19.0 * base,
            swing: 1.5 * swing,
            phase: 24.0 * phase,
            first_day: whole(7.0 * first_day),
            random,
        }
    }

    /// Highest memory of an hour.
    fn bytes(&mut self, hour: u64) -> u64 {
        let part = match (hour / 24 + self.first_day) % 7 {
            5 | 6 => 0.3,
            _ => 1.0,
        };
        let turn = (hour as f64 - self.phase) / 24.0 * std::f64::consts::TAU;
        // A sum of twelve is close to a normal distribution; a standard deviation of 10%.
        let noise: f64 = (0..12).map(|_| uniform(&mut self.random)).sum::<f64>() - 6.0;
        let curve = self.base * (1.0 + part * self.swing * turn.sin().max(0.0));
        whole(curve * (0.1 * noise).exp() * GIB as f64)
    }
}

/// A number from 0 to 1 (xorshift).
fn uniform(random: &mut u64) -> f64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    (*random >> 11) as f64 / (1_u64 << 53) as f64
}

/// The first of two weeks is observed, and the second is held back.
#[test]
fn recommended_memory_holds_later_peaks_and_frees_memory() {
    let (mut hours, mut held, mut requested, mut recommended) = (0_u64, 0_u64, 0.0, 0.0);
    for seed in 1..=300 {
        let mut curve = Curve::new(seed);
        let week: Vec<u64> = (0..7 * 24).map(|hour| curve.bytes(hour)).collect();
        // Users ask for 1.2 to 4 times what they need.
        let highest = week.iter().max().copied().unwrap();
        let current = whole((1.2 + 2.8 * uniform(&mut curve.random)) * highest as f64);
        let known = history(week.iter().map(|bytes| reading(*bytes, 0.1)));
        let request = memory(status(1, share(current, 40), known).request);
        for hour in 7 * 24..14 * 24 {
            hours += 1;
            held += u64::from(curve.bytes(hour) <= request);
        }
        requested += current as f64;
        recommended += request as f64;
    }
    let held = held as f64 / hours as f64;
    assert!(held >= 0.99, "{held} of the hours");
    let returned = 1.0 - recommended / requested;
    assert!(returned >= 0.25, "{returned} of the memory");
}

proptest! {
    /// Whatever was used: amounts are possible, the limit is not below the request, and a request below the present one holds the
    /// median of the days.
    #[test]
    fn amounts_are_consistent(
        days in prop::collection::vec((1_u64..200, 0.0_f64..1.2, any::<bool>()), 1..20),
        current in 1_u64..200, cores in 0_u8..=100,
    ) {
        let mut known = UsageHistory::default();
        for (day, (gib, ratio, is_denied)) in (0..).zip(&days) {
            let denied_at_bytes = is_denied.then_some(current * GIB);
            let one = Reading { denied_at_bytes, ..reading(gib * GIB, *ratio) };
            known.add(&at(24 * day), &one);
        }
        let last = known.memory_peaks.last().unwrap().bytes;
        let found = status(1, share(current * GIB, cores), known);
        prop_assert!(memory(found.limit) >= memory(found.request));
        // The newest day has half of the weight.
        let is_kept = found.notes.contains(&Note::AllMemoryWasUsed);
        prop_assert!(is_kept || memory(found.request) >= last);
        prop_assert!(found.request.cores.is_none_or(|cores| (CORES_STEP..=100).contains(&cores)));
        prop_assert_eq!(found.request.cores.is_some(), cores > 0);
    }
}
