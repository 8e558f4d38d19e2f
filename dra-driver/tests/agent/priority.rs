//! Priority between shares: in virtual time with fake processes, and with `libvgpu.so`.

use std::mem::offset_of;
use std::time::Duration;

use drava_vgpu_abi::region::Header;
use drava_vgpu_abi::{ComputePolicy, Limits, Priority};
use gpu_tenants::Tenant;
use rustix::time::{ClockId, clock_gettime};

use crate::node::{TestNode, eventually, limits};
use crate::virtual_clock::{FakeProcess, SECOND_US, STEP_US, VirtualClockAgent};

/// Returns an agent for these shares, and one fake process per share.
pub(crate) fn with_processes(shares: &[Limits]) -> (VirtualClockAgent, Vec<FakeProcess>) {
    let node = TestNode::new();
    for (number, limits) in (0..).zip(shares) {
        node.prepare(number, limits);
    }
    let mut agent = VirtualClockAgent::on(node);
    let card = agent.cards[0].clone();
    let processes = (0..).zip(shares).map(|(number, _)| {
        let process = FakeProcess::new(&agent.node, number);
        agent.listed.push((card.clone(), process.listed(number)));
        process
    });
    let processes = processes.collect();
    agent.run(STEP_US);
    (agent, processes)
}

#[test]
fn writes_priority_roles_to_pages() {
    use ComputePolicy::{Balance, Fixed, None as Unmetered, Token};
    let window = |agent: &VirtualClockAgent, number| agent.node.priority_words(number)[1] > 0;
    let notifies = |agent: &VirtualClockAgent, number| agent.node.priority_words(number)[2] > 0;
    let (mut agent, processes) = with_processes(&[
        limits(Balance, 50, 100),
        limits(Fixed, 20, 0),
        limits(Balance, 0, -100),
        limits(Unmetered, 0, 50),
    ]);
    let roles = |agent: &VirtualClockAgent| {
        [0, 1, 2, 3].map(|number| (notifies(agent, number), window(agent, number)))
    };
    let (notifier, yielder, neither) = ((true, false), (false, true), (false, false));
    assert_eq!(roles(&agent), [notifier, (true, true), yielder, neither]);
    // A share without active shares of other priorities has no role.
    processes[0].exit();
    agent.listed.retain(|(_, listed)| listed.pid != fake_pid(0));
    agent.run(15 * SECOND_US);
    assert_eq!(roles(&agent), [neither, notifier, yielder, neither]);
    // A changed priority takes effect on the next tick.
    agent
        .node
        .change_page(2, |limits| limits.priority = Priority::new(1).unwrap());
    agent.run(2 * SECOND_US);
    assert_eq!(roles(&agent), [neither, yielder, notifier, neither]);
    // Shares of equal priority have no role.
    let (mut agent, processes) = with_processes(&[limits(Balance, 50, 7), limits(Token, 50, 7)]);
    for step in 0..20 {
        for process in &processes {
            process.write(offset_of!(Header, busy_until_us), u64::MAX);
            process.record_usage(agent.now_us, step * STEP_US);
        }
        agent.run(STEP_US);
        for number in [0, 1] {
            assert_eq!(agent.node.priority_words(number), [0; 3]);
        }
    }
}

fn fake_pid(number: u32) -> u32 {
    100_000 + number
}

#[test]
fn yields_only_while_higher_priority_share_works() {
    use ComputePolicy::Balance;
    let (mut agent, processes) = with_processes(&[limits(Balance, 50, 100), limits(Balance, 0, 0)]);
    let until = |agent: &VirtualClockAgent| agent.node.priority_words(1)[0];
    let now = agent.now_us;
    processes[0].write(offset_of!(Header, busy_until_us), now + 20_000);
    agent.run(1);
    assert!(until(&agent) >= now + 20_000);
    assert_eq!(agent.node.priority_words(0)[0], 0);
    // The agent detects more work in time without a notification.
    agent.run(15_000);
    processes[0].write(offset_of!(Header, busy_until_us), now + 40_000);
    agent.run(4_900);
    assert!(until(&agent) >= now + 40_000);
    // The work ends. Values reported by the low-priority share have no effect.
    processes[1].write(offset_of!(Header, busy_until_us), u64::MAX);
    agent.run(40_000);
    assert!(until(&agent) <= agent.now_us, "{}", agent.now_us - now);
    assert_eq!(agent.node.priority_words(0)[0], 0);
}

