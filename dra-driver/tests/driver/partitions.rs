//! MIG partitions on simulated machines: publication, prepare, unprepare, crashes, foreign instances.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use drava_api::node_profile::GpuSettings;
use drava_cdi::{Driver, DriverRoot};
use drava_dra_driver::gpus::device_files::DeviceFiles;
use drava_dra_driver::gpus::gpu_plan::{self, Counters, DeviceKind, GpuPlan, PlannedDevice};
use drava_dra_driver::gpus::inventory::{NodeInventory, OpenLibrary};
use drava_dra_driver::node::options::Delivery;
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::prepare::apply::{ApplyError, Environment, partitions};
use drava_dra_driver::prepare::effects::{Effects, NodeAccess, NodeEffects};
use drava_dra_driver::prepare::record::ClaimRecord;
use drava_nvml::{Gpu, GpuInstance, GpuLibrary, GpuUuid, Library, Mig, Placement, find};
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{self, A30X2, A100_40X8, H100X2, RTX_PRO_6000X2};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{ClientKind, GpuIndex, MigRequest, Request};
use simulator_machine::root::{CAPABILITIES_MAJOR, DriverRoot as MachineRoot};
use simulator_machine::testing::Machine;

use crate::crash::CrashingEffects;
use crate::fixture::Allocated::{self, Partition};
use crate::fixture::{POOL, claim, claim_ref, inventory};
use crate::node::{TestNode, lacks_device_files};
use crate::publish::{check_limits, desired};

mod dynamic;
mod held;
mod killed;
mod model;
mod repair;

const BOOT: &str = "7c1d2f0e-0000-4000-8000-000000000001";

/// A node whose GPUs are in MIG mode.
struct PartitionedNode {
    machine: Machine,
    library: Arc<Library>,
    inventory: NodeInventory,
    node: TestNode,
}

impl PartitionedNode {
    fn start(yaml: &str) -> Self {
        let machine = Machine::start(yaml).unwrap();
        Self::enable(&machine);
        Self::of(machine)
    }

    /// Enables MIG mode of all GPUs.
    fn enable(machine: &Machine) {
        let count = machine.status().unwrap().gpus.len();
        for gpu in (0..).map(GpuIndex).take(count) {
            let root = MachineRoot::new(machine.root());
            let (mut connection, _) = Connection::open(&root, ClientKind::Nvml).unwrap();
            let request = MigRequest::SetMode { enabled: true };
            connection.request(&Request::Mig { gpu, request }).unwrap();
        }
    }

    fn of(machine: Machine) -> Self {
        let library = Library::open(&find(machine.root()).unwrap()).unwrap();
        let mut node = TestNode::started();
        node.paths.driver_root_mount = machine.root().to_owned();
        Self {
            inventory: inventory_of(&library),
            library: Arc::new(library),
            machine,
            node,
        }
    }

    /// Device files of the machine, in its own directory.
    fn device_files(&self) -> DeviceFiles {
        DeviceFiles {
            dev: self.machine.root().join("dev"),
            dev_on_node: "/dev".into(),
            own_dev: self.node.root.path().join("own-dev"),
            char_dir: None,
        }
    }

    fn effects(&self, boot_id: &str) -> NodeEffects {
        let library = Arc::clone(&self.library);
        let open: OpenLibrary =
            Arc::new(move || Ok(Box::new(Library::clone(&library)) as Box<dyn GpuLibrary>));
        let access = NodeAccess {
            cgroup_limits: self.node.cgroup_limits(&open),
            mps: self.node.mps(),
            proc_root: self.node.root.path().join("proc"),
            open,
            boot_id: boot_id.to_owned(),
            labels: Labels::Off,
            device_files: Some(self.device_files()),
        };
        NodeEffects::new(
            self.node.layout(),
            Arc::new(self.node.tmpfs.clone()),
            access,
        )
    }

    fn prepare(&self, number: u32, results: &[Allocated]) -> Result<ClaimRecord, ApplyError> {
        self.prepare_with(self.effects(BOOT), number, results)
    }

    fn prepare_with<E: Effects>(
        &self,
        effects: E,
        number: u32,
        results: &[Allocated],
    ) -> Result<ClaimRecord, ApplyError> {
        let root = DriverRoot::open(self.machine.root(), &self.node.paths.driver_root).unwrap();
        let (driver, installed) = (Driver::discover(root).unwrap(), self.node.installed());
        let environment = Environment {
            pool: POOL,
            inventory: &self.inventory,
            driver: &driver,
            installed: &installed,
            delivery: Delivery::Preload,
        };
        let found = claim(number, results);
        let prepared =
            self.node
                .applier(effects)
                .prepare(&claim_ref(number), Some(&found), &environment);
        prepared.map(|(record, _)| record)
    }

