//! Crashes and power failures after each step of prepare and unprepare.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use drava_cdi::Spec;
use drava_dra_driver::node::claim::{ClaimUid, ShareId};
use drava_dra_driver::prepare::base::Base;
use drava_dra_driver::prepare::effects::{EffectError, Effects, Ensured, NodeEffects};
use drava_dra_driver::prepare::liveness::Liveness;
use drava_dra_driver::prepare::record::{ClaimRecord, Loaded};
use drava_dra_driver::prepare::{Partition, Prepared};
use drava_nvml::{GpuInstance, GpuUuid};
use drava_vgpu_abi::LimitsSpec;

use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref};
use crate::node::lacks_device_files;
use crate::node::{TestNode, prepare, record_of, spec_of};

/// Effects of prepare of two shares: a record, two pages, two regions, a base, a spec.
const STEPS: usize = 7;

/// Effects that fail after a number of steps, as if the node had crashed.
pub(crate) struct CrashingEffects {
    node: NodeEffects,
    remaining: Arc<AtomicUsize>,
    crash: Crash,
}

/// End of a crashing process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Crash {
    /// Every further effect fails.
    Fails,
    /// SIGKILL ends the process.
    Killed,
}

impl CrashingEffects {
    pub(crate) fn after(effects: usize, node: NodeEffects) -> Self {
        Self {
            node,
            remaining: Arc::new(AtomicUsize::new(effects)),
            crash: Crash::Fails,
        }
    }

    /// As [`after`](Self::after), but kills this process.
    pub(crate) fn killing_after(effects: usize, node: NodeEffects) -> Self {
        Self {
            crash: Crash::Killed,
            ..Self::after(effects, node)
        }
    }

    /// As [`killing_after`](Self::killing_after), where other effects of the process count too.
    pub(crate) fn killing_with(remaining: &Arc<AtomicUsize>, node: NodeEffects) -> Self {
        Self {
            node,
            remaining: Arc::clone(remaining),
            crash: Crash::Killed,
        }
    }

    fn next_effect(&self) -> Result<(), EffectError> {
        match count_down(&self.remaining) {
            true => Ok(()),
            false if self.crash == Crash::Killed => kill_this(),
            false => Err(EffectError::File {
                operation: "apply",
                path: PathBuf::new(),
                source: std::io::Error::other("node crashed"),
            }),
        }
    }
}

/// Counts an effect. Returns false if it is one too many.
fn count_down(remaining: &AtomicUsize) -> bool {
    let step = |remaining: usize| remaining.checked_sub(1);
    let counted = remaining.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step);
    counted.is_ok()
}

fn kill_this() -> ! {
    let this = rustix::process::getpid();
    rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
    unreachable!("SIGKILL cannot be caught")
}

/// Counts an effect, and kills this process if it is one too many.
pub(crate) fn count_or_die(remaining: &AtomicUsize) {
    if !count_down(remaining) {
        kill_this();
    }
}

impl Effects for CrashingEffects {
    fn save_record(&self, record: &ClaimRecord) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.save_record(record)
    }

    fn ensure_page(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        spec: &LimitsSpec,
    ) -> Result<Ensured, EffectError> {
        self.next_effect()?;
        self.node.ensure_page(uid, share, spec)
    }

    fn ensure_usage(&self, uid: &ClaimUid, share: &ShareId) -> Result<Ensured, EffectError> {
        self.next_effect()?;
        self.node.ensure_usage(uid, share)
    }

    fn ensure_mps(&self, gpu: &str) -> Result<Ensured, EffectError> {
        self.next_effect()?;
        self.node.ensure_mps(gpu)
    }

    fn stop_mps(&self, gpu: &str) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.stop_mps(gpu)
    }

    fn create_device_files(&self, spec: &Spec) {
        self.node.create_device_files(spec);
    }

    fn ensure_base(&self, base: Base, spec: &Spec) -> Result<Ensured, EffectError> {
        self.next_effect()?;
        self.node.ensure_base(base, spec)
    }

    fn ensure_spec(&self, uid: &ClaimUid, spec: &Spec) -> Result<Ensured, EffectError> {
        self.next_effect()?;
        self.node.ensure_spec(uid, spec)
    }

    fn boot_id(&self) -> &str {
        self.node.boot_id()
    }

    fn liveness(&self, uid: &ClaimUid, devices: &[Prepared]) -> Liveness {
        self.node.liveness(uid, devices)
    }

    fn instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, EffectError> {
        self.node.instances(gpu)
    }

    fn ensure_mig_mode(&self, gpu: &GpuUuid, minor: u32, enabled: bool) -> Result<(), EffectError> {
        self.node.ensure_mig_mode(gpu, minor, enabled)
    }

    fn create_instance(
        &self,
        gpu: &GpuUuid,
        partition: &Partition,
    ) -> Result<GpuInstance, EffectError> {
        self.next_effect()?;
        self.node.create_instance(gpu, partition)
    }

    fn destroy_instance(&self, gpu: &GpuUuid, id: u32) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.destroy_instance(gpu, id)
    }

    fn remove_spec(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.remove_spec(uid)
    }

    fn remove_cgroup_limits(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.remove_cgroup_limits(uid)
    }

    fn remove_usage(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.remove_usage(uid)
    }

    fn remove_pages(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.remove_pages(uid)
    }

    fn remove_record(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.next_effect()?;
        self.node.remove_record(uid)
    }
}

