//! What the driver finds out about the memory limits of the NVIDIA driver, on the simulated machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use drava_api::obstacle::LimitObstacle;
use drava_dra_driver::gpus::cgroups::Cgroups;
use drava_dra_driver::gpus::driver_limits::{DriverLimits, probe, update};
use drava_dra_driver::gpus::inventory::OpenLibrary;
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::limits_page::Page;
use drava_dra_driver::prepare::Delivery;
use drava_dra_driver::prepare::base::CommonEdits;
use drava_dra_driver::prepare::cgroup_limits::{CgroupLimits, LimitRequest};
use drava_dra_driver::prepare::effects::Effects as _;
use drava_dra_driver::prepare::plan::plan;
use drava_dra_driver::prepare::record::{ClaimRecord, Loaded};
use drava_nvml::{GpuFault, GpuLibrary as _, GpuUuid, Library, Status, find};
use drava_vgpu_abi::{IdText, Limits, LimitsSpec};
use serde_json::{Value, json};
use simulator_machine::description::{B200X8, H100X2};
use simulator_machine::testing::{Machine, skips_without_root};

use crate::cluster::FakeGpus;
use crate::fixture::Allocated::Share;
use crate::fixture::{POOL, claim, claim_ref, h100x2, share_id};
use crate::node::{TestNode, environment, lacks_device_files, spec_of};

/// A machine with one B200 that counts memory by the cgroups below the directory.
pub(crate) fn b200(cgroups: &Path, backend: &str) -> Machine {
    let limits = format!("memoryLimits: {{backend: {backend}, cgroupRoot: {cgroups:?}}}");
    let one = one_b200().replace("memoryLimits: {backend: dmem}", &limits);
    Machine::start(&one).unwrap()
}

/// The description of a machine with one B200, and with driver 615.
pub(crate) fn one_b200() -> &'static str {
    let second = B200X8.match_indices("\n- model: ").nth(1).unwrap().0;
    &B200X8[..=second]
}

pub(crate) fn probed(machine: &Machine, cgroups: &Path) -> DriverLimits {
    let library = Library::open(&find(machine.root()).unwrap()).unwrap();
    let gpus = library.inventory().unwrap().gpus;
    probe(&library, &gpus, &Cgroups::new(cgroups))
}

pub(crate) fn only(limits: DriverLimits) -> Result<(), LimitObstacle> {
    let mut limits = limits.into_values();
    let first = limits.next().unwrap();
    assert!(limits.all(|other| other == first));
    first
}

fn hierarchy(controllers: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
    fs::write(root.path().join("cgroup.subtree_control"), "").unwrap();
    root
}

/// Otherwise no container of the claim would start there, though its class takes any limit.
#[test]
fn claim_follows_a_node_that_came_back_without_limits() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let prepared = |limit: Option<Result<(), LimitObstacle>>| {
        let mut inventory = h100x2();
        let gpu = inventory.nvml.gpus[0].uuid.clone();
        inventory
            .driver_limits
            .extend(limit.map(|limit| (gpu, limit)));
        let (driver, installed) = (node.driver(), node.installed());
        let environment = environment(&inventory, &driver, &installed);
        let (record, repairs) = applier
            .prepare(&claim_ref(1), Some(&found), &environment)
            .unwrap();
        let saved = applier.store().load(&claim_ref(1).uid).unwrap();
        assert!(matches!(saved, Loaded::Present(saved) if *saved == record));
        let spec = fs::read_to_string(spec_of(&node, 1)).unwrap();
        let is_limited = record.devices[0].share().unwrap().limited_by_driver;
        assert_eq!(spec.contains("createRuntime"), is_limited, "{spec}");
        (is_limited, repairs.0.join("; "))
    };
    assert_eq!(prepared(Some(Ok(()))), (true, String::new()));
    // The GPU does not answer yet, or a container runs.
    assert_eq!(prepared(None), (true, String::new()));
    let lost = Some(Err(LimitObstacle::OldDriver));
    let container = node.start_container(71, 1);
    assert_eq!(prepared(lost), (true, String::new()));
    fs::remove_dir_all(container).unwrap();
    let (is_limited, repairs) = prepared(lost);
    assert!(
        !is_limited && repairs.contains("libvgpu alone limits its memory"),
        "{repairs}"
    );
    assert_eq!(prepared(lost), (false, String::new()));
    // Those that have started since have no limit by the driver.
    assert_eq!(prepared(Some(Ok(()))), (false, String::new()));
}

