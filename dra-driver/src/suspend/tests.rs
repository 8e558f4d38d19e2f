//! Decisions: one table for each phase, and a model of the whole cycle with crashes and late writes.

use super::ProcessState::{Checkpointed, Failed, Locked, Running};
use super::*;

const GIB: u64 = 1 << 30;

fn held(pid: u32) -> HeldProcess {
    HeldProcess {
        pid,
        start_time: u64::from(pid),
    }
}

fn seen_process(pid: u32, state: ProcessState) -> SeenProcess {
    SeenProcess {
        process: held(pid),
        state,
        bytes: GIB,
    }
}

fn suspension(phase: Phase, pids: &[u32]) -> Suspension {
    Suspension {
        processes: pids.iter().copied().map(held).collect(),
        ..Suspension::new(phase)
    }
}

/// A claim that is to be suspended, in this phase, with processes in these states.
fn seen(phase: Phase, states: &[ProcessState]) -> Seen {
    let pids: Vec<u32> = (1..).take(states.len()).collect();
    let processes = pids.iter().zip(states);
    Seen {
        is_wanted: true,
        failure: None,
        recorded: Some(suspension(phase, &pids)),
        look: Look {
            page_waits: true,
            processes: processes
                .map(|(pid, state)| seen_process(*pid, *state))
                .collect(),
            is_free: true,
            ..Look::default()
        },
        answer: None,
        refusals: Refusals::default(),
    }
}

fn count(refusals: &mut Refusals, pid: u32, code: i32) {
    refusals.count(held(pid), &CheckpointError::Cuda(code));
}

#[test]
fn does_nothing_to_claim_without_label_and_state() {
    let mut seen = seen(Phase::Running, &[Running]);
    (seen.is_wanted, seen.recorded) = (false, None);
    seen.look.page_waits = false;
    assert_eq!(decide(&seen), Step::Done);
}

#[test]
fn suspends_step_by_step() {
    let mut begin = seen(Phase::Running, &[]);
    (begin.recorded, begin.look.page_waits) = (None, false);
    assert_eq!(
        decide(&begin),
        Step::Record(suspension(Phase::Suspending, &[]))
    );
    let mut seen = seen(Phase::Suspending, &[Running, Running]);
    seen.look.page_waits = false;
    assert!(matches!(decide(&seen), Step::Wait(_)));
    seen.look.page_waits = true;
    // What is locked is recorded first.
    seen.recorded = Some(suspension(Phase::Suspending, &[1]));
    let Step::Record(recorded) = decide(&seen) else {
        panic!("{:?}", decide(&seen));
    };
    assert_eq!((recorded.processes.len(), recorded.bytes), (2, GIB));
    seen.recorded = Some(recorded);
    assert_eq!(decide(&seen), Step::Lock(vec![held(1), held(2)]));
    seen.look.processes[0].state = Locked;
    assert_eq!(decide(&seen), Step::Lock(vec![held(2)]));
    seen.look.processes[1].state = Locked;
    assert_eq!(decide(&seen), Step::Checkpoint(vec![held(1), held(2)]));
    for process in &mut seen.look.processes {
        process.state = Checkpointed;
    }
    // NVML's data may lag, and a process may be on its way to the GPU.
    seen.look.is_free = false;
    assert!(matches!(decide(&seen), Step::Wait(_)));
    (seen.look.is_free, seen.look.is_changing) = (true, true);
    assert!(matches!(decide(&seen), Step::Wait(_)));
    seen.look.is_changing = false;
    let Step::Record(recorded) = decide(&seen) else {
        panic!("{:?}", decide(&seen));
    };
    assert_eq!((recorded.phase, recorded.bytes), (Phase::Suspended, GIB));
    seen.recorded = Some(recorded);
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::Suspended));
    seen.answer = Some(ConditionReason::Suspended);
    assert_eq!(decide(&seen), Step::Done);
}

