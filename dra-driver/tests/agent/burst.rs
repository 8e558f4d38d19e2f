//! Memory beyond the guarantees: lent while no claim holds it, and taken back before a claim gets it, with `libvgpu.so` on a simulated
//! machine. The GPU gives its shares 16 GiB.

use std::mem::offset_of;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use drava_api::config::Priority;
use drava_dra_driver::agent::node::nvml_observer::{BusyProcesses, Observation, ObservedProcess};
use drava_dra_driver::agent::share_metrics::ShareMetrics;
use drava_dra_driver::agent::{Agent, Config, Finding, FindingKind};
use drava_dra_driver::node::claim::ClaimRef;
use drava_dra_driver::node::mounts::MountedShare;
use drava_dra_driver::node::process::Processes;
use drava_dra_driver::prepare::apply::{MissedReclaims, Unreturned};
use drava_dra_driver::prepare::{Grant, Share};
use drava_nvml::GpuUuid;
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::region::Header;
use tokio::sync::watch;

use crate::node::{GIB, GPU, MIB, RunningAgent, TestNode, eventually};
use crate::virtual_clock::FakeProcess;

/// Memory of a context.
const CONTEXT_BYTES: u64 = 528 * MIB;

/// Returns the limits of a share with this memory.
pub(crate) fn limits(gib: u64) -> Limits {
    Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(gib * GIB)
    }
}

fn config(node: &TestNode) -> Config {
    Config {
        estimate: Arc::new(|_| Some(CONTEXT_BYTES)),
        allocatable: Arc::new(|_| Some(16 * GIB)),
        ..node.config()
    }
}

fn agent(node: &TestNode) -> RunningAgent {
    node.agent_with(config(node))
}

/// Returns a node with a share of 4 GiB that may use 12 GiB.
fn node() -> TestNode {
    let node = TestNode::new();
    prepare_burst(&node, 1, 4, 12);
    node
}

fn prepare_burst(node: &TestNode, number: u32, guarantee_gib: u64, limit_gib: u64) {
    node.prepare(number, &limits(guarantee_gib));
    let set = |share: &mut Share| share.limit_bytes = Some(limit_gib * GIB);
    node.node.change_record(number, set).unwrap();
}

/// Prepares a claim beside shares that can burst, as the driver does: its page begins without memory.
fn prepare_beside(node: &TestNode, number: u32, gib: u64) {
    node.prepare(number, &limits(0));
    let set = |share: &mut Share| share.memory_bytes = gib * GIB;
    node.node.change_record(number, set).unwrap();
}

/// Returns the command that takes this memory, in two allocations.
fn take(gib: u64) -> String {
    format!("memory {}", gib * GIB / 2)
}

#[track_caller]
fn await_limit(node: &TestNode, number: u32, gib: u64) {
    eventually(&format!("a limit of {gib} GiB of share {number}"), || {
        (node.page(number).memory_limit_bytes == Some(gib * GIB)).then_some(())
    });
}

/// Returns what a companion adds to a share.
pub(crate) fn grant(gib: u64, is_ending: bool) -> Grant {
    Grant {
        claim: ClaimRef {
            namespace: "default".to_owned(),
            name: "more".to_owned(),
            uid: gpu_node::claim_uid(9).unwrap(),
        },
        memory_bytes: gib * GIB,
        cores: 0,
        slots: 1,
        is_ending,
    }
}

fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A killed process is a zombie until its parent waits for it.
    !stat.is_empty() && !stat.contains(") Z ")
}

fn is_reclaimed(finding: &Finding, number: u32, pid: u32, for_claim: &str) -> bool {
    let FindingKind::Reclaimed { pid: killed, claim } = &finding.kind else {
        return false;
    };
    finding.share == TestNode::share_id(number) && *killed == pid && claim.name == for_claim
}

