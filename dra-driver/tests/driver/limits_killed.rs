//! A node driver that SIGKILL ends between any two effects on claims whose memory the NVIDIA driver limits: random sequences of
//! prepare, start of a container, growth and shrinking of the limit, and unprepare, on the simulated machine.
//!
//! Invariants: a container that has started keeps its limit through every kill, with the amount of the limits page as soon as a
//! node driver runs again; a claim without a record has no limit.
//!
//! The process that is killed is this program, started again, as in [`crate::partitions`]. The usual run has [`ROUNDS`] rounds;
//! `DRAVA_LIMIT_ROUNDS=1000` has more, and `DRAVA_LIMIT_SEED` repeats a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use drava_cdi::{Driver, DriverRoot};
use drava_dra_driver::gpus::inventory::{NodeInventory, OpenLibrary};
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::limits_page::Page;
use drava_dra_driver::node::options::Delivery;
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::node::tmpfs::KernelTmpfs;
use drava_dra_driver::prepare::apply::Environment;
use drava_dra_driver::prepare::cgroup_limits::LimitRequest;
use drava_dra_driver::prepare::effects::{NodeAccess, NodeEffects};
use drava_nvml::{
    CgroupMemory, EventSource, GpuError, GpuInstance, GpuLibrary, GpuUuid, Inventory,
    InventoryError, Library, Memory, MigProfile, Placement, Process, ProcessUtilization, Status,
    Telemetry, Utilization, WatchError, find,
};
use simulator_machine::testing::Machine;

use crate::cluster::unsupported;
use crate::crash::{CrashingEffects, count_or_die};
use crate::driver_limits::b200;
use crate::fixture::Allocated::Share;
use crate::fixture::{POOL, claim, claim_ref, inventory, share_id};
use crate::namespace::in_mount_namespace;
use crate::node::{NodeRoot, TestNode, record_of};

const TEST: &str = "limits_killed::limits_follow_claims_through_kills";

/// Set in the process that is killed: directory of the node, driver root, operation, number of effects.
const KILLED: &str = "DRAVA_TEST_LIMITS_KILLED";

/// Rounds of the usual run.
const ROUNDS: usize = 60;

const CLAIMS: [u32; 2] = [1, 2];

/// Containers of a claim at once.
const CONTAINERS: usize = 2;

/// Amounts of a limits page. A suspended share, and one that gave memory back, has less than its claim.
const AMOUNTS: [u64; 4] = [1 << 20, 4 << 30, 8 << 30, 16 << 30];

/// NVML whose changes of limits count as effects.
struct CountingLibrary {
    library: Library,
    remaining: Arc<AtomicUsize>,
}

