//! Reclaiming lent GPU time on the owner's notification, between the polls of the agent.

use std::mem::offset_of;
use std::time::Duration;

use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::page::LENT_OFFSET;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};

use crate::node::{TestNode, eventually, limits};
use crate::priority::{now_us, with_processes};
use crate::virtual_clock::{FakeProcess, STEP_US, VirtualClockAgent};

const BORROWER: u32 = 0;
const OWNER: u32 = 1;

fn rate(node: &TestNode, number: u32) -> u32 {
    node.page(number).rate_us_per_s.unwrap_or(0)
}

fn is_lent(node: &TestNode) -> bool {
    node.word(OWNER, LENT_OFFSET) != 0
}

/// Returns a borrower that uses the whole GPU and the idle owner of 70%.
fn lent_share() -> (VirtualClockAgent, [FakeProcess; 2]) {
    use ComputePolicy::Balance;
    let (mut agent, processes) = with_processes(&[limits(Balance, 30, 0), limits(Balance, 70, 0)]);
    let both: [FakeProcess; 2] = processes.try_into().ok().unwrap();
    for _ in 0..10 {
        tick(&mut agent, &both[0]);
    }
    (agent, both)
}

/// Runs one tick of the agent after the borrower has used the whole GPU.
fn tick(agent: &mut VirtualClockAgent, borrower: &FakeProcess) {
    borrower.record_usage(agent.now_us, agent.now_us);
    agent.run(STEP_US);
}

/// Records a launch of the owner.
fn launch(owner: &FakeProcess, now_us: u64) {
    owner.write(offset_of!(Header, last_demand_us), now_us);
}

#[test]
fn reclaims_lent_time_on_first_launch_and_relends_it() {
    let (mut agent, [borrower, owner]) = lent_share();
    for round in 0..5 {
        tick(&mut agent, &borrower);
        assert!(is_lent(&agent.node), "{round}");
        assert!(rate(&agent.node, BORROWER) >= 980_000, "{round}");
        // A notification only causes an early poll.
        borrower.record_usage(agent.now_us, agent.now_us);
        agent.run(1_000);
        let start_us = agent.now_us;
        launch(&owner, start_us);
        agent.run(1);
        // Its guarantee, less its part of the time of switches between contexts.
        assert_eq!(rate(&agent.node, BORROWER), 273_333, "{round}");
        assert!(rate(&agent.node, OWNER) >= 700_000, "{round}");
        assert!(
            !is_lent(&agent.node),
            "{round}: owner need not notify again"
        );
        // The owner continues and keeps its share.
        for _ in 0..3 {
            agent.run(10_000);
            launch(&owner, agent.now_us);
            assert_eq!(rate(&agent.node, BORROWER), 273_333, "{round}");
        }
        owner.write(
            SLOTS_OFFSET + offset_of!(Slot, gpu_time_us),
            round * 30_000 + 30_000,
        );
        // The owner goes idle, which the agent detects before the next two ticks.
        agent.run(64_000);
        assert!(is_lent(&agent.node), "{round}");
        assert!(rate(&agent.node, BORROWER) >= 980_000, "{round}");
    }
}

#[test]
fn keeps_resumed_share_active_between_launches() {
    let (mut agent, [borrower, owner]) = lent_share();
    // The owner resumes between two ticks and is polled from then on.
    borrower.record_usage(agent.now_us, agent.now_us);
    agent.run(1_000);
    launch(&owner, agent.now_us);
    agent.run(1);
    assert!(!is_lent(&agent.node));
    // A kernel of 80 ms every 70 ms exceeds its share, so the owner has debt while the kernel runs.
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

/// Each notification costs one read and gains the owner nothing.
#[test]
fn bounds_cost_of_constant_notifications() {
    let (mut agent, [borrower, owner]) = lent_share();
    let (mut reads, mut polls) = (0, 0);
    for _ in 0..100 {
        borrower.record_usage(agent.now_us, agent.now_us);
        for _ in 0..50 {
            launch(&owner, agent.now_us);
            reads += agent.run(2_000);
            polls += 1;
            assert!(rate(&agent.node, BORROWER) >= 273_333);
            assert!(rate(&agent.node, OWNER) <= 1_000_000);
        }
    }
    // The rest is the cost of each tick.
    assert!(reads <= 2 * polls, "{reads} reads in {polls} polls");
}

#[test]
fn reclaims_lent_time_on_notification() {
    let node = TestNode::new();
    node.prepare(BORROWER, &limits(ComputePolicy::Balance, 30, 0));
    node.prepare(OWNER, &limits(ComputePolicy::Balance, 70, 0));
    let processes = [BORROWER, OWNER].map(|number| FakeProcess::new(&node, number));
    let _agent = node.agent();
    // Without a notification, the next poll of a lent share is up to 20 ms away.
    let deadline_us = 5_000;
    let mut outcomes = Vec::new();
    let mut pause_ms = 0;
    eventually("most of 20 notifications to take effect at once", || {
        eventually("lent time", || {
            processes[0].record_usage(now_us(), now_us());
            (is_lent(&node) && rate(&node, BORROWER) >= 980_000).then_some(())
        });
        // Not in phase with ticks and polls.
        pause_ms = (pause_ms + 37) % 101;
        std::thread::sleep(Duration::from_millis(pause_ms));
        let start_us = now_us();
        launch(&processes[1], start_us);
        processes[1].notify_agent();
        let mut reacted = false;
        while !reacted && now_us() < start_us + deadline_us {
            std::thread::sleep(Duration::from_micros(300));
            reacted = rate(&node, BORROWER) < 500_000;
        }
        outcomes.push(reacted);
        let last = outcomes.iter().rev().take(20);
        (last.filter(|reacted| **reacted).count() >= 15).then_some(())
    });
}