#[test]
fn share_uses_free_memory_up_to_its_limit() {
    let node = node();
    let agent = agent(&node);
    await_limit(&node, 1, 12);
    assert!(node.tenant(1).ok(&take(13)).is_err(), "13 GiB of 12");
    let mut tenant = node.tenant(1);
    tenant.ok(&take(10)).unwrap();
    // Neither the end of the agent nor another one takes it away.
    drop(agent);
    let _agent = self::agent(&node);
    prepare_burst(&node, 2, 1, 2);
    await_limit(&node, 2, 2);
    assert_eq!(node.page(1).memory_limit_bytes, Some(12 * GIB));
    assert!(is_alive(tenant.pid()));
}

#[test]
fn unused_room_is_taken_back_without_end_of_process() {
    let node = node();
    let _agent = agent(&node);
    await_limit(&node, 1, 12);
    let mut first = node.tenant(1);
    first.ok(&take(8)).unwrap();
    prepare_beside(&node, 2, 6);
    await_limit(&node, 2, 6);
    await_limit(&node, 1, 10);
    let mut second = node.tenant(2);
    second.ok(&take(5)).unwrap();
    assert!(first.ok(&take(11)).is_err(), "11 GiB of 10");
    assert!(is_alive(first.pid()));
    assert_eq!(node.findings.lock().unwrap().as_slice(), []);
}

#[test]
fn process_that_keeps_lent_memory_is_killed_before_claim_gets_it() {
    let node = node();
    let _agent = agent(&node);
    await_limit(&node, 1, 12);
    let mut first = node.tenant(1);
    first.ok(&take(11)).unwrap();
    prepare_beside(&node, 2, 6);
    eventually("memory of the second", || {
        let limit = node.page(2).memory_limit_bytes;
        // Never before the first has given it back.
        assert!(
            limit == Some(0) || !is_alive(first.pid()),
            "a promise of memory in use"
        );
        (limit == Some(6 * GIB)).then_some(())
    });
    let mut second = node.tenant(2);
    second.ok(&take(5)).unwrap();
    node.await_finding("the kill", |finding| {
        is_reclaimed(finding, 1, first.pid(), "claim-2")
    });
    await_limit(&node, 1, 10);
    assert_eq!(
        node.findings.lock().unwrap().len(),
        1,
        "{:?}",
        node.findings
    );
}

/// The new claim may use more than its guarantee itself.
#[test]
fn claim_with_limit_waits_for_its_guarantee() {
    let node = node();
    let _agent = agent(&node);
    await_limit(&node, 1, 12);
    let mut first = node.tenant(1);
    first.ok(&take(11)).unwrap();
    node.prepare(2, &limits(0));
    let set = |share: &mut Share| {
        share.memory_bytes = 6 * GIB;
        share.limit_bytes = Some(8 * GIB);
    };
    node.node.change_record(2, set).unwrap();
    eventually("memory of the second", || {
        let limit = node.page(2).memory_limit_bytes;
        assert!(
            limit == Some(0) || !is_alive(first.pid()),
            "a promise of memory in use"
        );
        (limit >= Some(6 * GIB)).then_some(())
    });
}

/// The record of the second exists when no agent runs, as after a crash of the driver between record and limits.
#[test]
fn agent_that_starts_takes_back_for_claim_that_waits() {
    let node = node();
    let agent = node.agent_with(config(&node));
    await_limit(&node, 1, 12);
    let mut first = node.tenant(1);
    first.ok(&take(11)).unwrap();
    drop(agent);
    prepare_beside(&node, 2, 6);
    let _agent = self::agent(&node);
    await_limit(&node, 2, 6);
    assert!(!is_alive(first.pid()));
}

#[test]
fn growth_takes_lent_memory_back() {
    let node = node();
    node.prepare(2, &limits(2));
    let _agent = agent(&node);
    await_limit(&node, 1, 12);
    let mut first = node.tenant(1);
    first.ok(&take(11)).unwrap();
    let grow = |share: &mut Share| share.grants.push(grant(4, false));
    node.node.change_record(2, grow).unwrap();
    await_limit(&node, 2, 6);
    assert!(!is_alive(first.pid()));
    node.await_finding("the kill", |finding| {
        is_reclaimed(finding, 1, first.pid(), "claim-2")
    });
}

