//! Kernels that wait on the GPU for flags.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use super::{PERCENT, tenant_of_share};

/// While a kernel waits for a flag, nothing is known about its kind, and the GPU is idle.
#[test]
fn charges_launches_behind_flag_without_their_wait() {
    const KERNELS: u32 = 20;
    let test_bed = crate::test_bed();
    let (share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flags");
    let flags = File::create_new(&path).unwrap();
    flags.set_len(4096).unwrap();
    tenant
        .ok(&format!("exchange {} 1 {KERNELS} 1000000", path.display()))
        .unwrap();
    let throttled = Duration::from_micros(share.usage().unwrap().1[0].throttled_us);
    flags.write_all_at(&KERNELS.to_ne_bytes(), 4).unwrap();
    tenant.ok("synchronize").unwrap();
    // Each is charged the first guess of 2 ms. A second, the longest believed time, would throttle one for five.
    assert!(throttled < Duration::from_secs(5), "{throttled:?}");
}