/// As while NVML is released for an upgrade of the driver: the node has no cgroup v2 as little as before.
#[test]
fn gpu_that_does_not_answer_keeps_what_is_known_of_it() {
    let (gpus, inventory) = (FakeGpus::h100x2(), h100x2().nvml);
    let empty = tempfile::tempdir().unwrap();
    let cgroups = Cgroups::new(empty.path());
    let scan = |known: &DriverLimits| update(&gpus, &inventory, &cgroups, known);
    let known = scan(&DriverLimits::new());
    assert_eq!(known.len(), 2);
    assert_eq!(only(known.clone()), Err(LimitObstacle::OldDriver));
    for status in [
        Status::DriverNotLoaded,
        Status::GpuLost,
        Status::Timeout,
        Status::Other("unknown error".to_owned()),
    ] {
        gpus.fail_limits(status);
        assert_eq!(scan(&known), known);
        assert_eq!(scan(&DriverLimits::new()), DriverLimits::new());
    }
    gpus.fail_limits(Status::NotSupported);
    assert_eq!(only(scan(&known)), Err(LimitObstacle::NoCgroupV2));
}

#[test]
fn detects_limits_of_either_backend_and_leaves_none() {
    if skips_without_root() {
        return;
    }
    for (backend, controllers) in [("dmem", "cpu dmem"), ("misc", "cpu")] {
        let root = hierarchy(controllers);
        let machine = b200(root.path(), backend);
        assert_eq!(only(probed(&machine, root.path())), Ok(()), "{backend}");
        assert_eq!(machine.gpu(0).unwrap().memory_limits, []);
        let left: Vec<_> = fs::read_dir(root.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}

#[test]
fn names_what_is_missing_for_limits() {
    if skips_without_root() {
        return;
    }
    // The kernel has no controller, which the backend needs.
    let root = hierarchy("cpu");
    let machine = b200(root.path(), "dmem");
    let missing = only(probed(&machine, root.path())).unwrap_err();
    assert_eq!(missing, LimitObstacle::NoController);
    let machine = b200(root.path(), "none");
    let missing = only(probed(&machine, root.path())).unwrap_err();
    assert_eq!(missing, LimitObstacle::NoController);
    // Version 1.
    let without = tempfile::tempdir().unwrap();
    let machine = b200(without.path(), "misc");
    let missing = only(probed(&machine, without.path())).unwrap_err();
    assert_eq!(missing, LimitObstacle::NoCgroupV2);
}

#[test]
fn changes_no_cgroup_with_an_older_nvidia_driver() {
    let root = hierarchy("dmem");
    let machine = Machine::start(H100X2).unwrap();
    let missing = only(probed(&machine, root.path())).unwrap_err();
    assert_eq!(missing, LimitObstacle::OldDriver);
    let control = root.path().join("cgroup.subtree_control");
    assert_eq!(fs::read_to_string(control).unwrap(), "");
}

#[test]
fn asks_again_only_gpus_that_answer_and_had_no_limits() {
    if skips_without_root() {
        return;
    }
    let root = hierarchy("dmem");
    let machine = b200(root.path(), "dmem");
    let library = Library::open(&find(machine.root()).unwrap()).unwrap();
    let mut nvml = library.inventory().unwrap();
    let uuid = nvml.gpus[0].uuid.clone();
    let cgroups = Cgroups::new(root.path());
    let gone = Cgroups::new(root.path().join("gone"));
    let able = DriverLimits::from([(uuid.clone(), Ok(()))]);
    let unable = DriverLimits::from([(uuid.clone(), Err(LimitObstacle::Failed))]);
    // What would fail is not tried.
    assert_eq!(update(&library, &nvml, &gone, &able), able);
    assert_eq!(update(&library, &nvml, &cgroups, &unable), able);
    nvml.faults.push(GpuFault {
        index: 0,
        gpu: Some(uuid.clone()),
        query: "the memory",
        status: Status::Timeout,
    });
    assert_eq!(update(&library, &nvml, &cgroups, &unable), unable);
    assert_eq!(
        update(&library, &nvml, &cgroups, &DriverLimits::new()),
        DriverLimits::new()
    );
}

/// A node with a claim on the B200 whose memory the NVIDIA driver limits, and the directory of a container.
pub(crate) struct Limited {
    node: TestNode,
    machine: Machine,
    limits: Arc<CgroupLimits>,
    container: PathBuf,
}

pub(crate) const SHARE_BYTES: u64 = 8 << 30;

impl Limited {
    /// NVML of the machine, and its first GPU.
    fn library(&self) -> (Library, GpuUuid) {
        let library = Library::open(&find(self.machine.root()).unwrap()).unwrap();
        let gpu = library.inventory().unwrap().gpus.swap_remove(0).uuid;
        (library, gpu)
    }

    fn new() -> Self {
        Self::with("dmem", |root| {
            fs::create_dir_all(root.join("kubepods/pod/container")).unwrap();
            fs::write(root.join("cgroup.controllers"), "dmem").unwrap();
            for cgroup in ["", "kubepods", "kubepods/pod"] {
                fs::write(root.join(cgroup).join("cgroup.subtree_control"), "").unwrap();
            }
        })
    }

    /// As [`Self::new`], with cgroups that `lay_out` creates in a directory.
    pub(crate) fn with(backend: &str, lay_out: impl FnOnce(&Path)) -> Self {
        let node = TestNode::started();
        let root = node.root.path().join("cgroup");
        let container = root.join("kubepods/pod/container");
        lay_out(&root);
        let machine = b200(&root, backend);
        let library = Library::open(&find(machine.root()).unwrap()).unwrap();
        let gpu = library.inventory().unwrap().gpus.swap_remove(0);
        let open: OpenLibrary = Arc::new(move || Ok(Box::new(library.clone())));
        let limited = Self {
            limits: node.cgroup_limits(&open),
            node,
            machine,
            container,
        };
        limited.prepare(1, gpu.uuid.as_str(), SHARE_BYTES);
        limited
    }

    /// Prepares a claim with a share of the GPU.
    fn prepare(&self, number: u32, gpu: &str, bytes: u64) {
        let record = record(number, gpu);
        let effects = self.node.effects();
        effects.save_record(&record).unwrap();
        let page = page_of(&record, bytes);
        let uid = &record.claim.uid;
        effects.ensure_page(uid, &page.0, &page.1).unwrap();
    }

    fn request(&self, number: u32, cgroup: &str) -> LimitRequest {
        LimitRequest {
            claim: claim_ref(number).uid.to_string(),
            share: share_id(number, 0),
            cgroup: cgroup.to_owned(),
        }
    }

    pub(crate) fn limit(&self, cgroup: &str) -> Result<(), String> {
        let limited = self.limits.limit(&self.request(1, cgroup));
        limited.map_err(|error| drava_api::error::describe(&error))
    }

    /// Limits by cgroup, as the machine holds them.
    pub(crate) fn held(&self) -> Vec<(String, u64)> {
        let gpu = self.machine.gpu(0).unwrap();
        let limits = gpu.memory_limits.into_iter();
        limits
            .map(|limit| (limit.cgroup, limit.limits.hard_bytes))
            .collect()
    }

    fn set_page(&self, bytes: u64) {
        let uid = claim_ref(1).uid;
        let share = ShareId::parse(&share_id(1, 0)).unwrap();
        let dir = self.node.layout().limits(&uid, &share);
        let mut page = Page::open(&dir).unwrap();
        let set = page.change(|limits| limits.memory_limit_bytes = Some(bytes));
        set.unwrap();
    }
}

/// The record of a claim with a share of this GPU whose memory the NVIDIA driver limits.
fn record(number: u32, gpu: &str) -> ClaimRecord {
    let mut inventory = h100x2();
    let planned = inventory.nvml.gpus[0].uuid.clone();
    inventory.driver_limits.insert(planned, Ok(()));
    let claim = claim(number, &[Share(0, "8Gi", "0")]);
    let mut devices = plan(&claim_ref(number), Some(&claim), POOL, &inventory).unwrap();
    devices[0].gpu.uuid = gpu.to_owned();
    ClaimRecord {
        claim: claim_ref(number),
        devices,
        library: String::new(),
        hook: String::new(),
        delivery: Delivery::Preload,
        common: CommonEdits::default(),
        can_wait: true,
    }
}

pub(crate) const CONTAINER: &str = "/kubepods/pod/container";

fn page_of(record: &ClaimRecord, bytes: u64) -> (ShareId, LimitsSpec) {
    let device = &record.devices[0];
    let id = device.share().unwrap().id.clone();
    let spec = LimitsSpec {
        claim_uid: IdText::new(record.claim.uid.as_str()).unwrap(),
        share_id: IdText::new(id.as_str()).unwrap(),
        device_uuid: device.gpu.uuid.parse().unwrap(),
        limits: Limits::memory(bytes),
    };
    (id, spec)
}

#[test]
fn limits_container_before_it_starts_and_follows_the_page() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    limited.limit(CONTAINER).unwrap();
    let held = |bytes| vec![(CONTAINER.to_owned(), bytes)];
    assert_eq!(limited.held(), held(SHARE_BYTES));
    // Growth and shrinking change only the page.
    for bytes in [3 * SHARE_BYTES, SHARE_BYTES / 2] {
        limited.set_page(bytes);
        assert!(limited.limits.follow().is_empty());
        assert_eq!(limited.held(), held(bytes));
    }
    // A restarted container has a new cgroup, which gets the limit of now.
    fs::remove_dir(&limited.container).unwrap();
    fs::create_dir(limited.container.with_file_name("second")).unwrap();
    limited.limit("/kubepods/pod/second").unwrap();
    assert!(limited.limits.follow().is_empty());
    let second = ("/kubepods/pod/second".to_owned(), SHARE_BYTES / 2);
    assert_eq!(limited.held(), [second]);
}

#[test]
fn refuses_limit_of_unknown_share_and_of_what_is_no_container() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    for cgroup in ["/", "", "/kubepods/../..", "kubepods"] {
        let refused = limited.limit(cgroup).unwrap_err();
        assert!(refused.contains("is not the cgroup"), "{refused}");
    }
    assert!(limited.limit("/kubepods/pod/gone").is_err());
    for (claim, share) in [
        ("", share_id(1, 0)),
        ("../../etc", share_id(1, 0)),
        (claim_ref(2).uid.as_str(), share_id(1, 0)),
        (claim_ref(1).uid.as_str(), share_id(1, 1)),
    ] {
        let request = LimitRequest {
            claim: claim.to_owned(),
            share,
            cgroup: CONTAINER.to_owned(),
        };
        let refused = limited.limits.limit(&request).unwrap_err().to_string();
        assert!(refused.contains("has no share"), "{refused}");
    }
    assert_eq!(limited.held(), []);
}