#[test]
fn resumes_only_after_the_answer_is_there() {
    let mut seen = seen(Phase::Suspended, &[Checkpointed, Checkpointed]);
    seen.is_wanted = false;
    seen.answer = Some(ConditionReason::Suspended);
    assert_eq!(
        decide(&seen),
        Step::Record(suspension(Phase::Resuming, &[1, 2]))
    );
    seen.recorded = Some(suspension(Phase::Resuming, &[1, 2]));
    for answer in [
        None,
        Some(ConditionReason::Suspended),
        Some(ConditionReason::Resumed),
        Some(ConditionReason::SuspendFailed),
    ] {
        seen.answer = answer;
        assert_eq!(decide(&seen), Step::Answer(ConditionReason::Resuming));
    }
    seen.answer = Some(ConditionReason::Resuming);
    assert_eq!(decide(&seen), Step::Restore(vec![held(1), held(2)]));
    seen.look.processes[1].state = Locked;
    assert_eq!(decide(&seen), Step::Restore(vec![held(1)]));
    seen.look.processes[0].state = Locked;
    assert_eq!(decide(&seen), Step::Unlock(vec![held(1), held(2)]));
    seen.look.processes[0].state = Running;
    seen.look.processes[1].state = Running;
    assert_eq!(decide(&seen), Step::Record(suspension(Phase::Running, &[])));
    seen.recorded = Some(suspension(Phase::Running, &[]));
    assert!(matches!(decide(&seen), Step::Wait(_)), "of new processes");
    seen.look.page_waits = false;
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::Resumed));
    seen.answer = Some(ConditionReason::Resumed);
    assert_eq!(decide(&seen), Step::Done);
}

#[test]
fn reports_lost_state_of_share_that_an_earlier_boot_suspended() {
    let mut seen = seen(Phase::Suspended, &[]);
    seen.look.boot_id = "second".to_owned();
    let recorded = |boot: &str, pids: &[u32]| {
        Some(Suspension {
            boot_id: boot.to_owned(),
            ..suspension(Phase::Suspended, pids)
        })
    };
    for (boot, pids, expected) in [
        ("second", [1].as_slice(), ConditionReason::Demanded),
        ("first", &[1], ConditionReason::StateLost),
        // Nothing was lost, and records of older builds do not say.
        ("first", &[], ConditionReason::Demanded),
        ("", &[1], ConditionReason::Demanded),
    ] {
        seen.recorded = recorded(boot, pids);
        seen.look.is_demanded = true;
        for before in [ConditionReason::Suspended, ConditionReason::StateLost] {
            seen.answer = Some(before);
            let step = match before == expected {
                true => Step::Done,
                false => Step::Answer(expected),
            };
            assert_eq!(decide(&seen), step, "{boot} {pids:?} {before:?}");
        }
    }
    // It leaves no way back but that of each suspension.
    seen.recorded = recorded("first", &[1]);
    seen.is_wanted = false;
    assert!(matches!(decide(&seen), Step::Record(next) if next.phase == Phase::Resuming));
}

/// Otherwise the `Resuming` of an earlier cycle would pass for the one of the next.
#[test]
fn begins_no_cycle_while_an_earlier_answer_says_resuming() {
    let mut seen = seen(Phase::Running, &[Running]);
    seen.look.page_waits = false;
    seen.answer = Some(ConditionReason::Resuming);
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::Resumed));
    // An intent that returns does not stop a resume half-way.
    seen.recorded = Some(suspension(Phase::Resuming, &[1]));
    seen.look.processes[0].state = Locked;
    assert_eq!(decide(&seen), Step::Unlock(vec![held(1)]));
}

#[test]
fn undoes_what_failed_before_anything_was_promised() {
    let mut seen = seen(Phase::Suspending, &[Locked, Running, Checkpointed]);
    seen.failure = Some(ConditionReason::SuspendFailed);
    assert_eq!(decide(&seen), Step::Restore(vec![held(3)]));
    seen.look.processes[2].state = Locked;
    assert_eq!(decide(&seen), Step::Unlock(vec![held(1), held(3)]));
    seen.look.processes[0].state = Running;
    seen.look.processes[2].state = Running;
    assert_eq!(decide(&seen), Step::Record(suspension(Phase::Running, &[])));
    seen.recorded = Some(suspension(Phase::Running, &[]));
    seen.look.page_waits = false;
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::SuspendFailed));
    seen.answer = Some(ConditionReason::SuspendFailed);
    assert_eq!(decide(&seen), Step::Done);
    // Once the failure is old it is tried again.
    seen.failure = None;
    assert_eq!(
        decide(&seen),
        Step::Record(suspension(Phase::Suspending, &[]))
    );
}