#[test]
fn priority_decides_who_gets_free_memory() {
    let node = TestNode::new();
    prepare_burst(&node, 1, 2, 12);
    prepare_burst(&node, 2, 2, 8);
    let prefer = |share: &mut Share| share.priority = Priority::try_from(5).unwrap();
    node.node.change_record(2, prefer).unwrap();
    let _agent = agent(&node);
    await_limit(&node, 2, 8);
    await_limit(&node, 1, 8);
}

/// The region of the tenant shows almost no memory, and NVML shows 11 GiB.
#[test]
fn forged_use_is_not_taken_for_memory_given_back() {
    let node = node();
    let _agent = agent(&node);
    await_limit(&node, 1, 12);
    let mut hidden = node.escape(1, "cuMemAllocUnlisted", 11 * GIB, true);
    prepare_beside(&node, 2, 6);
    eventually("memory of the second", || {
        let limit = node.page(2).memory_limit_bytes;
        assert!(
            limit == Some(0) || !is_alive(hidden.pid()),
            "a promise of memory in use"
        );
        (limit == Some(6 * GIB)).then_some(())
    });
    assert_eq!(hidden.exit_signal(), Some(9));
}

/// Without NVML's list of processes nothing could be taken back safely, so nothing is lent.
#[test]
fn nothing_is_lent_without_nvml() {
    let node = TestNode::new();
    let closed = Config {
        open: Arc::new(|| Err("no NVML".to_owned())),
        ..config(&node)
    };
    // It is followed when the agent has started.
    node.prepare(3, &limits(1));
    let grow = |share: &mut Share| share.memory_bytes = 2 * GIB;
    node.node.change_record(3, grow).unwrap();
    let _agent = node.agent_with(closed);
    await_limit(&node, 3, 2);
    prepare_burst(&node, 1, 4, 12);
    // A guarantee is raised all the same.
    prepare_beside(&node, 2, 6);
    await_limit(&node, 2, 6);
    assert_eq!(node.page(1).memory_limit_bytes, Some(4 * GIB));
}

/// Other GPUs have nothing to do with a claim that cannot be read.
#[test]
fn damaged_record_holds_up_claims_of_its_gpus_only() {
    let node = node();
    node.prepare_on("GPU-00000000-0000-0000-0000-000000000009", 9, &limits(1));
    node.damage_record(9);
    let mut agent = SteppedAgent::new(&node);
    agent.step_until("a limit of 12 GiB", || limit_gib(&node, 1) == 12);
    prepare_beside(&node, 2, 6);
    agent.step_until("the guarantee", || limit_gib(&node, 2) == 6);
    node.prepare(8, &limits(1));
    node.damage_record(8);
    prepare_beside(&node, 3, 1);
    agent.step(50);
    assert_eq!(limit_gib(&node, 3), 0, "beside unknown shares");
}

/// Between two ticks of the agent the claim is unprepared, and prepared again with an empty page.
#[test]
fn claim_that_is_prepared_again_gets_its_guarantee() {
    let node = node();
    let mut agent = SteppedAgent::new(&node);
    agent.step_until("a limit of 12 GiB", || limit_gib(&node, 1) == 12);
    prepare_beside(&node, 2, 6);
    agent.step_until("the guarantee", || limit_gib(&node, 2) == 6);
    // A list of NVML would show that the page was replaced.
    agent.is_observed = false;
    node.unprepare(2);
    std::fs::remove_dir_all(node.node.container(2)).unwrap();
    prepare_beside(&node, 2, 6);
    agent.step_until("the guarantee again", || limit_gib(&node, 2) == 6);
}

/// A process in the container of a share, which has no context; killed on drop.
struct Sleeper(Child);

