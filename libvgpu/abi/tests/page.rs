//! The bytes of the limits page: a golden page, torn updates, damaged bytes.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::page::{lent, notify, suspended, window, yield_until};
use drava_vgpu_abi::{
    BrokenRegion, ComputePolicy, Cores, DeviceUuid, IdText, Limits, LimitsSpec, MemoryPolicy,
    PAGE_SIZE, PageError, Priority, decode, encode, own_time, update,
};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn spec() -> LimitsSpec {
    LimitsSpec {
        claim_uid: IdText::new("5c4f2b5e-9c0a-4a6e-8f7b-0d1e2f3a4b5c").unwrap(),
        share_id: IdText::new("11111111-2222-3333-4444-555555555555").unwrap(),
        device_uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".parse().unwrap(),
        limits: Limits {
            memory_limit_bytes: Some(8 * GIB),
            driver_reserve_bytes: 0x1234_5678,
            driver_excess_bytes: 0,
            driver_surplus_bytes: 0,
            lent_bytes: 0,
            cores: Cores::new(30).unwrap(),
            compute_policy: ComputePolicy::Balance,
            priority: Priority::new(-2).unwrap(),
            memory_policy: MemoryPolicy::Spill,
            broken_region: BrokenRegion::Open,
            can_suspend: false,
            rate_us_per_s: Some(300_000),
        },
    }
}

/// The bytes of ABI version 1, written by hand. A change here breaks running containers.
#[test]
fn encodes_golden_bytes_of_abi_version_1() {
    let page = encode(&spec());
    let mut expected = [0u8; PAGE_SIZE];
    expected[..8].copy_from_slice(b"DRAVALIM");
    expected[8..16].copy_from_slice(&[1, 0, 0, 0, 0, 0x10, 0, 0]);
    expected[16] = 1;
    expected[64..100].copy_from_slice(b"5c4f2b5e-9c0a-4a6e-8f7b-0d1e2f3a4b5c");
    expected[128..164].copy_from_slice(b"11111111-2222-3333-4444-555555555555");
    for (index, byte) in expected[192..208].iter_mut().enumerate() {
        *byte = u8::try_from(index * 0x11).unwrap();
    }
    expected[208..216].copy_from_slice(&[0x6b, 0xce, 0x0e, 0x20, 0xca, 0x92, 0xf6, 0x56]);
    expected[384] = 1;
    expected[392..400].copy_from_slice(&[0, 0, 0, 0, 2, 0, 0, 0]);
    expected[400..408].copy_from_slice(&[0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0]);
    expected[408..412].copy_from_slice(&[30, 0, 0, 0]);
    expected[412..416].copy_from_slice(&[1, 0, 0, 0]);
    expected[416..420].copy_from_slice(&[0xfe, 0xff, 0xff, 0xff]);
    expected[420..424].copy_from_slice(&[0b110, 0, 0, 0]);
    expected[424..432].copy_from_slice(&[0xe0, 0x93, 4, 0, 0, 0, 0, 0]);
    expected[504..512].copy_from_slice(&[0xf3, 0x70, 0xc3, 0x5b, 0x85, 0x35, 0xb4, 0xfa]);
    for (offset, (found, wanted)) in page.iter().zip(expected).enumerate() {
        assert_eq!(
            *found,
            wanted,
            "byte {offset}: {:02x?}",
            &page[offset..offset + 8]
        );
    }
}

/// The words that the agent changes often, written by hand.
#[test]
fn places_agent_words_at_golden_offsets() {
    let mut page = encode(&spec());
    let before = page;
    apply(&mut page, &[own_time(OwnTime::Part(500_000))]);
    assert_eq!(page[32..40], [0x20, 0xa1, 7, 0, 0, 0, 0, 0]);
    assert_eq!(page[..32], before[..32]);
    assert_eq!(page[40..], before[40..]);
    assert_eq!(decode(&page).unwrap().spec, spec());
}

