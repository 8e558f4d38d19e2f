//! Suspends and resumes the share of a claim as the node driver does, without an API server: the answers are in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use drava_api::condition::ConditionReason;
use drava_dra_driver::prepare::record::{Loaded, RecordStore};
use drava_dra_driver::prepare::{Prepared, Share};
use drava_dra_driver::suspend::checkpoint::{Action, Checkpointer};
use drava_dra_driver::suspend::node::SuspendNode;
use drava_dra_driver::suspend::{Refusals, Seen, Step, decide};
use drava_nvml::GpuUuid;
use serde::Serialize;

use crate::{Node, claim_uid};

/// Longest time for one direction.
const LONGEST: Duration = Duration::from_secs(240);

/// Time between two looks at a share that waits for something.
const POLL: Duration = Duration::from_millis(10);

/// Suspends and resumes shares of a node.
pub struct Suspender<'a> {
    node: &'a Node,
    suspend: SuspendNode,
    libcuda: PathBuf,
    answers: BTreeMap<u32, ConditionReason>,
}

/// What a suspension or a resume took.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Moved {
    /// All of it, seconds.
    pub seconds: f64,
    /// The calls that copy memory, seconds.
    pub copying_seconds: f64,
    /// Memory that NVML has shown of the processes, bytes.
    pub bytes: u64,
}

impl<'a> Suspender<'a> {
    /// Returns the suspender whose processes run `program`, which is the caller's and calls
    /// [`run`](drava_dra_driver::suspend::checkpoint::run).
    #[must_use]
    pub fn new(node: &'a Node, driver_root: &Path, libcuda: PathBuf, program: PathBuf) -> Self {
        let config = node.config(driver_root);
        Self {
            node,
            suspend: SuspendNode {
                layout: config.layout,
                checkpointer: Checkpointer::new(program, config.proc_root.clone()),
                proc_root: config.proc_root,
                open: config.open,
                boot_id: "boot".to_owned(),
            },
            libcuda,
            answers: BTreeMap::new(),
        }
    }

    fn share(&self, claim: u32) -> Result<(Share, GpuUuid)> {
        let store = RecordStore::new(self.node.layout().claims());
        let Loaded::Present(record) = store.load(&claim_uid(claim)?)? else {
            bail!("claim {claim} has no record");
        };
        let mut devices = record.devices.iter();
        let found = devices.find_map(|device| {
            let share = Prepared::share(device)?.clone();
            Some((share, GpuUuid::new(device.gpu.uuid.clone())))
        });
        found.context("the claim has no share")
    }

    /// Suspends the share of a claim, or resumes it.
    ///
    /// # Errors
    /// When it cannot be, or takes too long. What was locked is unlocked then.
    pub fn follow(&mut self, claim: u32, is_wanted: bool) -> Result<Moved> {
        let (begun, uid) = (Instant::now(), claim_uid(claim)?);
        let mut moved = Moved::default();
        let mut failure = None;
        loop {
            if begun.elapsed() > LONGEST {
                bail!("not within {} s", LONGEST.as_secs());
            }
            let (share, gpu) = self.share(claim)?;
            // NVML cannot list processes that change meanwhile.
            let Ok(look) = self.suspend.look(&uid, &share, &gpu, &self.libcuda) else {
                sleep(POLL);
                continue;
            };
            let refusal = look.refusal.clone();
            let seen = Seen {
                is_wanted,
                failure: failure
                    .as_ref()
                    .map(|_: &String| ConditionReason::SuspendFailed),
                recorded: share.suspension.clone(),
                look,
                answer: self.answers.get(&claim).copied(),
                refusals: Refusals::default(),
            };
            let step = decide(&seen);
            let (action, processes) = match &step {
                Step::Done => {
                    moved.seconds = begun.elapsed().as_secs_f64();
                    let recorded = share.suspension.map_or(0, |recorded| recorded.bytes);
                    moved.bytes = moved.bytes.max(recorded);
                    return match failure.or(refusal.filter(|_| is_wanted)) {
                        Some(failure) => bail!("{failure}"),
                        None => Ok(moved),
                    };
                }
                Step::Wait(_) => {
                    sleep(POLL);
                    continue;
                }
                Step::Record(suspension) => {
                    moved.bytes = moved.bytes.max(suspension.bytes);
                    let change = |share: &mut Share| share.suspension = Some(suspension.clone());
                    self.node.change_record(claim, change)?;
                    continue;
                }
                Step::Answer(reason) => {
                    self.answers.insert(claim, *reason);
                    continue;
                }
                Step::Kill(_) => bail!("a process can never be restored"),
                Step::Lock(processes) => (Action::Lock, processes),
                Step::Checkpoint(processes) => (Action::Checkpoint, processes),
                Step::Restore(processes) => (Action::Restore, processes),
                Step::Unlock(processes) => (Action::Unlock, processes),
            };
            let acting = Instant::now();
            let failures = self.suspend.act(&self.libcuda, action, processes);
            if matches!(action, Action::Checkpoint | Action::Restore) {
                moved.copying_seconds += acting.elapsed().as_secs_f64();
            }
            if let Some(first) = failures.first() {
                if !is_wanted {
                    bail!("{first}");
                }
                failure = Some(first.to_string());
            }
        }
    }
}
