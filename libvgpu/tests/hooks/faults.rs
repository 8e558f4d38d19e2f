//! Sticky errors: after a kernel has failed, every call in its context fails. The program gets the driver's errors, and
//! the account is right once the context has ended.

use crate::test_process::{CONTEXT_BYTES, GIB, MIB, TestProcess};
use crate::{limited, start};

/// `CUDA_ERROR_DEVICE_UNAVAILABLE`, `_ECC_UNCORRECTABLE`, `_ILLEGAL_ADDRESS`, `_LAUNCH_FAILED`.
const STICKY: [i64; 4] = [46, 214, 700, 719];

/// Uses of the failed context, of each kind of hook.
const USES: [&str; 12] = [
    "alloc 4096",
    "async 4096",
    "create 4194304",
    "array 64 64 cuArrayCreate_v2",
    "green",
    "meminfo",
    "row cuLaunchKernel",
    "row cuMemcpyDtoD_v2",
    "row cuMemsetD8_v2",
    "row cuGraphLaunch",
    "graph cuGraphInstantiateWithFlags cuGraphLaunch 1048576",
    "sync",
];

/// Results of a context with allocations in which a kernel fails, up to its end, and of the context before.
fn results(process: &mut TestProcess, error: i64) -> Vec<i64> {
    process.ok("context3");
    let allocated = process.ok(&format!("alloc {}", 100 * MIB))[0];
    process.ok(&format!("async {}", 100 * MIB));
    process.ok(&format!("fault {error}"));
    let mut results = Vec::new();
    for _ in 0..50 {
        results.extend(USES.map(|command| process.query(command)[0]));
    }
    results.push(process.query(&format!("free {allocated}"))[0]);
    results.push(process.query("destroycontext")[0]);
    results.push(process.query("row cuLaunchKernel")[0]);
    results
}

#[test]
fn returns_sticky_errors_as_driver_does() {
    let container = limited();
    let mut limited = start(&container);
    limited.ok("prepare");
    let free = limited.memory_info().0;
    let mut unlimited = crate::start_unlimited(&container);
    unlimited.ok("prepare");
    for error in STICKY {
        let expected = results(&mut unlimited, error);
        assert!(expected.iter().filter(|result| **result == error).count() > 500);
        let differing: Vec<_> = results(&mut limited, error)
            .into_iter()
            .zip(expected)
            .enumerate()
            .filter(|(_, (got, expected))| got != expected)
            .collect();
        assert!(differing.is_empty(), "{error}: {differing:?}");
        assert_eq!(limited.memory_info().0, free, "{error}");
    }
    drop(unlimited);
    // The code of the prepared module is memory of libcuda, which libvgpu does not see.
    const MODULE_BYTES: u64 = 2 * MIB;
    container.wait_for_ledger_bytes(CONTEXT_BYTES + MODULE_BYTES + GIB - free);
}
