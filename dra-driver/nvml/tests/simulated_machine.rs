//! The library against simulated machines, through `dlopen` as with a real driver.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use drava_nvml::{
    AddressingMode, ComputeCapability, ComputeMode, CudaVersion, EventKind, FabricState, Gpu,
    GpuLibrary, GpuUuid, Inventory, Library, Memory, MemoryRepair, Mig, MigVariant, Placement,
    ProcessKind, ProcessMemory, RecoveryAction, Sensor, Status, find,
};
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{B200X8, H100X2, T4};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{ClientKind, GpuEvent, GpuIndex, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

const MIB: u64 = 1 << 20;

fn open(machine: &Machine) -> Library {
    Library::open(&find(machine.root()).unwrap()).unwrap()
}

fn inventory(machine: &Machine) -> Inventory {
    open(machine).inventory().unwrap()
}

#[test]
fn reads_inventory_of_two_h100() {
    let inventory = inventory(&Machine::start(H100X2).unwrap());
    assert_eq!(inventory.driver_version, "580.65.06");
    assert_eq!(inventory.nvml_version, "13.580.65.06");
    assert_eq!(
        inventory.cuda_driver_version,
        Some(CudaVersion {
            major: 13,
            minor: 0
        })
    );
    assert!(!inventory.confidential_computing);
    assert_eq!(inventory.faults, []);
    let [first, second] = &inventory.gpus[..] else {
        panic!("{inventory:?}")
    };
    assert_eq!((first.index, first.minor), (0, 0));
    assert_eq!((second.index, second.minor), (1, 1));
    assert_eq!(
        first.uuid.as_str(),
        "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01"
    );
    assert_eq!(
        second.uuid.as_str(),
        "GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502"
    );
    let Gpu {
        name,
        brand,
        architecture,
        compute_capability,
        pci_bus_id,
        numa_node,
        memory,
        multiprocessors,
        addressing_mode,
        compute_mode,
        fabric,
        ..
    } = first;
    assert_eq!(name, "NVIDIA H100 80GB HBM3");
    assert_eq!(
        (brand.as_str(), architecture.as_str()),
        ("Nvidia", "Hopper")
    );
    assert_eq!(
        *compute_capability,
        ComputeCapability { major: 9, minor: 0 }
    );
    assert_eq!(pci_bus_id, "0000:1b:00.0");
    assert_eq!((*numa_node, second.numa_node), (Some(0), Some(1)));
    let total_bytes = 85_520_809_984;
    assert_eq!(
        *memory,
        Memory::Dedicated {
            total_bytes,
            reserved_bytes: 577_765_376,
            used_bytes: 0
        }
    );
    assert_eq!(*multiprocessors, Some(132));
    assert_eq!(*addressing_mode, Some(AddressingMode::Hmm));
    assert_eq!(*compute_mode, ComputeMode::Default);
    assert_eq!(*fabric, second.fabric);
    assert!(fabric.is_some());
}

#[test]
fn reads_mig_geometry() {
    let machine = Machine::start(H100X2).unwrap();
    let gpu = inventory(&machine).gpus.remove(0);
    let Mig::Capable {
        enabled: false,
        pending: false,
        profiles,
    } = gpu.mig
    else {
        panic!("{:?}", gpu.mig)
    };
    let names: Vec<(&str, u32)> = profiles
        .iter()
        .map(|profile| (profile.name.as_str(), profile.id))
        .collect();
    assert_eq!(
        names,
        [
            ("7g.80gb", 0),
            ("4g.40gb", 5),
            ("3g.40gb", 9),
            ("2g.20gb", 14),
            ("1g.20gb", 15),
            ("1g.10gb", 19),
            ("1g.10gb+me", 20),
        ]
    );
    let by_name = |name: &str| {
        profiles
            .iter()
            .find(|profile| profile.name == name)
            .unwrap()
    };
    let small = by_name("1g.10gb+me");
    assert_eq!(small.variant, MigVariant::MediaExtensions);
    assert_eq!(
        (small.slices, small.instance_count, small.multiprocessors),
        (1, 1, 16)
    );
    assert_eq!(
        (small.copy_engines, small.decoders, small.encoders),
        (1, 1, 0)
    );
    assert_eq!((small.jpeg_engines, small.ofa_engines), (1, 1));
    assert_eq!(small.memory_bytes, 9984 * MIB);
    let placements: Vec<String> = by_name("3g.40gb")
        .placements
        .iter()
        .map(Placement::to_string)
        .collect();
    assert_eq!(placements, ["0:4", "4:4"]);
    assert_eq!(small.placements.len(), 7);
}

#[test]
fn reads_gpu_without_mig_or_fabric() {
    let gpu = inventory(&Machine::start(T4).unwrap()).gpus.remove(0);
    assert_eq!(gpu.mig, Mig::NotCapable);
    assert_eq!(gpu.fabric, None);
    assert_eq!(gpu.architecture, "Turing");
    assert_eq!(gpu.multiprocessors, Some(40));
}

#[test]
fn error_names_unknown_gpu() {
    let machine = Machine::start(T4).unwrap();
    let library = open(&machine);
    let unknown = GpuUuid::new("GPU-00000000-0000-0000-0000-000000000000");
    let error = library.memory(&unknown).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot read the memory of GPU {unknown}")
    );
    assert_eq!(error.status, Status::NotFound);
    assert!(library.watch(&[unknown]).is_err());
}