impl Sleeper {
    fn start(node: &TestNode, number: u32, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new("sleep");
        prepare(command.arg("1000"));
        let child = command.spawn().unwrap();
        // Its files of `/proc` are those of the program from here on, as for other processes.
        node.node.add_process(child.id(), number).unwrap();
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts with share 1, which has charged 11 GiB of 12 in a slot, and no processes by NVML.
fn charged(node: &TestNode, exported_gib: u64) -> (SteppedAgent, FakeProcess) {
    let mut agent = SteppedAgent::new(node);
    agent.step_until("a limit of 12 GiB", || limit_gib(node, 1) == 12);
    let process = FakeProcess::new(node, 1);
    process.charge(11 * GIB, exported_gib * GIB);
    (agent, process)
}

/// The parent is dead, and its child keeps the open files of the GPU, by which memory stays allocated. NVML lists neither.
#[test]
fn child_that_keeps_memory_of_dead_process_is_killed() {
    let node = node();
    let (mut agent, process) = charged(&node, 0);
    let child = Sleeper::start(&node, 1, |command| process.leave_lock_to(command));
    prepare_beside(&node, 2, 6);
    let pid = child.pid();
    agent.step_until("the guarantee", || {
        let limit = limit_gib(&node, 2);
        assert!(limit == 0 || !is_alive(pid), "a promise of memory in use");
        limit == 6
    });
    assert!(is_reclaimed(&agent.found[0], 1, pid, "claim-2"));
}

#[test]
fn exported_memory_of_dead_process_is_taken_back() {
    let node = node();
    let (mut agent, process) = charged(&node, 11);
    drop(process);
    prepare_beside(&node, 2, 6);
    agent.step_until("the guarantee", || limit_gib(&node, 2) == 6);
}

/// Only memory that a process has explains that it is killed before others of the share.
#[test]
fn process_without_excess_is_not_killed_for_dead_process() {
    let node = node();
    let (mut agent, process) = charged(&node, 11);
    drop(process);
    let later = Sleeper::start(&node, 1, |_| ());
    let config = config(&node);
    let mut processes = Processes::new(config.proc_root, config.layout.claims());
    agent.processes.push(ObservedProcess {
        pid: later.pid(),
        used_bytes: Some(100 * MIB),
        info: processes.describe(later.pid()).unwrap(),
    });
    prepare_beside(&node, 2, 6);
    agent.step_until("a lower limit", || limit_gib(&node, 1) == 4);
    agent.step(6);
    let is_kill = |finding: &&Finding| matches!(finding.kind, FindingKind::Reclaimed { .. });
    assert_eq!(agent.found.iter().find(is_kill), None);
    assert!(is_alive(later.pid()));
    // Without a context it has nothing open.
    agent.processes.clear();
    agent.step_until("the guarantee", || limit_gib(&node, 2) == 6);
    assert!(is_alive(later.pid()));
}

/// A process that ends holds up its own share only.
#[test]
fn ending_process_holds_up_its_own_share_only() {
    let node = node();
    let mut agent = SteppedAgent::new(&node);
    agent.step_until("a limit of 12 GiB", || limit_gib(&node, 1) == 12);
    agent.ending = vec![TestNode::mounted(1)];
    prepare_beside(&node, 2, 6);
    agent.step(50);
    assert_eq!(limit_gib(&node, 2), 0);
    agent.ending = vec![TestNode::mounted(7)];
    agent.step_until("the guarantee", || limit_gib(&node, 2) == 6);
}

/// Returns a node with a share of 4 GiB that may use 13 GiB, also unused guarantees, and one of 12 GiB that lends.
fn lending_node() -> TestNode {
    let node = TestNode::new();
    prepare_burst(&node, 1, 4, 13);
    let set = |share: &mut Share| share.bursts_idle = true;
    node.node.change_record(1, set).unwrap();
    node.prepare(2, &limits(12));
    let set = |share: &mut Share| share.lends_idle = true;
    node.node.change_record(2, set).unwrap();
    node
}

fn lent_gib(node: &TestNode, number: u32) -> u64 {
    node.page(number).lent_bytes / GIB
}

/// Returns the sum of what the pages of the lending node promise, bytes.
fn promised_bytes(node: &TestNode) -> u64 {
    let page = |number| {
        let limits = node.page(number);
        limits.memory_limit_bytes.unwrap() - limits.lent_bytes
    };
    page(1) + page(2)
}

/// Both programs use libvgpu. The second needs what it is guaranteed while the first uses most of it.
#[test]
fn lender_gets_its_guarantee_while_others_use_it() {
    let node = lending_node();
    let _agent = agent(&node);
    let mut lender = node.tenant(2);
    eventually("a limit of 13 GiB", || {
        assert!(promised_bytes(&node) <= 16 * GIB, "promised twice");
        (limit_gib(&node, 1) == 13).then_some(())
    });
    assert_eq!(node.page(2).memory_limit_bytes, Some(12 * GIB));
    let mut borrower = node.tenant(1);
    borrower.ok(&take(12)).unwrap();
    // Within its margin it waits for nothing, and no process ends.
    lender.ok(&format!("memory {}", 256 * MIB)).unwrap();
    assert!(is_alive(borrower.pid()));
    // The first of the two allocations waits until the borrower has ended.
    lender.ok(&take(10)).unwrap();
    assert!(!is_alive(borrower.pid()));
    assert_eq!(lent_gib(&node, 2), 0);
    assert!(promised_bytes(&node) <= 16 * GIB, "promised twice");
    node.await_finding("the kill", |finding| {
        is_reclaimed(finding, 1, borrower.pid(), "claim-2")
    });
    // More than its guarantee is denied as ever.
    assert!(lender.ok(&take(4)).is_err());
}

#[test]
fn reports_what_share_lends() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    let lent_by = |agent: &SteppedAgent, number: u32| {
        let metrics = agent.metrics.borrow();
        let mut shares = metrics.iter();
        let share = shares.find(|share| share.share == TestNode::share_id(number));
        share.map(|share| share.lent_bytes)
    };
    agent.step_until("the loan", || lent_gib(&node, 2) == 9);
    // Metrics are sent once a second.
    agent.step(11);
    assert_eq!(lent_by(&agent, 2), Some(Some(9 * GIB)));
    assert_eq!(lent_by(&agent, 1), Some(None), "a share that borrows");
}

/// The borrower has freed most of what it was lent: the lender gets its guarantee, and no process ends.
#[test]
fn unused_loan_is_returned_without_end_of_process() {
    let node = lending_node();
    let _agent = agent(&node);
    let mut lender = node.tenant(2);
    eventually("a limit of 13 GiB", || {
        (limit_gib(&node, 1) == 13).then_some(())
    });
    let mut borrower = node.tenant(1);
    borrower.ok(&take(2)).unwrap();
    lender.ok(&take(11)).unwrap();
    assert!(is_alive(borrower.pid()));
    assert_eq!(node.findings.lock().unwrap().as_slice(), []);
}

/// Without `memory.lendIdle` of its class, without `memory.burst: idle` of the other one, nothing is lent.
#[test]
fn lends_only_where_both_classes_allow_it() {
    for (bursts, lends) in [(false, true), (true, false)] {
        let node = lending_node();
        let set = |share: &mut Share| share.bursts_idle = bursts;
        node.node.change_record(1, set).unwrap();
        let set = |share: &mut Share| share.lends_idle = lends;
        node.node.change_record(2, set).unwrap();
        let mut agent = SteppedAgent::new(&node);
        agent.step(300);
        assert_eq!((limit_gib(&node, 1), lent_gib(&node, 2)), (4, 0));
    }
}

/// A process that ends may have memory that neither region nor NVML shows.
#[test]
fn borrower_waits_until_use_of_lender_is_known() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    agent.ending = vec![TestNode::mounted(2)];
    agent.step(300);
    assert_eq!((limit_gib(&node, 1), lent_gib(&node, 2)), (4, 9));
    agent.ending.clear();
    agent.step_until("a limit of 13 GiB", || limit_gib(&node, 1) == 13);
}

