use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::slice::from_ref;
use std::sync::Arc;

use drava_vgpu_abi::region::{Header, REGION_ABI_VERSION, REGION_MAGIC};
use drava_vgpu_abi::{IdText, Limits, LimitsSpec, REGION_SIZE, encode, paths};

use super::*;
use crate::gpus::capacity::{MIB, ShareTotals};
use crate::gpus::cgroups::Cgroups;
use crate::gpus::inventory::OpenLibrary;
use crate::gpus::inventory::fixture::one_gpu;
use crate::mps::{Daemons, Roots};
use crate::node::claim::ClaimRef;
use crate::node::lock::Locks;
use crate::node::options::Paths;
use crate::node::selinux::Labels;
use crate::node::tmpfs::{KernelTmpfs, Tmpfs};
use crate::prepare::cgroup_limits::CgroupLimits;
use crate::prepare::companion::Addition;
use crate::prepare::effects::{NodeAccess, NodeEffects};
use crate::prepare::record::fixture;

pub(in super::super) const POOL: &str = "node-1/gpus";
pub(in super::super) const GIB: u64 = 1024 * MIB;

/// UUID of the pod of the bases.
const POD: &str = "pod-1";

/// A node without containers.
pub(in super::super) struct TestNode {
    _root: tempfile::TempDir,
    pub(in super::super) layout: Layout,
    pub(in super::super) applier: Arc<Applier<NodeEffects>>,
}

impl TestNode {
    pub(in super::super) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = |name: &str| root.path().join(name);
        let layout = Layout::new(&Paths {
            kubelet_dir: dir("kubelet"),
            cdi_dir: dir("cdi"),
            state_dir: dir("state"),
            run_dir: dir("run"),
            driver_root: PathBuf::from("/"),
            driver_root_mount: PathBuf::from("/"),
            dev_root: None,
            dev_root_mount: PathBuf::from("/"),
            dev_char_dir: None,
            artifacts_dir: dir("image"),
        });
        for dir in [layout.claims(), layout.locks()] {
            fs::create_dir_all(dir).unwrap();
        }
        let open: OpenLibrary = Arc::new(|| Err("no GPU".to_owned()));
        let cgroups = Cgroups::new(dir("cgroup"));
        let cgroup_limits = CgroupLimits::new(layout.clone(), cgroups, Arc::clone(&open));
        let roots = Roots {
            driver: dir("driver"),
            device: None,
            proc: dir("proc"),
        };
        let tmpfs = Arc::new(KernelTmpfs::default());
        let mps = Daemons::new(
            layout.clone(),
            dir("mps"),
            roots,
            Labels::Off,
            Arc::clone(&tmpfs) as Arc<dyn Tmpfs>,
        );
        let access = NodeAccess {
            mps: Arc::new(mps),
            open,
            cgroup_limits: Arc::new(cgroup_limits),
            proc_root: dir("proc"),
            boot_id: "boot".to_owned(),
            labels: Labels::Off,
            device_files: None,
        };
        let effects = NodeEffects::new(layout.clone(), tmpfs, access);
        let locks = Locks::new(layout.locks(), Duration::ZERO);
        Self {
            applier: Arc::new(Applier::new(layout.clone(), locks, effects)),
            layout,
            _root: root,
        }
    }

    /// Saves the record of a base of 8 GiB.
    pub(in super::super) fn prepare(
        &self,
        number: u32,
        grants: impl IntoIterator<Item = Grant>,
    ) -> ClaimRecord {
        let amounts = ShareTotals {
            memory_bytes: 8 * GIB,
            cores: 20,
            slots: 1,
        };
        let mut record = fixture::record(number, POOL, amounts);
        let share = record.devices[0].share_mut().unwrap();
        share.grants.extend(grants);
        self.applier.store().save(&record).unwrap();
        record
    }

    fn change(
        &self,
        seen: &ClaimRecord,
        present: &[Companion],
        memory: Option<Memory>,
        (before, now): (&FitsSince, Instant),
    ) -> Recorded {
        // The agent follows each record at once.
        let followed = self.applier.store().version(&seen.claim.uid);
        self.change_followed(seen, present, memory, (before, now), followed)
    }

    fn change_followed(
        &self,
        seen: &ClaimRecord,
        present: &[Companion],
        memory: Option<Memory>,
        (before, now): (&FitsSince, Instant),
        followed: Option<RecordVersion>,
    ) -> Recorded {
        let companions = Companions {
            present: present.to_vec(),
            unknown: BTreeSet::new(),
            pods: BTreeSet::from([POD.to_owned()]),
        };
        let seen = seen.clone();
        let changed = change(
            &self.applier,
            &one_gpu(),
            seen,
            &companions,
            |_| memory,
            (before, followed),
            now,
        );
        changed.unwrap().unwrap()
    }

    /// Changes the record now, when it is followed, and as soon as the share has settled.
    fn settle(
        &self,
        seen: &ClaimRecord,
        present: &[Companion],
        memory: Option<Memory>,
    ) -> [Recorded; 2] {
        let now = Instant::now();
        let first = self.change(seen, present, memory, (&FitsSince::new(), now));
        let followed = self.change(&first.record, present, memory, (&first.fits_since, now));
        let settled = (&followed.fits_since, now + SETTLED);
        let second = self.change(&followed.record, present, memory, settled);
        [first, second]
    }
}