#[test]
fn reads_values_of_idle_gpu() {
    let machine = Machine::start(T4).unwrap();
    let library = open(&machine);
    let gpu = &library.inventory().unwrap().gpus[0];
    assert_eq!(library.memory(&gpu.uuid).unwrap(), gpu.memory);
    assert_eq!(library.processes(&gpu.uuid).unwrap(), []);
    assert_eq!(
        library.utilization(&gpu.uuid).unwrap().unwrap().gpu_percent,
        0
    );
    assert_eq!(library.process_utilization(&gpu.uuid, 0).unwrap(), []);
    assert_eq!(library.mig_instances(&gpu.uuid).unwrap(), []);
}

#[test]
fn lists_process_with_memory_until_exit() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpus = library.inventory().unwrap().gpus;
    let root = DriverRoot::new(machine.root());
    // This process acts as a CUDA program.
    let (mut cuda, _welcome) = Connection::open(&root, ClientKind::Cuda).unwrap();
    cuda.request(&Request::CreateContext { gpu: GpuIndex(1) })
        .unwrap();

    let [process] = library.processes(&gpus[1].uuid).unwrap()[..] else {
        panic!("one process")
    };
    let ProcessMemory::Used { bytes } = process.memory else {
        panic!("{process:?}")
    };
    assert_eq!(
        (process.pid, process.kind),
        (std::process::id(), ProcessKind::Compute)
    );
    assert_eq!(
        (process.gpu_instance, process.compute_instance),
        (None, None)
    );
    let Memory::Dedicated { used_bytes, .. } = library.memory(&gpus[1].uuid).unwrap() else {
        panic!("no memory")
    };
    assert_eq!((bytes, used_bytes), (545_259_520, 545_259_520));
    assert_eq!(library.processes(&gpus[0].uuid).unwrap(), []);

    drop(cuda);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !library.processes(&gpus[1].uuid).unwrap().is_empty() {
        assert!(Instant::now() < deadline, "the process is still listed");
        std::thread::yield_now();
    }
    assert_eq!(library.memory(&gpus[1].uuid).unwrap(), gpus[1].memory);
}

#[test]
fn reports_xid_of_watched_gpu() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpus: Vec<GpuUuid> = library
        .inventory()
        .unwrap()
        .gpus
        .into_iter()
        .map(|gpu| gpu.uuid)
        .collect();
    let mut events = library.watch(&gpus).unwrap();
    assert_eq!(events.next(Duration::ZERO).unwrap(), None);
    machine
        .control(&Command::Raise(GpuEvent::Xid {
            gpu: GpuIndex(1),
            code: 79,
            instance: None,
        }))
        .unwrap();
    let event = events.next(Duration::from_secs(30)).unwrap().unwrap();
    assert_eq!(
        (event.gpu, event.kind),
        (gpus[1].clone(), EventKind::Xid(79))
    );
    assert_eq!((event.gpu_instance, event.compute_instance), (None, None));
    assert_eq!(events.next(Duration::ZERO).unwrap(), None);
}

#[test]
fn reports_memory_error_and_xid_of_gpu_instance() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpu = library.inventory().unwrap().gpus.remove(0).uuid;
    let mut events = library.watch(&[gpu]).unwrap();
    let raise = |event| machine.control(&Command::Raise(event)).unwrap();
    let gpu = GpuIndex(0);
    raise(GpuEvent::DoubleBitEcc { gpu });
    raise(GpuEvent::Xid {
        gpu,
        code: 95,
        instance: Some(3),
    });
    let mut next = || events.next(Duration::from_secs(30)).unwrap().unwrap();
    assert_eq!(next().kind, EventKind::DoubleBitEcc);
    let of_instance = next();
    assert_eq!(
        (of_instance.kind, of_instance.gpu_instance),
        (EventKind::Xid(95), Some(3))
    );
}

