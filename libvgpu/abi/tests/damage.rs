//! Arbitrary damage: a damaged page is rejected or decoded as one that was written, and a region with random content
//! grants nothing beyond the limit and blocks no operation.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::ledger::{MAX_BYTES, Region};
use drava_vgpu_abi::region::{Header, Slot, SlotIndex};
use drava_vgpu_abi::snapshot::Snapshot;
use drava_vgpu_abi::{IdText, Limits, LimitsSpec, PAGE_SIZE, decode, encode, update};
use proptest::prelude::*;

fn spec(limit_bytes: u64) -> LimitsSpec {
    LimitsSpec {
        claim_uid: IdText::new("claim").unwrap(),
        share_id: IdText::new("share").unwrap(),
        device_uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".parse().unwrap(),
        limits: Limits::memory(limit_bytes),
    }
}

/// One change of some bytes.
#[derive(Clone, Debug)]
enum Damage {
    Set(usize, u8),
    Fill(usize, usize, u8),
    Copy(usize, usize, usize),
    Cut(usize),
}

fn damage(size: usize) -> impl Strategy<Value = Damage> {
    // Mostly within the used part.
    let place = prop_oneof![3 => 0..size.min(768), 1 => 0..size];
    prop_oneof![
        8 => (place.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        2 => (place.clone(), 1..256usize, any::<u8>()).prop_map(|(at, length, byte)| Damage::Fill(at, length, byte)),
        2 => (place.clone(), place, 1..256usize).prop_map(|(from, to, length)| Damage::Copy(from, to, length)),
        1 => (0..size).prop_map(Damage::Cut),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    let end = |at: usize, length: usize, size: usize| (at + length).min(size);
    let size = bytes.len();
    match *damage {
        Damage::Set(at, byte) if at < size => bytes[at] = byte,
        Damage::Fill(at, length, byte) if at < size => {
            bytes[at..end(at, length, size)].fill(byte);
        }
        Damage::Copy(from, to, length) if from.max(to) < size => {
            let length = length.min(size - from.max(to));
            bytes.copy_within(from..from + length, to);
        }
        Damage::Cut(length) => bytes.truncate(length),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn rejects_damaged_page_or_reads_written_one(
        before in 1..MAX_BYTES,
        after in 1..MAX_BYTES,
        damages in prop::collection::vec(damage(PAGE_SIZE), 0..12),
    ) {
        let mut page = encode(&spec(before)).to_vec();
        for write in update(&page, &Limits::memory(after)).unwrap() {
            let at = usize::try_from(write.offset()).unwrap();
            page[at..at + write.bytes().len()].copy_from_slice(write.bytes());
        }
        prop_assert_eq!(decode(&page).unwrap().spec, spec(after));
        for damage in &damages {
            apply(&mut page, damage);
        }
        if let Ok(found) = decode(&page) {
            prop_assert!(
                found.spec == spec(before) || found.spec == spec(after),
                "{:?} after {:?}", found, damages
            );
        }
    }

    #[test]
    fn survives_arbitrary_page_and_region_bytes(
        bytes in prop::collection::vec(any::<u8>(), 0..PAGE_SIZE * 2),
    ) {
        let _ = decode(&bytes);
        if let Ok(snapshot) = Snapshot::decode(&bytes) {
            snapshot.processes().for_each(drop);
        }
    }
}

const SLOTS: usize = 4;

/// An operation of a process on a region.
#[derive(Clone, Debug)]
enum Step {
    Reserve(u64),
    ReserveOrRebuild(u64),
    ReserveSome(u64),
    Release(u64),
    Rebuild,
    Clear(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![0..1u64 << 40, Just(u64::MAX), Just(MAX_BYTES)];
    prop_oneof![
        bytes.clone().prop_map(Step::Reserve),
        bytes.clone().prop_map(Step::ReserveOrRebuild),
        bytes.clone().prop_map(Step::ReserveSome),
        bytes.prop_map(Step::Release),
        Just(Step::Rebuild),
        (0..SLOTS).prop_map(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn grants_nothing_beyond_limit_in_random_region(
        words in prop::collection::vec(prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), 0..1u64 << 40], 64),
        limit in 0..1u64 << 41,
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let mut words = words.into_iter().cycle();
        let header: Header = Header::from_words(|| AtomicU64::new(words.next().unwrap()));
        let slots: Vec<Slot> = (0..SLOTS)
            .map(|_| Slot::from_words(|| AtomicU64::new(words.next().unwrap())))
            .collect();
        let region = Region::new(&header, &slots);
        let me = SlotIndex::new(0).unwrap();
        for step in steps {
            match step {
                Step::Reserve(bytes) => {
                    if region.reserve(me, bytes, limit).is_ok() && bytes != 0 {
                        prop_assert!(region.total_bytes() <= limit);
                    }
                }
                Step::ReserveOrRebuild(bytes) => {
                    if region.reserve_or_rebuild(me, bytes, limit).is_ok() && bytes != 0 {
                        prop_assert!(region.total_bytes() <= limit);
                    }
                }
                Step::ReserveSome(bytes) => {
                    let got = region.reserve_up_to(me, bytes, limit);
                    prop_assert!(got <= bytes && got <= limit);
                }
                Step::Release(bytes) => prop_assert!(region.release(me, bytes) <= bytes),
                Step::Rebuild => {
                    let before = region.total_bytes();
                    region.rebuild(me);
                    prop_assert!(region.total_bytes() <= before);
                }
                Step::Clear(index) => region.clear(SlotIndex::new(index).unwrap()),
            }
        }
    }
}
