//! Suspension of shares: the memory of their processes moves to host memory, and they stand still until they are resumed.
//!
//! Intent and answer are levels. The intent is a label of the claim, the answer a condition of its devices, and the record has
//! the phase between both. Each review reads these three and the states of the processes, and takes one step. A crash between two steps
//! loses nothing.
//!
//! Invariants:
//! - The condition `Suspended` is True only after the record says [`Phase::Suspended`], which is written when NVML shows that the
//!   memory is free.
//! - No process is restored in [`Phase::Resuming`] before the API server has shown `Resuming`. A write of True that came to no end
//!   cannot land later: each write names the resource version that was read before it, and the write of `Resuming` came after.
//!   A cycle begins only when the API server shows another answer than `Resuming`, so the one that is shown is of this cycle.
//! - In [`Phase::Suspending`] no component was told that memory is free, so a failure may be undone at once.

use std::collections::BTreeMap;

use drava_api::condition::ConditionReason;

use crate::prepare::{HeldProcess, Phase, Suspension};

pub mod checkpoint;
pub mod node;

use checkpoint::{CheckpointError, ProcessState};

/// A process of a share on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenProcess {
    /// The process.
    pub process: HeldProcess,
    /// Its state.
    pub state: ProcessState,
    /// Memory that NVML shows, bytes.
    pub bytes: u64,
}

impl SeenProcess {
    /// Returns whether its memory is on the GPU.
    const fn has_memory(&self) -> bool {
        matches!(self.state, ProcessState::Running | ProcessState::Locked)
    }
}

/// What the node knows of a share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// The present boot of the node.
    pub boot_id: String,
    /// Why the share cannot be suspended.
    pub refusal: Option<String>,
    /// Whether the page says that processes that are not on the GPU wait.
    pub page_waits: bool,
    /// The processes on the GPU. Read only while the share is not running.
    pub processes: Vec<SeenProcess>,
    /// Whether a process is on its way to the GPU or from it.
    pub is_changing: bool,
    /// Whether the state of a process could not be read.
    pub is_unknown: bool,
    /// Whether a program has called libcuda since the suspension began.
    pub is_demanded: bool,
    /// Whether NVML shows no memory of the share.
    pub is_free: bool,
    /// Free memory of the GPU, bytes; `None` if NVML does not tell.
    pub free_bytes: Option<u64>,
}

/// What is known of a share at a review.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Whether the claim is to be suspended.
    pub is_wanted: bool,
    /// How the last attempt failed, if it is not to be repeated now.
    pub failure: Option<ConditionReason>,
    /// What is recorded.
    pub recorded: Option<Suspension>,
    /// What the node knows of the share.
    pub look: Look,
    /// Reason of the condition `Suspended` at the API server.
    pub answer: Option<ConditionReason>,
    /// Processes that libcuda refused to restore.
    pub refusals: Refusals,
}

/// `CUDA_ERROR_OPERATING_SYSTEM`: among others, an earlier restore of the process failed for lack of memory.
const OPERATING_SYSTEM: i32 = 304;

/// `CUDA_ERROR_ILLEGAL_STATE`: the process is not checkpointed.
const ILLEGAL_STATE: i32 = 401;

/// How often libcuda must refuse for the same reason until that counts. Once may be an error of the moment.
const MOST_REFUSALS: u32 = 2;

/// How libcuda refused to restore processes: its last error for each of them, and how often it came in succession. It is not
/// recorded: another node driver learns it by [`MOST_REFUSALS`] calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals(BTreeMap<HeldProcess, (i32, u32)>);

impl Refusals {
    /// Counts a failed restore.
    pub fn count(&mut self, process: HeldProcess, error: &CheckpointError) {
        let CheckpointError::Cuda(code) = *error else {
            return;
        };
        let refused = self.0.entry(process).or_insert((code, 0));
        let before = if refused.0 == code { refused.1 } else { 0 };
        *refused = (code, before.saturating_add(1));
    }

    /// Forgets processes that have ended, and those that were restored.
    pub fn retain(&mut self, look: &Look) {
        let is_held = |process: &HeldProcess| {
            let mut all = look.processes.iter();
            all.any(|seen| seen.process == *process && !seen.has_memory())
        };
        self.0.retain(|process, _| is_held(process));
    }