fn claim(number: u32) -> ClaimRef {
    let record = fixture::record(number, POOL, ShareTotals::default());
    record.claim
}

/// Returns a companion of claim 1 that adds this memory.
fn companion(number: u32, gib: u64) -> Companion {
    Companion {
        claim: claim(number),
        base: claim(1).uid,
        is_ending: false,
        pods: BTreeSet::from([POD.to_owned()]),
        additions: vec![Addition {
            request: "gpu".to_owned(),
            device: "gpu-0-vgpu".to_owned(),
            share: ShareId::parse(claim(number).uid.as_str()).unwrap(),
            amounts: ShareTotals {
                memory_bytes: gib * GIB,
                cores: 10,
                slots: 1,
            },
        }],
    }
}

fn ending(companion: Companion) -> Companion {
    Companion {
        is_ending: true,
        ..companion
    }
}

pub(in super::super) fn grant(number: u32, gib: u64) -> Grant {
    Grant {
        claim: claim(number),
        memory_bytes: gib * GIB,
        cores: 10,
        slots: 1,
        is_ending: false,
    }
}

fn memory(limit_gib: u64, used_gib: u64) -> Option<Memory> {
    Some(Memory {
        limit_bytes: limit_gib * GIB,
        used_bytes: Some(used_gib * GIB),
    })
}

fn grants(recorded: &Recorded) -> usize {
    let share = recorded.record.devices[0].share().unwrap();
    share.grants.len()
}

fn in_use(gib: u64) -> Option<GrantStatus> {
    Some(GrantStatus::InUse {
        kept_bytes: gib * GIB,
    })
}

#[test]
fn gives_back_what_vanished_companion_added() {
    let node = TestNode::new();
    let record = node.prepare(1, [grant(2, 4)]);
    let [first, second] = node.settle(&record, &[], memory(8, 3));
    assert!(first.has_ending());
    assert_eq!((grants(&first), grants(&second)), (1, 0));
}

#[test]
fn gives_back_only_what_fits_for_a_while() {
    let companion = ending(companion(2, 4));
    let unreadable = Memory {
        used_bytes: None,
        ..memory(8, 3).unwrap()
    };
    for (memory, expected) in [
        (memory(8, 8), None),
        (memory(8, 9), in_use(8)),
        (memory(12, 3), in_use(8)),
        (Some(unreadable), in_use(8)),
        (None, in_use(8)),
    ] {
        let node = TestNode::new();
        let record = node.prepare(1, [grant(2, 4)]);
        let [first, second] = node.settle(&record, from_ref(&companion), memory);
        assert_eq!(first.status_of(&companion), expected, "{memory:?}");
        let given_back = expected.is_none();
        assert_eq!(grants(&second) == 0, given_back, "{memory:?}");
        let after = if given_back {
            Some(GrantStatus::Released)
        } else {
            expected
        };
        assert_eq!(second.status_of(&companion), after, "{memory:?}");
    }
}

#[test]
fn counts_time_from_first_moment_that_fits() {
    let node = TestNode::new();
    let companion = [ending(companion(2, 4))];
    let record = node.prepare(1, [grant(2, 4)]);
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let none = FitsSince::new();
    let first = node.change(&record, &companion, memory(8, 3), (&none, at(0)));
    assert!(first.is_settling(at(0)), "the agent has not read it");
    let first = node.change(&first.record, &companion, memory(8, 3), (&none, at(0)));
    let early = (&first.fits_since, at(249));
    let early = node.change(&first.record, &companion, memory(8, 3), early);
    assert_eq!(grants(&early), 1);
    assert!(early.is_settling(at(249)));
    // An allocation that was admitted before is charged.
    let used = (&early.fits_since, at(251));
    let used = node.change(&early.record, &companion, memory(8, 9), used);
    let again = (&used.fits_since, at(400));
    let again = node.change(&used.record, &companion, memory(8, 3), again);
    assert_eq!(grants(&again), 1);
    let settled = (&again.fits_since, at(650));
    let settled = node.change(&again.record, &companion, memory(8, 3), settled);
    assert_eq!(grants(&settled), 0);
}