    fn unprepare(&self, number: u32) -> Result<(), ApplyError> {
        let applier = self.node.applier(self.effects(BOOT));
        applier.unprepare(&claim_ref(number))
    }

    fn gpu(&self, index: usize) -> &Gpu {
        &self.inventory.nvml.gpus[index]
    }

    /// Returns the instances of a GPU.
    fn instances(&self, index: usize) -> Vec<GpuInstance> {
        self.library.mig_instances(&self.gpu(index).uuid).unwrap()
    }

    /// Returns the first slices of the instances of the first GPU.
    fn starts(&self) -> Vec<u32> {
        let mut starts: Vec<_> = self
            .instances(0)
            .iter()
            .map(|instance| instance.placement.start)
            .collect();
        starts.sort_unstable();
        starts
    }

    /// Creates an instance on the first GPU as an administrator does.
    fn create_foreign(&self, profile: &str, start: u32) -> GpuInstance {
        let device = partition(self.gpu(0), profile, start);
        let DeviceKind::Partition { profile, placement } = device.kind else {
            panic!("{device:?}")
        };
        let created = self
            .library
            .create_mig(&self.gpu(0).uuid, profile.id, placement);
        created.unwrap()
    }

    fn error(&self, number: u32, results: &[Allocated]) -> String {
        let error = self.prepare(number, results).unwrap_err();
        drava_api::error::describe(&error)
    }
}

/// Two A100 40GB; eight take longer to start.
fn inventory_of(library: &Library) -> NodeInventory {
    NodeInventory {
        nvml: library.inventory().unwrap(),
        ..inventory(Vec::new())
    }
}

fn a100x2() -> String {
    let third = A100_40X8.match_indices("\n- model: ").nth(2);
    let end = third.map_or(A100_40X8.len(), |(position, _)| position + 1);
    A100_40X8[..end].to_owned()
}

fn partition(gpu: &Gpu, profile: &str, start: u32) -> PlannedDevice {
    let name = drava_api::names::mig_device(gpu.minor, profile, start);
    let mut partitions = gpu_plan::partitions(gpu, gpu.minor).into_iter();
    partitions.find(|device| device.name == name).unwrap()
}

/// The first A100 40GB of a machine with device files; `None` where they cannot be created.
fn a100() -> Option<PartitionedNode> {
    (!lacks_device_files()).then(|| PartitionedNode::start(&a100x2()))
}

#[test]
fn publishes_every_placement_of_every_profile() {
    let node = PartitionedNode::start(&a100x2());
    let pool = desired(&node.inventory);
    check_limits(&pool);
    let first: Vec<_> = pool
        .devices()
        .filter(|device| device.name.starts_with("gpu-0-"))
        .collect();
    let Mig::Capable { profiles, .. } = &node.gpu(0).mig else {
        panic!("no MIG")
    };
    let placements: usize = profiles
        .iter()
        .map(|profile| profile.placements.len())
        .sum();
    assert_eq!((first.len(), placements), (25, 25));
    assert_eq!(first[0].name, "gpu-0-mig-1g-5gb-6");
    assert_eq!(first[24].name, "gpu-0-mig-7g-40gb-0");
    let half = first
        .iter()
        .find(|device| device.name == "gpu-0-mig-3g-20gb-4")
        .unwrap();
    let capacity = half.capacity.as_ref().unwrap();
    let amount = |name: &str| capacity[name].value.0.clone();
    assert_eq!(amount("memory"), "19968Mi");
    // 42 of 108 multiprocessors.
    assert_eq!(
        ["cores", "multiprocessors", "copyEngines", "decoders"].map(amount),
        ["38", "42", "3", "2"]
    );
    let attributes = half.attributes.as_ref().unwrap();
    let text = |name: &str| attributes[name].string.clone().unwrap();
    assert_eq!(
        (text("type"), text("profile")),
        ("mig".to_owned(), "3g.20gb".to_owned())
    );
    assert_eq!(text("uuid"), node.gpu(0).uuid.as_str());
    assert_eq!(
        attributes["memoryMib"].int,
        Some(19_968),
        "not that of the GPU"
    );
    assert_eq!(half.allow_multiple_allocations, None);
    let consumed = &half.consumes_counters.as_ref().unwrap()[0];
    let consumed: BTreeMap<_, _> = consumed
        .counters
        .iter()
        .map(|(name, counter)| (name.as_str(), counter.value.0.as_str()))
        .collect();
    let expected = BTreeMap::from([
        ("memory-slice-4", "1"),
        ("memory-slice-5", "1"),
        ("memory-slice-6", "1"),
        ("memory-slice-7", "1"),
        ("copy-engines", "3"),
        ("decoders", "2"),
    ]);
    assert_eq!(consumed, expected);
}

