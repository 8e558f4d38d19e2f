//! A process that SIGKILL ends after each step of prepare and unprepare, and while NVML creates and destroys instances.
//!
//! The process is this program, started again: the node driver's code on real files and mounts, with NVML of a simulated
//! machine. The next process must complete or remove what the killed one left.

use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use drava_dra_driver::node::tmpfs::KernelTmpfs;
use simulator_machine::testing::poll;

use super::*;
use crate::fixture::Allocated::Share;
use crate::namespace::in_mount_namespace;
use crate::node::NodeRoot;

/// Set in the process that is killed: directory of the node, driver root, operation, number of effects.
const KILLED: &str = "DRAVA_TEST_KILLED";

/// More effects than any operation has.
const ALL: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Prepare,
    Unprepare,
}

/// The claim of a test.
#[derive(Clone, Copy)]
struct Claim {
    results: [Allocated; 2],
    /// Path of the test, which the killed process runs.
    test: &'static str,
}

const fn partitions_in(test: &'static str) -> Claim {
    Claim {
        results: [Partition(0, "1g.5gb", 6), Partition(1, "2g.10gb", 4)],
        test,
    }
}

/// A node with real mounts.
struct Node {
    library: Arc<Library>,
    inventory: NodeInventory,
    node: TestNode,
    claim: Claim,
}

impl Node {
    fn new(node: TestNode, claim: Claim) -> Self {
        let library = Library::open(&find(&node.paths.driver_root_mount).unwrap()).unwrap();
        Self {
            inventory: inventory_of(&library),
            library: Arc::new(library),
            node,
            claim,
        }
    }

    /// Returns an empty node of the machine.
    fn of(machine: &Machine, claim: Claim) -> Self {
        let mut node = TestNode::started();
        node.paths.driver_root_mount = machine.root().to_owned();
        Self::new(node, claim)
    }

    fn effects(&self) -> NodeEffects {
        let library = Arc::clone(&self.library);
        let open: OpenLibrary =
            Arc::new(move || Ok(Box::new(Library::clone(&library)) as Box<dyn GpuLibrary>));
        let access = NodeAccess {
            cgroup_limits: self.node.cgroup_limits(&open),
            mps: self.node.mps(),
            proc_root: self.node.root.path().join("proc"),
            open,
            boot_id: BOOT.to_owned(),
            labels: Labels::Off,
            device_files: None,
        };
        let tmpfs = Arc::new(KernelTmpfs::default());
        NodeEffects::new(self.node.layout(), tmpfs, access)
    }

    fn run<E: Effects>(&self, effects: E, operation: Operation) -> Result<(), ApplyError> {
        let applier = self.node.applier(effects);
        if operation == Operation::Unprepare {
            return applier.unprepare(&claim_ref(1));
        }
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
        let found = claim(1, &self.claim.results);
        let prepared = applier.prepare(&claim_ref(1), Some(&found), &environment);
        prepared.map(|_| ())
    }

