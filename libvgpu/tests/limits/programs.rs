//! Programs as people build and start them: AddressSanitizer, subsets of the visible GPUs, many threads.

use std::process::Stdio;

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::robustness::skipped;
use crate::test_process::{Container, GIB, GPUS, MIB, TestProcess};

/// AddressSanitizer demands to be the first library. A program that starts without this check is limited; the page for
/// troubleshooting names the variable. With delivery `shim` it starts as it is: see `shim.rs`.
#[test]
fn limits_program_with_address_sanitizer() {
    let Some(program) = interposer::sanitized() else {
        skipped("the C compiler has no AddressSanitizer (Debian: apt install libasan8)");
        return;
    };
    let container = Container::with_memory(GIB);
    let refused = container
        .command(program)
        .arg("dlsym")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(
        error.contains("ASan runtime does not come first in initial library list"),
        "{error}"
    );
    let mut command = container.command(program);
    command
        .arg("dlsym")
        .env("ASAN_OPTIONS", "verify_asan_link_order=0");
    let mut process = TestProcess::spawn(command);
    process.init(0);
    process.alloc(GIB);
    process.denied("alloc 1");
    assert_eq!(process.memory_info(), (0, GIB));
}

/// Shares belong to GPUs, whatever number a program gives them.
#[test]
fn limits_subsets_of_visible_devices() {
    let container = Container::new();
    container.add_share("first", GPUS[0], &Limits::memory(GIB));
    container.add_share("second", GPUS[1], &Limits::memory(2 * GIB));
    // The limits of the devices in their order.
    let subsets: [(&str, &[u64]); 5] = [
        ("0", &[GIB]),
        ("1", &[2 * GIB]),
        ("1,0", &[2 * GIB, GIB]),
        (GPUS[1], &[2 * GIB]),
        ("", &[]),
    ];
    for (visible, limits) in subsets {
        let mut process = container.start_with("dlsym", |command| {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        });
        for (device, limit) in limits.iter().enumerate() {
            process.init(u32::try_from(device).unwrap());
            assert_eq!(process.memory_info(), (*limit, *limit), "{visible}");
            process.denied(&format!("alloc {}", limit + 1));
            process.alloc(*limit);
            process.denied("alloc 1");
        }
        let beyond = process.query(&format!("init {}", limits.len()));
        assert_ne!(beyond[0], 0, "{visible:?} shows another device");
        process.kill();
        container.wait_for_ledger_bytes(0);
    }
}

#[test]
fn grants_exactly_the_limit_to_64_threads() {
    let container = Container::with_memory(2 * GIB);
    let mut process = container.process();
    // The driver rounds each allocation to 4 MiB.
    let granted = process.ok(&format!("threads 64 {}", 3 * MIB))[0];
    assert_eq!(granted.cast_unsigned() * 4 * MIB, 2 * GIB);
    assert_eq!(process.memory_info(), (0, 2 * GIB));
    process.denied("alloc 1");
}