#[test]
fn publishes_partitions_of_all_machines_within_api_limits() {
    for (name, yaml) in description::BUNDLED {
        if !yaml.contains("memorySlices") {
            continue;
        }
        let node = PartitionedNode::start(yaml);
        let pool = desired(&node.inventory);
        check_limits(&pool);
        assert!(
            pool.devices().all(|device| device.name.contains("-mig-")),
            "{name}"
        );
    }
}

/// Two partitions fit together if the counters suffice for both, and only then.
#[test]
fn counters_admit_exactly_the_pairs_that_the_gpu_admits() {
    if lacks_device_files() {
        return;
    }
    for yaml in [A30X2, &a100x2(), H100X2, RTX_PRO_6000X2] {
        let node = PartitionedNode::start(yaml);
        let gpu = node.gpu(0);
        let plan = GpuPlan::new(gpu, gpu.minor, false, &[], &GpuSettings::default());
        let create = |device: &PlannedDevice| {
            let DeviceKind::Partition { profile, placement } = &device.kind else {
                panic!("{device:?}")
            };
            node.library.create_mig(&gpu.uuid, profile.id, *placement)
        };
        for one in &plan.devices {
            let first = create(one).unwrap();
            for other in &plan.devices {
                let sum = |name: &String| -> u64 {
                    [one, other]
                        .iter()
                        .filter_map(|device| device.consumes.get(name))
                        .sum()
                };
                let fits = plan
                    .counters
                    .iter()
                    .all(|(name, total)| sum(name) <= *total);
                let second = create(other);
                assert_eq!(fits, second.is_ok(), "{} and {}", one.name, other.name);
                if let Ok(second) = second {
                    node.library.destroy_mig(&gpu.uuid, second.id).unwrap();
                }
            }
            node.library.destroy_mig(&gpu.uuid, first.id).unwrap();
        }
    }
}

#[test]
fn blocks_devices_that_foreign_instances_exclude() {
    if lacks_device_files() {
        return;
    }
    let node = PartitionedNode::start(&a100x2());
    let foreign = node.create_foreign("1g.5gb+me", 2);
    let plan = GpuPlan::new(node.gpu(0), 0, false, &[foreign], &GpuSettings::default());
    let blocked: Vec<_> = plan
        .devices
        .iter()
        .filter(|device| device.blocked.is_some())
        .map(|device| device.name.as_str())
        .collect();
    let is_free = |name: &str| !blocked.contains(&name);
    assert!(is_free("gpu-0-mig-1g-5gb-3") && is_free("gpu-0-mig-3g-20gb-4"));
    for name in [
        "gpu-0-mig-1g-5gb-2",
        "gpu-0-mig-1g-10gb-2",
        "gpu-0-mig-3g-20gb-0",
        "gpu-0-mig-7g-40gb-0",
        // Only one instance has the media extensions.
        "gpu-0-mig-1g-5gb-plus-me-6",
    ] {
        assert!(!is_free(name), "{name}");
    }
    let totals: Counters = plan.counters;
    assert_eq!(totals["memory-slice-2"], 1, "published counters stay");
}

#[test]
fn creates_and_destroys_instance_of_claim() {
    let Some(node) = a100() else { return };
    let record = node.prepare(1, &[Partition(0, "1g.5gb", 6)]).unwrap();
    let [instance] = &node.instances(0)[..] else {
        panic!("one instance")
    };
    assert_eq!(instance.placement, Placement { start: 6, size: 1 });
    let found = record.devices[0].partition().unwrap();
    let ids = found.instance.clone().unwrap();
    assert_eq!(ids.gpu_instance, instance.id);
    assert_eq!(ids.uuid, instance.compute_instances[0].uuid);

    let spec = std::fs::read_to_string(crate::node::spec_of(&node.node, 1)).unwrap();
    let spec: serde_json::Value = serde_json::from_str(&spec).unwrap();
    let edits = &spec["devices"][0]["containerEdits"];
    let nodes = edits["deviceNodes"].as_array().unwrap();
    let caps = |node: &&serde_json::Value| {
        let path = node["path"].as_str().unwrap();
        path.starts_with("/dev/nvidia-caps/nvidia-cap")
    };
    assert_eq!(nodes.iter().filter(caps).count(), 2, "{edits}");
    for capability in nodes.iter().filter(caps) {
        // The kernel driver creates no node; the runtime creates that of the container from the numbers.
        assert_eq!(
            (&capability["type"], &capability["major"]),
            (&"c".into(), &CAPABILITIES_MAJOR.into())
        );
        let path = capability["path"].as_str().unwrap();
        assert!(
            path.ends_with(&format!("nvidia-cap{}", capability["minor"])),
            "{capability}"
        );
        // For containers with their own user namespace.
        let on_node = node.machine.root().join(path.trim_start_matches('/'));
        let rdev = std::fs::metadata(on_node).unwrap().rdev();
        assert_eq!(rustix::fs::major(rdev), CAPABILITIES_MAJOR);
    }
    assert!(
        nodes.iter().any(|node| node["path"] == "/dev/nvidia0"),
        "{edits}"
    );

    // Repeated calls change nothing.
    assert_eq!(
        node.prepare(1, &[Partition(0, "1g.5gb", 6)]).unwrap(),
        record
    );
    assert_eq!(node.instances(0).len(), 1);
    node.unprepare(1).unwrap();
    node.unprepare(1).unwrap();
    assert!(node.instances(0).is_empty());
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
}

