use std::fs;

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};

use super::*;
use crate::prepare::base::CommonEdits;
use crate::prepare::{Access, Delivery, GpuRef, Share};

fn record(number: u32) -> ClaimRecord {
    let uid = format!("00000000-0000-4000-8000-{number:012}");
    let share = Share {
        id: ShareId::parse(&uid).unwrap(),
        memory_bytes: 1 << 30,
        cores: 0,
        slots: 1,
        compute_policy: ComputePolicy::Balance,
        priority: Priority::default(),
        memory_policy: MemoryPolicy::Hard,
        enforcement: Enforcement::default(),
        unmetered: false,
        grants: Vec::new(),
    };
    ClaimRecord {
        claim: ClaimRef {
            namespace: "default".to_owned(),
            name: format!("claim-{number}"),
            uid: ClaimUid::parse(&uid).unwrap(),
        },
        devices: vec![Prepared {
            request: "gpu".to_owned(),
            pool: "node-a/gpus".to_owned(),
            device: "gpu-0-vgpu".to_owned(),
            gpu: GpuRef {
                uuid: "GPU-0".to_owned(),
                minor: 0,
                pci_bus_id: String::new(),
            },
            access: Access::Share(share),
        }],
        library: String::new(),
        hook: String::new(),
        delivery: Delivery::Preload,
        common: CommonEdits::InClaim,
    }
}

/// A check every [`INTERVAL`]; returns the seconds of those at which the pods of the claims were due.
fn due_seconds(
    shared: &mut SharedClaims,
    store: &RecordStore,
    start: Instant,
    checks: u32,
    is_injected: bool,
) -> Vec<u64> {
    let mut seconds = Vec::new();
    for check in 0..checks {
        let now = start + INTERVAL * check;
        let due = shared.update(store, |_, _| is_injected, now).unwrap();
        for claim in due.missing {
            shared.known.get_mut(&claim.uid).unwrap().postpone(now);
            seconds.push((now - start).as_secs());
        }
    }
    seconds
}

#[test]
fn checks_pods_of_missing_claims_less_often() {
    let dir = tempfile::tempdir().unwrap();
    let (store, start) = (RecordStore::new(dir.path().to_owned()), Instant::now());
    store.save(&record(1)).unwrap();
    let mut shared = SharedClaims::default();
    let due = due_seconds(&mut shared, &store, start, 40, false);
    assert_eq!(due, [0, 5, 15, 35, 75, 135, 195]);
    let later = start + Duration::from_secs(200);
    assert!(due_seconds(&mut shared, &store, later, 2, true).is_empty());
    let due = due_seconds(&mut shared, &store, later + 2 * INTERVAL, 2, false);
    assert_eq!(due, [0, 5], "the claim was prepared again");
}

#[test]
fn reads_records_after_changes_only() {
    let dir = tempfile::tempdir().unwrap();
    let (store, now) = (RecordStore::new(dir.path().to_owned()), Instant::now());
    let mut changes = RecordChanges::default();
    assert!(changes.is_changed(&store, now));
    assert!(!changes.is_changed(&store, now));
    let before = fs::metadata(dir.path()).unwrap().modified().unwrap();
    store.save(&record(1)).unwrap();
    // The clock of the file system can be coarse.
    let later = before + Duration::from_secs(1);
    fs::File::open(dir.path())
        .unwrap()
        .set_modified(later)
        .unwrap();
    assert!(changes.is_changed(&store, now));
    assert!(!changes.is_changed(&store, now));
    assert!(changes.is_changed(&store, now + Duration::from_secs(60)));
}
