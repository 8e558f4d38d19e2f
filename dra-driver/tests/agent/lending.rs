//! What an idle share lends comes back when it wants it, and not only when the agent would have looked.

use std::mem::offset_of;
use std::time::Duration;

use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::page::LENT_OFFSET;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};

use crate::node::{TestNode, eventually};
use crate::priority::{now_us, with_processes};
use crate::shares::limits;
use crate::virtual_clock::{FakeProcess, STEP_US, VirtualClockAgent};

const BORROWER: u32 = 0;
const OWNER: u32 = 1;

fn rate(node: &TestNode, number: u32) -> u32 {
    node.page(number).rate_us_per_s.unwrap_or(0)
}

fn is_lent(node: &TestNode) -> bool {
    node.word(OWNER, LENT_OFFSET) != 0
}

/// One that uses all of the card, and the owner of most of it, which does nothing.
fn lent() -> (VirtualClockAgent, [FakeProcess; 2]) {
    use ComputePolicy::Balance;
    let (mut agent, process) = with_processes(&[limits(Balance, 30, 0), limits(Balance, 70, 0)]);
    let both: [FakeProcess; 2] = process.try_into().ok().unwrap();
    for _ in 0..10 {
        step(&mut agent, &both[0]);
    }
    (agent, both)
}

/// A step of the agent, before which the borrower has used all of the card.
fn step(agent: &mut VirtualClockAgent, borrower: &FakeProcess) {
    borrower.record_usage(agent.now_us, agent.now_us);
    agent.run(STEP_US);
}

/// The owner launches something.
fn launches(owner: &FakeProcess, now_us: u64) {
    owner.write(offset_of!(Header, last_demand_us), now_us);
}

#[test]
fn reclaims_lent_time_on_first_launch_and_relends_it() {
    let (mut agent, [borrower, owner]) = lent();
    for round in 0..5 {
        step(&mut agent, &borrower);
        assert!(is_lent(&agent.node), "{round}");
        assert!(rate(&agent.node, BORROWER) >= 980_000, "{round}");
        // A call is nothing but a look before its time.
        borrower.record_usage(agent.now_us, agent.now_us);
        agent.run(1_000);
        let begun_us = agent.now_us;
        launches(&owner, begun_us);
        agent.run(1);
        assert_eq!(rate(&agent.node, BORROWER), 300_000, "{round}");
        assert!(rate(&agent.node, OWNER) >= 700_000, "{round}");
        assert!(!is_lent(&agent.node), "{round}: it need not call again");
        // It goes on for a moment, and has all of what is its own.
        for _ in 0..3 {
            agent.run(10_000);
            launches(&owner, agent.now_us);
            assert_eq!(rate(&agent.node, BORROWER), 300_000, "{round}");
        }
        owner.write(
            SLOTS_OFFSET + offset_of!(Slot, gpu_time_us),
            round * 30_000 + 30_000,
        );
        // And rests: long before two steps have found it idle.
        agent.run(64_000);
        assert!(is_lent(&agent.node), "{round}");
        assert!(rate(&agent.node, BORROWER) >= 980_000, "{round}");
    }
}

#[test]
fn keeps_resumed_share_active_between_launches() {
    let (mut agent, [borrower, owner]) = lent();
    // It wakes between two steps, and is looked at from then on.
    borrower.record_usage(agent.now_us, agent.now_us);
    agent.run(1_000);
    launches(&owner, agent.now_us);
    agent.run(1);
    assert!(!is_lent(&agent.node));
    // A kernel of 80 ms each 70 ms, which is more than its part: it is in debt while it runs.
    let mut used_us = 0;
    for _ in 0..30 {
        used_us += 80_000;
        owner.record_usage(agent.now_us, used_us);
        owner.write(offset_of!(Header, credit_us), (-80_000i64).cast_unsigned());
        owner.write(offset_of!(Header, refilled_us), agent.now_us);
        borrower.record_usage(agent.now_us, agent.now_us);
        for _ in 0..14 {
            agent.run(5_000);
            assert!(!is_lent(&agent.node));
            assert!(rate(&agent.node, BORROWER) <= 310_000);
        }
    }
}

/// Whoever calls all the time is looked at, of which each look costs one read, and has nothing of it.
#[test]
fn bounds_cost_of_constant_notifications() {
    let (mut agent, [borrower, owner]) = lent();
    let (mut reads, mut looks) = (0, 0);
    for _ in 0..100 {
        borrower.record_usage(agent.now_us, agent.now_us);
        for _ in 0..50 {
            launches(&owner, agent.now_us);
            reads += agent.run(2_000);
            looks += 1;
            assert!(rate(&agent.node, BORROWER) >= 300_000);
            assert!(rate(&agent.node, OWNER) <= 1_000_000);
        }
    }
    // And what any share costs in a step.
    assert!(reads <= 2 * looks, "{reads} reads in {looks} looks");
}

#[test]
fn reclaims_lent_time_on_notification() {
    let node = TestNode::new();
    node.prepare(BORROWER, &limits(ComputePolicy::Balance, 30, 0));
    node.prepare(OWNER, &limits(ComputePolicy::Balance, 70, 0));
    let process = [BORROWER, OWNER].map(|number| FakeProcess::new(&node, number));
    let _agent = node.agent();
    // Without a call, the next look at a share whose time is lent is up to 20 ms away.
    let soon_us = 5_000;
    let mut heard_of = Vec::new();
    let mut pause_ms = 0;
    eventually("most of twenty calls to be heard at once", || {
        eventually("time that is lent", || {
            process[0].record_usage(now_us(), now_us());
            (is_lent(&node) && rate(&node, BORROWER) >= 980_000).then_some(())
        });
        // At no rhythm with the steps and the looks.
        pause_ms = (pause_ms + 37) % 101;
        std::thread::sleep(Duration::from_millis(pause_ms));
        let begun_us = now_us();
        launches(&process[1], begun_us);
        process[1].notify_agent();
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