#[test]
fn reads_recovery_action_until_reset() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpu = library.inventory().unwrap().gpus.remove(0).uuid;
    let action = || library.telemetry(&gpu).unwrap().recovery_action.value();
    assert_eq!(action(), Some(RecoveryAction::None));
    let gpu = GpuIndex(0);
    let faults = Faults {
        recovery_action: 1,
        ..Faults::default()
    };
    machine.control(&Command::Break { gpu, faults }).unwrap();
    assert_eq!(action(), Some(RecoveryAction::GpuReset));
    machine.control(&Command::Reset { gpu }).unwrap();
    assert_eq!(action(), Some(RecoveryAction::None));
}

#[test]
fn reads_fabric_and_memory_repair() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpu = library.inventory().unwrap().gpus.remove(0).uuid;
    let read = || {
        let telemetry = library.telemetry(&gpu).unwrap();
        (telemetry.fabric.value(), telemetry.memory_repair.value())
    };
    let repair = |is_pending, has_failed| {
        Some(MemoryRepair {
            is_pending,
            has_failed,
        })
    };
    assert_eq!(read(), (Some(FabricState::Completed), repair(false, false)));
    let gpu = GpuIndex(0);
    let faults = Faults {
        fabric_state: Some(2),
        repair_pending: true,
        ..Faults::default()
    };
    machine.control(&Command::Break { gpu, faults }).unwrap();
    assert_eq!(read(), (Some(FabricState::InProgress), repair(true, false)));
    machine.control(&Command::Reset { gpu }).unwrap();
    assert_eq!(read().1, repair(false, false), "repaired by the reset");
    // No fabric without NVSwitch, and pages instead of rows before Ampere.
    let machine = Machine::start(T4).unwrap();
    let faults = Faults {
        repair_pending: true,
        ..Faults::default()
    };
    machine.control(&Command::Break { gpu, faults }).unwrap();
    let gpu = inventory(&machine).gpus[0].uuid.clone();
    let telemetry = open(&machine).telemetry(&gpu).unwrap();
    assert_eq!(
        (telemetry.fabric.value(), telemetry.memory_repair.value(),),
        (None, repair(true, false))
    );
}

#[test]
fn reads_fabric_of_driver_before_versioned_query() {
    let yaml = H100X2.replace("580.65.06", "535.288.01");
    let machine = Machine::start(&yaml).unwrap();
    let gpu = inventory(&machine).gpus.remove(0);
    assert!(gpu.fabric.is_some(), "domain of NVLink");
    let library = open(&machine);
    let state = || library.telemetry(&gpu.uuid).unwrap().fabric;
    assert_eq!(state(), Sensor::Value(FabricState::Completed));
    let faults = Faults {
        fabric_state: Some(1),
        ..Faults::default()
    };
    let gpu = GpuIndex(0);
    machine.control(&Command::Break { gpu, faults }).unwrap();
    assert_eq!(state(), Sensor::Value(FabricState::NotStarted));
}

#[test]
fn reads_sensors_of_driver_without_recovery_action() {
    let yaml = H100X2.replace("580.65.06", "550.163.01");
    let machine = Machine::start(&yaml).unwrap();
    let gpu = inventory(&machine).gpus[0].uuid.clone();
    let telemetry = open(&machine).telemetry(&gpu).unwrap();
    assert_eq!(telemetry.recovery_action, Sensor::Absent);
    assert_eq!(telemetry.temperature_celsius, Sensor::Value(30));
}

#[test]
fn failed_query_leaves_other_sensors() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let uuid = library.inventory().unwrap().gpus.remove(0).uuid;
    let fail = |functions: &[&str], code| {
        let failing = functions.iter().map(|name| ((*name).to_owned(), code));
        let faults = Faults {
            failing: failing.collect(),
            ..Faults::default()
        };
        let gpu = GpuIndex(0);
        machine.control(&Command::Break { gpu, faults }).unwrap();
    };
    let failed = || -> Vec<&str> {
        let telemetry = library.telemetry(&uuid).unwrap();
        telemetry.failures().map(|(sensor, _)| sensor).collect()
    };
    assert!(failed().is_empty());
    let ecc = ["corrected ECC errors", "uncorrected ECC errors"];
    let (temperature, clocks) = (["temperature"], ["SM clock", "memory clock"]);
    let queries: [(&str, &[&str]); 10] = [
        ("nvmlDeviceGetMemoryInfo_v2", &["memory"]),
        ("nvmlDeviceGetUtilizationRates", &["utilization"]),
        ("nvmlDeviceGetTemperature", &temperature),
        ("nvmlDeviceGetPowerUsage", &["power draw"]),
        ("nvmlDeviceGetTotalEnergyConsumption", &["energy"]),
        ("nvmlDeviceGetClockInfo", &clocks),
        ("nvmlDeviceGetTotalEccErrors", &ecc),
        ("nvmlDeviceGetFieldValues", &["recovery action"]),
        ("nvmlDeviceGetGpuFabricInfoV", &["fabric state"]),
        ("nvmlDeviceGetRemappedRows", &["memory repair"]),
    ];
    // No permission, time-out, corrupted infoROM, no data, unknown.
    for code in [4, 10, 14, 21, 999] {
        for (function, sensors) in queries {
            fail(&[function], code);
            assert_eq!(failed(), sensors, "{function} fails with {code}");
        }
    }
    fail(&["nvmlDeviceGetTotalEccErrors"], 14);
    let telemetry = library.telemetry(&uuid).unwrap();
    let (_, error) = telemetry.failures().next().unwrap();
    assert!(error.to_string().contains("infoROM"), "{error}");
    // Errors of the GPU or the library are none of a sensor, also if all fail.
    for (code, status) in [
        (9, Status::DriverNotLoaded),
        (15, Status::GpuLost),
        (16, Status::ResetRequired),
        (18, Status::VersionMismatch),
    ] {
        fail(&["nvmlDeviceGetPowerUsage"], code);
        assert_eq!(library.telemetry(&uuid).unwrap_err().status, status);
    }
    fail(&queries.map(|(function, _)| function), 999);
    let error = library.telemetry(&uuid).unwrap_err();
    assert!(matches!(error.status, Status::Other(_)), "{error:?}");
}

