//! Repair of partitions after crashes, reboots and changes of MIG mode.

use super::*;

#[test]
fn completes_after_crash_at_any_step_of_prepare() {
    if lacks_device_files() {
        return;
    }
    let both = [Partition(0, "1g.5gb", 6), Partition(1, "2g.10gb", 4)];
    let mut step = 0;
    loop {
        let node = PartitionedNode::start(&a100x2());
        let cut = CrashingEffects::after(step, node.effects(BOOT));
        let is_complete = node.prepare_with(cut, 1, &both).is_ok();
        node.prepare(1, &both).unwrap();
        assert_eq!(
            (node.instances(0).len(), node.instances(1).len()),
            (1, 1),
            "step {step}"
        );
        node.unprepare(1).unwrap();
        assert!(
            node.instances(0).is_empty() && node.instances(1).is_empty(),
            "step {step}"
        );
        if is_complete {
            break;
        }
        step += 1;
    }
    // Record, two instances, spec.
    assert!(step >= 4, "{step} steps");
}

#[test]
fn removes_instances_after_crash_at_any_step() {
    if lacks_device_files() {
        return;
    }
    let both = [Partition(0, "1g.5gb", 6), Partition(1, "2g.10gb", 4)];
    for step in 0..6 {
        // During prepare.
        let node = PartitionedNode::start(&a100x2());
        let cut = CrashingEffects::after(step, node.effects(BOOT));
        let _ = node.prepare_with(cut, 1, &both);
        node.unprepare(1).unwrap();
        assert!(
            node.instances(0).is_empty() && node.instances(1).is_empty(),
            "step {step}"
        );
        // During unprepare.
        node.prepare(1, &both).unwrap();
        let cut = CrashingEffects::after(step, node.effects(BOOT));
        let _ = node.node.applier(cut).unprepare(&claim_ref(1));
        node.unprepare(1).unwrap();
        assert!(
            node.instances(0).is_empty() && node.instances(1).is_empty(),
            "step {step}"
        );
        assert_eq!(node.node.claim_state().0, Vec::<String>::new());
    }
}

#[test]
fn completes_instance_without_compute_instance() {
    let Some(node) = a100() else { return };
    let device = [Partition(0, "1g.5gb", 6)];
    node.prepare(1, &device).unwrap();
    // As if the driver had died between both creations.
    let instance = node.instances(0).remove(0);
    let root = MachineRoot::new(node.machine.root());
    let (mut connection, _) = Connection::open(&root, ClientKind::Nvml).unwrap();
    let request = MigRequest::DestroyComputeInstance {
        instance: simulator_machine::protocol::InstanceId {
            gpu_instance: instance.id,
            compute: instance.compute_instances[0].id,
        },
    };
    let gpu = GpuIndex(0);
    connection.request(&Request::Mig { gpu, request }).unwrap();
    assert!(node.instances(0)[0].compute_instances.is_empty());
    node.prepare(1, &device).unwrap();
    assert_eq!(node.instances(0)[0].compute_instances.len(), 1);
}

#[test]
fn recreates_instance_after_reboot() {
    const NEXT_BOOT: &str = "7c1d2f0e-0000-4000-8000-000000000002";
    let Some(node) = a100() else { return };
    let device = [Partition(0, "1g.5gb", 6)];
    node.prepare(1, &device).unwrap();
    let gpu = GpuIndex(0);
    node.machine.control(&Command::Reset { gpu }).unwrap();
    assert!(node.instances(0).is_empty());
    let effects = node.effects(NEXT_BOOT);
    let record = node.prepare_with(effects, 1, &device).unwrap();
    assert_eq!(record.devices[0].partition().unwrap().boot_id, NEXT_BOOT);
    assert_eq!(node.starts(), [6]);
    node.node
        .applier(node.effects(NEXT_BOOT))
        .unprepare(&claim_ref(1))
        .unwrap();
    assert!(node.instances(0).is_empty());

    // An instance that the administrator created after the reboot is not that of the record.
    node.prepare(2, &device).unwrap();
    node.machine.control(&Command::Reset { gpu }).unwrap();
    let foreign = node.create_foreign("1g.5gb", 6);
    node.node
        .applier(node.effects(NEXT_BOOT))
        .unprepare(&claim_ref(2))
        .unwrap();
    assert_eq!(node.instances(0), [foreign]);
}

#[test]
fn unprepares_after_mig_mode_was_switched_off() {
    let Some(node) = a100() else { return };
    node.prepare(1, &[Partition(0, "1g.5gb", 6)]).unwrap();
    let instance = node.instances(0).remove(0);
    node.library
        .destroy_mig(&node.gpu(0).uuid, instance.id)
        .unwrap();
    let root = MachineRoot::new(node.machine.root());
    let (mut connection, _) = Connection::open(&root, ClientKind::Nvml).unwrap();
    let (gpu, request) = (GpuIndex(0), MigRequest::SetMode { enabled: false });
    connection.request(&Request::Mig { gpu, request }).unwrap();
    node.machine.control(&Command::Reset { gpu }).unwrap();
    node.unprepare(1).unwrap();
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
}

#[test]
fn records_name_own_instances_of_this_boot() {
    let Some(node) = a100() else { return };
    node.prepare(1, &[Partition(0, "1g.5gb", 6)]).unwrap();
    let applier = node.node.applier(node.effects(BOOT));
    let own = partitions::recorded(applier.store(), BOOT, |_| false).unwrap();
    let gpu = GpuUuid::new(node.gpu(0).uuid.as_str());
    let key = (gpu, 19, Placement { start: 6, size: 1 });
    assert_eq!(own.instances.into_iter().collect::<Vec<_>>(), [key]);
    let other = partitions::recorded(applier.store(), "another boot", |_| false).unwrap();
    assert!(other.instances.is_empty());
    let released = partitions::recorded(applier.store(), BOOT, |_| true).unwrap();
    assert!(released.instances.is_empty());
}
