//! Decoding of a region by an external reader.

use drava_vgpu_abi::REGION_SIZE;
use drava_vgpu_abi::snapshot::{RegionError, Snapshot};
use proptest::prelude::*;

fn put(bytes: &mut [u8], offset: usize, value: u64) {
    bytes[offset..offset + 8].copy_from_slice(&value.to_ne_bytes());
}

/// The offsets of ABI version 1, written by hand.
#[test]
fn reads_golden_offsets_of_abi_version_1() {
    let mut bytes = vec![0; REGION_SIZE];
    put(&mut bytes, 0, u64::from_le_bytes(*b"DRAVAUSE"));
    put(&mut bytes, 8, 1);
    put(&mut bytes, 128, 0x0003_0000_0000_0400);
    put(&mut bytes, 136, 2048);
    put(&mut bytes, 256, 5);
    put(&mut bytes, 272, 6);
    put(&mut bytes, 384, (-7i64).cast_unsigned());
    put(&mut bytes, 400, 8);
    put(&mut bytes, 408, 9);
    put(&mut bytes, 416, 10);
    let slot = 4096 + 256 * 3;
    put(&mut bytes, slot, (9 << 8) | 1);
    for (index, offset) in [8, 16, 24, 32].into_iter().enumerate() {
        put(&mut bytes, slot + offset, 100 + index as u64);
    }
    for (index, offset) in [48, 56, 64].into_iter().enumerate() {
        put(&mut bytes, slot + offset, 200 + index as u64);
    }
    for (index, offset) in [128, 136, 144, 152, 160, 168].into_iter().enumerate() {
        put(&mut bytes, slot + offset, 300 + index as u64);
    }
    put(&mut bytes, 4096 + 256 * 4, 9 << 8);

    let snapshot = Snapshot::decode(&bytes).unwrap();
    let share = snapshot.share();
    assert_eq!(
        (
            share.total_bytes,
            share.peak_bytes,
            share.denied,
            share.reclaimed
        ),
        (1024, 2048, 5, 6)
    );
    assert_eq!(
        (
            share.credit_us,
            share.last_demand_us,
            share.admission_timeouts,
            share.busy_until_us
        ),
        (-7, 8, 9, 10)
    );
    let processes: Vec<_> = snapshot.processes().collect();
    assert_eq!(processes.len(), 1, "a free slot belongs to no process");
    let process = processes[0];
    assert_eq!((process.slot.get(), process.generation), (3, 9));
    assert_eq!(
        (
            process.owner.pid,
            process.owner.start_time,
            process.owner.pid_namespace
        ),
        (100, 101, 102)
    );
    assert_eq!(
        (
            process.used_bytes,
            process.driver_bytes,
            process.peak_bytes,
            process.exported_bytes
        ),
        (103, 200, 201, 202)
    );
    assert_eq!(
        (
            process.denied,
            process.gpu_time_us,
            process.throttled_us,
            process.launches
        ),
        (300, 301, 302, 303)
    );
    assert_eq!(
        (process.long_kernels, process.longest_kernel_us),
        (304, 305)
    );
}

/// A value that is not a PID is not truncated to one, which could belong to another process.
#[test]
fn rejects_values_that_are_not_pids() {
    let mut bytes = vec![0; REGION_SIZE];
    put(&mut bytes, 4096, 1);
    for pid in [(7 << 32) | 100, u64::MAX] {
        put(&mut bytes, 4096 + 8, pid);
        let process = Snapshot::decode(&bytes).unwrap().processes().next();
        assert_eq!(process.unwrap().owner.pid, 0);
    }
}

#[test]
fn reads_zeroed_file_as_empty_region() {
    let bytes = vec![0; REGION_SIZE];
    let snapshot = Snapshot::decode(&bytes).unwrap();
    assert_eq!(snapshot.share().total_bytes, 0);
    assert_eq!(snapshot.processes().count(), 0);
}

#[test]
fn rejects_other_files() {
    let mut bytes = vec![0; REGION_SIZE];
    assert_eq!(
        Snapshot::decode(&bytes[1..]).unwrap_err(),
        RegionError::Short {
            len: REGION_SIZE - 1
        }
    );
    put(&mut bytes, 0, 1);
    assert_eq!(Snapshot::decode(&bytes).unwrap_err(), RegionError::Magic);
    put(&mut bytes, 0, 0);
    put(&mut bytes, 8, 2);
    assert_eq!(
        Snapshot::decode(&bytes).unwrap_err(),
        RegionError::Version { found: 2 }
    );
}

proptest! {
    #[test]
    fn never_panics_on_random_bytes(seed: u64) {
        let states = std::iter::successors(Some(seed | 1), |state| {
            Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1))
        });
        // One word at a time into a growing vector: Miri records each borrow of a part.
        let mut bytes = Vec::with_capacity(REGION_SIZE);
        for state in states.take(REGION_SIZE / 8) {
            bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
        }
        put(&mut bytes, 0, u64::from_le_bytes(*b"DRAVAUSE"));
        put(&mut bytes, 8, 1);
        let snapshot = Snapshot::decode(&bytes).unwrap();
        let _ = snapshot.share();
        snapshot.processes().for_each(drop);
    }
}