/// A companion ends as soon as it is recorded. The limit fits without it, as it has for long: the agent has not raised it yet, and may
/// do so until it has read that the grant ends, however long that takes.
#[test]
fn gives_back_nothing_while_agent_may_raise_the_limit() {
    let node = TestNode::new();
    let (added, ended) = ([companion(2, 4)], [ending(companion(2, 4))]);
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let none = FitsSince::new();
    let record = node.prepare(1, []);
    let grown = node.change(&record, &added, memory(8, 3), (&none, at(0)));
    let with_grant = node.applier.store().version(&record.claim.uid);
    let mut ending = node.change(&grown.record, &ended, memory(8, 3), (&none, at(10)));
    for followed in [None, with_grant] {
        for ms in [20, 300, 60_000] {
            let before = ending.fits_since.clone();
            let before = (&before, at(ms));
            ending = node.change_followed(&ending.record, &ended, memory(8, 3), before, followed);
            assert_eq!(grants(&ending), 1, "{ms} ms");
            assert_ne!(ending.status_of(&ended[0]), Some(GrantStatus::Released));
            assert!(ending.is_settling(at(ms)));
        }
    }
    let [_, settled] = node.settle(&ending.record, &ended, memory(8, 3));
    assert_eq!(settled.status_of(&ended[0]), Some(GrantStatus::Released));
}

/// Only what a companion was granted can be in use.
#[test]
fn releases_companion_without_grant_from_full_share() {
    let node = TestNode::new();
    let (used, refused) = (ending(companion(2, 4)), ending(companion(3, 100)));
    let record = node.prepare(1, [grant(2, 4)]);
    let companions = [used.clone(), refused.clone()];
    let [_, second] = node.settle(&record, &companions, memory(12, 12));
    assert_eq!(second.status_of(&used), in_use(8));
    assert_eq!(second.status_of(&refused), Some(GrantStatus::Released));
}

/// A record that was damaged has lost its grants. The limit tells.
#[test]
fn companion_whose_grant_was_lost_is_in_use_until_limit_fits() {
    let node = TestNode::new();
    let companion = ending(companion(2, 4));
    let record = node.prepare(1, []);
    for (memory, expected) in [
        (memory(12, 10), in_use(8)),
        (memory(8, 10), in_use(8)),
        (memory(8, 6), Some(GrantStatus::Released)),
    ] {
        let [_, second] = node.settle(&record, from_ref(&companion), memory);
        assert_eq!(second.status_of(&companion), expected, "{memory:?}");
    }
}

/// The agent lends memory beyond the record, so the limit tells nothing of a lost grant.
#[test]
fn companion_of_share_that_bursts_is_released_without_a_grant() {
    let node = TestNode::new();
    let companion = ending(companion(2, 4));
    let mut record = node.prepare(1, []);
    let share = record.devices[0].share_mut().unwrap();
    share.limit_bytes = Some(16 * GIB);
    node.applier.store().save(&record).unwrap();
    let [_, second] = node.settle(&record, from_ref(&companion), memory(16, 10));
    assert_eq!(second.status_of(&companion), Some(GrantStatus::Released));
    // What it is granted it gives back as every share does: the agent lowers its limit first.
    let share = record.devices[0].share_mut().unwrap();
    share.grants.push(grant(2, 4));
    node.applier.store().save(&record).unwrap();
    let [_, second] = node.settle(&record, from_ref(&companion), memory(16, 6));
    assert_eq!(second.status_of(&companion), in_use(8));
}

#[test]
fn companion_of_which_another_record_may_have_grant_is_not_released() {
    let companion = ending(companion(2, 4));
    let released = |node: &TestNode, record: &ClaimRecord| {
        let [_, second] = node.settle(record, from_ref(&companion), memory(8, 3));
        second.status_of(&companion)
    };
    let node = TestNode::new();
    let record = node.prepare(1, []);
    node.prepare(9, [grant(2, 4)]);
    assert_eq!(released(&node, &record), None);
    node.applier.store().remove(&claim(9).uid).unwrap();
    assert_eq!(released(&node, &record), Some(GrantStatus::Released));
    let damaged = format!("{}.json", claim(9).uid);
    fs::write(node.layout.claims().join(damaged), "{").unwrap();
    assert_eq!(released(&node, &record), None);
}

