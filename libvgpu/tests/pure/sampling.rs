//! How often launches are sampled.

use std::mem::MaybeUninit;

use drava_vgpu_abi::cost::{Cost, SAMPLING_INTERVAL};

use crate::lease::Leases;

/// Charges launches of one cost and returns the number of sampled ones.
fn sampled(ns: u64, launches: u32) -> u32 {
    let leases: Box<Leases> = zeroed();
    let lease = leases.of_this_thread(0);
    let cost = (0..20).fold(Cost::UNKNOWN, |cost, _| cost.learn(ns));
    let (mut sampled, mut spent_ns, mut counted) = (0, 0, 0);
    for _ in 0..launches {
        let spent = lease.renew(ns);
        spent_ns += spent.ns;
        counted += spent.launches;
        if !lease.spend(cost) {
            lease.spend_admitted(ns);
            sampled += u32::from(lease.is_due(cost.weight(), 1));
        }
        assert_eq!(lease.remaining_ns(), 0);
    }
    let spent = lease.renew(0);
    let all = u64::from(launches);
    assert_eq!(
        (spent_ns + spent.ns, counted + spent.launches),
        (all * ns, all)
    );
    sampled
}

/// Zeroed memory, as in the library.
fn zeroed() -> Box<Leases> {
    let zeroes = Box::<MaybeUninit<Leases>>::new(MaybeUninit::zeroed());
    // SAFETY: atomics, for which all zeroes are valid; a `MaybeUninit` lies in memory as what it may be.
    unsafe { Box::from_raw(Box::into_raw(zeroes).cast()) }
}

#[test]
#[cfg_attr(miri, ignore = "asks the processor for the thread pointer")]
fn samples_launches_in_proportion_to_their_cost() {
    const LAUNCHES: u32 = 64_000;
    for ns in [300_000, 1_000_000, 20_000_000] {
        assert_eq!(sampled(ns, 1000), 1000, "{ns}");
    }
    for (ns, weight) in [(1_000, 1), (50_000, 10), (150_000, 32)] {
        let expected = f64::from(LAUNCHES * weight / SAMPLING_INTERVAL);
        let ratio = f64::from(sampled(ns, LAUNCHES)) / expected;
        assert!((0.9..1.1).contains(&ratio), "{ns}: {ratio}");
    }
}