#[test]
fn completes_prepare_after_crash_at_any_step() {
    if lacks_device_files() {
        return;
    }
    let found = claim(1, &[Share(0, "8Gi", "30"), Share(1, "4Gi", "0")]);
    let reference = TestNode::started();
    let (complete, _) = prepare(
        &reference,
        &reference.applier(reference.effects()),
        1,
        &found,
    )
    .unwrap();
    let (files, mounts) = reference.claim_state();
    for step in 0..=STEPS {
        let node = TestNode::started();
        let cut = CrashingEffects::after(step, node.effects());
        let outcome = prepare(&node, &node.applier(cut), 1, &found);
        assert_eq!(outcome.is_ok(), step == STEPS, "step {step}");
        let (files_left, _) = node.claim_state();
        assert_eq!(
            files_left.is_empty(),
            step == 0,
            "step {step}: files without a record"
        );

        let (record, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
        assert_eq!(record, complete, "step {step}");
        let (after, mounted) = node.claim_state();
        assert_eq!(
            (after, mounted.len()),
            (files.clone(), mounts.len()),
            "step {step}"
        );
    }
}

/// Damages a file as a power failure does that its writer did not sync.
fn damage(path: &Path, loss: Loss) {
    let bytes = fs::read(path).unwrap();
    match loss {
        Loss::Missing => fs::remove_file(path).unwrap(),
        Loss::Empty => fs::write(path, "").unwrap(),
        Loss::Torn => fs::write(path, &bytes[..bytes.len() / 2]).unwrap(),
        Loss::Zeros => fs::write(path, vec![0; bytes.len()]).unwrap(),
    }
}

/// State of a file after a power failure.
#[derive(Debug, Clone, Copy)]
enum Loss {
    Missing,
    Empty,
    Torn,
    Zeros,
}

#[test]
fn repairs_power_failure_at_any_prepare_step() {
    if lacks_device_files() {
        return;
    }
    let found = claim(1, &[Share(0, "8Gi", "30"), Share(1, "4Gi", "0")]);
    let reference = TestNode::started();
    let effects = reference.effects();
    let (complete, _) = prepare(&reference, &reference.applier(effects), 1, &found).unwrap();
    let content = |node: &TestNode| {
        let (files, mounts) = node.claim_state();
        let read = |name: &String| fs::read(node.root.path().join(name)).unwrap();
        let root = node.root.path().to_string_lossy().into_owned();
        let files: Vec<(String, String)> = files
            .iter()
            .map(|name| {
                (
                    name.clone(),
                    String::from_utf8_lossy(&read(name)).replace(&root, ""),
                )
            })
            .collect();
        (files, mounts.len())
    };
    for step in 1..=STEPS {
        for loss in [Loss::Missing, Loss::Empty, Loss::Torn, Loss::Zeros] {
            let node = TestNode::started();
            let cut = CrashingEffects::after(step, node.effects());
            let _ = prepare(&node, &node.applier(cut), 1, &found);
            node.tmpfs.reboot();
            let record = record_of(&node, 1);
            let (written, _) = node.claim_state();
            for path in written.iter().map(|name| node.root.path().join(name)) {
                if path != record {
                    damage(&path, loss);
                }
            }
            let (again, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
            assert_eq!(again, complete, "step {step}, {loss:?}");
            assert_eq!(content(&node), content(&reference), "step {step}, {loss:?}");
        }
    }
}

#[test]
fn unprepares_after_crash_at_any_prepare_step() {
    if lacks_device_files() {
        return;
    }
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    for step in 0..=5 {
        let node = TestNode::started();
        let _ = prepare(
            &node,
            &node.applier(CrashingEffects::after(step, node.effects())),
            1,
            &found,
        );
        node.applier(node.effects())
            .unprepare(&claim_ref(1))
            .unwrap();
        assert_eq!(
            node.claim_state(),
            (Vec::new(), Default::default()),
            "step {step}"
        );
    }
}

#[test]
fn completes_unprepare_after_crash_at_any_step() {
    if lacks_device_files() {
        return;
    }
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    for step in 0..4 {
        let node = TestNode::started();
        prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
        let cut = node.applier(CrashingEffects::after(step, node.effects()));
        cut.unprepare(&claim_ref(1)).unwrap_err();
        assert!(
            step == 0 || !spec_of(&node, 1).exists(),
            "step {step}: the spec must go first"
        );
        let record = node
            .applier(node.effects())
            .store()
            .load(&claim_ref(1).uid)
            .unwrap();
        assert!(
            matches!(record, Loaded::Present(_)),
            "step {step}: the record must go last"
        );
        node.applier(node.effects())
            .unprepare(&claim_ref(1))
            .unwrap();
        assert_eq!(
            node.claim_state(),
            (Vec::new(), Default::default()),
            "step {step}"
        );
    }
}