#[test]
fn companion_is_granted_when_limit_includes_it() {
    let node = TestNode::new();
    let companion = companion(2, 4);
    let record = node.prepare(1, []);
    let none = (&FitsSince::new(), Instant::now());
    let added = node.change(&record, from_ref(&companion), memory(8, 8), none);
    assert_eq!((grants(&added), added.status_of(&companion)), (1, None));
    let raised = node.change(&added.record, from_ref(&companion), memory(12, 8), none);
    assert_eq!(raised.status_of(&companion), Some(GrantStatus::Granted));
}

#[test]
fn companion_that_cannot_add_is_refused_and_holds_up_no_other() {
    let node = TestNode::new();
    let other = Companion {
        pods: BTreeSet::from(["pod-2".to_owned()]),
        ..companion(3, 4)
    };
    // The claim of another tenant is not named.
    let mut foreign = companion(5, 4);
    foreign.claim.namespace = "foreign".to_owned();
    let companions = [companion(2, 100), other, foreign, companion(4, 4)];
    let record = node.prepare(1, []);
    let none = (&FitsSince::new(), Instant::now());
    let recorded = node.change(&record, &companions, memory(12, 8), none);
    assert_eq!(grants(&recorded), 1);
    for (companion, expected) in companions.iter().zip([
        "cannot use",
        "reserved for one pod",
        "is not in its namespace",
    ]) {
        let status = recorded.status_of(companion);
        let refused = matches!(&status, Some(GrantStatus::Refused(why)) if why.contains(expected));
        assert!(refused, "{status:?}");
        let is_named = format!("{status:?}").contains(&record.claim.name);
        assert!(
            !is_named || companion.claim.namespace == record.claim.namespace,
            "{status:?}"
        );
    }
}

#[test]
fn changes_no_record_that_another_task_uses() {
    let node = TestNode::new();
    let record = node.prepare(1, []);
    let attempt = || {
        let companions = Companions {
            present: vec![companion(2, 4)],
            pods: BTreeSet::from([POD.to_owned()]),
            ..Companions::default()
        };
        let none = FitsSince::new();
        let (seen, now) = (record.clone(), Instant::now());
        let changed = change(
            &node.applier,
            &one_gpu(),
            seen,
            &companions,
            |_| None,
            (&none, None),
            now,
        );
        changed.unwrap().is_some()
    };
    let lock = node.applier.locks().claim(&record.claim.uid).unwrap();
    assert!(!attempt());
    drop(lock);
    node.prepare(1, [grant(3, 1)]);
    assert!(!attempt(), "another version");
    node.prepare(1, []);
    assert!(attempt());
}

#[test]
fn reads_memory_of_share() {
    let node = TestNode::new();
    let record = node.prepare(1, []);
    let (uid, share) = (&record.claim.uid, record.devices[0].share().unwrap());
    let read = || Memory::read(&node.layout, uid, &share.id);
    assert_eq!(read(), None);
    let spec = LimitsSpec {
        claim_uid: IdText::new(uid.as_str()).unwrap(),
        share_id: IdText::new(share.id.as_str()).unwrap(),
        device_uuid: "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01".parse().unwrap(),
        // Memory that libcuda takes beyond what libvgpu charges is in use, too.
        limits: Limits {
            driver_excess_bytes: GIB,
            ..Limits::memory(12 * GIB)
        },
    };
    let (limits, usage) = (
        node.layout.limits(uid, &share.id),
        node.layout.usage(uid, &share.id),
    );
    fs::create_dir_all(&limits).unwrap();
    fs::create_dir_all(&usage).unwrap();
    fs::write(limits.join(paths::PAGE_FILE), encode(&spec)).unwrap();
    let unreadable = Memory {
        limit_bytes: 12 * GIB,
        used_bytes: None,
    };
    assert_eq!(read(), Some(unreadable));
    let region = usage.join(paths::REGION_FILE);
    fs::write(&region, vec![0; REGION_SIZE]).unwrap();
    let region = fs::File::options().write(true).open(region).unwrap();
    for (offset, word) in [
        (offset_of!(Header, magic), REGION_MAGIC),
        (offset_of!(Header, abi_version), REGION_ABI_VERSION),
        (offset_of!(Header, total), 3 * GIB),
    ] {
        region
            .write_all_at(&word.to_ne_bytes(), offset as u64)
            .unwrap();
    }
    assert_eq!(read(), memory(12, 4));
}