/// What NVML shows counts, whatever the region of the lender says.
#[test]
fn lends_nothing_that_is_in_use_by_nvml() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    let lender = FakeProcess::new(&node, 2);
    agent.processes = vec![ObservedProcess {
        used_bytes: Some(8 * GIB),
        ..lender.listed(2)
    }];
    agent.step_until("a loan", || node.page(2).lent_bytes > 0);
    agent.step(100);
    // 12 GiB without 8 GiB and a margin of an eighth.
    assert_eq!(node.page(2).lent_bytes, 2 * GIB + GIB / 2);
    assert!(promised_bytes(&node) <= 16 * GIB);
}

/// The tenant of the lender writes what it likes: it gets its guarantee, and nothing of the other share.
#[test]
fn forged_demand_gains_no_more_than_the_guarantee() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    let lender = FakeProcess::new(&node, 2);
    let demand = |us: u64| lender.write(offset_of!(Header, memory_demand_us), us);
    // Nothing is lent so far: the demand is no reason for anything.
    demand(agent.now_us);
    agent.step_until("a limit of 13 GiB", || limit_gib(&node, 1) == 13);
    // Times that have passed, or are to come, are no demand.
    for forged in [
        1,
        agent.now_us - 20_000_000,
        u64::MAX,
        agent.now_us + 60_000_000,
    ] {
        demand(forged);
        agent.step(20);
        assert_eq!(limit_gib(&node, 1), 13, "{forged}");
    }
    // NVML shows that it has what it is guaranteed, so its demand is void. What it really uses is not lent.
    agent.processes = vec![ObservedProcess {
        used_bytes: Some(GIB),
        ..lender.listed(2)
    }];
    agent.step(5);
    demand(agent.now_us);
    agent.step_until("the guarantee", || lent_gib(&node, 2) == 0);
    assert_eq!(limit_gib(&node, 1), 4);
    let guarantee = node.page(2).memory_limit_bytes;
    assert_eq!(guarantee, Some(12 * GIB));
    // It lends nothing for a while.
    agent.step(50);
    assert_eq!(lent_gib(&node, 2), 0);
}