impl GpuLibrary for CountingLibrary {
    fn inventory(&self) -> Result<Inventory, InventoryError> {
        self.library.inventory()
    }

    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        bytes: Option<u64>,
    ) -> Result<(), GpuError> {
        // What comes before is another effect, such as the file that names the cgroup.
        count_or_die(&self.remaining);
        let set = self.library.set_memory_limit(gpu, cgroup, bytes);
        count_or_die(&self.remaining);
        set
    }

    fn cgroup_memory(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<CgroupMemory, GpuError> {
        self.library.cgroup_memory(gpu, cgroup)
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<Memory, GpuError> {
        self.library.memory(gpu)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<Process>, GpuError> {
        self.library.processes(gpu)
    }

    fn utilization(&self, gpu: &GpuUuid) -> Result<Option<Utilization>, GpuError> {
        self.library.utilization(gpu)
    }

    fn telemetry(&self, gpu: &GpuUuid) -> Result<Telemetry, GpuError> {
        self.library.telemetry(gpu)
    }

    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, GpuError> {
        self.library.process_utilization(gpu, since_us)
    }

    fn watch(&self, _gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError> {
        Err(WatchError::Create(Status::NotSupported))
    }

    fn mig_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        unsupported(gpu)
    }

    fn create_mig(&self, gpu: &GpuUuid, _: u32, _: Placement) -> Result<GpuInstance, GpuError> {
        unsupported(gpu)
    }

    fn destroy_mig(&self, gpu: &GpuUuid, _: u32) -> Result<(), GpuError> {
        unsupported(gpu)
    }

    fn is_mig_enabled(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        unsupported(gpu)
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, _: bool) -> Result<(), GpuError> {
        unsupported(gpu)
    }

    fn mig_remaining(&self, gpu: &GpuUuid, _: &MigProfile) -> Result<u32, GpuError> {
        unsupported(gpu)
    }
}

/// What the node driver does in one round.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Operation {
    Prepare(u32),
    /// Limits a container that starts.
    Limit(u32, String),
    /// Follows the limits pages.
    Follow,
    Unprepare(u32),
}

impl Operation {
    fn to_text(&self) -> String {
        match self {
            Self::Prepare(number) => format!("prepare {number} -"),
            Self::Limit(number, cgroup) => format!("limit {number} {cgroup}"),
            Self::Follow => "follow 0 -".to_owned(),
            Self::Unprepare(number) => format!("unprepare {number} -"),
        }
    }

    fn parse(text: &str) -> Self {
        let [kind, number, cgroup] = text.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        let number = number.parse().unwrap();
        match kind {
            "prepare" => Self::Prepare(number),
            "limit" => Self::Limit(number, cgroup.to_owned()),
            "follow" => Self::Follow,
            "unprepare" => Self::Unprepare(number),
            _ => panic!("{text}"),
        }
    }
}

/// A node driver on the node.
struct Instance {
    node: TestNode,
    library: Library,
    inventory: NodeInventory,
}

impl Instance {
    fn new(node: TestNode) -> Self {
        let library = Library::open(&find(&node.paths.driver_root_mount).unwrap()).unwrap();
        let mut inventory = NodeInventory {
            nvml: library.inventory().unwrap(),
            ..inventory(Vec::new())
        };
        for gpu in &inventory.nvml.gpus {
            inventory.driver_limits.insert(gpu.uuid.clone(), Ok(()));
        }
        Self {
            node,
            library,
            inventory,
        }
    }

    /// Does an operation as a driver that has just started, which dies after this number of effects.
    fn run(&self, operation: &Operation, effects: usize) -> Result<(), String> {
        let remaining = Arc::new(AtomicUsize::new(effects));
        let (library, counted) = (self.library.clone(), Arc::clone(&remaining));
        let open: OpenLibrary = Arc::new(move || {
            Ok(Box::new(CountingLibrary {
                library: library.clone(),
                remaining: Arc::clone(&counted),
            }))
        });
        let limits = self.node.cgroup_limits(&open);
        let access = NodeAccess {
            cgroup_limits: Arc::clone(&limits),
            mps: self.node.mps(),
            proc_root: self.node.root.path().join("proc"),
            open,
            boot_id: "boot".to_owned(),
            labels: Labels::Off,
            device_files: None,
        };
        let tmpfs = Arc::new(KernelTmpfs::default());
        let effects = NodeEffects::new(self.node.layout(), tmpfs, access);
        let applier = self
            .node
            .applier(CrashingEffects::killing_with(&remaining, effects));
        let text = |error: &dyn std::error::Error| drava_api::error::describe(error);
        match operation {
            Operation::Prepare(number) => {
                let paths = &self.node.paths;
                let root = DriverRoot::open(&paths.driver_root_mount, &paths.driver_root).unwrap();
                let (driver, installed) = (Driver::discover(root).unwrap(), self.node.installed());
                let environment = Environment {
                    pool: POOL,
                    inventory: &self.inventory,
                    driver: &driver,
                    installed: &installed,
                    delivery: Delivery::Preload,
                };
                let found = claim(*number, &[Share(0, "8Gi", "0")]);
                let prepared = applier.prepare(&claim_ref(*number), Some(&found), &environment);
                prepared.map(drop).map_err(|error| text(&error))
            }
            Operation::Limit(number, cgroup) => {
                let request = LimitRequest {
                    claim: claim_ref(*number).uid.to_string(),
                    share: share_id(*number, 0),
                    cgroup: cgroup.clone(),
                };
                limits.limit(&request).map_err(|error| text(&error))
            }
            Operation::Follow => match limits.follow().first() {
                None => Ok(()),
                Some(error) => Err(text(error)),
            },
            Operation::Unprepare(number) => applier
                .unprepare(&claim_ref(*number))
                .map_err(|error| text(&error)),
        }
    }
}

/// Runs the process that is killed, if this is one; it ends here.
#[expect(clippy::exit, reason = "the test that started the process continues")]
fn run_if_killed() {
    let Ok(arguments) = std::env::var(KILLED) else {
        return;
    };
    let [root, machine, operation, effects] = arguments.split('|').collect::<Vec<_>>()[..] else {
        panic!("{arguments}")
    };
    let root = NodeRoot::Existing(PathBuf::from(root));
    let instance = Instance::new(TestNode::at(root, PathBuf::from(machine)));
    let done = instance.run(&Operation::parse(operation), effects.parse().unwrap());
    std::process::exit(i32::from(done.is_err()));
}

/// Xorshift.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 16).unwrap() % bound
    }
}

