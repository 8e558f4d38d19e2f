//! The library against a stub in C for what the simulated machine does not do: drivers that lack symbols, cards that
//! give no figures or are lost, MIG instances.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests, and what they are made of"
)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use drava_nvml::{
    ComputeMode, EventKind, GpuLibrary, GpuUuid, Library, Memory, Mig, MigProfile, Placement,
    Status,
};
use tempfile::TempDir;

const ZERO: Duration = Duration::ZERO;
const MIB: u64 = 1 << 20;

/// The stub with these peculiarities. The directory must outlive the library.
fn stub(peculiarities: &[&str]) -> (Library, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub/nvml.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(source);
    cc.args(peculiarities.iter().map(|name| format!("-D{name}")));
    let status = cc
        .status()
        .expect("there is a C compiler, as Rust needs one");
    assert!(status.success());
    (Library::open(&path).unwrap(), dir)
}

fn card(number: u32) -> GpuUuid {
    GpuUuid::new(format!("GPU-{number}"))
}

fn profiles(library: &Library) -> Vec<MigProfile> {
    match library.inventory().unwrap().cards.swap_remove(0).mig {
        Mig::Capable { profiles, .. } => profiles,
        Mig::NotCapable => panic!("card 0 of the stub has MIG"),
    }
}

fn profile(library: &Library, name: &str) -> MigProfile {
    profiles(library)
        .into_iter()
        .find(|profile| profile.name == name)
        .unwrap()
}

#[test]
fn symbols_that_an_old_driver_lacks_cost_their_facts_alone() {
    let (library, _dir) = stub(&["OLD"]);
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.faults, []);
    assert_eq!(inventory.driver_version, "450.51");
    assert_eq!(inventory.cuda_driver_version, None);
    let card = &inventory.cards[0];
    assert_eq!(
        card.memory,
        Memory::Dedicated {
            total_bytes: 81_559 * MIB,
            reserved_bytes: 0,
            used_bytes: 300 * MIB
        }
    );
    assert_eq!(
        (card.brand.as_str(), card.architecture.as_str()),
        ("Unknown", "Unknown")
    );
    assert_eq!(
        (card.numa_node, card.multiprocessors, card.addressing_mode),
        (None, None, None)
    );
    assert_eq!(
        (card.compute_mode, &card.fabric),
        (ComputeMode::Unknown, &None)
    );
    assert_eq!(card.pci_bus_id, "0000:1b:00.0");
    assert_eq!(library.utilization(&card.uuid).unwrap(), None);
    assert_eq!(library.process_utilization(&card.uuid, 0).unwrap(), []);
    let error = library.processes(&card.uuid).unwrap_err();
    assert_eq!(
        error.status,
        Status::MissingSymbol("nvmlDeviceGetComputeRunningProcesses_v3")
    );
    // Profiles without names get those that nvidia-smi would print.
    let names: Vec<String> = profiles(&library)
        .into_iter()
        .map(|profile| profile.name)
        .collect();
    assert_eq!(names, ["3g.40gb", "1g.10gb"]);
}

#[test]
fn a_card_without_memory_figures_is_listed() {
    let (library, _dir) = stub(&["NO_MEMORY"]);
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.faults, []);
    assert_eq!(inventory.cards[0].memory, Memory::NotSupported);
    assert_eq!(library.memory(&card(0)).unwrap(), Memory::NotSupported);
}

#[test]
fn reserved_memory_is_told_apart() {
    let (library, _dir) = stub(&[]);
    let memory = Memory::Dedicated {
        total_bytes: 81_559 * MIB,
        reserved_bytes: 100 * MIB,
        used_bytes: 200 * MIB,
    };
    assert_eq!(library.memory(&card(0)).unwrap(), memory);
}

