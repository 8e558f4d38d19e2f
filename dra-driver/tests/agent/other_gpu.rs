//! Processes of a share on a GPU that their claim does not have, as in privileged containers.

use drava_api::config::Enforcement;
use drava_dra_driver::agent::FindingKind;
use drava_dra_driver::agent::policy::detection::{
    SuspectedViolation, ViolationChange, ViolationKind,
};
use drava_vgpu_abi::Limits;
use gpu_node::simulated;

use crate::node::{GIB, TestNode};

#[test]
fn reports_process_on_gpu_of_other_claim() {
    let mut node = TestNode::new();
    node.enforcement = Enforcement::Required;
    let other = simulated::uuid(&node.test_bed, 1).unwrap();
    for number in [1, 2] {
        node.prepare(number, &Limits::memory(2 * GIB));
    }
    // The GPU is the whole GPU of the first claim, and no share of the second one.
    node.node.add_whole_gpu(1, &other).unwrap();
    let _agent = node.agent();
    let start = |number| simulated::start_tenant(&node.node, &node.test_bed, 1, number).unwrap();
    let (owner, mut stranger) = (start(1), start(2));
    let found = node.await_finding("the use of the other GPU", |finding| {
        matches!(
            finding.kind,
            FindingKind::Violation(ViolationChange::Confirmed(_))
        )
    });
    let FindingKind::Violation(ViolationChange::Confirmed(SuspectedViolation::OtherGpu {
        pid,
        gpu,
        ..
    })) = &found.kind
    else {
        panic!("{found:?}");
    };
    assert_eq!((found.claim.as_str(), *pid), ("claim-2", stranger.pid()));
    assert_eq!(*gpu, other);
    // No isolation is promised to a container with all device files, so the process is reported only.
    stranger.ok("once 1000").unwrap();
    drop(stranger);
    let cleared = node.await_finding("the end of the use", |finding| {
        finding.kind == FindingKind::Violation(ViolationChange::Cleared(ViolationKind::OtherGpu))
    });
    assert_eq!(cleared.claim.as_str(), "claim-2");
    assert_eq!(
        node.findings.lock().unwrap().len(),
        2,
        "{:?}",
        node.findings
    );
    drop(owner);
}
