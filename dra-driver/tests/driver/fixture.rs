//! GPUs, claims and inventories for the tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use drava_dra_driver::gpus::coexistence::OtherOwners;
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::node::claim::{ClaimRef, ClaimUid};
use drava_nvml::{
    AddressingMode, ComputeCapability, ComputeMode, CudaVersion, Fabric, Gpu, GpuUuid, Inventory,
    Memory, Mig, MigProfile, MigVariant, Placement,
};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use serde_json::{Value, json};
use simulator_machine::description;
use simulator_machine::testing::Machine;

/// Name of the node.
pub(crate) const NODE: &str = "node-a";

/// Pool of the node.
pub(crate) const POOL: &str = "node-a/gpus";

/// UUIDs of the GPUs of the simulated machine.
pub(crate) const GPU_UUIDS: [&str; 2] = [
    "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01",
    "GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502",
];

/// Returns the driver root of a simulated machine with two H100. All tests share the machine and only read its files.
pub(crate) fn machine_root() -> &'static Path {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE
        .get_or_init(|| Machine::start(description::H100X2).unwrap())
        .root()
}

/// Returns the two H100 80GB of the simulated machine.
pub(crate) fn h100x2() -> NodeInventory {
    let gpu = |index: u32, uuid: &str, pci_bus_id: &str| Gpu {
        index,
        minor: index,
        uuid: GpuUuid::new(uuid),
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: ComputeCapability { major: 9, minor: 0 },
        pci_bus_id: pci_bus_id.to_owned(),
        numa_node: Some(index),
        memory: Memory::Dedicated {
            total_bytes: 85_520_809_984,
            reserved_bytes: 577_765_376,
            used_bytes: 0,
        },
        multiprocessors: Some(132),
        addressing_mode: Some(AddressingMode::Hmm),
        compute_mode: ComputeMode::Default,
        has_mps_clients: false,
        mig: Mig::Capable {
            enabled: false,
            pending: false,
            profiles: h100_profiles(),
        },
        fabric: Some(Fabric {
            cluster_uuid: "00000000-0000-0000-0000-000000000000".to_owned(),
            clique: 0,
        }),
    };
    inventory(vec![
        gpu(0, GPU_UUIDS[0], "0000:1b:00.0"),
        gpu(1, GPU_UUIDS[1], "0000:9d:00.0"),
    ])
}

/// Returns one Tesla T4: no MIG, no NVLink.
pub(crate) fn t4() -> NodeInventory {
    inventory(vec![Gpu {
        index: 0,
        minor: 0,
        uuid: GpuUuid::new("GPU-2b8e5d14-9c03-4f6a-b7d1-40a8e6c31f03"),
        name: "Tesla T4".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Turing".to_owned(),
        compute_capability: ComputeCapability { major: 7, minor: 5 },
        pci_bus_id: "0000:00:1e.0".to_owned(),
        numa_node: Some(0),
        memory: Memory::Dedicated {
            total_bytes: 16_106_127_360,
            reserved_bytes: 464_519_168,
            used_bytes: 0,
        },
        multiprocessors: Some(40),
        addressing_mode: Some(AddressingMode::Hmm),
        compute_mode: ComputeMode::Default,
        has_mps_clients: false,
        mig: Mig::NotCapable,
        fabric: None,
    }])
}

pub(crate) fn inventory(gpus: Vec<Gpu>) -> NodeInventory {
    let pcie_roots = gpus
        .iter()
        .map(|gpu| {
            (
                gpu.uuid.clone(),
                format!("pci{}", gpu.pci_bus_id.split_at(7).0),
            )
        })
        .collect();
    NodeInventory {
        nvml: Inventory {
            driver_version: "580.65.06".to_owned(),
            cuda_driver_version: Some(CudaVersion {
                major: 13,
                minor: 0,
            }),
            nvml_version: "13.580.65.06".to_owned(),
            confidential_computing: false,
            gpus,
            faults: Vec::new(),
        },
        numbers: BTreeMap::new(),
        pcie_roots,
        foreign_instances: BTreeMap::new(),
        settings: None,
        driver_limits: BTreeMap::new(),
        mps: Ok(()),
        other_owners: OtherOwners::default(),
        retained_totals: BTreeMap::new(),
    }
}