#[test]
fn keeps_guarantee_against_endless_busy_claim() {
    use ComputePolicy::Balance;
    for (percent, least) in [(40, 79), (0, 1)] {
        let (mut agent, processes) =
            with_processes(&[limits(Balance, 50, 100), limits(Balance, percent, 0)]);
        processes[0].write(offset_of!(Header, busy_until_us), u64::MAX);
        let (mut free, mut polls) = (0, 0);
        for _ in 0..10 * SECOND_US / 1_000 {
            agent.run(1_000);
            polls += 1;
            free += u32::from(agent.node.priority_words(1)[0] <= agent.now_us);
        }
        // While the low-priority share may launch, the GPU alternates between both.
        assert!(free * 100 >= least * polls, "{percent}: {free} of {polls}");
        assert!(
            free * 100 <= (least + 4) * polls,
            "{percent}: {free} of {polls}"
        );
    }
}

pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * SECOND_US + u64::try_from(now.tv_nsec).unwrap() / 1_000
}

#[test]
fn yields_on_notification() {
    let node = TestNode::new();
    node.prepare(0, &limits(ComputePolicy::Balance, 50, 100));
    node.prepare(1, &limits(ComputePolicy::Balance, 0, 0));
    let processes = [0, 1].map(|number| FakeProcess::new(&node, number));
    let _agent = node.agent();
    // Without a notification, the next poll is up to 20 ms away.
    let deadline_us = 5_000;
    let mut outcomes = Vec::new();
    let mut pause_ms = 0;
    eventually("most of 20 notifications to take effect at once", || {
        // Both shares want the GPU.
        processes
            .iter()
            .for_each(|process| process.record_usage(now_us(), 0));
        eventually("a share that notifies the agent", || {
            (node.priority_words(0)[2] > 0 && node.priority_words(1)[0] <= now_us()).then_some(())
        });
        let start_us = now_us();
        processes[0].write(offset_of!(Header, busy_until_us), start_us + 30_000);
        processes[0].notify_agent();
        let mut reacted = false;
        while !reacted && now_us() < start_us + deadline_us {
            std::thread::sleep(Duration::from_micros(500));
            reacted = node.priority_words(1)[0] > start_us;
        }
        outcomes.push(reacted);
        // Not in phase with ticks.
        pause_ms = (pause_ms + 37) % 101;
        std::thread::sleep(Duration::from_millis(40 + pause_ms));
        let last = outcomes.iter().rev().take(20);
        (last.filter(|reacted| **reacted).count() >= 15).then_some(())
    });
}

/// Returns the GPU time of `other` during `requests` single-kernel requests of `urgent`, ms.
fn other_time_ms(node: &TestNode, urgent: &mut Tenant, other: &Tenant, requests: u32) -> f64 {
    let pids = [other.pid()];
    let mut had = Duration::ZERO;
    for _ in 0..requests {
        std::thread::sleep(Duration::from_millis(60));
        let (before, _) = node.test_bed.used(&pids).unwrap();
        urgent.ok("once 60000000").unwrap();
        let (after, _) = node.test_bed.used(&pids).unwrap();
        had += after[0].saturating_sub(before[0]);
    }
    had.as_secs_f64() * 1e3
}

/// Checks that requests take less time with priority than without.
fn check_priority(policy: ComputePolicy) {
    const REQUESTS: u32 = 6;
    let node = TestNode::new();
    node.prepare(1, &limits(policy, 50, 0));
    node.prepare(2, &limits(policy, 0, 0));
    let _agent = node.agent_process();
    let (mut urgent, mut other) = (node.tenant(1), node.tenant(2));
    urgent.ok("once 60000000").unwrap();
    other.ok("start kernel ns=2000000 depth=8").unwrap();
    let mut seen = Vec::new();
    eventually("requests that wait less", || {
        let had = [0, 100].map(|priority| {
            node.change_page(1, |limits| {
                limits.priority = Priority::new(priority).unwrap();
            });
            eventually("the role of the other share", || {
                ((node.priority_words(2)[1] > 0) == (priority > 0)).then_some(())
            });
            other_time_ms(&node, &mut urgent, &other, REQUESTS)
        });
        seen.push(had);
        println!("{policy:?}: {seen:.0?}");
        // Each request needs 60 ms.
        (had[1] < had[0] / 2.0).then_some(())
    });
    // The other share still makes progress.
    let before = other.launched().unwrap();
    eventually("launches of the other share", || {
        (other.launched().unwrap() > before + 50).then_some(())
    });
}

#[test]
fn serves_requests_of_higher_priority_first() {
    check_priority(ComputePolicy::Balance);
}

#[test]
fn grants_token_to_higher_priority_first() {
    check_priority(ComputePolicy::Token);
}
