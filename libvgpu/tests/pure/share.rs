//! The mapped files of a share: the views follow the layout, for each of several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use drava_vgpu_abi::ledger::Rebuild;
use drava_vgpu_abi::region::{SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET, SlotIndex};
use drava_vgpu_abi::{
    IdText, Limits, LimitsSpec, PAGE_SIZE, PageWrite, REGION_SIZE, encode, update,
};

use crate::system::sys::{self, Fd, File};

pub(crate) type RegionWord = AtomicU64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachError {
    Content,
    Full,
}

#[path = "../../src/limits/share/mapping.rs"]
mod mapping;

fn region() -> Fd {
    Fd(File::of_zeroes(REGION_SIZE))
}

/// The `size` bytes of the file from `at`.
fn read(fd: Fd, at: usize, size: usize) -> Vec<u8> {
    let start = sys::map_file(fd, at + size, true)
        .unwrap()
        .cast::<AtomicU64>();
    (at / 8..(at + size) / 8)
        .flat_map(|index| {
            // SAFETY: within the file.
            let word = unsafe { start.add(index) };
            // SAFETY: aligned, and accessed only through atomics.
            let word = unsafe { word.as_ref() };
            word.load(Ordering::SeqCst).to_ne_bytes()
        })
        .collect()
}

#[test]
fn maps_exactly_the_whole_region() {
    let fd = region();
    let view = mapping::view(sys::map_file(fd, REGION_SIZE, true).unwrap());
    mapping::check(&view).unwrap();
    view.header().slots_in_use.store(u64::MAX, Ordering::SeqCst);
    assert_eq!(view.slots().len(), SLOT_COUNT);
    for (index, slot) in view.slots().iter().enumerate() {
        slot.used_bytes.store(index as u64 + 1, Ordering::SeqCst);
    }
    assert_eq!(read(fd, 0, 8), b"DRAVAUSE");
    // Miri checks a sample.
    for index in (0..SLOT_COUNT).step_by(if cfg!(miri) { 93 } else { 1 }) {
        let at = SLOTS_OFFSET + index * SLOT_SIZE + 32;
        assert_eq!(read(fd, at, 8), (index as u64 + 1).to_ne_bytes());
    }
}

#[test]
fn rejects_other_file() {
    let fd = region();
    let view = mapping::view(sys::map_file(fd, REGION_SIZE, true).unwrap());
    view.header().abi_version.store(2, Ordering::SeqCst);
    assert_eq!(mapping::check(&view), Err(AttachError::Content));
}