#[test]
fn removes_limits_with_the_claim_and_no_others() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    let foreign = limited.container.with_file_name("foreign");
    fs::create_dir(&foreign).unwrap();
    limited.limit(CONTAINER).unwrap();
    let (library, gpu) = limited.library();
    library
        .set_memory_limit(&gpu, &foreign, Some(1 << 20))
        .unwrap();
    let others = [("/kubepods/pod/foreign".to_owned(), 1 << 20)];
    let uid = claim_ref(1).uid;
    limited.limits.remove(&uid).unwrap();
    assert_eq!(limited.held(), others);
    // After a crash: the claim has no record, and only the file says that there are limits.
    limited.limit(CONTAINER).unwrap();
    limited.node.effects().remove_record(&uid).unwrap();
    let open: OpenLibrary = Arc::new(move || Ok(Box::new(library.clone())));
    let restarted = limited.node.cgroup_limits(&open);
    assert!(restarted.follow().is_empty());
    assert_eq!(limited.held(), others);
}

#[test]
fn sets_limit_again_that_a_crash_left_out() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    limited.limit(CONTAINER).unwrap();
    let (library, gpu) = limited.library();
    library
        .set_memory_limit(&gpu, &limited.container, None)
        .unwrap();
    assert_eq!(limited.held(), []);
    let open: OpenLibrary = Arc::new(move || Ok(Box::new(library.clone())));
    let restarted = limited.node.cgroup_limits(&open);
    assert!(restarted.follow().is_empty());
    assert_eq!(limited.held(), [(CONTAINER.to_owned(), SHARE_BYTES)]);
}

