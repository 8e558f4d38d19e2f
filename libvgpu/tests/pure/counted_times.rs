//! The counter of GPU time only rises, and loses nothing.

use std::mem::MaybeUninit;

use crate::counted_time::CountedTime;

fn nothing() -> CountedTime {
    // SAFETY: all zeroes is none.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[test]
fn counts_sum_of_amounts_below_a_microsecond() {
    let counted = nothing();
    let sum: u64 = (0..10_000).map(|_| counted.add(333)).sum();
    assert_eq!(sum, 3_330);
}

#[test]
fn subtracts_negative_amounts_from_next_amounts() {
    let counted = nothing();
    let steps = [(5_000, 5), (-7_500, 0), (4_000, 0), (4_000, 0), (9_500, 10)];
    for (ns, us) in steps {
        assert_eq!(counted.add(ns), us, "{ns}");
    }
    assert_eq!(counted.add(5_000), 5);
}
