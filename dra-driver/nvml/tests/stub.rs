//! The library against an NVML stub in C, for cases that the simulated machine does not have: drivers that lack symbols,
//! GPUs without memory size, lost GPUs, failing MIG calls.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

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

/// Compiles the stub with these defines and opens it. The directory must outlive the library.
fn stub(defines: &[&str]) -> (Library, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub/nvml.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(source);
    cc.args(defines.iter().map(|name| format!("-D{name}")));
    let status = cc
        .status()
        .expect("a C compiler is installed, as Rust requires");
    assert!(status.success());
    (Library::open(&path).unwrap(), dir)
}

fn gpu(number: u32) -> GpuUuid {
    GpuUuid::new(format!("GPU-{number}"))
}

fn profiles(library: &Library) -> Vec<MigProfile> {
    match library.inventory().unwrap().gpus.swap_remove(0).mig {
        Mig::Capable { profiles, .. } => profiles,
        Mig::NotCapable => panic!("GPU 0 of the stub supports MIG"),
    }
}

fn profile(library: &Library, name: &str) -> MigProfile {
    profiles(library)
        .into_iter()
        .find(|profile| profile.name == name)
        .unwrap()
}

#[test]
fn missing_symbols_make_only_their_values_unknown() {
    let (library, _dir) = stub(&["OLD"]);
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.faults, []);
    assert_eq!(inventory.driver_version, "450.51");
    assert_eq!(inventory.cuda_driver_version, None);
    let gpu = &inventory.gpus[0];
    assert_eq!(
        gpu.memory,
        Memory::Dedicated {
            total_bytes: 81_559 * MIB,
            reserved_bytes: 0,
            used_bytes: 300 * MIB
        }
    );
    assert_eq!(
        (gpu.brand.as_str(), gpu.architecture.as_str()),
        ("Unknown", "Unknown")
    );
    assert_eq!(
        (gpu.numa_node, gpu.multiprocessors, gpu.addressing_mode),
        (None, None, None)
    );
    assert_eq!(
        (gpu.compute_mode, &gpu.fabric),
        (ComputeMode::Unknown, &None)
    );
    assert_eq!(gpu.pci_bus_id, "0000:1b:00.0");
    assert_eq!(library.utilization(&gpu.uuid).unwrap(), None);
    assert_eq!(library.process_utilization(&gpu.uuid, 0).unwrap(), []);
    let error = library.processes(&gpu.uuid).unwrap_err();
    assert_eq!(
        error.status,
        Status::MissingSymbol("nvmlDeviceGetComputeRunningProcesses_v3")
    );
    // Profiles without names get the names of nvidia-smi.
    let names: Vec<String> = profiles(&library)
        .into_iter()
        .map(|profile| profile.name)
        .collect();
    assert_eq!(names, ["3g.40gb", "1g.10gb"]);
}

#[test]
fn lists_gpu_without_memory_size() {
    let (library, _dir) = stub(&["NO_MEMORY"]);
    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.faults, []);
    assert_eq!(inventory.gpus[0].memory, Memory::NotSupported);
    assert_eq!(library.memory(&gpu(0)).unwrap(), Memory::NotSupported);
}

#[test]
fn reports_clients_of_mps() {
    for (defines, expected) in [(&["MPS"][..], true), (&[], false), (&["OLD"], false)] {
        let (library, _dir) = stub(defines);
        let inventory = library.inventory().unwrap();
        assert_eq!(inventory.gpus[0].has_mps_clients, expected, "{defines:?}");
    }
}

#[test]
fn reports_reserved_memory_separately() {
    let (library, _dir) = stub(&[]);
    let memory = Memory::Dedicated {
        total_bytes: 81_559 * MIB,
        reserved_bytes: 100 * MIB,
        used_bytes: 200 * MIB,
    };
    assert_eq!(library.memory(&gpu(0)).unwrap(), memory);
}

#[test]
fn reports_lost_gpu_once_and_watches_the_others() {
    let (library, _dir) = stub(&["LOST"]);
    assert_eq!(library.inventory().unwrap().gpus.len(), 2);
    let mut events = library.watch(&[gpu(0), gpu(1)]).unwrap();
    assert_eq!(events.next(ZERO).unwrap(), None);
    let lost = events.next(ZERO).unwrap().unwrap();
    assert_eq!((lost.gpu, lost.kind), (gpu(1), EventKind::Lost));
    let xid = events.next(ZERO).unwrap().unwrap();
    assert_eq!((xid.gpu, xid.kind), (gpu(0), EventKind::Xid(48)));
    assert_eq!((xid.gpu_instance, xid.compute_instance), (Some(3), Some(0)));

    let inventory = library.inventory().unwrap();
    assert_eq!(inventory.gpus.len(), 1, "the other GPU is listed");
    let [fault] = &inventory.faults[..] else {
        panic!("{inventory:?}")
    };
    assert_eq!(
        (fault.index, fault.gpu.as_ref(), &fault.status),
        (1, Some(&gpu(1)), &Status::GpuLost)
    );
    assert!(library.watch(&[gpu(0), gpu(1)]).is_err());
}

