//! Suspended shares, with `libvgpu.so`, the agent and real processes on a simulated machine. The test stands for the API server.

use std::fs::OpenOptions;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use drava_api::condition::ConditionReason;
use drava_dra_driver::agent::node::usage_region::ReadBuffer;
use drava_dra_driver::prepare::record::{Loaded, RecordStore};
use drava_dra_driver::prepare::{HeldProcess, Phase, Prepared, Share, Suspension};
use drava_dra_driver::suspend::checkpoint::{Action, CheckpointError, Checkpointer, ProcessState};
use drava_dra_driver::suspend::node::SuspendNode;
use drava_dra_driver::suspend::{Look, Refusals, Seen, Step, decide};
use drava_nvml::GpuUuid;
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::page::SUSPENDED_OFFSET;
use drava_vgpu_abi::region::{SLOTS_OFFSET, Slot};
use gpu_tenants::{Tenant, TestBed, library};
use simulator_machine::description::H100X2;

use crate::escape::Escape;
use crate::node::{GIB, GPU, MIB, RunningAgent, TestNode, eventually};

/// The claim that is suspended.
const CLAIM: u32 = 1;

struct Fixture {
    node: TestNode,
    suspend: SuspendNode,
    libcuda: PathBuf,
    agent: Option<RunningAgent>,
    is_wanted: bool,
    answers: Vec<ConditionReason>,
    failure: Option<(ConditionReason, String)>,
    refusals: Refusals,
    killed: Vec<u32>,
}

impl Fixture {
    fn new() -> Self {
        Self::on(TestNode::new())
    }

    /// On a machine whose checkpoints behave in this way.
    fn with_checkpoints(checkpoints: &str) -> Self {
        let machine = format!("checkpoints: {{{checkpoints}}}\n{H100X2}");
        let test_bed = TestBed::with_machine(library::shipped().unwrap(), &machine);
        Self::on(TestNode::on(test_bed.unwrap()))
    }

    fn on(node: TestNode) -> Self {
        let limits = Limits {
            can_suspend: true,
            ..Limits::memory(4 * GIB)
        };
        node.prepare(CLAIM, &limits);
        let config = node.config();
        let program = PathBuf::from(env!("CARGO_BIN_EXE_drava-dra-driver"));
        Self {
            suspend: SuspendNode {
                layout: config.layout,
                checkpointer: Checkpointer::new(program, config.proc_root.clone()),
                proc_root: config.proc_root,
                open: config.open,
                boot_id: "boot".to_owned(),
            },
            libcuda: node.test_bed.machine().lib_dir().join("libcuda.so.1"),
            agent: Some(node.agent()),
            node,
            is_wanted: true,
            answers: Vec::new(),
            failure: None,
            refusals: Refusals::default(),
            killed: Vec::new(),
        }
    }

    fn share(&self) -> Share {
        let store = RecordStore::new(self.node.node.layout().claims());
        let uid = gpu_node::claim_uid(CLAIM).unwrap();
        let Loaded::Present(record) = store.load(&uid).unwrap() else {
            panic!("no record");
        };
        record
            .devices
            .iter()
            .find_map(Prepared::share)
            .unwrap()
            .clone()
    }

    fn look(&self) -> Look {
        let uid = gpu_node::claim_uid(CLAIM).unwrap();
        let (share, gpu) = (self.share(), GpuUuid::new(GPU));
        // NVML cannot list processes that change meanwhile; the driver looks again, too.
        eventually("a look", || {
            self.suspend.look(&uid, &share, &gpu, &self.libcuda).ok()
        })
    }

    /// Takes one step, as the driver does.
    fn step(&mut self) -> Step {
        let step = self.next();
        self.take(&step);
        step
    }

    /// Returns the next step.
    fn next(&mut self) -> Step {
        let look = self.look();
        self.refusals.retain(&look);
        decide(&Seen {
            is_wanted: self.is_wanted,
            failure: self.failure.as_ref().map(|(reason, _)| *reason),
            recorded: self.share().suspension,
            look,
            answer: self.answers.last().copied(),
            refusals: self.refusals.clone(),
        })
    }