#[test]
fn assigns_distinct_slots_to_concurrent_processes() {
    const LIMIT: u64 = 1000;
    let fd = region();
    let rounds = if cfg!(miri) { 20 } else { 2000 };
    let taken: Vec<usize> = thread::scope(|scope| {
        let join = |_| {
            scope.spawn(move || {
                let view = mapping::view(sys::map_file(fd, REGION_SIZE, true).unwrap());
                mapping::check(&view).unwrap();
                let (slot, generation) = mapping::acquire_slot(&view, fd).unwrap();
                for _ in 0..rounds {
                    if view.reserve_or_rebuild(slot, 300, LIMIT).is_ok() {
                        assert!(view.total_bytes() <= LIMIT);
                        assert_eq!(view.release(slot, 300), 300);
                    }
                }
                assert!(view.is_owned(slot, generation));
                slot.get()
            })
        };
        let threads: Vec<_> = (0..4).map(join).collect();
        threads.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let mut sorted = taken.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 4, "{taken:?}");
    let view = mapping::view(sys::map_file(fd, REGION_SIZE, true).unwrap());
    let (slot, _) = mapping::acquire_slot(&view, fd).unwrap();
    assert_eq!(view.rebuild(slot), Rebuild::Exact);
    assert_eq!(view.total_bytes(), 0);
    assert_eq!(view.slots().len(), 5);
    assert!(
        (0..5)
            .filter_map(SlotIndex::new)
            .all(|slot| !view.is_free(slot))
    );
}

#[test]
fn reuses_dead_slot_of_full_region() {
    let fd = region();
    let view = mapping::view(sys::map_file(fd, REGION_SIZE, true).unwrap());
    let (first, generation) = mapping::acquire_slot(&view, fd).unwrap();
    // The other processes are alive: their slots are locked and in use.
    view.header()
        .slots_in_use
        .store(SLOT_COUNT as u64, Ordering::SeqCst);
    for (index, slot) in view.slots().iter().enumerate().skip(1) {
        let offset = SlotIndex::new(index).unwrap().offset();
        assert!(sys::lock(fd, offset, SLOT_SIZE));
        slot.state.store(1, Ordering::SeqCst);
    }
    assert_eq!(
        mapping::acquire_slot(&view, fd).unwrap_err(),
        AttachError::Full,
        "all processes are alive"
    );
    // A process dies with memory that is open elsewhere: its memory stays charged, and its slot stays in use.
    let dead = SlotIndex::new(7).unwrap();
    view.charge(dead, 9);
    view.slot(dead)
        .unwrap()
        .exported_bytes
        .store(9, Ordering::SeqCst);
    view.slot(first)
        .unwrap()
        .opened_bytes
        .store(9, Ordering::SeqCst);
    view.reclaim_slot(dead);
    sys::unlock(fd, dead.offset(), SLOT_SIZE);
    assert!(view.is_orphaned(dead));
    assert_eq!(
        mapping::acquire_slot(&view, fd).unwrap_err(),
        AttachError::Full
    );
    view.slot(first)
        .unwrap()
        .opened_bytes
        .store(0, Ordering::SeqCst);
    view.reclaim_slot(dead);
    view.slot(dead).unwrap().state.store(1, Ordering::SeqCst);
    assert!(sys::lock(fd, dead.offset(), SLOT_SIZE));
    view.charge(first, 5);
    // Its owner dies.
    sys::unlock(fd, first.offset(), SLOT_SIZE);
    let (again, next) = mapping::acquire_slot(&view, fd).unwrap();
    assert_eq!((again, next), (first, generation + 1));
    assert_eq!(view.rebuild(again), Rebuild::Exact);
    assert_eq!(view.total_bytes(), 0);
}

fn spec(limit_bytes: u64) -> LimitsSpec {
    LimitsSpec {
        claim_uid: IdText::new("claim").unwrap(),
        share_id: IdText::new("share").unwrap(),
        device_uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".parse().unwrap(),
        limits: Limits::memory(limit_bytes),
    }
}

/// Writes word by word, as other processes see the writes.
fn write(fd: Fd, at: usize, bytes: &[u8]) {
    let start = sys::map_file(fd, PAGE_SIZE, true)
        .unwrap()
        .cast::<AtomicU64>();
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        // SAFETY: within the file.
        let place = unsafe { start.add(at / 8 + index) };
        // SAFETY: aligned, and accessed only through atomics.
        let place = unsafe { place.as_ref() };
        place.store(
            u64::from_ne_bytes(word.try_into().unwrap()),
            Ordering::SeqCst,
        );
    }
}

/// The node driver changes the page while a process reads it repeatedly.
#[test]
fn reads_consistent_page_during_update() {
    let nothing = Fd(File::of_zeroes(PAGE_SIZE));
    assert!(mapping::map_page(nothing).is_none(), "a page of zeroes");
    let fd = Fd(File::of_zeroes(PAGE_SIZE));
    write(fd, 0, &encode(&spec(1)));
    let (page, first) = mapping::map_page(fd).unwrap();
    assert_eq!(first.spec, spec(1));
    assert_eq!(mapping::page_words(page).len(), PAGE_SIZE / 8);
    let last = if cfg!(miri) { 4 } else { 500 };
    thread::scope(|scope| {
        scope.spawn(|| {
            for limit in 2..=last {
                let writes: [PageWrite; 2] =
                    update(&read(fd, 0, PAGE_SIZE), &Limits::memory(limit)).unwrap();
                for one in writes {
                    write(fd, usize::try_from(one.offset()).unwrap(), one.bytes());
                }
            }
        });
        let mut seen = 1;
        while seen < last {
            // A reader that is overtaken repeatedly gives up and keeps the previous limits. A reader that is overtaken
            // twice may read the previous limits again; the hint has changed too then, so the reader retries.
            let Some(page) = mapping::read_page(page) else {
                continue;
            };
            let limit = page.spec.limits.memory_limit_bytes.unwrap();
            assert_eq!(page.spec, spec(limit));
            assert_eq!(page.generation, limit);
            seen = seen.max(limit);
        }
    });
}