#[test]
fn lists_other_gpus_while_one_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let hang = dir.path().join("hang");
    std::fs::write(&hang, "").unwrap();
    let (library, _dir) = stub(&[&format!("HANG=\"{}\"", hang.display())]);
    let read = |library: &Library| {
        let inventory = library.inventory().unwrap();
        let gpus: Vec<_> = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let faults = inventory.faults.into_iter();
        let faults: Vec<_> = faults.map(|fault| (fault.index, fault.status)).collect();
        (gpus, faults)
    };
    assert_eq!(read(&library), (vec![gpu(0)], vec![(1, Status::Timeout)]));
    // The second inventory does not wait again.
    let before = std::time::Instant::now();
    assert_eq!(read(&library), (vec![gpu(0)], vec![(1, Status::Timeout)]));
    assert!(before.elapsed() < Duration::from_secs(5));

    std::fs::remove_file(&hang).unwrap();
    let both = (vec![gpu(0), gpu(1)], Vec::new());
    while read(&library) != both {
        std::thread::yield_now();
    }
    // A GPU that was read before is listed as it was.
    std::fs::write(&hang, "").unwrap();
    let (gpus, faults) = read(&library);
    assert_eq!((gpus, faults), (both.0, vec![(1, Status::Timeout)]));
}

#[test]
fn creates_lists_and_destroys_mig_instances() {
    let (library, _dir) = stub(&[]);
    let gpu = gpu(0);
    let (small, large) = (profile(&library, "1g.10gb"), profile(&library, "3g.40gb"));
    assert_eq!(
        large.placements,
        [
            Placement { start: 0, size: 4 },
            Placement { start: 4, size: 4 }
        ]
    );
    assert_eq!(library.mig_instances(&gpu).unwrap(), []);
    assert_eq!(library.mig_remaining(&gpu, &large).unwrap(), 2);

    let first = library
        .create_mig(&gpu, large.id, large.placements[1])
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
        "the compute instance uses all slices"
    );
    assert_eq!(compute.uuid.as_str(), "MIG-1-2");
    let second = library
        .create_mig(&gpu, small.id, small.placements[3])
        .unwrap();
    assert_eq!(
        library.mig_instances(&gpu).unwrap(),
        [first.clone(), second.clone()]
    );
    assert_eq!(library.mig_remaining(&gpu, &large).unwrap(), 0);

    let error = library
        .create_mig(&gpu, large.id, large.placements[1])
        .unwrap_err();
    assert_eq!(error.status, Status::InsufficientResources);
    assert_eq!(
        error.to_string(),
        format!(
            "cannot create a MIG instance of profile {} at 4:4 of GPU GPU-0",
            large.id
        )
    );

    library.destroy_mig(&gpu, first.id).unwrap();
    library.destroy_mig(&gpu, first.id).unwrap();
    assert_eq!(library.mig_instances(&gpu).unwrap(), [second]);
    assert_eq!(library.mig_remaining(&gpu, &large).unwrap(), 1);
}

#[test]
fn rolls_back_incomplete_mig_instance() {
    let (library, _dir) = stub(&["NO_COMPUTE"]);
    let large = profile(&library, "3g.40gb");
    assert!(
        library
            .create_mig(&gpu(0), large.id, large.placements[0])
            .is_err()
    );
    assert_eq!(library.mig_instances(&gpu(0)).unwrap(), []);
    assert_eq!(library.mig_remaining(&gpu(0), &large).unwrap(), 2);
}

#[test]
fn keeps_mig_instance_in_use() {
    let (library, _dir) = stub(&["BUSY"]);
    let large = profile(&library, "3g.40gb");
    let instance = library
        .create_mig(&gpu(0), large.id, large.placements[0])
        .unwrap();
    let error = library.destroy_mig(&gpu(0), instance.id).unwrap_err();
    assert_eq!(error.status, Status::InUse);
    assert_eq!(
        error.to_string(),
        "cannot destroy MIG instance 1 of GPU GPU-0"
    );
    assert_eq!(library.mig_instances(&gpu(0)).unwrap(), [instance]);
}

#[test]
fn gpu_without_mig_has_no_instances() {
    let (library, _dir) = stub(&[]);
    assert_eq!(library.inventory().unwrap().gpus[1].mig, Mig::NotCapable);
    assert_eq!(library.mig_instances(&gpu(1)).unwrap(), []);
    library.destroy_mig(&gpu(1), 5).unwrap();
}
