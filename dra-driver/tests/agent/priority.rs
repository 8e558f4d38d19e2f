//! What the agent does for shares of higher priority: in virtual time with process regions, and beside `libvgpu.so`.

use std::mem::offset_of;
use std::time::Duration;

use drava_vgpu_abi::region::Header;
use drava_vgpu_abi::{ComputePolicy, Limits, Priority};
use gpu_tenants::Tenant;
use rustix::time::{ClockId, clock_gettime};

use crate::node::{TestNode, eventually};
use crate::shares::limits;
use crate::virtual_clock::{FakeProcess, SECOND_US, STEP_US, VirtualClockAgent};

/// Shares with processes, of which the agent tells.
pub(crate) fn with_processes(shares: &[Limits]) -> (VirtualClockAgent, Vec<FakeProcess>) {
    let node = TestNode::new();
    for (number, limits) in (0..).zip(shares) {
        node.prepare(number, limits);
    }
    let mut agent = VirtualClockAgent::on(node);
    let card = agent.cards[0].clone();
    let process = (0..).zip(shares).map(|(number, _)| {
        let process = FakeProcess::new(&agent.node, number);
        agent.listed.push((card.clone(), process.listed(number)));
        process
    });
    let process = process.collect();
    agent.run(STEP_US);
    (agent, process)
}

#[test]
fn writes_priority_roles_to_pages() {
    use ComputePolicy::{Balance, Fixed, None as Unmetered, Token};
    let window = |agent: &VirtualClockAgent, number| agent.node.manners(number)[1] > 0;
    let calls = |agent: &VirtualClockAgent, number| agent.node.manners(number)[2] > 0;
    let (mut agent, process) = with_processes(&[
        limits(Balance, 50, 100),
        limits(Fixed, 20, 0),
        limits(Balance, 0, -100),
        limits(Unmetered, 0, 50),
    ]);
    let ranks = |agent: &VirtualClockAgent| {
        [0, 1, 2, 3].map(|number| (calls(agent, number), window(agent, number)))
    };
    let (call, give_way, neither) = ((true, false), (false, true), (false, false));
    assert_eq!(ranks(&agent), [call, (true, true), give_way, neither]);
    // Who is alone with its priority, or with shares that nobody uses, is left in peace.
    process[0].exit();
    agent
        .listed
        .retain(|(_, listed)| listed.pid != forged_pid(0));
    agent.run(15 * SECOND_US);
    assert_eq!(ranks(&agent), [neither, call, give_way, neither]);
    // A priority that is changed counts from the next step on.
    agent
        .node
        .change_page(2, |limits| limits.priority = Priority::new(1).unwrap());
    agent.run(2 * SECOND_US);
    assert_eq!(ranks(&agent), [neither, give_way, call, neither]);
    // Those that are equal do not know of all this.
    let (mut agent, process) = with_processes(&[limits(Balance, 50, 7), limits(Token, 50, 7)]);
    for step in 0..20 {
        for process in &process {
            process.write(offset_of!(Header, busy_until_us), u64::MAX);
            process.record_usage(agent.now_us, step * STEP_US);
        }
        agent.run(STEP_US);
        for number in [0, 1] {
            assert_eq!(agent.node.manners(number), [0; 3]);
        }
    }
}

fn forged_pid(number: u32) -> u32 {
    100_000 + number
}

#[test]
fn yields_only_while_higher_priority_share_works() {
    use ComputePolicy::Balance;
    let (mut agent, process) = with_processes(&[limits(Balance, 50, 100), limits(Balance, 0, 0)]);
    let until = |agent: &VirtualClockAgent| agent.node.manners(1)[0];
    let now = agent.now_us;
    process[0].write(offset_of!(Header, busy_until_us), now + 20_000);
    agent.run(1);
    assert!(until(&agent) >= now + 20_000);
    assert_eq!(agent.node.manners(0)[0], 0);
    // It goes on working, which is seen in time although it does not call.
    agent.run(15_000);
    process[0].write(offset_of!(Header, busy_until_us), now + 40_000);
    agent.run(4_900);
    assert!(until(&agent) >= now + 40_000);
    // It does not; and what the other one says of itself changes nothing.
    process[1].write(offset_of!(Header, busy_until_us), u64::MAX);
    agent.run(40_000);
    assert!(until(&agent) <= agent.now_us, "{}", agent.now_us - now);
    assert_eq!(agent.node.manners(0)[0], 0);
}