#[test]
fn a_lost_card_is_told_once_and_the_others_are_watched_on() {
    let (library, _dir) = stub(&["LOST"]);
    assert_eq!(library.inventory().unwrap().cards.len(), 2);
    let mut events = library.watch(&[card(0), card(1)]).unwrap();
    assert_eq!(events.next(ZERO).unwrap(), None);
    let lost = events.next(ZERO).unwrap().unwrap();
    assert_eq!((lost.card, lost.kind), (card(1), EventKind::Lost));
    let xid = events.next(ZERO).unwrap().unwrap();
    assert_eq!((xid.card, xid.kind), (card(0), EventKind::Xid(48)));
    assert_eq!((xid.gpu_instance, xid.compute_instance), (Some(3), Some(0)));

    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.cards.len(), 1, "the other card is still there");
    let [fault] = &inventory.faults[..] else {
        panic!("{inventory:?}")
    };
    assert_eq!(
        (fault.index, fault.card.as_ref(), &fault.status),
        (1, Some(&card(1)), &Status::GpuLost)
    );
    assert!(library.watch(&[card(0), card(1)]).is_err());
}

#[test]
fn partitions_are_created_listed_and_destroyed() {
    let (library, _dir) = stub(&[]);
    let card = card(0);
    let (small, large) = (profile(&library, "1g.10gb"), profile(&library, "3g.40gb"));
    assert_eq!(
        large.placements,
        [
            Placement { start: 0, size: 4 },
            Placement { start: 4, size: 4 }
        ]
    );
    assert_eq!(library.mig_instances(&card).unwrap(), []);
    assert_eq!(library.mig_remaining(&card, &large).unwrap(), 2);

    let first = library
        .create_mig(&card, &large, large.placements[1])
        .unwrap();
    assert_eq!(
        (first.profile_id, first.placement),
        (9, large.placements[1])
    );
    let [compute] = &first.compute_instances[..] else {
        panic!("{first:?}")
    };
    assert_eq!(
        compute.profile_id, 2,
        "the compute instance takes all slices"
    );
    assert_eq!(compute.uuid.as_str(), "MIG-1-2");
    let second = library
        .create_mig(&card, &small, small.placements[3])
        .unwrap();
    assert_eq!(
        library.mig_instances(&card).unwrap(),
        [first.clone(), second.clone()]
    );
    assert_eq!(library.mig_remaining(&card, &large).unwrap(), 0);

    let error = library
        .create_mig(&card, &large, large.placements[1])
        .unwrap_err();
    assert_eq!(error.status, Status::InsufficientResources);
    assert_eq!(
        error.to_string(),
        "cannot create MIG instance 3g.40gb at 4:4 of card GPU-0"
    );

    library.destroy_mig(&card, first.id).unwrap();
    library.destroy_mig(&card, first.id).unwrap();
    assert_eq!(library.mig_instances(&card).unwrap(), [second]);
    assert_eq!(library.mig_remaining(&card, &large).unwrap(), 1);
}

#[test]
fn half_a_partition_does_not_stay() {
    let (library, _dir) = stub(&["NO_COMPUTE"]);
    let large = profile(&library, "3g.40gb");
    assert!(
        library
            .create_mig(&card(0), &large, large.placements[0])
            .is_err()
    );
    assert_eq!(library.mig_instances(&card(0)).unwrap(), []);
    assert_eq!(library.mig_remaining(&card(0), &large).unwrap(), 2);
}

#[test]
fn a_partition_in_use_stays() {
    let (library, _dir) = stub(&["BUSY"]);
    let large = profile(&library, "3g.40gb");
    let instance = library
        .create_mig(&card(0), &large, large.placements[0])
        .unwrap();
    let error = library.destroy_mig(&card(0), instance.id).unwrap_err();
    assert_eq!(error.status, Status::InUse);
    assert_eq!(
        error.to_string(),
        "cannot destroy MIG instance 1 of card GPU-0"
    );
    assert_eq!(library.mig_instances(&card(0)).unwrap(), [instance]);
}

#[test]
fn a_card_without_mig_has_no_partitions() {
    let (library, _dir) = stub(&[]);
    assert_eq!(library.inventory().unwrap().cards[1].mig, Mig::NotCapable);
    assert_eq!(library.mig_instances(&card(1)).unwrap(), []);
    library.destroy_mig(&card(1), 5).unwrap();
}
