//! Kernels whose local memory libcuda adds to the context of a full share, where `enforcement: required` kills violators.

use std::sync::Arc;

use drava_api::config::Enforcement;
use drava_dra_driver::agent::FindingKind;
use drava_dra_driver::agent::policy::detection::ViolationKind;
use drava_vgpu_abi::Limits;
use gpu_tenants::library;

use super::CONTEXT_BYTES;
use super::driver_growth::{OUT_OF_MEMORY, program};
use crate::escape::Escape;
use crate::node::{GIB, MIB, TestNode, eventually};

const LIMIT: u64 = 4 * GIB;

fn node() -> TestNode {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(LIMIT)
    };
    node.prepare(1, &limits);
    node.prepare(2, &limits);
    node
}

fn start(node: &TestNode) -> Escape {
    let mut command = node.test_bed.machine().command(program());
    command
        .env("LD_PRELOAD", library::shipped().unwrap())
        .env("DRAVA_RUN_DIR", node.node.container(1));
    let mut process = Escape::start(&mut command);
    node.node.add_process(process.pid(), 1).unwrap();
    assert_eq!(process.read_result(), 0);
    process
}

/// Waits until the agent has killed a process of the second share, which it does no sooner than in the first.
fn await_kill(node: &TestNode) {
    let mut uncounted = node.escape(2, "cuMemAlloc_v2", MIB, false);
    assert_eq!(uncounted.exit_signal(), Some(9));
}

#[test]
fn spares_full_share_whose_kernel_needs_local_memory() {
    let node = node();
    let mut config = node.config();
    config.estimate = Arc::new(|_| Some(CONTEXT_BYTES));
    let _agent = node.agent_with(config);
    let mut process = start(&node);
    for step in [64 * MIB, 2 * MIB] {
        assert_eq!(process.send(&format!("fill {step}")), OUT_OF_MEMORY);
    }
    assert_eq!(process.send("kernel local_4096"), 0);
    let used_bytes = node.test_bed.machine().gpu(0).unwrap().used_bytes;
    assert!(used_bytes > LIMIT + 512 * MIB, "{used_bytes}");
    // The agent charges what libvgpu could not see.
    eventually("the excess", || {
        (node.page(1).driver_excess_bytes > 512 * MIB).then_some(())
    });
    await_kill(&node);
    assert!(process.is_running(), "{:?}", node.findings);
    assert_eq!(process.send("fill 2097152"), OUT_OF_MEMORY);
    assert_eq!(process.send("kernel local_4096"), 0);
    let findings = node.findings.lock().unwrap();
    let is_own = |claim: &str| claim == "claim-1";
    assert!(
        findings
            .iter()
            .all(|finding| !is_own(finding.claim.as_str())),
        "{findings:?}"
    );
}

#[test]
fn kills_process_with_more_than_driver_memory() {
    let node = node();
    let _agent = node.agent();
    let mut greedy = node.escape(1, "cuMemAllocUnlisted", 8 * GIB, true);
    assert_eq!(greedy.exit_signal(), Some(9));
    node.await_finding("the kill", |finding| {
        let reason = ViolationKind::OverLimit;
        matches!(finding.kind, FindingKind::Killed { reason: found, .. } if found == reason)
    });
}