    /// Returns why libcuda refuses to restore a process, once that counts.
    fn proven(&self, process: &HeldProcess) -> Option<i32> {
        let (code, count) = *self.0.get(process)?;
        (count >= MOST_REFUSALS).then_some(code)
    }
}

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing is left to be done for this intent.
    Done,
    /// Something else must happen first.
    Wait(&'static str),
    /// Record this. [`Phase::Resuming`] only if the share fits its GPU.
    Record(Suspension),
    /// Lock these processes.
    Lock(Vec<HeldProcess>),
    /// Checkpoint these processes.
    Checkpoint(Vec<HeldProcess>),
    /// Restore these processes.
    Restore(Vec<HeldProcess>),
    /// Unlock these processes.
    Unlock(Vec<HeldProcess>),
    /// Kill these processes, which libcuda never restores, so that their containers restart.
    Kill(Vec<HeldProcess>),
    /// Write the condition.
    Answer(ConditionReason),
}

/// Returns the next step.
#[must_use]
pub fn decide(seen: &Seen) -> Step {
    match seen.phase() {
        // The record was lost, maybe that of a share whose memory others use.
        None if seen.look.page_waits => seen.record(Phase::Resuming),
        None | Some(Phase::Running) => decide_running(seen),
        Some(Phase::Suspending) if seen.is_wanted && seen.failure.is_none() => suspend(seen),
        Some(Phase::Suspending) => resume(seen),
        Some(Phase::Suspended) if seen.is_wanted => hold(seen),
        Some(Phase::Suspended) => seen.record(Phase::Resuming),
        Some(Phase::Resuming) if seen.answer == Some(ConditionReason::Resuming) => resume(seen),
        Some(Phase::Resuming) => Step::Answer(ConditionReason::Resuming),
    }
}

fn decide_running(seen: &Seen) -> Step {
    if seen.look.page_waits {
        return Step::Wait("the node agent has not ended the wait of new processes");
    }
    let answer = |reason| match seen.answer == Some(reason) {
        true => Step::Done,
        false => Step::Answer(reason),
    };
    if !seen.is_wanted {
        // Without an answer there is nothing to take back.
        return match seen.answer {
            None => Step::Done,
            Some(_) => answer(ConditionReason::Resumed),
        };
    }
    // A refusal stands as long as the label.
    if seen.look.refusal.is_some() || seen.answer == Some(ConditionReason::SuspendRefused) {
        return answer(ConditionReason::SuspendRefused);
    }
    if let Some(failure) = seen.failure {
        return answer(failure);
    }
    match seen.answer {
        Some(
            ConditionReason::Resuming
            | ConditionReason::Suspended
            | ConditionReason::Demanded
            | ConditionReason::StateLost,
        ) => Step::Answer(ConditionReason::Resumed),
        _ => Step::Record(Suspension {
            boot_id: seen.look.boot_id.clone(),
            ..Suspension::new(Phase::Suspending)
        }),
    }
}

/// What is waited for while a process may be locked.
const UNKNOWN: &str = "libcuda does not tell the state of a process";

fn suspend(seen: &Seen) -> Step {
    if !seen.look.page_waits {
        return Step::Wait("the node agent has not made new processes wait");
    }
    if let Some(recorded) = seen.with_new_processes() {
        return Step::Record(recorded);
    }
    if let Some(step) = hold_processes(seen) {
        return step;
    }
    if seen.look.is_unknown {
        return Step::Wait(UNKNOWN);
    }
    match seen.look.is_changing || !seen.look.is_free {
        true => Step::Wait("NVML still shows memory of the share, or a process is starting"),
        false => seen.record(Phase::Suspended),
    }
}