#[test]
fn refuses_before_it_records_anything() {
    let mut seen = seen(Phase::Running, &[]);
    (seen.recorded, seen.look.page_waits) = (None, false);
    seen.look.refusal = Some("the claim has several devices".to_owned());
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::SuspendRefused));
    seen.answer = Some(ConditionReason::SuspendRefused);
    assert_eq!(decide(&seen), Step::Done);
    // The refusal stands as long as the label.
    seen.look.refusal = None;
    assert_eq!(decide(&seen), Step::Done);
    seen.is_wanted = false;
    assert_eq!(decide(&seen), Step::Answer(ConditionReason::Resumed));
}

#[test]
fn holds_process_that_came_back_to_the_gpu() {
    let mut seen = seen(Phase::Suspended, &[Checkpointed, Running]);
    seen.answer = Some(ConditionReason::Suspended);
    seen.recorded = Some(suspension(Phase::Suspended, &[1]));
    let Step::Record(recorded) = decide(&seen) else {
        panic!("{:?}", decide(&seen));
    };
    assert_eq!(recorded.processes, [held(1), held(2)]);
    seen.recorded = Some(recorded);
    assert_eq!(decide(&seen), Step::Lock(vec![held(2)]));
    seen.look.processes[1].state = Locked;
    assert_eq!(decide(&seen), Step::Checkpoint(vec![held(2)]));
}

#[test]
fn ends_no_suspension_of_process_whose_state_is_unknown() {
    for (phase, is_wanted) in [(Phase::Suspending, true), (Phase::Resuming, false)] {
        let mut seen = seen(phase, &[]);
        (seen.is_wanted, seen.look.is_unknown) = (is_wanted, true);
        seen.answer = Some(ConditionReason::Resuming);
        assert!(matches!(decide(&seen), Step::Wait(_)), "{phase:?}");
    }
}

#[test]
fn resumes_share_whose_record_was_lost() {
    for is_wanted in [true, false] {
        let mut seen = seen(Phase::Running, &[Checkpointed]);
        (seen.recorded, seen.is_wanted) = (None, is_wanted);
        assert_eq!(
            decide(&seen),
            Step::Record(suspension(Phase::Resuming, &[]))
        );
    }
}

/// The world of one share with two processes: what steps do, with an API server that executes some writes late.
#[derive(Clone)]
struct World {
    seen: Seen,
    /// Resource version of the claim.
    version: u64,
    /// Writes without an answer, with the version that they name.
    late: Vec<(u64, ConditionReason)>,
    /// Processes that libcuda never restores.
    lost: Vec<HeldProcess>,
    killed: u32,
}

impl World {
    fn new() -> Self {
        let mut seen = seen(Phase::Running, &[Running, Running]);
        (seen.recorded, seen.look.page_waits) = (None, false);
        Self {
            seen,
            version: 1,
            late: Vec::new(),
            lost: Vec::new(),
            killed: 0,
        }
    }

    fn write(&mut self, version: u64, reason: ConditionReason) {
        if version == self.version {
            self.seen.answer = Some(reason);
            self.version += 1;
        }
    }

    /// Whether the controller counts the memory as free.
    fn is_promised(&self) -> bool {
        self.seen.is_wanted && self.seen.answer == Some(ConditionReason::Suspended)
    }

    fn change_intent(&mut self) {
        self.seen.is_wanted = !self.seen.is_wanted;
        self.version += 1;
    }

    /// Sets the state of processes. A crash leaves all but the first as they are.
    fn set(&mut self, processes: &[HeldProcess], state: ProcessState, chance: u64) {
        let count = match chance.is_multiple_of(3) {
            true => 1,
            false => processes.len(),
        };
        for held in processes.iter().take(count) {
            let mut all = self.seen.look.processes.iter_mut();
            if let Some(process) = all.find(|seen| seen.process == *held) {
                process.state = state;
                process.bytes = if matches!(state, Checkpointed | Failed) {
                    0
                } else {
                    GIB
                };
            }
        }
    }