/// The lender has all of its guarantee by NVML, and claims to wait: no process of others ends for it.
#[test]
fn demand_of_share_that_has_its_guarantee_is_void() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    let lender = FakeProcess::new(&node, 2);
    agent.processes = vec![ObservedProcess {
        used_bytes: Some(12 * GIB),
        ..lender.listed(2)
    }];
    let borrower = Sleeper::start(&node, 1, |_| ());
    for _ in 0..40 {
        lender.write(offset_of!(Header, memory_demand_us), agent.now_us);
        agent.step(10);
        assert_eq!((limit_gib(&node, 1), lent_gib(&node, 2)), (4, 0));
    }
    assert!(is_alive(borrower.pid()));
    assert_eq!(agent.found, []);
}

/// The region of the lender cannot be read: it may use all of its guarantee.
#[test]
fn lends_nothing_of_share_with_damaged_region() {
    let node = lending_node();
    std::fs::write(node.region(2), b"damaged").unwrap();
    let mut agent = SteppedAgent::new(&node);
    agent.step(300);
    assert_eq!((limit_gib(&node, 1), lent_gib(&node, 2)), (4, 0));
}

/// The agent ends at any time, and another one goes on.
#[test]
fn loan_outlives_the_agent() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    agent.step_until("a limit of 13 GiB", || limit_gib(&node, 1) == 13);
    let mut another = SteppedAgent::new(&node);
    another.now_us = agent.now_us;
    drop(agent);
    another.step(20);
    assert_eq!((limit_gib(&node, 1), lent_gib(&node, 2)), (13, 9));
    // No share borrows any more.
    node.unprepare(1);
    another.step_until("the guarantee", || lent_gib(&node, 2) == 0);
}

