//! Shares that grow and shrink while their programs run: the agent writes the amounts of the record to the limits page.

use std::mem::offset_of;

use drava_dra_driver::node::claim::ClaimRef;
use drava_dra_driver::prepare::record::RecordStore;
use drava_dra_driver::prepare::{Grant, Share};
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};

use crate::node::{GIB, TestNode, eventually};
use crate::virtual_clock::{FakeProcess, SECOND_US, VirtualClockAgent};

/// Adds 2 GiB and 30% of the GPU's time to a share of 4 GiB.
fn grow(share: &mut Share) {
    share.grants.push(Grant {
        claim: ClaimRef {
            namespace: "default".to_owned(),
            name: "more".to_owned(),
            uid: gpu_node::claim_uid(9).unwrap(),
        },
        memory_bytes: 2 * GIB,
        cores: 30,
        slots: 1,
        is_ending: false,
    });
}

fn end_growth(share: &mut Share) {
    share.grants[0].is_ending = true;
}

/// Returns the command that takes this memory, in two allocations.
fn take(gib: u64) -> String {
    format!("memory {}", gib * GIB / 2)
}

fn node() -> TestNode {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(4 * GIB));
    node
}

/// Waits until the page has this memory limit.
fn await_limit(node: &TestNode, gib: u64) {
    eventually(&format!("a limit of {gib} GiB"), || {
        (node.page(1).memory_limit_bytes == Some(gib * GIB)).then_some(())
    });
}

#[test]
fn program_gets_what_its_share_gains() {
    let node = node();
    let _agent = node.agent();
    let mut tenant = node.tenant(1);
    let five = take(5);
    assert!(tenant.ok(&five).is_err(), "5 GiB of 4");
    tenant.ok("memory 0").unwrap();
    node.node.change_record(1, grow).unwrap();
    await_limit(&node, 6);
    assert_eq!(node.page(1).cores.percent(), 30);
    tenant.ok(&five).unwrap();
}

/// What is given back depends on it: no limit follows from an earlier record.
#[test]
fn record_is_followed_when_the_limit_is_written() {
    let node = node();
    let config = node.config();
    let followed = config.followed.clone();
    let (claim, store) = (
        gpu_node::claim_uid(1).unwrap(),
        RecordStore::new(node.node.layout().claims()),
    );
    assert_eq!(followed.version_of(&claim), None);
    let _agent = node.agent_with(config);
    for (change, gib) in [(grow as fn(&mut Share), 6), (end_growth, 4)] {
        node.node.change_record(1, change).unwrap();
        let version = store.version(&claim);
        eventually("the newest record", || {
            (followed.version_of(&claim) == version).then_some(())
        });
        assert_eq!(node.page(1).memory_limit_bytes, Some(gib * GIB));
    }
}

#[test]
fn share_that_uses_its_growth_keeps_it_until_it_frees() {
    let node = node();
    node.node.change_record(1, grow).unwrap();
    let _agent = node.agent();
    await_limit(&node, 6);
    let mut tenant = node.tenant(1);
    tenant.ok(&take(5)).unwrap();
    node.node.change_record(1, end_growth).unwrap();
    // Cores are given back at once: nothing holds them.
    eventually("no guarantee", || {
        (node.page(1).cores.percent() == 0).then_some(())
    });
    assert_eq!(node.page(1).memory_limit_bytes, Some(6 * GIB));
    tenant.ok("memory 0").unwrap();
    await_limit(&node, 4);
    assert!(tenant.ok(&take(5)).is_err(), "5 GiB of 4");
}

/// Its charge stays in the region until another process needs memory.
#[test]
fn memory_of_killed_program_is_given_back() {
    let node = node();
    node.node.change_record(1, grow).unwrap();
    let _agent = node.agent();
    await_limit(&node, 6);
    let mut killed = node.tenant(1);
    killed.ok(&take(5)).unwrap();
    node.node.change_record(1, end_growth).unwrap();
    eventually("no guarantee", || {
        (node.page(1).cores.percent() == 0).then_some(())
    });
    assert_eq!(node.page(1).memory_limit_bytes, Some(6 * GIB));
    killed.kill().unwrap();
    await_limit(&node, 4);
}

/// A damaged record has lost its grants. It gets them again when the API server answers, however late.
#[test]
fn share_whose_record_lost_its_growth_keeps_what_it_uses() {
    let node = node();
    node.node.change_record(1, grow).unwrap();
    let mut agent = VirtualClockAgent::on(node);
    agent.run(SECOND_US);
    let limit = |agent: &VirtualClockAgent| agent.node.page(1).memory_limit_bytes;
    assert_eq!(limit(&agent), Some(6 * GIB));
    let process = FakeProcess::new(&agent.node, 1);
    let use_memory = |gib: u64| {
        process.write(offset_of!(Header, total), gib * GIB);
        process.write(SLOTS_OFFSET + offset_of!(Slot, used_bytes), gib * GIB);
    };
    use_memory(5);
    let lost = |share: &mut Share| share.grants.clear();
    agent.node.node.change_record(1, lost).unwrap();
    agent.run(60 * SECOND_US);
    assert_eq!(agent.node.page(1).cores.percent(), 0);
    assert_eq!(limit(&agent), Some(6 * GIB));
    use_memory(3);
    agent.run(SECOND_US);
    assert_eq!(limit(&agent), Some(4 * GIB));
}

#[test]
fn restarted_agent_follows_what_is_recorded() {
    let node = node();
    let agent = node.agent();
    await_limit(&node, 4);
    drop(agent);
    node.node.change_record(1, grow).unwrap();
    let _agent = node.agent();
    await_limit(&node, 6);
}
