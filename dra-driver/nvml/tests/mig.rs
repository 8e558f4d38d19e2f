//! MIG instances on simulated GPUs.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::os::fd::OwnedFd;

use drava_nvml::{Gpu, GpuLibrary, GpuUuid, Library, Mig, MigProfile, Placement, Status, find};
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{A30X2, H100X2, RTX_PRO_6000X2};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{ClientKind, GpuIndex, InstanceId, MigRequest, Reply, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::{Machine, skips_without_root};

/// A machine whose first GPU is in MIG mode.
struct MigMachine {
    machine: Machine,
    library: Library,
    gpu: GpuUuid,
    profiles: Vec<MigProfile>,
}

impl MigMachine {
    fn start(yaml: &str) -> Self {
        let machine = Machine::start(yaml).unwrap();
        request(&machine, MigRequest::SetMode { enabled: true }).unwrap();
        let library = Library::open(&find(machine.root()).unwrap()).unwrap();
        let Gpu { uuid, mig, .. } = library.inventory().unwrap().gpus.remove(0);
        let Mig::Capable {
            enabled: true,
            pending: true,
            profiles,
        } = mig
        else {
            panic!("{mig:?}")
        };
        Self {
            machine,
            library,
            gpu: uuid,
            profiles,
        }
    }

    fn profile(&self, name: &str) -> &MigProfile {
        let found = self.profiles.iter().find(|profile| profile.name == name);
        found.unwrap()
    }

    fn create(&self, name: &str, start: u32) -> Result<drava_nvml::GpuInstance, Status> {
        let profile = self.profile(name);
        let size = profile.placements[0].size;
        let placement = Placement { start, size };
        let created = self.library.create_mig(&self.gpu, profile.id, placement);
        created.map_err(|error| error.status)
    }

    fn remaining(&self, name: &str) -> u32 {
        let profile = self.profile(name);
        self.library.mig_remaining(&self.gpu, profile).unwrap()
    }
}

/// Sends a request for GPU 0 on a new connection.
fn request(
    machine: &Machine,
    request: MigRequest,
) -> Result<Reply, simulator_machine::client::ClientError> {
    let root = DriverRoot::new(machine.root());
    let (mut connection, _welcome): (_, _) = Connection::open(&root, ClientKind::Nvml)?;
    let gpu = GpuIndex(0);
    connection.request(&Request::Mig { gpu, request })
}

#[test]
fn lists_instances_until_they_are_destroyed() {
    if skips_without_root() {
        return;
    }
    let node = MigMachine::start(H100X2);
    let large = node.create("3g.40gb", 4).unwrap();
    let small = node.create("1g.10gb", 0).unwrap();
    assert_eq!(
        (large.placement, large.compute_instances.len()),
        (Placement { start: 4, size: 4 }, 1)
    );
    let mut expected = vec![large.clone(), small.clone()];
    expected.sort_by_key(|instance| instance.id);
    assert_eq!(node.library.mig_instances(&node.gpu).unwrap(), expected);
    assert_eq!(
        (node.remaining("3g.40gb"), node.remaining("1g.10gb")),
        (0, 3)
    );

    node.library.destroy_mig(&node.gpu, large.id).unwrap();
    assert_eq!(node.library.mig_instances(&node.gpu).unwrap(), [small]);
    assert_eq!(node.remaining("3g.40gb"), 1);
    // A repeated destroy succeeds.
    node.library.destroy_mig(&node.gpu, large.id).unwrap();
    // The same placement yields the same device.
    assert_eq!(node.create("3g.40gb", 4), Ok(large));
}

#[test]
fn creates_every_placement_of_every_profile() {
    if skips_without_root() {
        return;
    }
    for yaml in [A30X2, H100X2, RTX_PRO_6000X2] {
        let node = MigMachine::start(yaml);
        for profile in &node.profiles {
            assert_eq!(
                node.remaining(&profile.name),
                profile.instance_count,
                "{}",
                profile.name
            );
            for placement in &profile.placements {
                let created = node.create(&profile.name, placement.start).unwrap();
                assert_eq!(
                    (created.profile_id, created.placement),
                    (profile.id, *placement)
                );
                node.library.destroy_mig(&node.gpu, created.id).unwrap();
            }
        }
        assert_eq!(node.library.mig_instances(&node.gpu).unwrap(), []);
    }
}

#[test]
fn rejects_placement_in_use_without_residue() {
    if skips_without_root() {
        return;
    }
    let node = MigMachine::start(H100X2);
    let first = node.create("4g.40gb", 0).unwrap();
    assert_eq!(
        node.create("3g.40gb", 0),
        Err(Status::InsufficientResources)
    );
    assert_eq!(node.library.mig_instances(&node.gpu).unwrap(), [first]);
}

#[test]
fn reports_rejection_by_the_driver() {
    if skips_without_root() {
        return;
    }
    let node = MigMachine::start(H100X2);
    let faults = Faults {
        refuses_instances: true,
        ..Faults::default()
    };
    let gpu = GpuIndex(0);
    node.machine
        .control(&Command::Break { gpu, faults })
        .unwrap();
    assert_eq!(
        node.create("1g.10gb", 0),
        Err(Status::InsufficientResources)
    );
    assert_eq!(node.library.mig_instances(&node.gpu).unwrap(), []);
}

#[test]
fn destroys_instance_only_after_its_process_exits() {
    if skips_without_root() {
        return;
    }
    let node = MigMachine::start(H100X2);
    let created = node.create("1g.10gb", 2).unwrap();
    let root = DriverRoot::new(node.machine.root());
    let (mut cuda, welcome) = Connection::open(&root, ClientKind::Cuda).unwrap();
    let _memory: Vec<OwnedFd> = welcome.fds;
    let gpu = GpuIndex(0);
    let Reply::ContextCreated { context } = cuda.request(&Request::CreateContext { gpu }).unwrap()
    else {
        panic!("no context")
    };
    let instance = InstanceId {
        gpu_instance: created.id,
        compute: created.compute_instances[0].id,
    };
    let enter = MigRequest::Enter { context, instance };
    cuda.request(&Request::Mig {
        gpu,
        request: enter,
    })
    .unwrap();

    let [process] = node.library.processes(&node.gpu).unwrap()[..] else {
        panic!("one process")
    };
    assert_eq!(
        (process.gpu_instance, process.compute_instance),
        (Some(created.id), Some(instance.compute))
    );
    // A GPU in MIG mode reports no utilization.
    assert_eq!(node.library.utilization(&node.gpu).unwrap(), None);
    let error = node.library.destroy_mig(&node.gpu, created.id).unwrap_err();
    assert_eq!(error.status, Status::InUse);
    drop(cuda);
    node.machine
        .wait_for_gpu(0, |gpu| gpu.processes.is_empty())
        .unwrap();
    node.library.destroy_mig(&node.gpu, created.id).unwrap();
}