/// Returns the MIG profiles of an H100 80GB.
fn h100_profiles() -> Vec<MigProfile> {
    let profile = |id,
                   name: &str,
                   variant,
                   slices,
                   count,
                   mib: u64,
                   sms,
                   starts: &[u32],
                   size,
                   engines: [u32; 4]| {
        let [copy_engines, decoders, jpeg_engines, ofa_engines] = engines;
        MigProfile {
            id,
            name: name.to_owned(),
            variant,
            slices,
            instance_count: count,
            memory_bytes: mib << 20,
            multiprocessors: sms,
            copy_engines,
            decoders,
            encoders: 0,
            jpeg_engines,
            ofa_engines,
            placements: starts
                .iter()
                .map(|&start| Placement { start, size })
                .collect(),
        }
    };
    let plain = MigVariant::Plain;
    let all = [0, 1, 2, 3, 4, 5, 6];
    vec![
        profile(19, "1g.10gb", plain, 1, 7, 9984, 16, &all, 1, [1, 1, 1, 0]),
        profile(
            20,
            "1g.10gb+me",
            MigVariant::MediaExtensions,
            1,
            1,
            9984,
            16,
            &all,
            1,
            [1, 1, 1, 1],
        ),
        profile(
            15,
            "1g.20gb",
            plain,
            1,
            4,
            20096,
            26,
            &[0, 2, 4, 6],
            2,
            [1, 1, 1, 0],
        ),
        profile(
            14,
            "2g.20gb",
            plain,
            2,
            3,
            20096,
            32,
            &[0, 2, 4],
            2,
            [2, 2, 2, 0],
        ),
        profile(
            9,
            "3g.40gb",
            plain,
            3,
            2,
            40448,
            60,
            &[0, 4],
            4,
            [3, 3, 3, 0],
        ),
        profile(5, "4g.40gb", plain, 4, 1, 40448, 64, &[0], 4, [4, 4, 4, 0]),
        profile(0, "7g.80gb", plain, 7, 1, 81152, 132, &[0], 8, [8, 7, 7, 1]),
    ]
}

/// Returns the reference of `claim-<number>`; its UID contains the number.
pub(crate) fn claim_ref(number: u32) -> ClaimRef {
    ClaimRef {
        namespace: "default".to_owned(),
        name: format!("claim-{number}"),
        uid: ClaimUid::parse(&format!("00000000-0000-4000-8000-{number:012}")).unwrap(),
    }
}

/// Returns the share ID of the result at `position` of claim `number`.
pub(crate) fn share_id(number: u32, position: usize) -> String {
    format!("5a5a5a5a-0000-4000-8000-{number:06}{position:06}")
}

/// One result of an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Allocated {
    /// A share of the GPU with this minor number: memory, cores.
    Share(u32, &'static str, &'static str),
    /// The whole GPU with this minor number.
    Whole(u32),
    /// A partition of the GPU with this minor number: profile, first memory slice.
    Partition(u32, &'static str, u32),
}

/// Returns an allocated and reserved claim with these results for requests `gpu`, `gpu1`, ….
pub(crate) fn claim(number: u32, results: &[Allocated]) -> ResourceClaim {
    claim_with(number, results, &json!([]))
}

/// Returns a [`claim`] with opaque config (`status.allocation.devices.config`).
pub(crate) fn claim_with(number: u32, results: &[Allocated], config: &Value) -> ResourceClaim {
    let ClaimRef {
        namespace,
        name,
        uid,
    } = claim_ref(number);
    let results: Vec<Value> = results
        .iter()
        .enumerate()
        .map(|(position, result)| {
            let request = if position == 0 { "gpu".to_owned() } else { format!("gpu{position}") };
            match result {
                Allocated::Share(minor, memory, cores) => json!({
                    "request": request, "driver": "gpu.drava.dev", "pool": POOL, "device": format!("gpu-{minor}-vgpu"),
                    "shareID": share_id(number, position),
                    "consumedCapacity": {"memory": memory, "cores": cores, "slots": "1"},
                }),
                Allocated::Whole(minor) => json!({
                    "request": request, "driver": "gpu.drava.dev", "pool": POOL, "device": format!("gpu-{minor}"),
                }),
                Allocated::Partition(minor, profile, start) => json!({
                    "request": request, "driver": "gpu.drava.dev", "pool": POOL,
                    "device": drava_api::names::mig_device(*minor, profile, *start),
                }),
            }
        })
        .collect();
    serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": uid.as_str(), "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}]}},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-uid"}],
        },
    }))
    .unwrap()
}

/// Returns the allocation results of a claim.
pub(crate) fn results_of(claim: &mut ResourceClaim) -> &mut Vec<DeviceRequestAllocationResult> {
    let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
    allocation
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap()
}

/// Returns the config of an allocation with one entry.
pub(crate) fn config(source: &str, fields: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig"});
    parameters
        .as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    json!([{"source": source, "requests": [], "opaque": {"driver": "gpu.drava.dev", "parameters": parameters}}])
}

/// Returns the path and length of each file below `root`.
pub(crate) fn tree(root: &Path) -> BTreeMap<String, u64> {
    fn walk(root: &Path, dir: &Path, found: &mut BTreeMap<String, u64>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                walk(root, &path, found);
            } else {
                let name = path
                    .strip_prefix(root)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned();
                found.insert(name, entry.metadata().unwrap().len());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    found
}
