//! The ledger in histories of a few processes, one of which is killed after each of its steps in turn.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::ledger::{LimitExceeded, MAX_BYTES, Owner, Rebuild, Region};
use drava_vgpu_abi::region::{Header, SLOT_COUNT, Slot, SlotIndex};
use proptest::prelude::*;

thread_local! {
    /// Steps until the running operation is killed.
    static FUSE: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Panic payload that stands for `kill -9`.
struct Killed;

#[derive(Default)]
struct Cut(Cell<u64>);

impl Cut {
    fn step(&self) {
        if let Some(left) = FUSE.get() {
            if left == 0 {
                FUSE.set(None);
                // Bypasses the panic hook: nothing should be printed.
                resume_unwind(Box::new(Killed));
            }
            FUSE.set(Some(left - 1));
        }
    }
}

impl Word for Cut {
    fn load(&self) -> u64 {
        self.0.get()
    }

    fn store(&self, value: u64) {
        self.0.set(value);
        self.step();
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let found = self.0.get();
        if found != current {
            return Err(found);
        }
        self.0.set(new);
        self.step();
        Ok(found)
    }

    fn fetch_add(&self, value: u64) -> u64 {
        let found = self.0.replace(self.0.get().wrapping_add(value));
        self.step();
        found
    }

    fn fetch_sub(&self, value: u64) -> u64 {
        let found = self.0.replace(self.0.get().wrapping_sub(value));
        self.step();
        found
    }
}

const OWNER: Owner = Owner {
    pid: 7,
    start_time: 70,
    pid_namespace: 700,
};

struct Share {
    header: Header<Cut>,
    slots: Vec<Slot<Cut>>,
}

impl Share {
    fn new(processes: usize) -> Self {
        let share = Self {
            header: Header::from_words(Cut::default),
            slots: (0..processes)
                .map(|_| Slot::from_words(Cut::default))
                .collect(),
        };
        for index in 0..processes {
            share.region().acquire_slot(at(index), OWNER).unwrap();
        }
        share
    }

    fn region(&self) -> Region<'_, Cut> {
        Region::new(&self.header, &self.slots)
    }

    fn used(&self) -> u64 {
        self.slots.iter().map(|slot| slot.used_bytes.load()).sum()
    }
}

fn at(index: usize) -> SlotIndex {
    SlotIndex::new(index).unwrap()
}

/// Runs `operation` for at most `steps` steps; returns whether it was killed.
fn killed_after(steps: u32, operation: impl FnOnce()) -> bool {
    FUSE.set(Some(steps));
    let outcome = catch_unwind(AssertUnwindSafe(operation));
    FUSE.set(None);
    match outcome {
        Ok(()) => false,
        Err(payload) if payload.is::<Killed>() => true,
        Err(payload) => resume_unwind(payload),
    }
}

#[test]
fn grants_reservation_exactly_or_denies_it() {
    let share = Share::new(2);
    let region = share.region();
    assert_eq!(region.reserve(at(0), 60, 100), Ok(()));
    assert_eq!(region.reserve(at(1), 41, 100), Err(LimitExceeded));
    assert_eq!(region.reserve(at(1), 40, 100), Ok(()));
    assert_eq!(region.reserve(at(1), 1, 100), Err(LimitExceeded));
    assert_eq!(region.total_bytes(), 100);
    assert_eq!(region.release(at(0), 60), 60);
    assert_eq!(region.total_bytes(), 40);
    assert_eq!(region.reserve_up_to(at(0), 100, 100), 60);
    assert_eq!(region.reserve_up_to(at(0), 1, 100), 0);
}

#[test]
fn saturates_sums() {
    let share = Share::new(1);
    let region = share.region();
    assert_eq!(
        region.reserve(at(0), u64::MAX, u64::MAX),
        Err(LimitExceeded)
    );
    assert_eq!(region.reserve(at(0), MAX_BYTES, u64::MAX), Ok(()));
    region.charge(at(0), 5);
    assert_eq!(region.total_bytes(), MAX_BYTES);
    assert_eq!(region.release(at(0), u64::MAX), MAX_BYTES);
    assert_eq!(region.release(at(0), 1), 0);
    assert_eq!(region.total_bytes(), 0);
}

#[test]
fn denies_until_usage_is_below_lowered_limit() {
    let share = Share::new(1);
    let region = share.region();
    assert_eq!(region.reserve(at(0), 80, 100), Ok(()));
    assert_eq!(region.reserve(at(0), 1, 50), Err(LimitExceeded));
    assert_eq!(region.reserve_up_to(at(0), 10, 50), 0);
    region.release(at(0), 40);
    assert_eq!(region.reserve(at(0), 10, 50), Ok(()));
}