    /// Starts the process that is killed before its effect number `effects`.
    fn start(&self, operation: Operation, effects: usize) -> Child {
        let arguments = [
            self.node.root.path().to_str().unwrap().to_owned(),
            self.node
                .paths
                .driver_root_mount
                .to_str()
                .unwrap()
                .to_owned(),
            format!("{operation:?}"),
            effects.to_string(),
        ];
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", self.claim.test, "--nocapture"])
            .env(KILLED, arguments.join("|"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Runs the process. Returns whether it was killed.
    fn is_killed(&self, operation: Operation, effects: usize) -> bool {
        let status = self.start(operation, effects).wait().unwrap();
        assert!(
            status.signal() == Some(9) || status.code().is_some(),
            "{status}"
        );
        status.signal() == Some(9)
    }

    /// Returns the number of MIG instances of all GPUs.
    fn instances(&self) -> usize {
        let gpus = self.inventory.nvml.gpus.iter();
        let is_partitioned = |gpu: &&Gpu| matches!(gpu.mig, Mig::Capable { enabled: true, .. });
        let of_gpu = |gpu: &Gpu| self.library.mig_instances(&gpu.uuid).unwrap().len();
        gpus.filter(is_partitioned).map(of_gpu).sum()
    }

    /// Returns the mounts of usage regions.
    fn mounts(&self) -> usize {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let usages = self.node.layout().usages();
        let usages = usages.to_str().unwrap();
        mounts.lines().filter(|line| line.contains(usages)).count()
    }

    /// Checks that a new process prepares the claim completely.
    fn completes(&self, context: &str) {
        self.run(self.effects(), Operation::Prepare).unwrap();
        let is_share = |result: &&Allocated| matches!(result, Share(..));
        let shares = self.claim.results.iter().filter(is_share).count();
        let expected = (self.claim.results.len() - shares, shares);
        assert_eq!((self.instances(), self.mounts()), expected, "{context}");
    }

    /// Checks that a new process removes everything.
    fn removes(&self, context: &str) {
        self.run(self.effects(), Operation::Unprepare).unwrap();
        assert_eq!((self.instances(), self.mounts()), (0, 0), "{context}");
        assert_eq!(self.node.claim_state().0, Vec::<String>::new(), "{context}");
    }
}

/// Runs the process that is killed, if this is one; it ends here.
#[expect(clippy::exit, reason = "the test that started the process continues")]
fn run_if_killed(claim: Claim) {
    let Ok(arguments) = std::env::var(KILLED) else {
        return;
    };
    let arguments: Vec<&str> = arguments.split('|').collect();
    let [root, machine, operation, effects] = arguments[..] else {
        panic!("{arguments:?}")
    };
    let root = NodeRoot::Existing(PathBuf::from(root));
    let node = Node::new(TestNode::at(root, PathBuf::from(machine)), claim);
    let operation = match operation {
        "Prepare" => Operation::Prepare,
        _ => Operation::Unprepare,
    };
    let effects = CrashingEffects::killing_after(effects.parse().unwrap(), node.effects());
    let is_done = node.run(effects, operation).is_ok();
    std::process::exit(i32::from(!is_done));
}

/// Kills processes at every step on the machine. Returns the numbers of steps of prepare and unprepare.
fn kill_at_every_step(machine: &Machine, claim: Claim) -> (usize, usize) {
    let mut steps = 0;
    loop {
        let node = Node::of(machine, claim);
        let is_killed = node.is_killed(Operation::Prepare, steps);
        node.completes(&format!("prepare was killed at step {steps}"));
        node.removes(&format!("prepare was killed at step {steps}"));
        // Kubelet may unprepare a claim whose prepare was killed.
        node.is_killed(Operation::Prepare, steps);
        node.removes(&format!("prepare was killed at step {steps}, not repeated"));
        if !is_killed {
            break;
        }
        steps += 1;
    }
    let mut undo_steps = 0;
    loop {
        let node = Node::of(machine, claim);
        node.completes("first");
        let is_killed = node.is_killed(Operation::Unprepare, undo_steps);
        node.removes(&format!("unprepare was killed at step {undo_steps}"));
        if !is_killed {
            return (steps, undo_steps);
        }
        undo_steps += 1;
    }
}

#[test]
fn next_process_repairs_shares_of_killed_one() {
    const CLAIM: Claim = Claim {
        results: [Share(0, "8Gi", "30"), Share(1, "4Gi", "0")],
        test: "partitions::killed::next_process_repairs_shares_of_killed_one",
    };
    run_if_killed(CLAIM);
    in_mount_namespace(CLAIM.test, || {
        let machine = Machine::start(H100X2).unwrap();
        // A record, two pages, two regions, a base, a spec; the spec, the limits by the driver, the regions, the pages, the record.
        assert_eq!(kill_at_every_step(&machine, CLAIM), (7, 5));
    });
}

fn partitioned_machine() -> Machine {
    let machine = Machine::start(&a100x2()).unwrap();
    PartitionedNode::enable(&machine);
    machine
}

#[test]
fn next_process_repairs_partitions_of_killed_one() {
    const CLAIM: Claim =
        partitions_in("partitions::killed::next_process_repairs_partitions_of_killed_one");
    run_if_killed(CLAIM);
    in_mount_namespace(CLAIM.test, || {
        let machine = partitioned_machine();
        // A record, two instances, a base, a spec; the same without the base, and steps for the limits by the driver, the usage
        // regions and the pages that a claim might have.
        assert_eq!(kill_at_every_step(&machine, CLAIM), (5, 7));
    });
}

#[test]
fn next_process_completes_killed_rollback() {
    const CLAIM: Claim =
        partitions_in("partitions::killed::next_process_completes_killed_rollback");
    run_if_killed(CLAIM);
    in_mount_namespace(CLAIM.test, || {
        let machine = partitioned_machine();
        let set_refused = |refuses_instances| {
            let faults = Faults {
                refuses_instances,
                ..Faults::default()
            };
            let gpu = GpuIndex(1);
            machine.control(&Command::Break { gpu, faults }).unwrap();
        };
        let mut steps = 0;
        loop {
            let node = Node::of(&machine, CLAIM);
            set_refused(true);
            let is_killed = node.is_killed(Operation::Prepare, steps);
            set_refused(false);
            match steps % 2 {
                0 => node.completes(&format!("rollback was killed at step {steps}")),
                _ => node.removes(&format!("rollback was killed at step {steps}")),
            }
            node.removes(&format!("rollback was killed at step {steps}"));
            if !is_killed {
                break;
            }
            steps += 1;
        }
        // The record, an instance, the failed one; then the rollback removes instance and record.
        assert!(steps > 4, "only {steps} steps");
    });
}

/// Kills the process while `is_half` holds. Returns false if it has ended before.
fn is_killed_in(mut process: Child, is_half: impl Fn() -> bool) -> bool {
    let is_alive = poll(|| {
        if is_half() {
            return Ok(Some(true));
        }
        Ok(process.try_wait()?.map(|_| false))
    });
    if !is_alive.unwrap() {
        return false;
    }
    process.kill().unwrap();
    process.wait().unwrap().signal() == Some(9)
}

#[test]
fn next_process_repairs_half_created_instance() {
    const CLAIM: Claim =
        partitions_in("partitions::killed::next_process_repairs_half_created_instance");
    run_if_killed(CLAIM);
    in_mount_namespace(CLAIM.test, || {
        let machine = partitioned_machine();
        let delay = |milliseconds| {
            let faults = Faults {
                delay: Duration::from_millis(milliseconds),
                ..Faults::default()
            };
            let gpu = GpuIndex(0);
            machine.control(&Command::Break { gpu, faults }).unwrap();
        };
        let node = Node::of(&machine, CLAIM);
        let is_half = || {
            let gpu = machine.gpu(0).unwrap();
            let instances = gpu.mig.gpu_instances;
            matches!(&instances[..], [instance] if instance.compute_instances.is_empty())
        };
        // Slow replies keep the GPU for a while in the state between both calls of NVML.
        let is_killed = |operation| {
            delay(200);
            let is_killed = is_killed_in(node.start(operation, ALL), is_half);
            delay(0);
            is_killed
        };
        let kill = |operation, restore: &dyn Fn()| {
            let mut attempts = 0..5;
            while !(is_killed(operation) && is_half()) {
                assert!(
                    attempts.next().is_some(),
                    "{operation:?} was never seen in between"
                );
                restore();
            }
        };
        for completes in [true, false] {
            kill(Operation::Prepare, &|| node.removes("completed"));
            if completes {
                node.completes("killed between both calls of a creation");
            }
            node.removes("killed between both calls of a creation");
        }
        node.completes("before a destruction");
        kill(Operation::Unprepare, &|| node.completes("completed"));
        node.removes("killed between both calls of a destruction");
    });
}
