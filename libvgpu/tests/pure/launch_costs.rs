//! The table of launch costs has a bounded size, and recurring kinds keep their entries.

use std::mem::MaybeUninit;

use drava_vgpu_abi::cost::{Cost, FIRST_GUESS_NS, LaunchKind};

use crate::costs::Costs;

/// More kinds than the table has entries.
const MANY: u64 = if cfg!(miri) { 6_000 } else { 100_000 };

fn no_costs() -> Box<Costs> {
    let costs = Box::<MaybeUninit<Costs>>::new(MaybeUninit::zeroed());
    // SAFETY: all zeroes is an empty table.
    unsafe { costs.assume_init() }
}

/// As of a program that compiles a kernel for each shape.
fn kind(number: u64) -> LaunchKind {
    LaunchKind::kernel(0x7f00_0000_0000 + number * 48, [1; 3], [1; 3])
}

fn learn(costs: &Costs, kind: LaunchKind, ns: u64) {
    costs.change(kind, |cost| cost.learn(ns));
}

#[test]
fn keeps_recurring_kinds_among_kinds_that_occur_once() {
    let costs = no_costs();
    let recurring = || (0..500).map(kind);
    for kind in recurring() {
        (0..10).for_each(|_| learn(&costs, kind, 5_000));
    }
    for number in 1_000..1_000 + MANY {
        learn(&costs, kind(number), 1_000_000);
    }
    let lost = recurring().filter(|kind| costs.get(*kind).samples() < 10);
    assert_eq!(lost.count(), 0);
}

#[test]
fn charges_average_of_kinds_without_entry() {
    let costs = no_costs();
    let recurring = || (0..12_000).map(kind);
    for _ in 0..3 {
        recurring().for_each(|kind| learn(&costs, kind, 5_000));
    }
    let new = (1_000_000..1_000_100).map(|number| costs.get(kind(number)));
    let guessed = new.filter(|cost| cost.ns() == FIRST_GUESS_NS).count();
    assert!(guessed < 50, "{guessed} of 100 kinds cost the first guess");
}

#[test]
fn replaces_kinds_that_no_longer_recur() {
    let costs = no_costs();
    for _ in 0..20 {
        (0..12_000).for_each(|number| learn(&costs, kind(number), 5_000));
    }
    let now = || (1_000_000..1_000_100).map(kind);
    for _ in 0..40 {
        now().for_each(|kind| learn(&costs, kind, 9_000));
    }
    let known =
        now().filter(|kind| costs.get(*kind) != Cost::UNKNOWN && costs.get(*kind).ns() > 8_000);
    assert_eq!(known.count(), 100);
}

/// Handles of the functions of an unloaded module recur for other functions.
#[test]
fn samples_all_kinds_again_when_stale() {
    let costs = no_costs();
    (0..10).for_each(|_| learn(&costs, kind(1), 5_000));
    costs.set(kind(2), Cost::unmeasurable(7_000));
    costs.mark_all_stale();
    assert_eq!(costs.get(kind(1)).ns(), 5_000);
    assert_eq!(costs.get(kind(1)).weight(), None, "each launch is sampled");
    assert_eq!(costs.get(kind(2)), Cost::unmeasurable(7_000));
    costs.forget(kind(1));
    assert_eq!(costs.get(kind(1)), Cost::UNKNOWN);
}
