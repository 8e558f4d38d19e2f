//! A process is killed after every single step of the accounting; surviving processes get its memory. Kills at random
//! moments: `stress.rs`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::test_process::{CONTEXT_BYTES, Container, GPUS, MIB, ObjectId, TestProcess};

/// Commands of the process that is killed.
const COMMANDS: [&str; 11] = [
    "init 0",
    "alloc 67108864",
    "alloc 33554432",
    "free 1",
    "meminfo",
    "alloc 134217728",
    "ipcget 3",
    "alloc 1073741824",
    "pitch 100000 100",
    "free 3",
    "releaseprimary 0",
];

const LIMIT: u64 = 256 * MIB;

/// Size of memory that processes share.
const SHARED: u64 = 32 * MIB;

/// A container whose share has a surviving process with 100 MiB.
fn container() -> (Container, TestProcess) {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: MIB,
        ..Limits::memory(LIMIT)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut survivor = container.process();
    survivor.alloc(100 * MIB);
    (container, survivor)
}

fn start_crashing(container: &Container, change: impl FnOnce(&mut Command)) -> TestProcess {
    container.start_with("dlsym", |command| {
        command.env("LD_PRELOAD", interposer::library_with_kill_points());
        change(command);
    })
}

#[test]
fn survives_crash_after_any_step() {
    let (container, mut survivor) = container();
    let left = LIMIT - 101 * MIB;
    for steps in 1.. {
        let mut crashing = start_crashing(&container, |command| {
            command.env("DRAVA_KILL_AFTER", steps.to_string());
        });
        let is_alive = COMMANDS
            .iter()
            .all(|command| crashing.try_request(command).is_some());
        crashing.kill();
        container.wait_for_ledger_bytes(100 * MIB + CONTEXT_BYTES);
        assert_eq!(survivor.memory_info().0, left, "after step {steps}");
        let rest = survivor.alloc(left / (2 * MIB) * (2 * MIB));
        survivor.denied(&format!("alloc {}", 2 * MIB));
        survivor.ok(&format!("free {rest}"));
        if is_alive {
            assert!(steps > 50, "only {steps} steps were taken");
            break;
        }
    }
}

/// Kills two processes, one of them with memory that the survivor has open. Returns the survivor's handle and address
/// of that memory.
fn kill_with_shared_memory(
    container: &Container,
    survivor: &mut TestProcess,
) -> (ObjectId, ObjectId) {
    let mut victim = container.process();
    let mut other = container.process();
    other.alloc(16 * MIB);
    other.kill();
    victim.alloc(16 * MIB);
    let handle = victim.ok(&format!("create {SHARED} 0 1"))[0];
    let descriptor = victim.ok(&format!("export {handle}"))[0];
    let imported = survivor.ok(&format!("import {} {descriptor}", victim.pid()))[0];
    let address = survivor.ok(&format!("reserve {SHARED}"))[0];
    survivor.ok(&format!("map {address} {SHARED} {imported} 0"));
    victim.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 1)
        .unwrap();
    (imported, address)
}

/// Commands of a process that finds a dead process and opens memory of the survivor.
fn reclaiming_commands(survivor: &TestProcess, descriptor: ObjectId) -> [String; 7] {
    [
        "init 0".into(),
        format!("import {} {descriptor}", survivor.pid()),
        format!("reserve {SHARED}"),
        format!("map 2 {SHARED} 1 0"),
        "meminfo".into(),
        format!("unmap 2 {SHARED}"),
        "release 1".into(),
    ]
}

/// Creates exportable memory and returns its descriptor.
fn export(survivor: &mut TestProcess) -> ObjectId {
    let handle = survivor.ok(&format!("create {SHARED} 0 1"))[0];
    survivor.ok(&format!("export {handle}"))[0]
}