#[test]
fn reads_sensors_of_idle_h100() {
    let machine = Machine::start(H100X2).unwrap();
    let gpu = inventory(&machine).gpus[0].uuid.clone();
    let telemetry = open(&machine).telemetry(&gpu).unwrap();
    assert!(matches!(
        telemetry.memory,
        Sensor::Value(Memory::Dedicated { .. })
    ));
    assert_eq!(telemetry.utilization.value().unwrap().gpu_percent, 0);
    assert_eq!(telemetry.temperature_celsius, Sensor::Value(30));
    assert_eq!(telemetry.power_milliwatts, Sensor::Value(70_000));
    assert!(telemetry.energy_millijoules.value().is_some());
    assert_eq!(telemetry.memory_clock_mhz, Sensor::Value(2619));
    assert!(telemetry.sm_clock_mhz.value().is_some());
    assert_eq!(
        (telemetry.ecc_corrected, telemetry.ecc_uncorrected),
        (Sensor::Value(0), Sensor::Value(0))
    );
}

#[test]
fn reopens_library_after_restart() {
    let mut machine = Machine::start(T4).unwrap();
    let before = inventory(&machine);
    machine.restart().unwrap();
    assert_eq!(inventory(&machine), before);
}

/// Eight B200 whose driver counts memory by the cgroups below a directory.
fn b200(cgroups: &std::path::Path, backend: &str) -> Machine {
    let limits = format!("memoryLimits: {{backend: {backend}, cgroupRoot: {cgroups:?}}}");
    Machine::start(&B200X8.replace("memoryLimits: {backend: dmem}", &limits)).unwrap()
}

#[test]
fn limits_memory_of_a_cgroup_since_615() {
    let cgroups = tempfile::tempdir().unwrap();
    let leaf = cgroups.path().join("leaf");
    std::fs::create_dir(&leaf).unwrap();
    let machine = b200(cgroups.path(), "misc");
    let library = open(&machine);
    let gpu = library.inventory().unwrap().gpus.swap_remove(0).uuid;
    let limit = || library.cgroup_memory(&gpu, &leaf).unwrap();
    assert_eq!((limit().limit_bytes, limit().used_bytes), (None, 0));
    library.set_memory_limit(&gpu, &leaf, Some(MIB)).unwrap();
    assert_eq!(limit().limit_bytes, Some(MIB));
    // No memory is guaranteed: the kernel would keep it when the cgroup goes.
    let set = &machine.gpu(0).unwrap().memory_limits[0];
    assert_eq!((set.cgroup.as_str(), set.limits.soft_bytes), ("/leaf", 0));
    library.set_memory_limit(&gpu, &leaf, None).unwrap();
    assert_eq!(limit().limit_bytes, None);
    let gone = cgroups.path().join("gone");
    let error = library.set_memory_limit(&gpu, &gone, None).unwrap_err();
    assert_eq!(error.status, Status::NotFound);
}

#[test]
fn older_library_has_no_memory_limits() {
    let machine = Machine::start(H100X2).unwrap();
    let library = open(&machine);
    let gpu = library.inventory().unwrap().gpus.swap_remove(0).uuid;
    let root = std::path::Path::new("/sys/fs/cgroup");
    let error = library.cgroup_memory(&gpu, root).unwrap_err();
    let missing = Status::MissingSymbol("nvmlDeviceSetMemoryLimits_v1");
    assert_eq!(error.status, missing);
    assert_eq!(
        library
            .set_memory_limit(&gpu, root, None)
            .unwrap_err()
            .status,
        missing
    );
}