    /// Takes one step; `chance` decides what goes wrong.
    fn step(&mut self, chance: u64) {
        if chance.is_multiple_of(5) && !self.late.is_empty() {
            let (version, reason) = self.late.remove(0);
            self.write(version, reason);
        }
        match decide(&self.seen) {
            Step::Done | Step::Wait(_) => {}
            Step::Record(recorded) => self.seen.recorded = Some(recorded),
            Step::Lock(processes) if chance.is_multiple_of(7) => {
                self.set(&processes[..1], Locked, 1);
                if self.seen.phase() == Some(Phase::Suspending) {
                    self.seen.failure = Some(ConditionReason::SuspendFailed);
                }
            }
            // Drivers differ in the state after it.
            Step::Restore(processes) if chance.is_multiple_of(13) => {
                let state = if chance.is_multiple_of(2) {
                    Failed
                } else {
                    Checkpointed
                };
                self.set(&processes[..1], state, 1);
                self.lost.push(processes[0]);
            }
            Step::Restore(processes) => {
                let is_lost = |process: &HeldProcess| self.lost.contains(process);
                let (lost, restored): (Vec<_>, Vec<_>) = processes.into_iter().partition(is_lost);
                for process in lost {
                    count(&mut self.seen.refusals, process.pid, OPERATING_SYSTEM);
                }
                self.set(&restored, Locked, chance);
            }
            Step::Lock(processes) => self.set(&processes, Locked, chance),
            // Their container starts another one.
            Step::Kill(processes) => {
                for held in processes {
                    assert!(self.lost.contains(&held), "{:?}", self.seen);
                    let mut all = self.seen.look.processes.iter_mut();
                    let killed = all.find(|seen| seen.process == held).unwrap();
                    *killed = seen_process(held.pid + 2, Running);
                    self.killed += 1;
                }
            }
            Step::Checkpoint(processes) => self.set(&processes, Checkpointed, chance),
            Step::Unlock(processes) => self.set(&processes, Running, chance),
            Step::Answer(reason) if chance.is_multiple_of(4) => {
                self.late.push((self.version, reason));
            }
            Step::Answer(reason) => self.write(self.version, reason),
        }
        // The agent, and a failure that is old.
        if let Some(recorded) = &self.seen.recorded {
            self.seen.look.page_waits = recorded.phase != Phase::Running;
        }
        if chance.is_multiple_of(11) {
            self.seen.failure = None;
        }
        // A new driver.
        if chance.is_multiple_of(17) {
            self.seen.refusals = Refusals::default();
        }
        self.seen.refusals.retain(&self.seen.look);
        let mut processes = self.seen.look.processes.iter();
        self.seen.look.is_free = processes.all(|process| process.bytes == 0);
    }
}

/// Whatever is late, fails or crashes: memory that is promised to others is free, and both ends are reached.
#[test]
fn promises_no_memory_that_is_in_use() {
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random >> 20
    };
    let (mut promised, mut resumed, mut killed) = (0, 0, 0);
    for _ in 0..300 {
        let mut world = World::new();
        for _ in 0..200 {
            let chance = next();
            if chance.is_multiple_of(23) {
                world.change_intent();
            }
            world.step(chance);
            if world.is_promised() {
                promised += 1;
                assert!(world.seen.look.is_free, "{:?}", world.seen);
            }
        }
        for is_wanted in [true, false] {
            if world.seen.is_wanted != is_wanted {
                world.change_intent();
            }
            world.seen.failure = None;
            (0..64).for_each(|_| world.step(1));
            let states = world.seen.look.processes.iter().map(|seen| seen.state);
            let expected = if is_wanted { Checkpointed } else { Running };
            assert!(
                states.clone().all(|state| state == expected),
                "{:?}",
                world.seen
            );
            assert_eq!(world.is_promised(), is_wanted);
            resumed += u32::from(!is_wanted);
        }
        killed += world.killed;
    }
    assert!(
        promised > 1000 && resumed == 300 && killed > 30,
        "{promised} {resumed} {killed}"
    );
}

#[test]
fn kills_process_that_libcuda_never_restores() {
    let mut resuming = seen(Phase::Resuming, &[Locked, Checkpointed, Checkpointed]);
    resuming.is_wanted = false;
    resuming.answer = Some(ConditionReason::Resuming);
    let mut undoing = seen(Phase::Suspending, &[Locked, Checkpointed, Checkpointed]);
    undoing.failure = Some(ConditionReason::SuspendFailed);
    for (seen, state) in [
        (&resuming, Checkpointed),
        (&resuming, Failed),
        (&undoing, Checkpointed),
        (&undoing, Failed),
    ] {
        let mut seen = seen.clone();
        seen.look.processes[1].state = state;
        assert_eq!(decide(&seen), Step::Restore(vec![held(2), held(3)]));
        count(&mut seen.refusals, 2, OPERATING_SYSTEM);
        assert_eq!(decide(&seen), Step::Restore(vec![held(2), held(3)]));
        count(&mut seen.refusals, 2, OPERATING_SYSTEM);
        assert_eq!(decide(&seen), Step::Kill(vec![held(2)]));
        seen.look.processes.remove(1);
        assert_eq!(decide(&seen), Step::Restore(vec![held(3)]));
        seen.look.processes[1].state = Locked;
        assert_eq!(decide(&seen), Step::Unlock(vec![held(1), held(3)]));
    }
}