/// The words for priorities and for lending. ABI version 1 had zeroes there: in an old page they request nothing, and
/// old readers ignore them.
#[test]
fn places_other_share_words_at_golden_offsets() {
    let mut page = encode(&spec());
    let before = page;
    for offset in [48, 56, 216, 224, 232] {
        assert_eq!(page[offset..offset + 8], [0; 8]);
    }
    apply(
        &mut page,
        &[
            yield_until(0x0102_0304_0506_0708),
            window(200),
            notify(true),
            lent(true),
            suspended(7),
        ],
    );
    assert_eq!(page[48..56], [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(page[56..64], [200, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[216..224], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[..48], before[..48]);
    assert_eq!(page[64..216], before[64..216]);
    assert_eq!(page[224..232], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[232..240], [7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[240..], before[240..]);
    assert_eq!(decode(&page).unwrap().spec, spec());
    apply(
        &mut page,
        &[
            yield_until(0),
            window(0),
            notify(false),
            lent(false),
            suspended(0),
        ],
    );
    assert_eq!(page, before);
}

fn apply(page: &mut [u8], writes: &[drava_vgpu_abi::PageWrite]) {
    for write in writes {
        let offset = usize::try_from(write.offset()).unwrap();
        page[offset..offset + write.bytes().len()].copy_from_slice(write.bytes());
    }
}

/// ABI version 1 had no such flag: an old page says no, and old readers ignore it.
#[test]
fn stores_in_a_flag_whether_share_may_be_suspended() {
    let limits = Limits {
        can_suspend: true,
        ..spec().limits
    };
    let page = encode(&LimitsSpec { limits, ..spec() });
    assert_eq!((encode(&spec())[420], page[420]), (0b0110, 0b1110));
}

/// ABI version 1 had zeroes there: an old page has no correction, and old readers ignore the words.
#[test]
fn stores_driver_correction_in_reserved_bytes() {
    let mut limits = spec().limits;
    limits.driver_excess_bytes = 0x0102_0304_0506_0708;
    limits.driver_surplus_bytes = 0x1112_1314_1516_1718;
    limits.lent_bytes = 0x2122_2324_2526_2728;
    let page = encode(&LimitsSpec { limits, ..spec() });
    assert_eq!(page[432..440], [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(
        page[440..448],
        [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]
    );
    assert_eq!(
        page[448..456],
        [0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21]
    );
    assert_eq!(page[..432], encode(&spec())[..432]);
}

#[test]
fn keeps_identity_and_increments_generation_on_update() {
    let mut page = encode(&spec());
    for round in 2..10u64 {
        let limits = Limits::memory(round * GIB);
        let writes = update(&page, &limits).unwrap();
        apply(&mut page, &writes);
        let decoded = decode(&page).unwrap();
        assert_eq!(decoded.spec, LimitsSpec { limits, ..spec() });
        assert_eq!(decoded.generation, round);
        assert_eq!(page[16..24], round.to_le_bytes());
    }
}

#[test]
fn reads_old_or_new_limits_after_torn_update() {
    let old = spec();
    let new = LimitsSpec {
        limits: Limits::memory(3 * GIB),
        ..old
    };
    let page = encode(&old);
    let writes = update(&page, &new.limits).unwrap();
    let steps: Vec<(usize, u8)> = writes
        .iter()
        .flat_map(|write| {
            let start = usize::try_from(write.offset()).unwrap();
            write
                .bytes()
                .iter()
                .enumerate()
                .map(move |(index, byte)| (start + index, *byte))
        })
        .collect();
    let mut torn = page;
    for (done, (offset, byte)) in steps.iter().enumerate() {
        torn[*offset] = *byte;
        // Miri takes seconds for each.
        if cfg!(miri) && done % 8 != 0 {
            continue;
        }
        let found = decode(&torn).unwrap().spec;
        assert!(found == old || found == new, "after {} bytes", done + 1);
        // The next start of the driver repeats the update and succeeds.
        let mut repaired = torn;
        apply(&mut repaired, &update(&torn, &new.limits).unwrap());
        assert_eq!(decode(&repaired).unwrap().spec, new);
    }
    assert_eq!(decode(&torn).unwrap().spec, new);
}

#[test]
fn ignores_reserved_bytes() {
    let mut page = encode(&spec());
    for range in [24..64, 216..256, 512..PAGE_SIZE] {
        page[range].fill(0xa5);
    }
    assert_eq!(decode(&page).unwrap().spec, spec());
}

#[test]
fn rejects_other_files_and_versions() {
    let page = encode(&spec());
    assert_eq!(decode(&page[..100]), Err(PageError::Short { len: 100 }));
    assert_eq!(decode(&[0; PAGE_SIZE]), Err(PageError::Magic));
    let mut other = page;
    other[8] = 2;
    assert_eq!(decode(&other), Err(PageError::Version { found: 2 }));
    let mut other = page;
    other[70] ^= 1;
    assert_eq!(decode(&other), Err(PageError::Identity));
    let mut other = page;
    other[392] ^= 1;
    assert_eq!(decode(&other), Err(PageError::Records));
}

fn limits() -> impl Strategy<Value = Limits> {
    let policies = prop::sample::select(vec![
        ComputePolicy::None,
        ComputePolicy::Balance,
        ComputePolicy::Fixed,
    ]);
    (
        prop::option::of(0..u64::MAX),
        any::<(u64, u64, u64, u64)>(),
        0..=100u32,
        policies,
        -100..=100i32,
        any::<(bool, bool, bool)>(),
        any::<Option<u32>>(),
    )
        .prop_map(
            |(
                memory,
                (reserve, excess, surplus, lent),
                cores,
                compute_policy,
                priority,
                (spill, open, can_suspend),
                rate,
            )| {
                Limits {
                    memory_limit_bytes: memory,
                    driver_reserve_bytes: reserve,
                    driver_excess_bytes: excess,
                    driver_surplus_bytes: surplus,
                    lent_bytes: lent,
                    cores: Cores::new(cores).unwrap(),
                    compute_policy,
                    priority: Priority::new(priority).unwrap(),
                    memory_policy: if spill {
                        MemoryPolicy::Spill
                    } else {
                        MemoryPolicy::Hard
                    },
                    broken_region: if open {
                        BrokenRegion::Open
                    } else {
                        BrokenRegion::Closed
                    },
                    can_suspend,
                    rate_us_per_s: rate,
                }
            },
        )
}

proptest! {
    #[test]
    fn decodes_encoded_page(
        limits in limits(),
        claim in "[!-~]{1,63}",
        share in "[!-~]{1,63}",
        uuid: [u8; 16],
    ) {
        let spec = LimitsSpec {
            claim_uid: IdText::new(&claim).unwrap(),
            share_id: IdText::new(&share).unwrap(),
            device_uuid: DeviceUuid(uuid),
            limits,
        };
        prop_assert_eq!(decode(&encode(&spec)).unwrap().spec, spec);
    }

    #[test]
    fn never_panics_on_arbitrary_bytes(bytes: Vec<u8>, at in 0..PAGE_SIZE) {
        let mut page = encode(&spec());
        for (target, byte) in page[at..].iter_mut().zip(&bytes) {
            *target ^= byte;
        }
        let _ = decode(&page);
        let _ = decode(&bytes);
    }
}
