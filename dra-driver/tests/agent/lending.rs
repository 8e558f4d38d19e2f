//! What an idle share lends comes back when it wants it, and not only when the agent would have looked.

use std::mem::offset_of;
use std::time::Duration;

use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::page::LENT_OFFSET;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};

use crate::idle::{Clockwork, Forged, STEP_US};
use crate::node::{Node, eventually};
use crate::priority::{inhabited, now_us};
use crate::shares::limits;

const BORROWER: u32 = 0;
const OWNER: u32 = 1;

fn rate(node: &Node, number: u32) -> u32 {
    node.page(number).rate_us_per_s.unwrap_or(0)
}

fn is_lent(node: &Node) -> bool {
    node.word(OWNER, LENT_OFFSET) != 0
}

/// One that uses all of the card, and the owner of most of it, which does nothing.
fn lent() -> (Clockwork, [Forged; 2]) {
    use ComputePolicy::Balance;
    let (mut clockwork, forged) = inhabited(&[limits(Balance, 30, 0), limits(Balance, 70, 0)]);
    let both: [Forged; 2] = forged.try_into().ok().unwrap();
    for _ in 0..10 {
        step(&mut clockwork, &both[0]);
    }
    (clockwork, both)
}

/// A step of the agent, before which the borrower has used all of the card.
fn step(clockwork: &mut Clockwork, borrower: &Forged) {
    borrower.works(clockwork.now_us, clockwork.now_us);
    clockwork.run(STEP_US);
}

/// The owner launches something.
fn launches(owner: &Forged, now_us: u64) {
    owner.write(offset_of!(Header, wanted_us), now_us);
}

#[test]
fn what_is_lent_comes_back_with_the_first_launch_and_is_lent_again_when_that_was_all() {
    let (mut clockwork, [borrower, owner]) = lent();
    for round in 0..5 {
        step(&mut clockwork, &borrower);
        assert!(is_lent(&clockwork.node), "{round}");
        assert!(rate(&clockwork.node, BORROWER) >= 980_000, "{round}");
        // A call is nothing but a look before its time.
        borrower.works(clockwork.now_us, clockwork.now_us);
        clockwork.run(1_000);
        let begun_us = clockwork.now_us;
        launches(&owner, begun_us);
        clockwork.run(1);
        assert_eq!(rate(&clockwork.node, BORROWER), 300_000, "{round}");
        assert!(rate(&clockwork.node, OWNER) >= 700_000, "{round}");
        assert!(!is_lent(&clockwork.node), "{round}: it need not call again");
        // It goes on for a moment, and has all of what is its own.
        for _ in 0..3 {
            clockwork.run(10_000);
            launches(&owner, clockwork.now_us);
            assert_eq!(rate(&clockwork.node, BORROWER), 300_000, "{round}");
        }
        owner.write(
            SLOTS_OFFSET + offset_of!(Slot, gpu_time_us),
            round * 30_000 + 30_000,
        );
        // And rests: long before two steps have found it idle.
        clockwork.run(64_000);
        assert!(is_lent(&clockwork.node), "{round}");
        assert!(rate(&clockwork.node, BORROWER) >= 980_000, "{round}");
    }
}

#[test]
fn who_goes_on_after_it_woke_is_not_taken_for_idle_between_its_launches() {
    let (mut clockwork, [borrower, owner]) = lent();
    // It wakes between two steps, and is looked at from then on.
    borrower.works(clockwork.now_us, clockwork.now_us);
    clockwork.run(1_000);
    launches(&owner, clockwork.now_us);
    clockwork.run(1);
    assert!(!is_lent(&clockwork.node));
    // A kernel of 80 ms each 70 ms, which is more than its part: it is in debt while it runs.
    let mut used_us = 0;
    for _ in 0..30 {
        used_us += 80_000;
        owner.works(clockwork.now_us, used_us);
        owner.write(offset_of!(Header, credit_us), (-80_000i64).cast_unsigned());
        owner.write(offset_of!(Header, refilled_us), clockwork.now_us);
        borrower.works(clockwork.now_us, clockwork.now_us);
        for _ in 0..14 {
            clockwork.run(5_000);
            assert!(!is_lent(&clockwork.node));
            assert!(rate(&clockwork.node, BORROWER) <= 310_000);
        }
    }
}

/// Whoever calls all the time is looked at, of which each look costs one read, and has nothing of it.
#[test]
fn who_wants_back_all_the_time_and_uses_nothing_costs_the_agent_little_and_others_no_guarantee() {
    let (mut clockwork, [borrower, owner]) = lent();
    let (mut reads, mut looks) = (0, 0);
    for _ in 0..100 {
        borrower.works(clockwork.now_us, clockwork.now_us);
        for _ in 0..50 {
            launches(&owner, clockwork.now_us);
            reads += clockwork.run(2_000);
            looks += 1;
            assert!(rate(&clockwork.node, BORROWER) >= 300_000);
            assert!(rate(&clockwork.node, OWNER) <= 1_000_000);
        }
    }
    // And what any share costs in a step.
    assert!(reads <= 2 * looks, "{reads} reads in {looks} looks");
}

#[test]
fn a_call_of_one_that_was_lent_is_heard_long_before_anybody_would_look() {
    let node = Node::new();
    node.prepare(BORROWER, &limits(ComputePolicy::Balance, 30, 0));
    node.prepare(OWNER, &limits(ComputePolicy::Balance, 70, 0));
    let forged = [BORROWER, OWNER].map(|number| Forged::new(&node, number));
    let _agent = node.agent();
    // Without a call, the next look at a share whose time is lent is up to 20 ms away.
    let soon_us = 5_000;
    let mut heard_of = Vec::new();
    let mut pause_ms = 0;
    eventually("most of twenty calls to be heard at once", || {
        eventually("time that is lent", || {
            forged[0].works(now_us(), now_us());
            (is_lent(&node) && rate(&node, BORROWER) >= 980_000).then_some(())
        });
        // At no rhythm with the steps and the looks.
        pause_ms = (pause_ms + 37) % 101;
        std::thread::sleep(Duration::from_millis(pause_ms));
        let begun_us = now_us();
        launches(&forged[1], begun_us);
        forged[1].calls();
        let mut heard = false;
        while !heard && now_us() < begun_us + soon_us {
            std::thread::sleep(Duration::from_micros(300));
            heard = rate(&node, BORROWER) < 500_000;
        }
        heard_of.push(heard);
        let last = heard_of.iter().rev().take(20);
        (last.filter(|heard| **heard).count() >= 15).then_some(())
    });
}
