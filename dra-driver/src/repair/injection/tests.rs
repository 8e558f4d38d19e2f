use std::fs;

use super::*;
use crate::gpus::capacity::{MIB, ShareTotals};
use crate::prepare::record::fixture;

fn record(number: u32) -> ClaimRecord {
    let amounts = ShareTotals {
        memory_bytes: 1024 * MIB,
        cores: 0,
        slots: 1,
    };
    fixture::record(number, "node-a/gpus", amounts)
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
