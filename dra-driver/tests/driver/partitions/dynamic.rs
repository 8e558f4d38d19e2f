//! Mode `dynamic`: MIG mode of a simulated H100 follows the claims.

use drava_api::node_profile::{Mode, NodeSettings};

use super::*;
use crate::fixture::Allocated::{Share, Whole};

/// Two H100 in mode `dynamic`, MIG mode off.
fn dynamic(yaml: &str) -> Option<PartitionedNode> {
    if lacks_device_files() {
        return None;
    }
    let mut node = PartitionedNode::of(Machine::start(yaml).unwrap());
    let gpus = node.inventory.nvml.gpus.iter().map(|gpu| {
        let settings = GpuSettings {
            mode: Mode::Dynamic,
            ..GpuSettings::default()
        };
        (gpu.uuid.to_string(), settings)
    });
    let settings = NodeSettings {
        gpus: gpus.collect(),
        ..NodeSettings::default()
    };
    node.inventory.settings = Some(settings);
    Some(node)
}

impl PartitionedNode {
    fn is_mig_enabled(&self) -> bool {
        self.library.is_mig_enabled(&self.gpu(0).uuid).unwrap()
    }
}

#[test]
fn gpu_goes_from_shares_to_partitions_to_whole_and_back() {
    let Some(node) = dynamic(H100X2) else { return };
    node.prepare(1, &[Share(0, "8Gi", "30")]).unwrap();
    assert!(!node.is_mig_enabled());
    let error = node.error(2, &[Partition(0, "1g.10gb", 6)]);
    assert!(error.contains("uses the GPU as shares"), "{error}");
    assert!(!node.is_mig_enabled(), "switched under a share");
    node.unprepare(1).unwrap();

    node.prepare(2, &[Partition(0, "1g.10gb", 6)]).unwrap();
    node.prepare(3, &[Partition(0, "3g.40gb", 0)]).unwrap();
    assert!(node.is_mig_enabled());
    assert_eq!(node.starts(), [0, 6]);
    let error = node.error(4, &[Whole(0)]);
    assert!(error.contains("uses the GPU as MIG partitions"), "{error}");
    node.unprepare(2).unwrap();
    node.unprepare(3).unwrap();

    node.prepare(4, &[Whole(0)]).unwrap();
    assert!(!node.is_mig_enabled());
    node.unprepare(4).unwrap();
    node.prepare(5, &[Share(0, "8Gi", "30")]).unwrap();
    node.unprepare(5).unwrap();
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
}

#[test]
fn names_program_that_keeps_mig_mode() {
    let Some(node) = dynamic(H100X2) else { return };
    let root = MachineRoot::new(node.machine.root());
    let (mut monitor, _) = Connection::open(&root, ClientKind::Cuda).unwrap();
    let gpu = GpuIndex(0);
    monitor.request(&Request::CreateContext { gpu }).unwrap();
    // A monitor without a context, as `/proc` shows it.
    let process = node.node.root.path().join("proc/77");
    std::fs::create_dir_all(process.join("fd")).unwrap();
    std::fs::write(process.join("comm"), "dcgm-exporter\n").unwrap();
    std::os::unix::fs::symlink("/dev/nvidia0", process.join("fd/5")).unwrap();

    let error = node.error(1, &[Partition(0, "1g.10gb", 6)]);
    assert!(
        error.contains("device gpu-0-mig-1g-10gb-6")
            && error.contains("cannot switch MIG mode of GPU")
            && error.contains("dcgm-exporter (process 77)"),
        "{error}"
    );
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
    let pending = node.library.inventory().unwrap().gpus.swap_remove(0).mig;
    assert!(
        matches!(pending, Mig::Capable { pending: false, .. }),
        "a reset would switch the mode"
    );

    drop(monitor);
    node.machine
        .wait_for_gpu(0, |gpu| gpu.processes.is_empty())
        .unwrap();
    node.prepare(1, &[Partition(0, "1g.10gb", 6)]).unwrap();
}

#[test]
fn foreign_instance_keeps_mig_mode() {
    let Some(node) = dynamic(H100X2) else { return };
    PartitionedNode::enable(&node.machine);
    let foreign = node.create_foreign("1g.10gb", 2);
    for results in [[Share(0, "8Gi", "30")], [Whole(0)]] {
        let error = node.error(1, &results);
        assert!(
            error.contains("MIG instance") && error.contains("slices 2:1"),
            "{error}"
        );
    }
    assert_eq!(node.instances(0), [foreign]);
    node.prepare(2, &[Partition(0, "1g.10gb", 6)]).unwrap();
    assert_eq!(node.starts(), [2, 6]);
}