#[test]
fn denies_on_random_region_content() {
    let share = Share::new(2);
    let region = share.region();
    share.header.slots_in_use.store(u64::MAX);
    share.header.total.store(u64::MAX);
    assert_eq!(region.reserve(at(0), 1, 1 << 30), Err(LimitExceeded));
    share.slots[1].used_bytes.store(u64::MAX);
    share.slots[1].in_flight_bytes.store(u64::MAX);
    assert_eq!(region.rebuild(at(0)), Rebuild::Contended);
    assert_eq!(region.total_bytes(), MAX_BYTES);
    region.clear(at(1));
    assert_eq!(region.rebuild(at(0)), Rebuild::Exact);
    assert_eq!(region.total_bytes(), 0);
}

#[derive(Clone, Debug)]
enum Operation {
    Reserve(u64),
    ReserveSome(u64),
    Release(u64),
    Charge(u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (0..60u64).prop_map(Operation::Reserve),
        (0..60u64).prop_map(Operation::ReserveSome),
        (0..60u64).prop_map(Operation::Release),
        (0..5u64).prop_map(Operation::Charge),
    ]
}

fn run(region: Region<'_, Cut>, process: usize, operation: &Operation, limit: u64) {
    match *operation {
        Operation::Reserve(bytes) => {
            let _ = region.reserve(at(process), bytes, limit);
        }
        Operation::ReserveSome(bytes) => {
            region.reserve_up_to(at(process), bytes, limit);
        }
        Operation::Release(bytes) => {
            region.release(at(process), bytes);
        }
        Operation::Charge(bytes) => region.charge(at(process), bytes),
    }
}

proptest! {
    /// After any history the total equals the sum of the slots. Process 0 is then killed after each step of its next
    /// operation in turn: the total may be too high but never too low. Clearing the dead slot and one rebuild make the
    /// total exact, even if the repairing process is killed and another one repeats the repair.
    #[test]
    fn repairs_any_crash_on_next_rebuild(
        history in prop::collection::vec((0..3usize, operation()), 0..40),
        last in operation(),
        limit in 50..120u64,
    ) {
        let killed_last = |steps| {
            let share = Share::new(3);
            for (process, operation) in &history {
                run(share.region(), *process, operation, limit);
                prop_assert_eq!(share.region().total_bytes(), share.used());
            }
            let killed = killed_after(steps, || run(share.region(), 0, &last, limit));
            let survivors: u64 = share.slots[1..].iter().map(|slot| slot.used_bytes.load()).sum();
            prop_assert!(share.region().total_bytes() >= survivors);
            Ok((share, survivors, killed))
        };
        for steps in 0.. {
            let (_, _, killed) = killed_last(steps)?;
            if !killed {
                break;
            }
            for repair_steps in 0.. {
                let (share, survivors, _) = killed_last(steps)?;
                let repair = |me| {
                    share.region().clear(at(0));
                    share.region().rebuild(at(me));
                };
                let repairer_killed = killed_after(repair_steps, || repair(1));
                prop_assert!(share.region().total_bytes() >= survivors);
                repair(2);
                prop_assert_eq!(share.region().total_bytes(), survivors);
                if !repairer_killed {
                    break;
                }
            }
        }
    }

    /// A new owner gets an empty slot, whatever the slot held and wherever the claim was interrupted.
    #[test]
    fn starts_claimed_slot_empty(used in 0..100u64, steps in 0..20u32) {
        let share = Share::new(2);
        share.region().charge(at(0), used);
        killed_after(steps, || { share.region().acquire_slot(at(0), OWNER); });
        let generation = share.region().acquire_slot(at(0), OWNER).unwrap();
        prop_assert!(share.region().is_owned(at(0), generation));
        prop_assert!(!share.region().is_owned(at(0), generation + 1));
        prop_assert_eq!(share.used(), 0);
        share.region().rebuild(at(0));
        prop_assert_eq!(share.region().total_bytes(), 0);
    }
}

/// Reclaiming skips free slots, so memory in a free slot would stay charged.
#[test]
fn frees_slot_only_when_it_holds_nothing() {
    for steps in 0.. {
        let share = Share::new(2);
        let slot = &share.slots[0];
        share.region().charge(at(0), 50);
        slot.in_flight_bytes.store(7);
        slot.exported_bytes.store(30);
        slot.opened_bytes.store(20);
        let killed = killed_after(steps, || share.region().clear(at(0)));
        if share.region().is_free(at(0)) {
            let left = [
                &slot.used_bytes,
                &slot.in_flight_bytes,
                &slot.exported_bytes,
                &slot.opened_bytes,
            ];
            assert_eq!(left.map(Word::load), [0; 4], "after step {steps}");
        }
        if !killed {
            assert!(share.region().is_free(at(0)));
            break;
        }
    }
}

/// A process whose slot was reassigned detects the new owner, even one with the same PID.
#[test]
fn gives_each_slot_owner_its_own_generation() {
    let share = Share::new(1);
    let region = share.region();
    let first = region.acquire_slot(at(0), OWNER).unwrap();
    assert!(region.is_owned(at(0), first));
    let second = region.acquire_slot(at(0), OWNER).unwrap();
    assert!(second > first);
    assert!(region.is_owned(at(0), second) && !region.is_owned(at(0), first));
    region.clear(at(0));
    assert!(!region.is_owned(at(0), second));
    let third = region.acquire_slot(at(0), OWNER).unwrap();
    assert!(third > second, "also a slot that was free in between");
}