/// A companion of the lender is given back while a part of the guarantee is lent.
#[test]
fn share_that_shrinks_takes_its_loan_back_first() {
    let node = lending_node();
    let shrink = |share: &mut Share| {
        share.memory_bytes = 6 * GIB;
        share.grants.push(grant(6, true));
    };
    let mut agent = SteppedAgent::new(&node);
    agent.step_until("a limit of 13 GiB", || limit_gib(&node, 1) == 13);
    node.node.change_record(2, shrink).unwrap();
    agent.step_until("a limit of 6 GiB", || {
        let limits = node.page(2);
        let limit = limits.memory_limit_bytes.unwrap();
        assert!(limit == 12 * GIB || limits.lent_bytes == 0, "{limits:?}");
        assert!(promised_bytes(&node) <= 16 * GIB);
        limit == 6 * GIB
    });
}

/// A process that does not end keeps what a lender needs.
#[test]
fn late_guarantee_of_lender_is_counted() {
    let node = lending_node();
    let mut agent = SteppedAgent::new(&node);
    let (lender, borrower) = (FakeProcess::new(&node, 2), FakeProcess::new(&node, 1));
    agent.step_until("a limit of 13 GiB", || limit_gib(&node, 1) == 13);
    // Its process cannot be killed: it ends in the kernel.
    borrower.charge(12 * GIB, 0);
    agent.ending = vec![TestNode::mounted(1)];
    for _ in 0..15 {
        lender.write(offset_of!(Header, memory_demand_us), agent.now_us);
        agent.step(1);
    }
    assert_eq!(agent.missed(), 0);
    agent.step(30);
    assert_eq!((agent.missed(), lent_gib(&node, 2)), (1, 9));
}

fn limit_gib(node: &TestNode, number: u32) -> u64 {
    node.page(number).memory_limit_bytes.unwrap() / GIB
}

/// An agent in virtual time, on a GPU with these processes by NVML.
pub(crate) struct SteppedAgent {
    agent: Agent,
    pub(crate) now_us: u64,
    pub(crate) processes: Vec<ObservedProcess>,
    ending: Vec<MountedShare>,
    pub(crate) is_observed: bool,
    found: Vec<Finding>,
    missed: MissedReclaims,
    metrics: watch::Receiver<Arc<[ShareMetrics]>>,
}

impl SteppedAgent {
    pub(crate) fn new(node: &TestNode) -> Self {
        let closed = Config {
            open: Arc::new(|| Err("the test provides the observations".to_owned())),
            ..config(node)
        };
        Self {
            missed: closed.missed_reclaims.clone(),
            metrics: closed.metrics.subscribe(),
            agent: Agent::new(closed),
            now_us: 1_000_000_000,
            processes: Vec::new(),
            ending: Vec::new(),
            is_observed: true,
            found: Vec::new(),
        }
    }

    /// Returns how many guarantees were not met in time.
    fn missed(&self) -> u64 {
        let all = Unreturned::ALL.map(|cause| self.missed.of(cause).get());
        all.iter().sum()
    }

    /// Runs ticks of 100 ms, each with a list of the processes.
    pub(crate) fn step(&mut self, count: u32) {
        for _ in 0..count {
            self.now_us += 100_000;
            let observation = Observation {
                gpu: GpuUuid::new(GPU.to_owned()),
                requested_us: self.now_us,
                is_extra: false,
                is_complete: true,
                ending: self.ending.clone(),
                processes: Some(self.processes.clone()),
                busy: BusyProcesses::NotRead,
            };
            if self.is_observed {
                let found = self.agent.scan(self.now_us, &observation);
                self.found.extend(found);
            }
            self.found.extend(self.agent.poll(self.now_us));
        }
    }

    #[track_caller]
    fn step_until(&mut self, what: &str, is_met: impl Fn() -> bool) {
        for _ in 0..600 {
            self.step(1);
            if is_met() {
                return;
            }
            // Killed processes end in real time.
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("not within 60 s: {what}");
    }
}
