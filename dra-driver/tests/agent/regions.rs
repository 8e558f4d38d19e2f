//! Reading of usage regions with one shared buffer.

use std::fs::{self, OpenOptions};
use std::mem::offset_of;
use std::path::PathBuf;

use drava_dra_driver::agent::node::usage_region::{ReadBuffer, UsageRegion};
use drava_vgpu_abi::ledger::MAX_BYTES;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};
use drava_vgpu_abi::{REGION_SIZE, paths};

use crate::node::MIB;
use crate::virtual_clock::{FakeProcess, lock_slot};

/// Creates a usage directory with a region.
fn region() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(paths::REGION_FILE);
    fs::write(&file, vec![0; REGION_SIZE]).unwrap();
    (dir, file)
}

#[test]
fn reads_each_region_independently() {
    let ((first, first_file), (second, second_file)) = (region(), region());
    let (occupied, empty) = (FakeProcess::at(&first_file), FakeProcess::at(&second_file));
    // The first region has a second process in its third slot; the process of the second region has exited.
    let third = SLOTS_OFFSET + 2 * size_of::<Slot>();
    occupied.write(third + offset_of!(Slot, state), 0x101);
    occupied.write(offset_of!(Header, slots_in_use), 3);
    empty.exit();
    let mut buffer = ReadBuffer::default();
    let mut processes = |dir: &tempfile::TempDir| {
        let view = UsageRegion::open(dir.path()).view(&mut buffer).unwrap();
        view.processes.len()
    };
    assert_eq!([processes(&first), processes(&second)], [2, 0]);
}

#[test]
fn caps_values_at_region_maximum() {
    let (dir, file) = region();
    let process = FakeProcess::at(&file);
    process.write(offset_of!(Header, total), MAX_BYTES);
    process.write(SLOTS_OFFSET + offset_of!(Slot, used_bytes), u64::MAX);
    let view = UsageRegion::open(dir.path()).view(&mut ReadBuffer::default());
    assert_eq!(view.unwrap().processes[0].used_bytes, MAX_BYTES);
}

#[test]
fn reads_region_that_replaced_another() {
    let (dir, file) = region();
    let mut buffer = ReadBuffer::default();
    let mut usage = UsageRegion::open(dir.path());
    let old = dir.path().join("old");
    fs::rename(&file, old).unwrap();
    assert!(usage.verify().is_err(), "region is missing");
    fs::write(&file, vec![0; REGION_SIZE]).unwrap();
    let _process = FakeProcess::at(&file);
    assert_eq!(usage.verify(), Ok(()));
    assert_eq!(usage.view(&mut buffer).unwrap().processes.len(), 1);
    // Replaced by one rename.
    let (_other, replacement) = region();
    fs::copy(&replacement, dir.path().join("new")).unwrap();
    fs::rename(dir.path().join("new"), &file).unwrap();
    assert_eq!(usage.verify(), Ok(()));
    assert_eq!(usage.view(&mut buffer).unwrap().processes.len(), 0);
}

/// Slots of a living process, of another one, and one with what an ended process had exported.
#[test]
fn counts_no_memory_of_ended_processes_but_what_they_exported() {
    let (dir, file) = region();
    let living = FakeProcess::at(&file);
    living.write(offset_of!(Header, slots_in_use), 3);
    living.write(offset_of!(Header, total), 16 * MIB);
    for (slot, state, used_mib, exported_mib) in
        [(0, 0x101, 9, 9), (1, 0x101, 5, 2), (2, 0x102, 1, 1)]
    {
        let slot = SLOTS_OFFSET + slot * size_of::<Slot>();
        living.write(slot + offset_of!(Slot, state), state);
        living.write(slot + offset_of!(Slot, used_bytes), used_mib * MIB);
        living.write(slot + offset_of!(Slot, exported_bytes), exported_mib * MIB);
    }
    let counted = || {
        let bytes = UsageRegion::open(dir.path())
            .live_use(&mut ReadBuffer::default())
            .map(|live| live.bytes);
        bytes.unwrap() / MIB
    };
    let other = OpenOptions::new().write(true).open(&file).unwrap();
    lock_slot(&other, 1);
    assert_eq!(counted(), 16);
    drop(other);
    assert_eq!(counted(), 13);
    drop(living);
    assert_eq!(counted(), 13, "all of the first slot is exported");
}