/// Kubelet repeats a failed prepare for as long as the pod exists.
#[test]
fn failed_prepare_keeps_the_instance_for_its_repetition() {
    let Some(node) = a100() else { return };
    let one = [Partition(0, "1g.5gb", 6)];
    let directory = &node.node.paths.cdi_dir;
    std::fs::remove_dir(directory).unwrap();
    std::fs::write(directory, "not a directory").unwrap();
    let error = node.error(1, &one);
    assert!(error.contains("CDI directory"), "{error}");
    let [instance] = &node.instances(0)[..] else {
        panic!("one instance")
    };
    let uuid = &instance.compute_instances[0].uuid;
    node.error(1, &one);
    assert_eq!(&node.instances(0)[0].compute_instances[0].uuid, uuid);
    std::fs::remove_file(directory).unwrap();
    std::fs::create_dir(directory).unwrap();
    let record = node.prepare(1, &one).unwrap();
    let of_claim = record.devices[0].partition().unwrap().instance.as_ref();
    assert_eq!(&of_claim.unwrap().uuid, uuid);
    node.unprepare(1).unwrap();
    assert!(node.instances(0).is_empty());
}

/// A missing file is found before an instance is created.
#[test]
fn creates_no_instance_that_containers_cannot_use() {
    let Some(node) = a100() else { return };
    let devices = node.machine.root().join("proc/devices");
    let kept = std::fs::read_to_string(&devices).unwrap();
    std::fs::write(&devices, "Character devices:\n  1 mem\n").unwrap();
    let error = node.error(1, &[Partition(0, "1g.5gb", 6)]);
    assert!(
        error.contains("device gpu-0-mig-1g-5gb-6")
            && error.contains("no major number nvidia-caps"),
        "{error}"
    );
    assert!(node.instances(0).is_empty());
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
    std::fs::write(&devices, kept).unwrap();
    node.prepare(1, &[Partition(0, "1g.5gb", 6)]).unwrap();
}

#[test]
fn recreates_missing_instance_of_prepared_claim() {
    let Some(node) = a100() else { return };
    node.prepare(1, &[Partition(0, "2g.10gb", 4)]).unwrap();
    let instance = node.instances(0).remove(0);
    node.library
        .destroy_mig(&node.gpu(0).uuid, instance.id)
        .unwrap();
    node.prepare(1, &[Partition(0, "2g.10gb", 4)]).unwrap();
    assert_eq!(node.starts(), [4]);
}

#[test]
fn rolls_back_claim_if_one_instance_cannot_be_created() {
    let Some(node) = a100() else { return };
    let faults = Faults {
        refuses_instances: true,
        ..Faults::default()
    };
    let gpu = GpuIndex(1);
    node.machine
        .control(&Command::Break { gpu, faults })
        .unwrap();
    let both = [Partition(0, "1g.5gb", 6), Partition(1, "1g.5gb", 6)];
    let error = node.error(1, &both);
    assert!(
        error.contains("device gpu-1-mig-1g-5gb-6: cannot create")
            && error.contains("insufficient resources"),
        "{error}"
    );
    assert!(node.instances(0).is_empty());
    assert_eq!(node.node.claim_state().0, Vec::<String>::new());
    let faults = Faults::default();
    node.machine
        .control(&Command::Break { gpu, faults })
        .unwrap();
    node.prepare(1, &both).unwrap();
    assert_eq!((node.instances(0).len(), node.instances(1).len()), (1, 1));
}

#[test]
fn never_touches_foreign_instance() {
    let Some(node) = a100() else { return };
    let foreign = node.create_foreign("1g.5gb", 3);
    // Of the same geometry, and of another one.
    for device in [("1g.5gb", 3), ("3g.20gb", 0)] {
        let error = node.error(1, &[Partition(0, device.0, device.1)]);
        assert!(
            error.contains(&format!("MIG instance {}", foreign.id))
                && error.contains("drava did not create"),
            "{error}"
        );
        node.unprepare(1).unwrap();
        assert_eq!(node.instances(0), std::slice::from_ref(&foreign));
        assert_eq!(node.node.claim_state().0, Vec::<String>::new());
    }
    node.prepare(2, &[Partition(0, "3g.20gb", 4)]).unwrap();
    node.unprepare(2).unwrap();
    assert_eq!(node.instances(0), [foreign]);
}