/// Whether a driver has followed the limits pages since their last change.
#[derive(Clone, Copy)]
enum Follows {
    Already,
    Later,
}

/// What the kubelet, the container runtime and the tenants know.
struct Model {
    machine: Machine,
    instance: Instance,
    random: Random,
    prepared: BTreeSet<u32>,
    /// Containers that run, by claim.
    running: BTreeMap<u32, Vec<String>>,
    /// Amounts of the limits pages, by claim; before and after a change that is being followed.
    amounts: BTreeMap<u32, [u64; 2]>,
    containers: usize,
    /// Kills by operation.
    kills: BTreeMap<&'static str, usize>,
    log: Vec<String>,
}

impl Model {
    fn new(random: Random) -> Self {
        let mut node = TestNode::started();
        let root = node.root.path().join("cgroup");
        fs::create_dir_all(root.join("kubepods")).unwrap();
        fs::write(root.join("cgroup.controllers"), "dmem").unwrap();
        for cgroup in ["", "kubepods"] {
            fs::write(root.join(cgroup).join("cgroup.subtree_control"), "").unwrap();
        }
        let machine = b200(&root, "dmem");
        node.paths.driver_root_mount = machine.root().to_owned();
        Self {
            instance: Instance::new(node),
            machine,
            random,
            prepared: BTreeSet::new(),
            running: BTreeMap::new(),
            amounts: BTreeMap::new(),
            containers: 0,
            kills: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    fn directory(&self, cgroup: &str) -> PathBuf {
        let root = self.instance.node.root.path().join("cgroup");
        root.join(cgroup.trim_start_matches('/'))
    }

    /// Limits of the machine by cgroup. The machine forgets those of a cgroup that is gone with the next call of NVML.
    fn held(&self) -> BTreeMap<String, u64> {
        let limits = self.machine.gpu(0).unwrap().memory_limits.into_iter();
        limits
            .filter(|limit| self.directory(&limit.cgroup).is_dir())
            .map(|limit| (limit.cgroup, limit.limits.hard_bytes))
            .collect()
    }

    /// Runs a process that is killed after this number of effects. Returns whether it did its operation.
    fn process(&mut self, operation: &Operation, effects: usize) -> bool {
        let node = &self.instance.node;
        let arguments = [
            node.root.path().to_str().unwrap(),
            node.paths.driver_root_mount.to_str().unwrap(),
            &operation.to_text(),
            &effects.to_string(),
        ];
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(KILLED, arguments.join("|"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        let outcome = match (status.signal(), status.code()) {
            (Some(9), _) => "killed",
            (_, Some(0)) => "done",
            other => panic!("{operation:?} ended with {other:?}"),
        };
        self.log
            .push(format!("{operation:?}, {effects}: {outcome}"));
        if outcome == "killed" {
            let kind = match operation {
                Operation::Prepare(_) => "prepare",
                Operation::Limit(..) => "limit",
                Operation::Follow => "follow",
                Operation::Unprepare(_) => "unprepare",
            };
            *self.kills.entry(kind).or_default() += 1;
        }
        outcome == "done"
    }

    /// Does an operation in this process, which is a driver that starts after the kill.
    fn repeat(&mut self, operation: &Operation) {
        let done = self.instance.run(operation, usize::MAX);
        self.log.push(format!("{operation:?}: {done:?}"));
        assert_eq!(done, Ok(()));
    }

    fn round(&mut self) {
        let number = CLAIMS[self.random.below(CLAIMS.len())];
        if !self.prepared.contains(&number) {
            return self.prepare(number);
        }
        let running = self.running.get(&number).map_or(0, Vec::len);
        match self.random.below(8) {
            0..=2 if running < CONTAINERS => self.start(number),
            0..=4 if running > 0 => self.change(number),
            5 if running > 0 => self.end_container(number),
            0..=5 => self.start(number),
            _ => self.unprepare(number),
        }
    }

    fn prepare(&mut self, number: u32) {
        let prepare = Operation::Prepare(number);
        let effects = self.random.below(8);
        let is_done = self.process(&prepare, effects);
        self.restart();
        // Kubelet repeats a failed call, or gives up.
        if !is_done && self.random.below(3) == 0 {
            self.repeat(&Operation::Unprepare(number));
        } else {
            self.repeat(&prepare);
            self.prepared.insert(number);
            self.amounts.insert(number, [8 << 30; 2]);
        }
        self.check();
    }

    /// Starts a container. One whose hook failed does not run, and its cgroup may stay for a while.
    fn start(&mut self, number: u32) {
        self.containers += 1;
        let cgroup = format!("/kubepods/c{}", self.containers);
        fs::create_dir(self.directory(&cgroup)).unwrap();
        let limit = Operation::Limit(number, cgroup.clone());
        let effects = self.random.below(4);
        let mut starts = self.process(&limit, effects);
        // Without a driver that follows: the container starts at once.
        let mut held = self.held();
        self.restart();
        if !starts && self.random.below(2) == 0 {
            self.repeat(&limit);
            held = self.held();
            starts = true;
        }
        if starts {
            let [_, now] = self.amounts[&number];
            assert_eq!(held.get(&cgroup), Some(&now), "{cgroup} starts");
            self.running.entry(number).or_default().push(cgroup);
        } else if self.random.below(2) == 0 {
            fs::remove_dir(self.directory(&cgroup)).unwrap();
        }
        self.check();
    }

    /// Changes the limits page, as the agent does for growth, for memory that is given back, and for a suspension.
    fn change(&mut self, number: u32) {
        let bytes = AMOUNTS[self.random.below(AMOUNTS.len())];
        let uid = claim_ref(number).uid;
        let share = ShareId::parse(&share_id(number, 0)).unwrap();
        let directory = self.instance.node.layout().limits(&uid, &share);
        let mut page = Page::open(&directory).unwrap();
        page.change(|limits| limits.memory_limit_bytes = Some(bytes))
            .unwrap();
        let [_, before] = self.amounts[&number];
        self.amounts.insert(number, [before, bytes]);
        let effects = self.random.below(2 * CONTAINERS * CLAIMS.len());
        self.process(&Operation::Follow, effects);
        self.check_running(Follows::Later);
        self.restart();
        self.amounts.insert(number, [bytes; 2]);
        self.check();
    }

    /// Ends a container: its limit ends with its cgroup.
    fn end_container(&mut self, number: u32) {
        let running = self.running.get_mut(&number).unwrap();
        let ended = running.remove(0);
        fs::remove_dir(self.directory(&ended)).unwrap();
        self.process(&Operation::Follow, 0);
        self.restart();
        self.check();
    }

    fn unprepare(&mut self, number: u32) {
        // The containers have ended; the runtime may remove their cgroups later.
        let ended = self.running.remove(&number).unwrap_or_default();
        let has_cgroups = self.random.below(3) > 0;
        if !has_cgroups {
            for cgroup in &ended {
                fs::remove_dir(self.directory(cgroup)).unwrap();
            }
        }
        let unprepare = Operation::Unprepare(number);
        let effects = self.random.below(6 + 2 * ended.len());
        let is_done = self.process(&unprepare, effects);
        self.check_running(Follows::Later);
        self.restart();
        if !is_done {
            self.repeat(&unprepare);
        }
        self.prepared.remove(&number);
        self.amounts.remove(&number);
        self.check();
        if has_cgroups {
            for cgroup in ended {
                fs::remove_dir(self.directory(&cgroup)).unwrap();
            }
        }
    }

    /// Starts a driver, which follows the limits pages at once.
    fn restart(&mut self) {
        self.check_running(Follows::Later);
        self.repeat(&Operation::Follow);
    }

    /// Checks that containers that run have a limit: that of the page, or before a driver has followed it, that of the page before.
    fn check_running(&self, follows: Follows) {
        let held = self.held();
        for (number, cgroup) in self
            .running
            .iter()
            .flat_map(|(number, all)| all.iter().map(move |one| (number, one)))
        {
            let [before, now] = self.amounts[number];
            let limit = held.get(cgroup);
            let allowed = match follows {
                Follows::Already => limit == Some(&now),
                Follows::Later => limit == Some(&now) || limit == Some(&before),
            };
            assert!(
                allowed,
                "{cgroup} of claim {number} has {limit:?}, not {now}"
            );
        }
    }

    /// Checks all invariants while a driver runs.
    fn check(&mut self) {
        self.repeat(&Operation::Follow);
        self.check_running(Follows::Already);
        // Of a claim with a record its file explains each limit, also that of a container whose hook failed.
        let node = &self.instance.node;
        let (recorded, released): (Vec<u32>, Vec<u32>) = CLAIMS
            .into_iter()
            .partition(|number| record_of(node, *number).exists());
        let named: BTreeSet<String> = recorded
            .into_iter()
            .flat_map(|one| self.named(one))
            .collect();
        let held = self.held();
        let unexplained: Vec<&String> = held.keys().filter(|one| !named.contains(*one)).collect();
        assert!(
            unexplained.is_empty(),
            "limits without a claim: {unexplained:?}"
        );
        for number in released {
            let is_left = self.limits_file(number).exists();
            assert!(!is_left, "the file of claim {number} is left");
        }
    }

    fn limits_file(&self, number: u32) -> PathBuf {
        let directory = self.instance.node.layout().cgroup_limits();
        directory.join(claim_ref(number).uid.as_str())
    }

    /// Cgroups in the file of a claim.
    fn named(&self, number: u32) -> Vec<String> {
        let file = fs::read(self.limits_file(number)).unwrap_or_else(|_| b"[]".to_vec());
        let named: Vec<serde_json::Value> = serde_json::from_slice(&file).unwrap();
        let root = self.directory("/").display().to_string();
        let cgroup = |one: &serde_json::Value| {
            let directory = one["directory"].as_str().unwrap();
            format!("/{}", directory.strip_prefix(&root).unwrap())
        };
        named.iter().map(cgroup).collect()
    }
}

/// `eprintln!` would be hidden for a test that passes.
pub(crate) fn report(line: &str) {
    let line = format!("{line}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

pub(crate) fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap())
}

#[test]
fn limits_follow_claims_through_kills() {
    run_if_killed();
    in_mount_namespace(TEST, || {
        let seed = number("DRAVA_LIMIT_SEED");
        let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 0x5eed);
        let rounds = number("DRAVA_LIMIT_ROUNDS").map_or(ROUNDS, |all| all.try_into().unwrap());
        report(&format!("DRAVA_LIMIT_SEED={seed}"));
        let mut model = Model::new(Random(seed));
        for round in 0..rounds {
            let attempt = std::panic::AssertUnwindSafe(|| model.round());
            if std::panic::catch_unwind(attempt).is_err() {
                let last = model.log.len().saturating_sub(15);
                panic!(
                    "seed {seed}, round {round}:\n{}",
                    model.log[last..].join("\n")
                );
            }
        }
        report(&format!("{rounds} rounds, kills: {:?}", model.kills));
        let kills: usize = model.kills.values().sum();
        assert!(kills >= rounds / 3, "too few kills: {:?}", model.kills);
        assert_eq!(model.kills.len(), 4, "{:?}", model.kills);
        for number in CLAIMS {
            model.running.remove(&number);
            model.repeat(&Operation::Unprepare(number));
        }
        assert_eq!(model.held(), BTreeMap::new());
        assert_eq!(model.instance.node.claim_state().0, Vec::<String>::new());
    });
}