#[test]
fn keeps_guarantee_against_endless_busy_claim() {
    use ComputePolicy::Balance;
    for (percent, least) in [(40, 79), (0, 1)] {
        let (mut agent, process) =
            with_processes(&[limits(Balance, 50, 100), limits(Balance, percent, 0)]);
        process[0].write(offset_of!(Header, busy_until_us), u64::MAX);
        let (mut free, mut looks) = (0, 0);
        for _ in 0..10 * SECOND_US / 1_000 {
            agent.run(1_000);
            looks += 1;
            free += u32::from(agent.node.manners(1)[0] <= agent.now_us);
        }
        // The card runs both by turns while it may launch.
        assert!(free * 100 >= least * looks, "{percent}: {free} of {looks}");
        assert!(
            free * 100 <= (least + 4) * looks,
            "{percent}: {free} of {looks}"
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
    let process = [0, 1].map(|number| FakeProcess::new(&node, number));
    let _agent = node.agent();
    // Without a call, the next look at a share whose time is lent is up to 20 ms away.
    let soon_us = 5_000;
    let mut heard_of = Vec::new();
    let mut pause_ms = 0;
    eventually("most of twenty calls to be heard at once", || {
        // Others still want the card, or had it a moment ago.
        process
            .iter()
            .for_each(|process| process.record_usage(now_us(), 0));
        eventually("one that is listened to", || {
            (node.manners(0)[2] > 0 && node.manners(1)[0] <= now_us()).then_some(())
        });
        let begun_us = now_us();
        process[0].write(offset_of!(Header, busy_until_us), begun_us + 30_000);
        process[0].notify_agent();
        let mut heard = false;
        while !heard && now_us() < begun_us + soon_us {
            std::thread::sleep(Duration::from_micros(500));
            heard = node.manners(1)[0] > begun_us;
        }
        heard_of.push(heard);
        // At no rhythm with the steps.
        pause_ms = (pause_ms + 37) % 101;
        std::thread::sleep(Duration::from_millis(40 + pause_ms));
        let last = heard_of.iter().rev().take(20);
        (last.filter(|heard| **heard).count() >= 15).then_some(())
    });
}

/// Milliseconds of the card that the other one had while the first made so many requests of one kernel each.
fn meanwhile(node: &TestNode, urgent: &mut Tenant, other: &Tenant, requests: u32) -> f64 {
    let pids = [other.pid()];
    let mut had = Duration::ZERO;
    for _ in 0..requests {
        std::thread::sleep(Duration::from_millis(60));
        let (before, _) = node.ground.used(&pids).unwrap();
        urgent.ok("once 60000000").unwrap();
        let (after, _) = node.ground.used(&pids).unwrap();
        had += after[0].saturating_sub(before[0]);
    }
    had.as_secs_f64() * 1e3
}

/// The same with and without priority.
fn comes_first(policy: ComputePolicy) {
    const REQUESTS: u32 = 6;
    let node = TestNode::new();
    node.prepare(1, &limits(policy, 50, 0));
    node.prepare(2, &limits(policy, 0, 0));
    let _agent = node.agent_process();
    let (mut urgent, mut other) = (node.tenant(1), node.tenant(2));
    urgent.ok("once 60000000").unwrap();
    other.ok("start kernel ns=2000000 depth=8").unwrap();
    let mut seen = Vec::new();
    eventually("requests that hardly wait", || {
        let had = [0, 100].map(|priority| {
            node.change_page(1, |limits| {
                limits.priority = Priority::new(priority).unwrap();
            });
            eventually("the other one knows", || {
                ((node.manners(2)[1] > 0) == (priority > 0)).then_some(())
            });
            meanwhile(&node, &mut urgent, &other, REQUESTS)
        });
        seen.push(had);
        println!("{policy:?}: {seen:.0?}");
        // Beside 60 ms each that were wanted.
        (had[1] < had[0] / 2.0).then_some(())
    });
    // And it lives on what is left.
    let before = other.launched().unwrap();
    eventually("the other one goes on", || {
        (other.launched().unwrap() > before + 50).then_some(())
    });
}

#[test]
fn serves_requests_of_higher_priority_first() {
    comes_first(ComputePolicy::Balance);
}

#[test]
fn grants_token_to_higher_priority_first() {
    comes_first(ComputePolicy::Token);
}
