//! Partitions created and destroyed through the library, on simulated cards in MIG mode.
#![expect(clippy::unwrap_used, reason = "tests, and what they are made of")]

use std::os::fd::OwnedFd;

use drava_nvml::{Card, GpuLibrary, GpuUuid, Library, Mig, MigProfile, Placement, Status, find};
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{A30X2, H100X2, RTX_PRO_6000X2};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{CardIndex, ClientKind, InstanceId, MigRequest, Reply, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

/// A machine whose first card is in MIG mode.
struct Partitioned {
    machine: Machine,
    library: Library,
    card: GpuUuid,
    profiles: Vec<MigProfile>,
}

impl Partitioned {
    fn start(yaml: &str) -> Self {
        let machine = Machine::start(yaml).unwrap();
        request(&machine, MigRequest::SetMode { enabled: true }).unwrap();
        let library = Library::open(&find(machine.root()).unwrap()).unwrap();
        let Card { uuid, mig, .. } = library.inventory().unwrap().cards.remove(0);
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
            card: uuid,
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
        let created = self.library.create_mig(&self.card, profile, placement);
        created.map_err(|error| error.status)
    }

    fn remaining(&self, name: &str) -> u32 {
        let profile = self.profile(name);
        self.library.mig_remaining(&self.card, profile).unwrap()
    }
}

/// A request about card 0, from a connection that closes again.
fn request(
    machine: &Machine,
    request: MigRequest,
) -> Result<Reply, simulator_machine::client::ClientError> {
    let root = DriverRoot::new(machine.root());
    let (mut connection, _welcome): (_, _) = Connection::open(&root, ClientKind::Nvml)?;
    let card = CardIndex(0);
    connection.request(&Request::Mig { card, request })
}

#[test]
fn what_is_created_is_listed_until_it_is_destroyed() {
    let node = Partitioned::start(H100X2);
    let large = node.create("3g.40gb", 4).unwrap();
    let small = node.create("1g.10gb", 0).unwrap();
    assert_eq!(
        (large.placement, large.compute_instances.len()),
        (Placement { start: 4, size: 4 }, 1)
    );
    let mut expected = vec![large.clone(), small.clone()];
    expected.sort_by_key(|instance| instance.id);
    assert_eq!(node.library.mig_instances(&node.card).unwrap(), expected);
    assert_eq!(
        (node.remaining("3g.40gb"), node.remaining("1g.10gb")),
        (0, 3)
    );

    node.library.destroy_mig(&node.card, large.id).unwrap();
    assert_eq!(node.library.mig_instances(&node.card).unwrap(), [small]);
    assert_eq!(node.remaining("3g.40gb"), 1);
    // Destroying twice succeeds, as after a restart in between.
    node.library.destroy_mig(&node.card, large.id).unwrap();
    // The same place gives the same device again.
    assert_eq!(node.create("3g.40gb", 4), Ok(large));
}

#[test]
fn every_placement_of_every_profile_can_be_made() {
    for yaml in [A30X2, H100X2, RTX_PRO_6000X2] {
        let node = Partitioned::start(yaml);
        for profile in &node.profiles {
            assert_eq!(
                node.remaining(&profile.name),
                profile.instance_count,
                "{}",
                profile.name
            );
            for placement in &profile.placements {
                let made = node.create(&profile.name, placement.start).unwrap();
                assert_eq!((made.profile_id, made.placement), (profile.id, *placement));
                node.library.destroy_mig(&node.card, made.id).unwrap();
            }
        }
        assert_eq!(node.library.mig_instances(&node.card).unwrap(), []);
    }
}

#[test]
fn a_taken_place_is_refused_and_nothing_is_left_behind() {
    let node = Partitioned::start(H100X2);
    let first = node.create("4g.40gb", 0).unwrap();
    assert_eq!(
        node.create("3g.40gb", 0),
        Err(Status::InsufficientResources)
    );
    assert_eq!(node.library.mig_instances(&node.card).unwrap(), [first]);
}

#[test]
fn a_driver_that_refuses_instances_says_why() {
    let node = Partitioned::start(H100X2);
    let faults = Faults {
        refuses_instances: true,
        ..Faults::default()
    };
    let card = CardIndex(0);
    node.machine
        .control(&Command::Break { card, faults })
        .unwrap();
    assert_eq!(
        node.create("1g.10gb", 0),
        Err(Status::InsufficientResources)
    );
    assert_eq!(node.library.mig_instances(&node.card).unwrap(), []);
}

#[test]
fn an_instance_with_a_process_stays_until_the_process_is_gone() {
    let node = Partitioned::start(H100X2);
    let made = node.create("1g.10gb", 2).unwrap();
    let root = DriverRoot::new(node.machine.root());
    let (mut cuda, welcome) = Connection::open(&root, ClientKind::Cuda).unwrap();
    let _memory: Vec<OwnedFd> = welcome.fds;
    let card = CardIndex(0);
    let Reply::ContextCreated { context } = cuda.request(&Request::CreateContext { card }).unwrap()
    else {
        panic!("no context")
    };
    let instance = InstanceId {
        gpu: made.id,
        compute: made.compute_instances[0].id,
    };
    let enter = MigRequest::Enter { context, instance };
    cuda.request(&Request::Mig {
        card,
        request: enter,
    })
    .unwrap();

    let [process] = node.library.processes(&node.card).unwrap()[..] else {
        panic!("one process")
    };
    assert_eq!(
        (process.gpu_instance, process.compute_instance),
        (Some(made.id), Some(instance.compute))
    );
    // In MIG mode a card does not say how busy it is.
    assert_eq!(node.library.utilization(&node.card).unwrap(), None);
    let refused = node.library.destroy_mig(&node.card, made.id).unwrap_err();
    assert_eq!(refused.status, Status::InUse);
    drop(cuda);
    node.machine
        .wait_for_card(0, |card| card.processes.is_empty())
        .unwrap();
    node.library.destroy_mig(&node.card, made.id).unwrap();
}
