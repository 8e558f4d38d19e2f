//! Priority between shares: in virtual time with fake processes, and with `libvgpu.so`.

use std::mem::offset_of;
use std::time::{Duration, Instant};

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
    let gpu = agent.gpus[0].clone();
    let processes = (0..).zip(shares).map(|(number, _)| {
        let process = FakeProcess::new(&agent.node, number);
        agent.listed.push((gpu.clone(), process.listed(number)));
        process
    });
    let processes = processes.collect();
    agent.run(STEP_US);
    (agent, processes)
}

#[test]
fn writes_priority_roles_to_pages() {
    use ComputePolicy::{Balance, Fixed, None as Unmetered};
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
    let (mut agent, processes) = with_processes(&[limits(Balance, 50, 7), limits(Fixed, 50, 7)]);
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

/// Reactions of the agent in each of two ways.
const REACTIONS: usize = 20;

/// Checks that the agent reacts to notifications and does not only poll. `reaction` returns the time of one reaction, with or
/// without a notification. The verdict needs no absolute time, and a load of the host delays both ways alike.
pub(crate) fn assert_reacts_to_notifications(mut reaction: impl FnMut(bool) -> Duration) {
    let mut reactions = [const { Vec::new() }; 2];
    for sample in 0..2 * REACTIONS {
        let notifies = sample % 2 == 0;
        reactions[usize::from(notifies)].push(reaction(notifies));
        // Not in phase with ticks and polls.
        std::thread::sleep(Duration::from_millis(sample as u64 * 37 % 101));
    }
    let [polled, notified] = reactions.map(|mut reactions| {
        reactions.sort();
        reactions[REACTIONS / 2]
    });
    // Medians of chance times between two polls differ less, unless in one of hundreds of runs.
    assert!(notified < polled / 2, "{notified:?}, by polls {polled:?}");
}

/// Waits for an effect on a page, which follows in less than 10 s, and returns the time.
pub(crate) fn time_until(is_effective: impl Fn() -> bool) -> Duration {
    let begun = Instant::now();
    while !is_effective() {
        assert!(begun.elapsed() < Duration::from_secs(10), "no effect");
        std::thread::sleep(Duration::from_micros(300));
    }
    begun.elapsed()
}

#[test]
fn yields_on_notification() {
    let node = TestNode::new();
    node.prepare(0, &limits(ComputePolicy::Balance, 50, 100));
    node.prepare(1, &limits(ComputePolicy::Balance, 0, 0));
    let processes = [0, 1].map(|number| FakeProcess::new(&node, number));
    let _agent = node.agent();
    assert_reacts_to_notifications(|notifies| {
        // Both shares want the GPU.
        processes
            .iter()
            .for_each(|process| process.record_usage(now_us(), 0));
        eventually("a share that notifies the agent", || {
            (node.priority_words(0)[2] > 0 && node.priority_words(1)[0] <= now_us()).then_some(())
        });
        let start_us = now_us();
        processes[0].write(offset_of!(Header, busy_until_us), start_us + SECOND_US);
        if notifies {
            processes[0].notify_agent();
        }
        let took = time_until(|| node.priority_words(1)[0] > start_us);
        processes[0].write(offset_of!(Header, busy_until_us), 0);
        took
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

/// Checks that another share uses less of the GPU during requests of a share of higher priority. The node is the same without
/// and with priority, so the load of the host is about the same.
#[test]
fn serves_requests_of_higher_priority_first() {
    let policy = ComputePolicy::Balance;
    const REQUESTS: u32 = 10;
    let node = TestNode::new();
    node.prepare(1, &limits(policy, 50, 0));
    node.prepare(2, &limits(policy, 0, 0));
    let _agent = node.agent_process();
    let (mut urgent, mut other) = (node.tenant(1), node.tenant(2));
    urgent.ok("once 60000000").unwrap();
    other.ok("start kernel ns=2000000 depth=8").unwrap();
    let had = [0, 100].map(|priority| {
        eventually("the role of the other share", || {
            // A write of the agent at the same time may replace that of the test.
            node.change_page(1, |limits| {
                limits.priority = Priority::new(priority).unwrap();
            });
            ((node.priority_words(2)[1] > 0) == (priority > 0)).then_some(())
        });
        other_time_ms(&node, &mut urgent, &other, REQUESTS)
    });
    // Each request needs 60 ms.
    assert!(had[1] < had[0] / 2.0, "{had:.0?}");
    // The other share still makes progress.
    let before = other.launched().unwrap();
    eventually("launches of the other share", || {
        (other.launched().unwrap() > before + 50).then_some(())
    });
}