    fn take(&mut self, step: &Step) {
        let (action, processes) = match step {
            Step::Done | Step::Wait(_) => return,
            Step::Record(suspension) => return self.record(suspension),
            Step::Answer(reason) => return self.answers.push(*reason),
            Step::Kill(processes) => {
                let uid = gpu_node::claim_uid(CLAIM).unwrap();
                let killed = self.suspend.kill(&uid, &self.share(), processes);
                return self.killed.extend(killed);
            }
            Step::Lock(processes) => (Action::Lock, processes),
            Step::Checkpoint(processes) => (Action::Checkpoint, processes),
            Step::Restore(processes) => (Action::Restore, processes),
            Step::Unlock(processes) => (Action::Unlock, processes),
        };
        let failures = self.suspend.act(&self.libcuda, action, processes);
        let Some(first) = failures.first() else {
            return;
        };
        if action == Action::Restore {
            for failure in &failures {
                self.refusals.count(failure.process, &failure.error);
            }
            return;
        }
        let suspension = self.share().suspension.unwrap();
        assert_eq!(suspension.phase, Phase::Suspending, "{first}");
        let reason = match first.error.is_final() {
            true => ConditionReason::SuspendRefused,
            false => ConditionReason::SuspendFailed,
        };
        self.failure = Some((reason, first.to_string()));
    }

    fn record(&self, suspension: &Suspension) {
        let change = |share: &mut Share| share.suspension = Some(suspension.clone());
        self.node.node.change_record(CLAIM, change).unwrap();
    }

    /// Takes steps until nothing is left to be done.
    #[track_caller]
    fn settle(&mut self) {
        eventually("the end of the steps", || {
            (self.step() == Step::Done).then_some(())
        });
    }

    /// Takes steps until the next one is this.
    #[track_caller]
    fn settle_before(&mut self, phase: Phase) {
        eventually("a phase", || {
            let share = self.share();
            let is_there = share
                .suspension
                .is_some_and(|recorded| recorded.phase == phase);
            if !is_there {
                self.step();
            }
            is_there.then_some(())
        });
    }

    /// Takes steps up to one that `matches` accepts, and returns that one without taking it.
    #[track_caller]
    fn settle_before_step(&mut self, matches: impl Fn(&Step) -> bool) -> Step {
        eventually("a step", || {
            let step = self.next();
            if matches(&step) {
                return Some(step);
            }
            self.take(&step);
            None
        })
    }

    #[track_caller]
    fn suspend(&mut self) {
        self.is_wanted = true;
        self.settle();
        assert_eq!(self.answers.last(), Some(&ConditionReason::Suspended));
    }

    #[track_caller]
    fn resume(&mut self) {
        self.is_wanted = false;
        self.settle();
        assert_eq!(
            self.answers[self.answers.len() - 2..],
            [ConditionReason::Resuming, ConditionReason::Resumed]
        );
    }

    fn used_bytes(&self) -> u64 {
        self.node.test_bed.machine().gpu(0).unwrap().used_bytes
    }

    /// Starts a process with 1 GiB in the container of the claim.
    fn tenant(&self) -> Tenant {
        let mut tenant = self.node.tenant(CLAIM);
        tenant.ok(&format!("memory {}", GIB / 2)).unwrap();
        // The first launch loads the module.
        tenant.ok("once 1000").unwrap();
        tenant
    }

    /// Starts a process with more memory than [`Self::tenant`] in the container of the claim.
    fn start_large(&self) -> Escape {
        let bytes = GIB + GIB / 2;
        self.node.escape(CLAIM, "cuMemAlloc_v2", bytes, true)
    }

    /// Starts a process that ends once it has a context on the GPU and 1 MiB.
    fn newcomer(&self) -> Newcomer {
        let mut command = self.node.test_bed.machine().program("cuda-probe").unwrap();
        let process = command
            .args(["alloc", "--mib", "1", "--hold", "0"])
            .env("CUDA_VISIBLE_DEVICES", "0")
            .env("LD_PRELOAD", library::shipped().unwrap())
            .env("DRAVA_RUN_DIR", self.node.node.container(CLAIM))
            .spawn()
            .unwrap();
        self.node.node.add_process(process.id(), CLAIM).unwrap();
        Newcomer(process)
    }
}

/// A process, killed with the value.
struct Newcomer(Child);

