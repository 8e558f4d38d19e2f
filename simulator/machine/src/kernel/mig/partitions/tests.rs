use std::collections::BTreeSet;

use super::*;
use crate::description::{A30X2, A100_40X8, BUNDLED, H100X2, MachineDescription, RTX_PRO_6000X2};

fn partitions(yaml: &str) -> Partitions {
    let machine = MachineDescription::parse(yaml).unwrap();
    let gpu = &machine.gpus[0];
    let mut partitions = Partitions::new(machine.model(gpu).mig.clone(), gpu);
    assert_eq!(
        partitions.set_mode(true, false, false),
        Ok(MigActivation::Active)
    );
    partitions
}

fn nothing(_: ContextId) -> u64 {
    0
}

/// All layouts reachable by creating instances of these profiles, as sets of (profile, start).
fn layouts(yaml: &str, profiles: &[u32]) -> BTreeSet<Vec<(u32, u32)>> {
    let mut known: BTreeSet<Vec<(u32, u32)>> = BTreeSet::new();
    let empty = partitions(yaml);
    let mut open = vec![vec![]];
    while let Some(layout) = open.pop() {
        if !known.insert(layout.clone()) {
            continue;
        }
        let mut gpu = empty.clone();
        for (profile, start) in &layout {
            gpu.create_gpu_instance(*profile, Some(*start)).unwrap();
        }
        for profile in profiles {
            let table = gpu.profile(*profile).unwrap().clone();
            for start in gpu.free_starts(&table) {
                let mut next = layout.clone();
                next.push((*profile, start));
                next.sort_unstable();
                open.push(next);
            }
        }
    }
    known
}

#[test]
fn reaches_all_published_layouts_of_an_a100() {
    // 1g, 2g, 3g, 4g, 7g: 298 layouts; with the 1g of double memory 723.
    let plain = [19, 14, 9, 5, 0];
    assert_eq!(layouts(A100_40X8, &plain).len(), 298);
    let with_double_memory = [19, 15, 14, 9, 5, 0];
    assert_eq!(layouts(A100_40X8, &with_double_memory).len(), 723);
}

#[test]
fn reports_remaining_capacity() {
    for (name, yaml) in BUNDLED {
        let machine = MachineDescription::parse(yaml).unwrap();
        let Some(table) = machine.model(&machine.gpus[0]).mig.clone() else {
            continue;
        };
        let empty = partitions(yaml);
        for profile in &table.profiles {
            let most = empty.remaining_gpu_instances(profile.id);
            assert_eq!(most, Ok(profile.instances), "{name}: {}", profile.name);
        }
        for first in &table.profiles {
            for wanted in &table.profiles {
                let mut gpu = empty.clone();
                gpu.create_gpu_instance(first.id, None).unwrap();
                let remaining = gpu.remaining_gpu_instances(wanted.id).unwrap();
                let created =
                    (0..).take_while(|_| gpu.create_gpu_instance(wanted.id, None).is_ok());
                assert_eq!(
                    remaining,
                    u32::try_from(created.count()).unwrap(),
                    "{name}: {} after {}",
                    wanted.name,
                    first.name
                );
                assert_eq!(gpu.remaining_gpu_instances(wanted.id), Ok(0));
                assert_eq!(
                    gpu.create_gpu_instance(wanted.id, None),
                    Err(Refusal::InsufficientResources)
                );
            }
        }
    }
}

/// On no real GPU does one of these limits bound capacity alone: number of a profile, overlapping
/// placements, compute slices.
#[test]
fn bounds_capacity_by_count_placement_and_slices() {
    let capacities = |from: &str, to: &str, id: u32| {
        assert!(H100X2.contains(from));
        let mut gpu = partitions(&H100X2.replace(from, to));
        let mut capacities = vec![gpu.remaining_gpu_instances(id).unwrap()];
        while gpu.create_gpu_instance(id, None).is_ok() {
            capacities.push(gpu.remaining_gpu_instances(id).unwrap());
        }
        capacities
    };
    let count = (
        "id: 19, slices: 1, instances: 7",
        "id: 19, slices: 1, instances: 3",
    );
    assert_eq!(capacities(count.0, count.1, 19), [3, 2, 1, 0]);
    // The lowest placement first.
    let places = (
        "starts: [0, 2, 4], size: 2",
        "starts: [0, 1, 2, 3], size: 2",
    );
    assert_eq!(capacities(places.0, places.1, 14), [2, 1, 0]);
    let slices = (
        "id: 14, slices: 2, instances: 3, multiprocessors: 32",
        "id: 14, slices: 3, instances: 3, multiprocessors: 32",
    );
    assert_eq!(capacities(slices.0, slices.1, 14), [2, 1, 0]);
}

#[test]
fn numbers_gpu_instances_like_the_driver() {
    // `nvidia-smi mig -cgi 19,14,5` on an A100 creates the largest first and prints 1, 5 and 13.
    let mut gpu = partitions(A100_40X8);
    assert_eq!(gpu.create_gpu_instance(5, None), Ok(1));
    assert_eq!(gpu.create_gpu_instance(14, None), Ok(5));
    assert_eq!(gpu.create_gpu_instance(19, None), Ok(13));
    // The first 3g is the upper half.
    let mut gpu = partitions(A100_40X8);
    assert_eq!(gpu.create_gpu_instance(9, None), Ok(2));
    assert_eq!(gpu.create_gpu_instance(9, None), Ok(1));
    // Four slices on an A30, twelve on an RTX PRO 6000.
    for yaml in [A30X2, RTX_PRO_6000X2] {
        let mut gpu = partitions(yaml);
        let mut ids: Vec<u32> = (0..4)
            .map(|_| gpu.create_gpu_instance(14, None).unwrap())
            .collect();
        ids.sort_unstable();
        assert_eq!(ids, [3, 4, 5, 6]);
    }
}