#[test]
fn survives_crash_while_reclaiming_dead_slot() {
    let (container, mut survivor) = container();
    let descriptor = export(&mut survivor);
    let commands = reclaiming_commands(&survivor, descriptor);
    let left = LIMIT - 101 * MIB - SHARED;
    for steps in 1.. {
        let (imported, address) = kill_with_shared_memory(&container, &mut survivor);
        let mut crashing = start_crashing(&container, |command| {
            command.env("DRAVA_KILL_AFTER", steps.to_string());
        });
        let is_alive = commands
            .iter()
            .all(|command| crashing.try_request(command).is_some());
        crashing.kill();
        container.wait_for_ledger_bytes(100 * MIB + 2 * SHARED + CONTEXT_BYTES);
        assert_eq!(
            survivor.memory_info().0,
            left - SHARED,
            "open, after step {steps}"
        );
        survivor.ok(&format!("unmap {address} {SHARED}"));
        survivor.ok(&format!("release {imported}"));
        assert_eq!(survivor.memory_info().0, left, "closed, after step {steps}");
        if is_alive {
            assert!(steps > 30, "only {steps} steps were taken");
            break;
        }
    }
}

/// The first process of a share initializes the region.
#[test]
fn survives_crash_while_initializing_region() {
    let container = Container::new();
    for steps in 1..16 {
        let tenant = container.tenant(LIMIT);
        let mut crashing = start_crashing(&container, |command| {
            command
                .env("DRAVA_RUN_DIR", tenant.path())
                .env("DRAVA_KILL_AFTER", steps.to_string());
        });
        crashing.try_request("init 0");
        crashing.kill();
        container.wait_for_ledger_bytes(0);
        let mut next = container.process_of(&tenant);
        assert_eq!(next.memory_info(), (LIMIT, LIMIT), "after step {steps}");
    }
}

/// Source lines that write to a region, except those that only count GPU time, or say that a process waits for memory. `libvgpu/abi/tests/bucket.rs` covers
/// crashes there.
fn crash_points_in_source() -> BTreeSet<String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut steps = BTreeSet::new();
    for file in [
        "libvgpu/abi/src/ledger.rs",
        "libvgpu/src/limits/share.rs",
        "libvgpu/src/limits/share/mapping.rs",
        "libvgpu/src/limits/share/usage.rs",
    ] {
        let source = fs::read_to_string(workspace.join(file)).unwrap();
        for (index, line) in source.lines().enumerate() {
            let operations = ["store(", "fetch_add(", "fetch_sub(", "compare_exchange("];
            let is_step = operations.iter().any(|operation| {
                // Only words of the process itself are written with an explicit ordering.
                let of_region = format!("Word::{operation}");
                line.contains(&of_region)
                    || (file.ends_with("ledger.rs") && line.contains(&format!(".{operation}")))
            });
            if is_step {
                steps.insert(format!("{file}:{}", index + 1));
            }
        }
    }
    steps
}

/// The tests above reach every crash point: each line that writes to a region is one of them.
#[test]
fn reaches_every_crash_point() {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let traced = |container: &Container, commands: &[String]| {
        let mut process = start_crashing(container, |command| {
            command.env("DRAVA_KILL_TRACE", trace.path());
        });
        for command in commands {
            process.request(command);
        }
        process.kill();
    };
    // The first process of its share.
    let fresh = Container::with_memory(LIMIT);
    traced(&fresh, &COMMANDS.map(String::from));
    let (container, mut survivor) = container();
    let descriptor = export(&mut survivor);
    kill_with_shared_memory(&container, &mut survivor);
    traced(&container, &reclaiming_commands(&survivor, descriptor));
    let taken: BTreeSet<String> = fs::read_to_string(trace.path())
        .unwrap()
        .lines()
        .map(String::from)
        .collect();
    let missing: Vec<String> = crash_points_in_source()
        .difference(&taken)
        .cloned()
        .collect();
    let source =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("abi/src/ledger.rs"))
            .unwrap();
    // Reached only in a race; `libvgpu/abi/tests/loom.rs` covers it.
    let race = source
        .lines()
        .position(|line| line.contains("if since > left {"))
        .unwrap();
    let race = format!("libvgpu/abi/src/ledger.rs:{}", race + 3);
    assert_eq!(missing, [race]);
}