/// NVML has one limit for a GPU and a cgroup.
#[test]
fn container_with_two_shares_of_a_gpu_has_the_sum_of_their_limits() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    let (library, gpu) = limited.library();
    limited.prepare(2, gpu.as_str(), SHARE_BYTES / 2);
    limited.limit(CONTAINER).unwrap();
    limited
        .limits
        .limit(&limited.request(2, CONTAINER))
        .unwrap();
    let held = |bytes| vec![(CONTAINER.to_owned(), bytes)];
    assert_eq!(limited.held(), held(SHARE_BYTES * 3 / 2));
    limited.set_page(2 * SHARE_BYTES);
    assert!(limited.limits.follow().is_empty());
    assert_eq!(limited.held(), held(SHARE_BYTES * 5 / 2));
    let open: OpenLibrary = Arc::new(move || Ok(Box::new(library.clone())));
    let restarted = limited.node.cgroup_limits(&open);
    assert!(restarted.follow().is_empty());
    assert_eq!(limited.held(), held(SHARE_BYTES * 5 / 2));
    // One of the claims ends.
    restarted.remove(&claim_ref(1).uid).unwrap();
    assert_eq!(limited.held(), held(SHARE_BYTES / 2));
    assert!(restarted.follow().is_empty());
    assert_eq!(limited.held(), held(SHARE_BYTES / 2));
    restarted.remove(&claim_ref(2).uid).unwrap();
    assert_eq!(limited.held(), []);
}