#[test]
fn keeps_gpu_instance_while_compute_instances_exist() {
    let mut gpu = partitions(H100X2);
    let gpu_instance = gpu.create_gpu_instance(9, Some(0)).unwrap();
    assert_eq!(gpu.remaining_compute_instances(gpu_instance, 0), Ok(3));
    assert_eq!(gpu.create_compute_instance(gpu_instance, 1, Some(0)), Ok(0));
    assert_eq!(gpu.remaining_compute_instances(gpu_instance, 0), Ok(1));
    assert_eq!(
        gpu.create_compute_instance(gpu_instance, 2, None),
        Err(Refusal::InsufficientResources)
    );
    assert_eq!(gpu.create_compute_instance(gpu_instance, 0, None), Ok(1));
    // Four slices in an instance of three.
    assert_eq!(
        gpu.create_compute_instance(gpu_instance, 3, None),
        Err(Refusal::NotSupported)
    );
    let state = gpu.state(nothing);
    let [first, second] = &state.gpu_instances[0].compute_instances[..] else {
        panic!("{state:?}")
    };
    assert_eq!((first.start, first.multiprocessors), (0, 32));
    assert_eq!((second.start, second.multiprocessors), (2, 16));
    assert_ne!(first.uuid, second.uuid);
    assert_eq!((first.index, second.index), (0, 1));
    assert_eq!(gpu.destroy_gpu_instance(gpu_instance), Err(Refusal::InUse));
    let destroyed = |compute| InstanceId {
        gpu_instance,
        compute,
    };
    assert_eq!(gpu.destroy_compute_instance(destroyed(0)), Ok(()));
    assert_eq!(
        gpu.destroy_compute_instance(destroyed(0)),
        Err(Refusal::NotFound)
    );
    assert_eq!(gpu.destroy_compute_instance(destroyed(1)), Ok(()));
    assert_eq!(gpu.destroy_gpu_instance(gpu_instance), Ok(()));
    assert_eq!(
        gpu.destroy_gpu_instance(gpu_instance),
        Err(Refusal::NotFound)
    );
}

#[test]
fn keeps_instance_and_limits_memory_of_a_context() {
    let mut gpu = partitions(H100X2);
    let gpu_instance = gpu.create_gpu_instance(19, None).unwrap();
    let compute = gpu.create_compute_instance(gpu_instance, 0, None).unwrap();
    let instance = InstanceId {
        gpu_instance,
        compute,
    };
    let total = 9984 << 20;
    let too_large = gpu.enter(ContextId(1), instance, total + 1, nothing);
    assert_eq!(too_large, Err(Refusal::OutOfMemory));
    assert_eq!(gpu.enter(ContextId(1), instance, total, nothing), Ok(()));
    let second = gpu.enter(ContextId(2), instance, 1, |_| total);
    assert_eq!(second, Err(Refusal::OutOfMemory));
    assert_eq!(gpu.destroy_compute_instance(instance), Err(Refusal::InUse));
    gpu.leave(ContextId(1));
    assert_eq!(gpu.destroy_compute_instance(instance), Ok(()));
}

#[test]
fn defers_mig_mode_until_idle_or_reset() {
    let machine = |yaml| {
        let machine = MachineDescription::parse(yaml).unwrap();
        let mig = machine.model(&machine.gpus[0]).mig.clone();
        Partitions::new(mig, &machine.gpus[0])
    };
    let mut hopper = machine(H100X2);
    assert_eq!(hopper.set_mode(true, true, false), Ok(MigActivation::InUse));
    assert_eq!((hopper.enabled, hopper.pending), (false, true));
    assert_eq!(
        hopper.set_mode(true, false, true),
        Ok(MigActivation::Active)
    );
    hopper.create_gpu_instance(19, None).unwrap();
    assert_eq!(hopper.set_mode(false, false, false), Err(Refusal::InUse));

    let mut ampere = machine(A30X2);
    assert_eq!(ampere.set_mode(true, false, true), Ok(MigActivation::InUse));
    assert_eq!((ampere.enabled, ampere.pending), (false, true));
    assert_eq!(
        ampere.create_gpu_instance(14, None),
        Err(Refusal::NotSupported)
    );
    ampere.reset();
    assert_eq!((ampere.enabled, ampere.pending), (true, true));
    ampere.create_gpu_instance(14, None).unwrap();
    ampere.reset();
    assert_eq!(ampere.state(nothing).gpu_instances, []);
}

#[test]
fn starts_in_stored_mig_mode() {
    let yaml = A30X2.replace("numaNode: 0", "numaNode: 0\n  migEnabled: true");
    let machine = MachineDescription::parse(&yaml).unwrap();
    let gpu = &machine.gpus[0];
    let mut partitions = Partitions::new(machine.model(gpu).mig.clone(), gpu);
    assert!(partitions.is_enabled());
    partitions.create_gpu_instance(14, None).unwrap();
    partitions.reset();
    assert!(partitions.is_enabled(), "a reset keeps the mode");
}
