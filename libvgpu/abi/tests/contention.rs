//! The share's own part of measured time.

use drava_vgpu_abi::contention::{ALL_PPM, OwnLaunch, OwnTime, SLICE_US};
use drava_vgpu_abi::cost::Cost;
use proptest::prelude::*;

const SLICE_NS: u64 = SLICE_US as u64 * 1_000;

/// The time that events measure for a launch of `own_ns` that starts `into_slice_ns` after the start of a slice, if each
/// slice is followed by an interruption.
fn measured_ns(own_ns: u64, into_slice_ns: u64, interruption_ns: u64) -> u64 {
    // A launch that ends with its slice is not interrupted.
    let interruptions = (into_slice_ns + own_ns).saturating_sub(1) / SLICE_NS;
    own_ns + interruptions * interruption_ns
}

#[test]
fn places_word_at_golden_bits() {
    assert_eq!(OwnTime::Part(500_000).word(), 500_000);
    assert_eq!(OwnTime::Interrupted(2_450).word(), 2_450 << 32);
    assert_eq!(
        OwnTime::Saturating(500_000).word(),
        0xffff_ffff << 32 | 500_000
    );
}

#[test]
fn takes_damaged_words_for_whole_time() {
    let both = OwnTime::Part(500_000).word() | OwnTime::Interrupted(2_450).word();
    for word in [0, u64::from(ALL_PPM), both, u64::MAX, 2_000_000 << 32] {
        assert_eq!(OwnTime::from_word(word), OwnTime::ALL, "{word:#x}");
    }
}

#[test]
fn multiplies_hours_without_overflow() {
    let day_ns = 24 * 3_600 * 1_000_000_000;
    assert_eq!(OwnTime::Part(250_000).of_ns(day_ns), day_ns / 4);
    assert!(OwnTime::Interrupted(2_450).of_ns(u64::MAX) < u64::MAX);
}

/// The cost of a kind of launches of `ns`.
fn kind(ns: u64) -> Cost {
    (0..8).fold(Cost::UNKNOWN, |cost, _| cost.learn(ns))
}

fn evidence(ns: u64) -> OwnLaunch {
    OwnLaunch {
        ns,
        is_evidence: true,
    }
}

fn no_evidence(ns: u64) -> OwnLaunch {
    OwnLaunch {
        ns,
        is_evidence: false,
    }
}

/// A kernel of 5 µs that was interrupted for 2.4 instead of 2.45 ms would seem to take no time.
#[test]
fn counts_interrupted_short_launch_as_usual() {
    let own = OwnTime::Interrupted(2_450);
    assert_eq!(own.of_launch(5_000, kind(5_000)), evidence(5_000));
    assert_eq!(own.of_launch(2_405_000, kind(5_000)), no_evidence(5_000));
    assert_eq!(own.of_launch(2_405_000, Cost::UNKNOWN), no_evidence(0));
    assert_eq!(own.of_launch(3_450_000, kind(5_000)), evidence(1_000_000));
}

/// Of a cheap kind few launches are measured, and fewer interrupted ones, which would stand for many others.
#[test]
fn counts_cheap_launches_of_saturating_share_as_usual() {
    let own = OwnTime::Saturating(500_000);
    assert_eq!(own.of_launch(100_000, kind(100_000)), evidence(100_000));
    assert_eq!(
        own.of_launch(1_500_000, kind(100_000)),
        no_evidence(100_000)
    );
    assert_eq!(
        own.of_launch(4_000_000, kind(2_000_000)),
        evidence(2_000_000)
    );
    assert_eq!(own.of_launch(100_000, Cost::UNKNOWN), evidence(50_000));
    assert_eq!(
        OwnTime::Part(500_000).of_launch(100_000, kind(100_000)),
        evidence(50_000)
    );
}

proptest! {
    #[test]
    fn decodes_encoded_word(ppm in 1..ALL_PPM, us in 1..1_000_000_u32) {
        for own in [OwnTime::Part(ppm), OwnTime::Interrupted(us), OwnTime::Saturating(ppm)] {
            prop_assert_eq!(OwnTime::from_word(own.word()), own);
        }
    }

    /// An interruption is never shorter than a slice of another context and two switches.
    #[test]
    fn recognizes_each_interruption(
        own_ns in 1..60_000_000_u64,
        into_slice_ns in 0..SLICE_NS,
        interruption_us in SLICE_US + 50..20_000,
    ) {
        let interruption_ns = u64::from(interruption_us) * 1_000;
        let measured_ns = measured_ns(own_ns, into_slice_ns, interruption_ns);
        prop_assert_eq!(OwnTime::Interrupted(interruption_us).of_ns(measured_ns), own_ns);
    }

    #[test]
    fn never_exceeds_measured_time(word: u64, measured_ns: u64) {
        prop_assert!(OwnTime::from_word(word).of_ns(measured_ns) <= measured_ns);
    }
}