#[test]
fn hung_nvml_holds_up_no_release() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    let (library, gpu) = limited.library();
    limited.prepare(2, gpu.as_str(), SHARE_BYTES);
    // NVML hangs when it is opened, while `hang` is held.
    let gate = Arc::new(std::sync::Mutex::new(()));
    let passed = Arc::clone(&gate);
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let open: OpenLibrary = Arc::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        drop(passed.lock());
        Ok(Box::new(library.clone()))
    });
    let limits = limited.node.cgroup_limits(&open);
    limits.limit(&limited.request(1, CONTAINER)).unwrap();
    let hang = gate.lock().unwrap();
    let before = calls.load(Ordering::SeqCst);
    let other = {
        let (limits, request) = (Arc::clone(&limits), limited.request(2, CONTAINER));
        std::thread::spawn(move || limits.limit(&request))
    };
    while calls.load(Ordering::SeqCst) == before {
        std::thread::yield_now();
    }
    let asked = Instant::now();
    assert!(limits.follow().is_empty());
    limits.remove(&claim_ref(3).uid).unwrap();
    let others = asked.elapsed();
    limits.remove(&claim_ref(1).uid).unwrap();
    let error = other.join().unwrap().unwrap_err().to_string();
    assert!(others * 4 < asked.elapsed(), "{others:?}");
    assert!(error.contains("does not answer"), "{error}");
    drop(hang);
    // What could not be set is set when NVML answers again.
    while limited.held() != [(CONTAINER.to_owned(), SHARE_BYTES)] {
        assert!(limits.follow().is_empty());
    }
    limits.remove(&claim_ref(2).uid).unwrap();
    assert_eq!(limited.held(), []);
}

#[test]
fn sets_limit_again_that_another_program_changed() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    limited.limit(CONTAINER).unwrap();
    let (library, gpu) = limited.library();
    for other in [None, Some(2 * SHARE_BYTES)] {
        library
            .set_memory_limit(&gpu, &limited.container, other)
            .unwrap();
        let failures: Vec<_> = (0..50).flat_map(|_| limited.limits.follow()).collect();
        let [failure] = &failures[..] else {
            panic!("{failures:?}")
        };
        let failure = failure.to_string();
        assert!(
            failure.contains("by another program than drava"),
            "{failure}"
        );
        assert_eq!(limited.held(), [(CONTAINER.to_owned(), SHARE_BYTES)]);
    }
}

#[test]
fn cgroup_that_fails_holds_up_no_other() {
    if skips_without_root() {
        return;
    }
    let limited = Limited::new();
    limited.limit(CONTAINER).unwrap();
    // The claim has a cgroup on a GPU that is lost, before the other one.
    let file = limited.node.layout().cgroup_limits();
    let file = file.join(claim_ref(1).uid.as_str());
    let mut limits: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let mut lost = limits[0].clone();
    lost["gpu"] = json!("GPU-00000000-0000-0000-0000-000000000000");
    limits.as_array_mut().unwrap().insert(0, lost);
    fs::write(&file, limits.to_string()).unwrap();
    let library = Library::open(&find(limited.machine.root()).unwrap()).unwrap();
    let open: OpenLibrary = Arc::new(move || Ok(Box::new(library.clone())));
    let restarted = limited.node.cgroup_limits(&open);
    limited.set_page(2 * SHARE_BYTES);
    assert_eq!(restarted.follow().len(), 1);
    assert_eq!(limited.held(), [(CONTAINER.to_owned(), 2 * SHARE_BYTES)]);
}