#[test]
fn kills_no_suspended_or_restored_process() {
    for (phase, state) in [
        (Phase::Suspending, Checkpointed),
        (Phase::Suspended, Checkpointed),
        (Phase::Resuming, Locked),
        (Phase::Resuming, Running),
    ] {
        let mut seen = seen(phase, &[state]);
        seen.answer = Some(ConditionReason::Resuming);
        for _ in 0..MOST_REFUSALS {
            count(&mut seen.refusals, 1, OPERATING_SYSTEM);
        }
        assert!(!matches!(decide(&seen), Step::Kill(_)), "{phase:?}");
    }
}

#[test]
fn kills_no_process_for_refusals_that_can_pass() {
    let mut seen = seen(Phase::Resuming, &[Checkpointed]);
    seen.answer = Some(ConditionReason::Resuming);
    let restore = Step::Restore(vec![held(1)]);
    // Out of memory; each error interrupts the succession of the other.
    for code in [
        2,
        2,
        2,
        OPERATING_SYSTEM,
        2,
        OPERATING_SYSTEM,
        ILLEGAL_STATE,
        ILLEGAL_STATE,
    ] {
        count(&mut seen.refusals, 1, code);
        assert_eq!(decide(&seen), restore, "{code}");
    }
    for error in [
        CheckpointError::Busy,
        CheckpointError::Failed(String::new()),
    ] {
        (0..9).for_each(|_| seen.refusals.count(held(1), &error));
        assert_eq!(decide(&seen), restore);
    }
    // Another process with its PID has no part in it.
    (0..2).for_each(|_| count(&mut seen.refusals, 1, OPERATING_SYSTEM));
    seen.look.processes[0].process.start_time += 1;
    assert!(matches!(decide(&seen), Step::Restore(_)));
    seen.refusals.retain(&seen.look);
    assert_eq!(seen.refusals, Refusals::default());
}

#[test]
fn restored_process_begins_with_no_refusals() {
    let mut seen = seen(Phase::Resuming, &[Checkpointed]);
    count(&mut seen.refusals, 1, OPERATING_SYSTEM);
    let before = seen.refusals.clone();
    seen.refusals.retain(&seen.look);
    assert_eq!(seen.refusals, before);
    seen.look.processes[0].state = Locked;
    seen.refusals.retain(&seen.look);
    assert_eq!(seen.refusals, Refusals::default());
}

#[test]
fn waits_for_no_process_that_failed_by_itself() {
    let mut seen = seen(Phase::Resuming, &[Failed, Running]);
    seen.answer = Some(ConditionReason::Resuming);
    for _ in 0..MOST_REFUSALS {
        assert_eq!(decide(&seen), Step::Restore(vec![held(1)]));
        count(&mut seen.refusals, 1, ILLEGAL_STATE);
    }
    assert_eq!(decide(&seen), Step::Record(suspension(Phase::Running, &[])));
}

#[test]
fn restores_only_into_memory_that_is_free() {
    let mut seen = seen(Phase::Resuming, &[Checkpointed, Checkpointed]);
    seen.is_wanted = false;
    seen.answer = Some(ConditionReason::Resuming);
    let bytes = 8 << 30;
    seen.recorded.as_mut().unwrap().bytes = bytes;
    seen.look.free_bytes = Some(bytes - 1);
    assert!(
        matches!(decide(&seen), Step::Wait(_)),
        "{:?}",
        decide(&seen)
    );
    seen.look.free_bytes = Some(bytes);
    assert!(
        matches!(decide(&seen), Step::Restore(_)),
        "{:?}",
        decide(&seen)
    );
    // The first is restored already, so less is needed.
    seen.look.processes[0].state = Locked;
    seen.look.free_bytes = Some(bytes / 2);
    assert!(
        matches!(decide(&seen), Step::Restore(_)),
        "{:?}",
        decide(&seen)
    );
}