#[test]
fn records_peak_usage() {
    let share = Share::new(2);
    let region = share.region();
    region.reserve(at(0), 60, 100).unwrap();
    region.reserve(at(1), 30, 100).unwrap();
    assert_eq!(region.reserve(at(1), 30, 100), Err(LimitExceeded));
    region.release(at(0), 60);
    region.reserve(at(0), 10, 100).unwrap();
    assert_eq!(share.header.peak_bytes.load(), 90);
    let peaks = [0, 1].map(|index: usize| share.slots[index].peak_bytes.load());
    assert_eq!(peaks, [60, 30]);
    region.clear(at(0));
    assert_eq!(share.slots[0].peak_bytes.load(), 0, "of another process");
}

#[test]
fn counts_rebuilds_that_correct_the_total() {
    let share = Share::new(2);
    let region = share.region();
    region.charge(at(0), 60);
    assert_eq!(region.rebuild(at(1)), Rebuild::Exact);
    assert_eq!(share.header.epoch.load(), 0);
    region.clear(at(0));
    assert_eq!(share.header.reclaimed.load(), 1);
    assert_eq!(region.rebuild(at(1)), Rebuild::Exact);
    assert_eq!(share.header.epoch.load(), 1);
    // A free slot has no owner to lose it.
    region.clear(at(0));
    assert_eq!(share.header.reclaimed.load(), 1);
    // Also for an owner with orphaned memory, and only once.
    region.acquire_slot(at(0), OWNER).unwrap();
    region.charge(at(0), 60);
    share.slots[0].exported_bytes.store(60);
    share.slots[1].opened_bytes.store(40);
    for _ in 0..2 {
        region.reclaim_slot(at(0));
        assert!(region.is_orphaned(at(0)));
        assert_eq!(share.header.reclaimed.load(), 2);
    }
}

#[test]
fn rejects_slot_index_beyond_last() {
    assert_eq!(at(SLOT_COUNT - 1).get(), SLOT_COUNT - 1);
    for index in [SLOT_COUNT, SLOT_COUNT + 1, usize::MAX] {
        assert_eq!(SlotIndex::new(index), None);
    }
}

/// Exported memory of a dead process stays charged while another process has it open, and no longer, even if any of the
/// reclaiming processes is killed.
#[test]
fn keeps_charge_for_dead_process_memory_open_elsewhere() {
    for steps in 0.. {
        let share = Share::new(4);
        let region = share.region();
        region.charge(at(0), 50);
        share.slots[0].exported_bytes.store(30);
        // Opened by two processes: it can be the same memory or different memory.
        share.slots[1].opened_bytes.store(20);
        share.slots[2].opened_bytes.store(20);
        region.charge(at(1), 5);
        let killed = killed_after(steps, || {
            region.reclaim_slot(at(0));
            region.rebuild(at(3));
        });
        assert!(region.total_bytes() >= 35, "after step {steps}");
        region.reclaim_slot(at(0));
        region.rebuild(at(3));
        assert!(region.is_orphaned(at(0)) && !region.is_free(at(0)));
        let total = region.total_bytes();
        assert!((35..=45).contains(&total), "{total} after step {steps}");
        share.slots[1].opened_bytes.store(0);
        region.reclaim_slot(at(0));
        region.rebuild(at(3));
        assert_eq!(region.total_bytes(), 25, "after step {steps}");
        share.slots[2].opened_bytes.store(0);
        region.reclaim_slot(at(0));
        region.rebuild(at(3));
        assert_eq!(region.total_bytes(), 5);
        assert!(region.is_free(at(0)));
        if !killed {
            break;
        }
    }
}

/// The opened memory may belong to another share, so the charge is limited to the exported bytes.
#[test]
fn limits_orphaned_charge_to_exported_bytes() {
    let share = Share::new(3);
    let region = share.region();
    region.charge(at(0), 50);
    share.slots[0].exported_bytes.store(10);
    share.slots[1].opened_bytes.store(30);
    for _ in 0..2 {
        region.reclaim_slot(at(0));
        region.rebuild(at(2));
        assert_eq!(region.total_bytes(), 10);
    }
}

#[test]
fn limits_orphaned_charges_to_opened_bytes() {
    let share = Share::new(4);
    let region = share.region();
    for dead in [0, 1] {
        region.charge(at(dead), 40);
        share.slots[dead].exported_bytes.store(40);
    }
    share.slots[2].opened_bytes.store(50);
    for _ in 0..2 {
        for dead in [0, 1] {
            region.reclaim_slot(at(dead));
        }
        region.rebuild(at(3));
        assert_eq!(region.total_bytes(), 50);
    }
}
