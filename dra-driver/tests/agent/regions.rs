//! Regions as the agent reads them, one after the other with one buffer.

use std::fs;
use std::mem::offset_of;
use std::path::PathBuf;

use drava_dra_driver::agent::share::{Scratch, Usage};
use drava_vgpu_abi::ledger::MAX_BYTES;
use drava_vgpu_abi::region::{Header, SLOTS_OFFSET, Slot};
use drava_vgpu_abi::{REGION_SIZE, paths};

use crate::idle::Forged;

/// A usage directory with a region.
fn region() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(paths::REGION_FILE);
    fs::write(&file, vec![0; REGION_SIZE]).unwrap();
    (dir, file)
}

#[test]
fn what_one_region_says_is_not_read_in_the_next_one() {
    let ((first, first_file), (second, second_file)) = (region(), region());
    let (crowded, deserted) = (Forged::at(&first_file), Forged::at(&second_file));
    // The first has a process in its third slot, the second had one in its first.
    let third = SLOTS_OFFSET + 2 * size_of::<Slot>();
    crowded.write(third + offset_of!(Slot, state), 0x101);
    crowded.write(offset_of!(Header, slots_in_use), 3);
    deserted.ends();
    let mut scratch = Scratch::default();
    let mut processes = |dir: &tempfile::TempDir| {
        let view = Usage::open(dir.path()).view(&mut scratch).unwrap();
        view.processes.len()
    };
    assert_eq!([processes(&first), processes(&second)], [2, 0]);
}

#[test]
fn no_figure_is_larger_than_a_region_can_count() {
    let (dir, file) = region();
    let forged = Forged::at(&file);
    forged.write(offset_of!(Header, total), MAX_BYTES);
    forged.write(SLOTS_OFFSET + offset_of!(Slot, used_bytes), u64::MAX);
    let view = Usage::open(dir.path()).view(&mut Scratch::default());
    assert_eq!(view.unwrap().processes[0].used_bytes, MAX_BYTES);
}

#[test]
fn a_region_that_was_put_in_the_place_of_another_is_the_one_that_is_read() {
    let (dir, file) = region();
    let mut scratch = Scratch::default();
    let mut usage = Usage::open(dir.path());
    let old = dir.path().join("old");
    fs::rename(&file, old).unwrap();
    assert!(usage.verify().is_err(), "there is none");
    fs::write(&file, vec![0; REGION_SIZE]).unwrap();
    let _process = Forged::at(&file);
    assert_eq!(usage.verify(), Ok(()));
    assert_eq!(usage.view(&mut scratch).unwrap().processes.len(), 1);
    // Straight from one to the other as well.
    let (_other, replacement) = region();
    fs::copy(&replacement, dir.path().join("new")).unwrap();
    fs::rename(dir.path().join("new"), &file).unwrap();
    assert_eq!(usage.verify(), Ok(()));
    assert_eq!(usage.view(&mut scratch).unwrap().processes.len(), 0);
}