fn hold(seen: &Seen) -> Step {
    if let Some(recorded) = seen.with_new_processes() {
        return Step::Record(recorded);
    }
    if let Some(step) = hold_processes(seen) {
        return step;
    }
    if seen.is_lost() {
        return match seen.answer {
            Some(ConditionReason::StateLost) => Step::Done,
            _ => Step::Answer(ConditionReason::StateLost),
        };
    }
    // A demand stays one until the share is resumed.
    match (seen.answer, seen.look.is_demanded) {
        (Some(ConditionReason::Demanded), _) => Step::Done,
        (Some(ConditionReason::Suspended), false) => Step::Done,
        (_, true) => Step::Answer(ConditionReason::Demanded),
        (_, false) => Step::Answer(ConditionReason::Suspended),
    }
}

fn hold_processes(seen: &Seen) -> Option<Step> {
    let running = seen.in_state(ProcessState::Running);
    if !running.is_empty() {
        return Some(Step::Lock(running));
    }
    let locked = seen.in_state(ProcessState::Locked);
    (!locked.is_empty()).then_some(Step::Checkpoint(locked))
}

fn resume(seen: &Seen) -> Step {
    let (mut lost, mut checkpointed) = (Vec::new(), Vec::new());
    for SeenProcess { process, state, .. } in &seen.look.processes {
        // Drivers differ in whether a process whose restore failed is in the state `Failed`, so its restores tell.
        match (state, seen.refusals.proven(process)) {
            (ProcessState::Running | ProcessState::Locked, _) => {}
            (_, Some(OPERATING_SYSTEM)) => lost.push(*process),
            // It failed by itself, and does not stand still.
            (ProcessState::Failed, Some(ILLEGAL_STATE)) => {}
            (ProcessState::Checkpointed | ProcessState::Failed, _) => checkpointed.push(*process),
        }
    }
    if !lost.is_empty() {
        return Step::Kill(lost);
    }
    if !checkpointed.is_empty() {
        // After a restore that fails for lack of memory, libcuda may restore the process never again.
        return match seen.lacks_memory() {
            true => Step::Wait("the GPU has too little free memory to restore the share"),
            false => Step::Restore(checkpointed),
        };
    }
    let locked = seen.in_state(ProcessState::Locked);
    match locked.is_empty() {
        true if seen.look.is_unknown => Step::Wait(UNKNOWN),
        true => Step::Record(Suspension::new(Phase::Running)),
        false => Step::Unlock(locked),
    }
}

impl Seen {
    fn phase(&self) -> Option<Phase> {
        Some(self.recorded.as_ref()?.phase)
    }

    fn in_state(&self, state: ProcessState) -> Vec<HeldProcess> {
        let found = self
            .look
            .processes
            .iter()
            .filter(|seen| seen.state == state);
        found.map(|seen| seen.process).collect()
    }

    fn record(&self, phase: Phase) -> Step {
        Step::Record(match &self.recorded {
            Some(recorded) => Suspension {
                phase,
                ..recorded.clone()
            },
            None => Suspension::new(phase),
        })
    }

    /// Returns whether processes were held in an earlier boot of the node.
    fn is_lost(&self) -> bool {
        self.recorded.as_ref().is_some_and(|recorded| {
            let Suspension {
                processes, boot_id, ..
            } = recorded;
            !processes.is_empty() && !boot_id.is_empty() && *boot_id != self.look.boot_id
        })
    }

    /// Returns whether the GPU has too little memory for what is recorded. When some of it is restored already, that cannot be told.
    fn lacks_memory(&self) -> bool {
        let recorded = self.recorded.as_ref().map_or(0, |recorded| recorded.bytes);
        let mut processes = self.look.processes.iter();
        !processes.any(SeenProcess::has_memory)
            && self.look.free_bytes.is_some_and(|free| free < recorded)
    }

    /// Returns the record with the processes that it lacks, which precedes their lock: a checkpointed process is in no list of
    /// NVML. `None` if it has all.
    fn with_new_processes(&self) -> Option<Suspension> {
        let mut recorded = self.recorded.clone()?;
        let known = recorded.processes.clone();
        let new = self.look.processes.iter();
        for new in new.filter(|seen| !known.contains(&seen.process)) {
            recorded.processes.push(new.process);
            recorded.bytes = recorded.bytes.saturating_add(new.bytes);
        }
        (recorded.processes != known).then_some(recorded)
    }
}

#[cfg(test)]
mod tests;