impl Newcomer {
    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn other_share_uses_the_memory_of_suspended_processes_that_go_on_later() {
    let mut fixture = Fixture::new();
    let (mut first, mut second) = (fixture.tenant(), fixture.tenant());
    let used = fixture.used_bytes();
    assert!(used > 2 * GIB);
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
    assert_ne!(fixture.node.word(CLAIM, SUSPENDED_OFFSET), 0);
    let recorded = fixture.share().suspension.unwrap();
    assert_eq!((recorded.processes.len(), recorded.bytes), (2, used));
    // It stands still.
    first.send("once 1000").unwrap();

    let total = fixture.node.test_bed.machine().gpu(0).unwrap();
    let most = total.total_bytes - total.reserved_bytes - GIB;
    fixture.node.prepare(2, &Limits::memory(total.total_bytes));
    let mut other = fixture.node.tenant(2);
    other.ok(&format!("memory {}", most / 2)).unwrap();
    assert!(fixture.used_bytes() > most);
    other.kill().unwrap();
    eventually("the end of the other", || {
        (fixture.used_bytes() == 0).then_some(())
    });

    fixture.resume();
    assert_eq!(fixture.used_bytes(), used);
    assert!(first.receive().unwrap().starts_with("0 "));
    second.ok("once 1000").unwrap();
    eventually("no wait", || {
        (fixture.node.word(CLAIM, SUSPENDED_OFFSET) == 0).then_some(())
    });
    assert_eq!(
        fixture.answers,
        [
            ConditionReason::Suspended,
            ConditionReason::Resuming,
            ConditionReason::Resumed
        ]
    );
}

#[test]
fn process_that_cannot_be_locked_unlocks_the_other() {
    let mut fixture = Fixture::new();
    let (mut first, mut busy) = (fixture.tenant(), fixture.tenant());
    let used = fixture.used_bytes();
    // It works for four seconds.
    busy.ok("queue 4000000000").unwrap();
    eventually("a failure", || {
        fixture.step();
        fixture.failure.is_some().then_some(())
    });
    fixture.settle();
    let (reason, message) = fixture.failure.take().unwrap();
    assert_eq!(reason, ConditionReason::SuspendFailed);
    assert!(message.contains("did not end within 200 ms"), "{message}");
    assert_eq!(fixture.answers, [ConditionReason::SuspendFailed]);
    assert_eq!(fixture.used_bytes(), used);
    first.ok("once 1000").unwrap();
    busy.ok("once 1000").unwrap();
    // Later it can.
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
}

#[test]
fn process_in_uninterruptible_sleep_fails_before_any_lock() {
    let mut fixture = Fixture::new();
    let (mut first, mut asleep) = (fixture.tenant(), fixture.tenant());
    let used = fixture.used_bytes();
    // libcuda's lock of it returns when that ends.
    asleep.send("vfork").unwrap();
    let process = PathBuf::from(format!("/proc/{}", asleep.pid()));
    let read = |file: &str| std::fs::read_to_string(process.join(file)).unwrap();
    let is_asleep = || read("stat").contains(") D ");
    eventually("the sleep", || is_asleep().then_some(()));
    let lock = fixture.settle_before_step(|step| matches!(step, Step::Lock(_)));
    fixture.take(&lock);
    let (reason, message) = fixture.failure.clone().unwrap();
    assert_eq!(reason, ConditionReason::SuspendFailed);
    let expected = format!("cannot lock process {} of the node: a thread", asleep.pid());
    assert!(message.starts_with(&expected), "{message}");
    first.ok("once 1000").unwrap();
    fixture.settle();
    assert!(is_asleep(), "all of this happens meanwhile");
    assert_eq!(fixture.answers, [ConditionReason::SuspendFailed]);
    assert_eq!(fixture.used_bytes(), used);
    assert_eq!(fixture.node.word(CLAIM, SUSPENDED_OFFSET), 0);
    // Later it can.
    fixture.failure = None;
    let child = read(&format!("task/{}/children", asleep.pid()));
    let killed = Command::new("kill").args(["-KILL", child.trim()]).status();
    assert!(killed.unwrap().success(), "{child}");
    assert!(asleep.receive().unwrap().starts_with("0"));
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
}

#[test]
fn first_call_of_suspended_process_demands_its_resume() {
    let mut fixture = Fixture::new();
    let mut tenant = fixture.tenant();
    let uid = gpu_node::claim_uid(CLAIM).unwrap();
    for _ in 0..2 {
        fixture.suspend();
        let id = fixture.share().id;
        let is_demanded = |fixture: &Fixture| {
            let suspend = &fixture.suspend;
            suspend.is_demanded(&uid, &id, &mut ReadBuffer::default())
        };
        assert!(!is_demanded(&fixture), "an earlier demand is over");
        assert_eq!(fixture.step(), Step::Done);
        tenant.send("once 1000").unwrap();
        eventually("the demand", || is_demanded(&fixture).then_some(()));
        assert_eq!(fixture.step(), Step::Answer(ConditionReason::Demanded));
        assert_eq!(fixture.step(), Step::Done);
        assert_eq!(fixture.used_bytes(), 0, "it waits for the controller");
        fixture.resume();
        assert!(tenant.receive().unwrap().starts_with("0 "));
        assert!(!is_demanded(&fixture));
    }
}

#[test]
fn new_process_waits_until_its_share_is_resumed() {
    let mut fixture = Fixture::new();
    // Without processes there is nothing to move.
    fixture.suspend();
    let mut newcomer = fixture.newcomer();
    let mut killed = fixture.newcomer();
    // A start takes some milliseconds.
    std::thread::sleep(Duration::from_millis(700));
    assert!(!newcomer.has_ended() && !killed.has_ended());
    assert_eq!(fixture.used_bytes(), 0);
    // It is killed as any process.
    killed.0.kill().unwrap();
    eventually("the end of the killed process", || {
        killed.has_ended().then_some(())
    });
    // It waits for the GPU, which is a demand.
    assert_eq!(fixture.step(), Step::Answer(ConditionReason::Demanded));
    assert_eq!(fixture.step(), Step::Done);
    fixture.resume();
    eventually("the end of the newcomer", || {
        newcomer.has_ended().then_some(())
    });
    assert!(newcomer.0.wait().unwrap().success());
}

/// Each step is one that a driver can be killed after: nothing but records, pages and processes is left from one to the next.
#[test]
fn driver_goes_on_from_any_step_in_the_direction_of_the_intent() {
    let mut fixture = Fixture::new();
    let mut tenant = fixture.tenant();
    let used = fixture.used_bytes();
    for steps in 1..8 {
        fixture.is_wanted = true;
        let mut taken = 0;
        // What is waited for takes some looks.
        eventually("the steps", || {
            taken += i32::from(!matches!(fixture.step(), Step::Wait(_)));
            (taken == steps).then_some(())
        });
        // A new agent, too.
        fixture.agent = None;
        fixture.agent = Some(fixture.node.agent());
        fixture.is_wanted = false;
        fixture.settle();
        assert_eq!(fixture.used_bytes(), used, "{steps}");
        tenant.ok("once 1000").unwrap();
        fixture.suspend();
        assert_eq!(fixture.used_bytes(), 0, "{steps}");
        fixture.resume();
        assert_eq!(fixture.used_bytes(), used, "{steps}");
    }
}

#[test]
fn state_of_suspended_share_is_lost_with_the_boot_of_the_node() {
    let mut fixture = Fixture::new();
    let tenant = fixture.tenant();
    fixture.suspend();
    tenant.kill().unwrap();
    assert_eq!(fixture.step(), Step::Done, "its container restarts");
    fixture.suspend.boot_id = "next".to_owned();
    assert_eq!(
        fixture.step(),
        Step::Answer(ConditionReason::StateLost),
        "it was restarted with the node"
    );
    assert_eq!(fixture.step(), Step::Done);
    // As for a pod that cannot be evicted.
    fixture.resume();
    let mut again = fixture.tenant();
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
    fixture.resume();
    again.ok("once 1000").unwrap();
}

#[test]
fn killed_processes_leave_nothing_to_resume() {
    let mut fixture = Fixture::new();
    let tenant = fixture.tenant();
    fixture.suspend();
    tenant.kill().unwrap();
    assert_eq!(fixture.step(), Step::Done);
    fixture.resume();
    assert_eq!(fixture.used_bytes(), 0);
    // Another one can be suspended again.
    let _tenant = fixture.tenant();
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
}

#[test]
fn share_with_lost_record_is_resumed() {
    let mut fixture = Fixture::new();
    let mut tenant = fixture.tenant();
    let used = fixture.used_bytes();
    fixture.suspend();
    let lost = |share: &mut Share| share.suspension = None;
    fixture.node.node.change_record(CLAIM, lost).unwrap();
    fixture.is_wanted = false;
    fixture.settle_before(Phase::Resuming);
    assert_eq!(fixture.used_bytes(), 0, "before the answer");
    fixture.settle();
    assert_eq!(fixture.used_bytes(), used);
    tenant.ok("once 1000").unwrap();
}

#[test]
fn process_with_exported_memory_is_refused_before_the_lock() {
    let mut fixture = Fixture::new();
    let _tenant = fixture.tenant();
    let region = fixture.node.region(CLAIM);
    let region = OpenOptions::new().write(true).open(region).unwrap();
    let at = SLOTS_OFFSET + offset_of!(Slot<u64>, exported_bytes);
    region.write_all_at(&MIB.to_ne_bytes(), at as u64).unwrap();
    fixture.settle();
    assert_eq!(fixture.answers, [ConditionReason::SuspendRefused]);
    assert_eq!(fixture.share().suspension, None);
    let refusal = fixture.look().refusal.unwrap();
    assert!(
        refusal.contains("other processes may have open"),
        "{refusal}"
    );
}

#[test]
fn old_libcuda_is_refused_with_the_version_that_is_needed() {
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libold.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-o"])
        .arg(&library)
        .args(["-x", "c", "/dev/null"])
        .status();
    assert!(compiled.unwrap().success());
    let mut fixture = Fixture::new();
    let _tenant = fixture.tenant();
    fixture.libcuda = library;
    let change = |share: &mut Share| {
        share.suspension = Some(Suspension::new(Phase::Suspending));
    };
    fixture.node.node.change_record(CLAIM, change).unwrap();
    let refusal = fixture.look().refusal.unwrap();
    assert!(refusal.contains("570 or later"), "{refusal}");
}

/// The memory is gone between the check of the free memory and the restore, as by a process outside of all shares.
#[test]
fn process_whose_restore_failed_is_killed_and_its_share_resumed() {
    for checkpoints in ["showsFailure: false", "showsFailure: true"] {
        let mut fixture = Fixture::with_checkpoints(checkpoints);
        let mut small = fixture.tenant();
        let kept = fixture.used_bytes();
        let mut large = fixture.start_large();
        fixture.suspend();
        fixture.is_wanted = false;
        let restore = fixture.settle_before_step(|step| matches!(step, Step::Restore(_)));
        let gpu = fixture.node.test_bed.machine().gpu(0).unwrap();
        fixture.node.prepare(2, &Limits::memory(gpu.total_bytes));
        let mut other = fixture.node.escape(2, "cuMemAlloc_v2", MIB, true);
        // The GPU has room for the small process alone.
        let free = gpu.total_bytes - gpu.reserved_bytes - fixture.used_bytes();
        assert_eq!(other.send(&format!("take {}", free - kept - GIB / 4)), 0);
        fixture.take(&restore);
        drop(other);
        fixture.settle();

        assert_eq!(fixture.killed, [large.pid()], "{checkpoints}");
        assert_eq!(large.exit_signal(), Some(9));
        small.ok("once 1000").unwrap();
        assert_eq!(fixture.used_bytes(), kept);
        assert_eq!(fixture.share().suspension.unwrap().phase, Phase::Running);
        assert_eq!(fixture.refusals, Refusals::default());
        // The share is as any other: the program that its container starts again, and the next suspension.
        let mut again = fixture.start_large();
        fixture.suspend();
        assert_eq!(fixture.used_bytes(), 0);
        fixture.resume();
        assert_eq!(again.send("free"), 0);
        small.ok("once 1000").unwrap();
        assert_eq!(fixture.killed.len(), 1);
    }
}

#[test]
fn managed_memory_undoes_the_suspension_with_the_reason() {
    let mut fixture = Fixture::new();
    let mut plain = fixture.tenant();
    let mut managed = fixture.node.escape(CLAIM, "cuMemAllocManaged", MIB, true);
    let used = fixture.used_bytes();
    fixture.settle();
    let (reason, message) = fixture.failure.take().unwrap();
    assert_eq!(reason, ConditionReason::SuspendRefused);
    assert!(
        message.contains(&managed.pid().to_string()) && message.contains("managed memory"),
        "{message}"
    );
    assert_eq!(fixture.answers, [ConditionReason::SuspendRefused]);
    assert_eq!(fixture.share().suspension.unwrap().phase, Phase::Running);
    // Nothing stands still, also the process that was checkpointed before.
    assert_eq!(fixture.used_bytes(), used);
    plain.ok("once 1000").unwrap();
    assert_eq!(managed.send("free"), 0);
    // With another label, it can.
    fixture.is_wanted = false;
    fixture.settle();
    fixture.suspend();
    assert_eq!(fixture.used_bytes(), 0);
}

#[test]
fn share_is_suspended_once_nvml_shows_its_memory_as_free() {
    // NVML shows it for good, and not at all.
    for (delay, is_late) in [(u32::MAX, true), (0, false)] {
        let mut fixture = Fixture::with_checkpoints(&format!("nvmlDelayMilliseconds: {delay}"));
        let mut tenant = fixture.tenant();
        let used = fixture.used_bytes();
        let held = fixture.settle_before_step(|step| matches!(step, Step::Checkpoint(_)));
        fixture.take(&held);
        let look = fixture.look();
        assert_eq!(look.processes[0].state, ProcessState::Checkpointed);
        assert_eq!(fixture.used_bytes(), 0);
        assert_eq!(look.is_free, !is_late);
        match fixture.next() {
            Step::Wait(what) => assert!(is_late && what.contains("NVML still shows"), "{what}"),
            Step::Record(recorded) => {
                assert!(
                    !is_late && recorded.phase == Phase::Suspended,
                    "{recorded:?}"
                );
            }
            step => panic!("{step:?}"),
        }
        if is_late {
            // As the driver does when it has waited long enough.
            fixture.failure = Some((ConditionReason::SuspendFailed, String::new()));
            fixture.settle();
            assert_eq!(fixture.answers, [ConditionReason::SuspendFailed]);
        } else {
            fixture.suspend();
            fixture.resume();
        }
        assert_eq!(fixture.used_bytes(), used);
        tenant.ok("once 1000").unwrap();
    }
}

/// A process that ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a process as the record names it.
fn held(process: &Child) -> HeldProcess {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let start_time = fields.split_ascii_whitespace().nth(19).unwrap();
    HeldProcess {
        pid: process.id(),
        start_time: start_time.parse().unwrap(),
    }
}

#[test]
fn process_that_cannot_be_restored_holds_up_no_other() {
    let fixture = Fixture::new();
    let directory = tempfile::tempdir().unwrap();
    let (program, log) = (directory.path().join("call"), directory.path().join("log"));
    let sleep = || Killed(Command::new("sleep").arg("600").spawn().unwrap());
    let processes = [sleep(), sleep()];
    // The node driver's own program, for which the first process always fails.
    let text = format!(
        "#!/bin/sh\necho \"$3 $4\" >> {}\ncase $4 in {}) echo cuda 2;; *) echo state locked;; esac\n",
        log.display(),
        processes[0].0.id()
    );
    std::fs::write(&program, text).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    let node = SuspendNode {
        checkpointer: Checkpointer::new(program, "/proc".into()),
        proc_root: "/proc".into(),
        ..fixture.suspend.clone()
    };
    let all = [held(&processes[0].0), held(&processes[1].0)];
    let calls = |action: Action| {
        let _ = std::fs::remove_file(&log);
        assert_eq!(node.act(&fixture.libcuda, action, &all).len(), 1);
        std::fs::read_to_string(&log).unwrap().lines().count()
    };
    assert_eq!(calls(Action::Restore), 2);
    assert_eq!(calls(Action::Unlock), 2);
    // What goes on only together ends with the first failure.
    assert_eq!(calls(Action::Lock), 1);
}

#[test]
fn process_that_has_the_pid_of_another_is_not_locked() {
    let mut fixture = Fixture::new();
    let mut tenant = fixture.tenant();
    fixture.suspend();
    let recorded = fixture.share().suspension.unwrap();
    let [process] = recorded.processes[..] else {
        panic!("{recorded:?}");
    };
    fixture.resume();
    // It was started later than the one that is meant.
    let meant = HeldProcess {
        start_time: process.start_time - 1,
        ..process
    };
    let call = |action, process| {
        fixture
            .suspend
            .checkpointer
            .call(&fixture.libcuda, action, process)
    };
    assert_eq!(call(Action::Lock, meant), Err(CheckpointError::Ended));
    assert_eq!(call(Action::Look, process), Ok(ProcessState::Running));
    tenant.ok("once 1000").unwrap();
    assert_eq!(call(Action::Lock, process), Ok(ProcessState::Locked));
}
