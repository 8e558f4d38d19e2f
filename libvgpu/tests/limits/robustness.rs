//! Environments and program behavior that break interposers: sandboxes, vfork, closed descriptors, truncated files,
//! other users.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use drava_vgpu_abi::{Limits, REGION_SIZE};

use crate::interposer;
use crate::loaders::build_library;
use crate::test_process::{Container, GIB, GPUS, MIB, TestProcess};

/// A process with a context on the first GPU that resolves functions by `route`.
pub(crate) fn by_route(container: &Container, route: &str) -> TestProcess {
    let mut process = container.start(route);
    process.init(0);
    process
}

/// A process with some system calls forbidden, and the file of its standard error.
fn sandboxed_process(container: &Container, forbidden: &str) -> (TestProcess, PathBuf) {
    let errors = container.run_dir().join(format!("stderr-{forbidden}"));
    let process = container.start_with("dlsym", |command| {
        command
            .env("TEST_PROCESS_FORBIDS", forbidden)
            .stderr(fs::File::create(&errors).unwrap());
    });
    (process, errors)
}

#[test]
fn limits_with_inessential_syscalls_forbidden() {
    let container = Container::with_memory(GIB);
    // As the node driver creates it.
    fs::write(container.region("share"), vec![0; REGION_SIZE]).unwrap();
    let (mut process, errors) = sandboxed_process(&container, "inessential");
    process.init(0);
    process.alloc(GIB);
    let (mut other, _) = sandboxed_process(&container, "inessential");
    other.init(0);
    other.denied("alloc 1");
    process.kill();
    container.wait_for_ledger_bytes(crate::test_process::CONTEXT_BYTES);
    other.alloc(GIB);
    assert_eq!(fs::read_to_string(errors).unwrap(), "");
}

/// A call that ends few references needs no memory of its own.
#[test]
fn frees_memory_in_process_that_can_map_no_more() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let handle = process.ok(&format!("create {} 0 1", 4 * MIB))[0];
    let address = process.ok(&format!("reserve {}", 8 * MIB))[0];
    for offset in [0, 4 * MIB] {
        process.ok(&format!("map {address} {} {handle} {offset}", 4 * MIB));
    }
    let pointer = process.alloc(64 * MIB);
    process.ok("forbidmemory");
    process.ok(&format!("unmap {address} {}", 8 * MIB));
    process.ok(&format!("release {handle}"));
    process.ok(&format!("free {pointer}"));
    assert_eq!(process.memory_info(), (GIB, GIB));
}

/// With system calls forbidden that the account needs, the library cannot count. It denies all memory and reports the
/// cause; it neither ends the program nor lifts the limit.
#[test]
fn denies_memory_with_essential_syscalls_forbidden() {
    for (forbidden, message) in [
        ("status", "limits page of share"),
        ("open", "cannot open the file"),
        ("map", "cannot map the file"),
        ("lock", "no free slot"),
    ] {
        let container = Container::with_memory(GIB);
        let (mut process, errors) = sandboxed_process(&container, forbidden);
        let has_context = process.query("init 0")[0] == 0;
        if has_context {
            process.denied("alloc 1");
            process.denied(&format!("create {} 0 1", 2 * MIB));
        }
        assert!(process.end().success(), "{forbidden}");
        let errors = fs::read_to_string(errors).unwrap();
        assert!(errors.contains(message), "{forbidden}: {errors}");
        assert!(
            errors.contains("denying GPU memory"),
            "{forbidden}: {errors}"
        );
    }
}

/// A failure to list shares is not the same as having no share.
#[test]
fn denies_memory_when_shares_cannot_be_listed() {
    for obstacle in ["directory", "rundir", "no descriptors"] {
        let container = Container::with_memory(GIB);
        let errors = container.run_dir().join("stderr");
        let mut process = container.start_with("dlsym", |command| {
            match obstacle {
                "no descriptors" => command.env("TEST_PROCESS_WITHOUT_DESCRIPTORS", "yes"),
                forbidden => command.env("TEST_PROCESS_FORBIDS", forbidden),
            };
            command.stderr(fs::File::create(&errors).unwrap());
        });
        process.denied("init 0");
        assert!(process.end().success(), "{obstacle}");
        let errors = fs::read_to_string(errors).unwrap();
        assert!(errors.contains("denying GPU memory"), "{errors}");
    }
}

#[test]
fn resolves_first_function_in_vfork_child() {
    let container = Container::with_memory(GIB);
    let mut process = container.start("dlsym");
    process.ok("vforklookup");
    process.init(0);
    process.alloc(GIB);
    process.denied("alloc 1");
    let mut other = container.process();
    other.denied("alloc 1");
    process.kill();
    container.wait_for_ledger_bytes(crate::test_process::CONTEXT_BYTES);
    other.alloc(GIB);
}

#[test]
fn tolerates_region_that_grows_in_use() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB / 2);
    let region = fs::File::options()
        .write(true)
        .open(container.region("share"))
        .unwrap();
    region.set_len(4 * REGION_SIZE as u64).unwrap();
    process.denied(&format!("alloc {GIB}"));
    let mut other = container.process();
    assert_eq!(other.memory_info(), (GIB / 2, GIB));
    other.alloc(GIB / 2);
    process.denied("alloc 1");
    other.kill();
    process.alloc(GIB / 2);
}

/// Preloaded by two names, for example by a user's `LD_PRELOAD` and the container's `/etc/ld.so.preload`: only the
/// first copy counts.
#[test]
fn counts_once_with_two_copies_of_library() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("libvgpu.so");
    fs::copy(interposer::library(), &copy).unwrap();
    let own = interposer::library().display();
    for preload in [format!("{own} {}", copy.display()), format!("{own}:{own}")] {
        let container = Container::with_memory(GIB);
        for route in ["dlsym", "procaddress", "next"] {
            let mut process = container.start_with(route, |command| {
                command.env("LD_PRELOAD", &preload);
            });
            process.init(0);
            assert_eq!(process.memory_info(), (GIB, GIB));
            let allocation = process.alloc(GIB / 2);
            assert_eq!(process.memory_info(), (GIB / 2, GIB), "{preload} {route}");
            process.denied(&format!("alloc {GIB}"));
            process.ok(&format!("free {allocation}"));
            assert_eq!(process.memory_info(), (GIB, GIB), "{preload} {route}");
            assert!(process.end().success());
        }
    }
}

/// Allocations through addresses that the program found by itself are not counted (see `docs/security.md`). Its other
/// allocations are, and so are those of other processes of the share.
#[test]
fn does_not_count_calls_by_address() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let address = process.ok("addressof cuMemAlloc_v2")[0];
    assert_ne!(address, 0);
    process.ok(&format!("allocat {address} {}", 2 * GIB));
    assert!(container.ledger_bytes() > 2 * GIB);
    assert_eq!(process.memory_info(), (GIB, GIB));
    process.alloc(GIB);
    process.denied("alloc 1");
    container.process().denied("alloc 1");
}

#[test]
fn preserves_parent_account_across_vfork() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB / 2);
    process.ok("vfork");
    assert_eq!(process.memory_info(), (GIB / 2, GIB));
    let mut other = container.process();
    other.denied(&format!("alloc {GIB}"));
    other.alloc(GIB / 2);
}

#[test]
fn survives_program_closing_foreign_descriptors() {
    let container = Container::with_memory(GIB);
    let mut living = container.process();
    living.alloc(GIB / 2);
    let mut process = container.process();
    process.alloc(GIB / 4);
    assert_eq!(process.ok("closeregion"), [1]);
    // A lock on the new file with that descriptor number does not mark the other process as dead,
    process.denied(&format!("alloc {GIB}"));
    assert_eq!(process.memory_info().0, GIB / 4);
    // and the process without the descriptor is still known to be alive.
    living.denied(&format!("alloc {GIB}"));
    assert_eq!(living.memory_info().0, GIB / 4);
    // It still detects dead processes.
    living.kill();
    process.alloc(3 * GIB / 4);
}

#[test]
fn resizes_region_of_wrong_size() {
    for size in [0, 1, 4096, REGION_SIZE - 1, REGION_SIZE + 4096] {
        let container = Container::with_memory(GIB);
        fs::write(container.region("share"), vec![0; size]).unwrap();
        let mut process = container.process();
        process.alloc(GIB);
        process.denied("alloc 1");
        let length = fs::metadata(container.region("share")).unwrap().len();
        assert_eq!(length, REGION_SIZE.max(size) as u64);
    }
}

#[test]
fn limits_damage_of_truncated_region_to_its_share() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    let mut victim = container.process();
    victim.alloc(MIB);
    let other_container = Container::with_memory(GIB);
    let mut other = other_container.process();
    let region = fs::File::options()
        .write(true)
        .open(container.region("share"))
        .unwrap();
    region.set_len(0).unwrap();
    // The mapping has no memory any more: the kernel kills the process at its next request.
    assert_eq!(victim.try_request("alloc 4096"), None);
    other.alloc(GIB);
    other.denied("alloc 1");
    // The next process finds an empty region.
    drop(victim);
    container.wait_for_ledger_bytes(0);
    container.process().alloc(GIB);
}

/// Returns whether this process may change users and mount namespaces; the calling test is skipped otherwise.
pub(crate) fn is_root() -> bool {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        skipped("not root: users and mounts cannot be changed");
    }
    is_root
}

/// Reports that the current test is skipped, for `cargo xtask test`. Written directly, because the test harness hides
/// `eprintln!` output of passing tests.
pub(crate) fn skipped(reason: &str) {
    use std::io::Write;
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

pub(crate) const NOBODY: u32 = 65534;

/// Lets other users reach files in root's directories.
fn make_accessible(path: &Path) {
    for directory in path.ancestors() {
        let Ok(status) = fs::metadata(directory) else {
            continue;
        };
        let mode = status.permissions().mode();
        if mode & 0o5 != 0o5 && directory.starts_with(std::env::temp_dir()) {
            fs::set_permissions(directory, fs::Permissions::from_mode(mode | 0o55)).unwrap();
        }
    }
}

#[test]
fn shares_region_between_users() {
    if !is_root() {
        return;
    }
    for (first, second) in [(0, NOBODY), (NOBODY, 0), (NOBODY, NOBODY - 1)] {
        let container = Container::with_memory(GIB);
        make_accessible(container.machine.root());
        make_accessible(&container.run_dir().join("share/usage"));
        make_accessible(&container.run_dir().join("share/limits"));
        // A separate mount that all users may write, as the node driver creates it.
        let usage = container.run_dir().join("share/usage");
        fs::set_permissions(&usage, fs::Permissions::from_mode(0o777)).unwrap();
        let files = tempfile::tempdir().unwrap();
        make_accessible(files.path());
        let copy = |file: &Path| {
            let target = files.path().join(file.file_name().unwrap());
            fs::copy(file, &target).unwrap();
            target
        };
        let (library, program) = (
            copy(interposer::library()),
            copy(interposer::test_process()),
        );
        let start = |user: u32| {
            let mut command = container.command(&program);
            command
                .arg("dlsym")
                .env("LD_PRELOAD", &library)
                .uid(user)
                .gid(user);
            let mut process = TestProcess::spawn(command);
            process.init(0);
            process
        };
        let mut one = start(first);
        one.alloc(GIB);
        let mut other = start(second);
        other.denied("alloc 1");
        one.kill();
        container.wait_for_ledger_bytes(crate::test_process::CONTEXT_BYTES);
        other.alloc(GIB);
    }
}

/// As in a container with `readOnlyRootFilesystem`, an empty environment and an `/etc/ld.so.preload` that already names
/// another library.
#[test]
fn limits_read_only_container_without_environment() {
    if !is_root() {
        return;
    }
    let container = Container::with_memory(GIB);
    let files = tempfile::tempdir().unwrap();
    let other = build_library(files.path(), "other", "int other_library;", &[]);
    let preload = files.path().join("ld.so.preload");
    let content = format!("{}\n{}\n", interposer::library().display(), other.display());
    fs::write(&preload, content).unwrap();
    // The standard directory, because no environment variable can name another.
    let script = format!(
        "set -e
        mount --make-rprivate /
        mkdir -p /run/drava
        mount --bind {run} /run/drava
        mount -t tmpfs none /mnt
        cp -a /etc/. /mnt/
        cp {preload} /mnt/ld.so.preload
        mount --bind /mnt /etc
        mount -o remount,bind,ro /
        exec env -i LD_LIBRARY_PATH={libraries} {subject} dlsym",
        run = container.run_dir().display(),
        preload = preload.display(),
        libraries = container.machine.lib_dir().display(),
        subject = interposer::test_process().display(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    let mut process = TestProcess::spawn(command);
    process.init(0);
    process.alloc(GIB);
    process.denied("alloc 1");
    assert_eq!(process.memory_info(), (0, GIB));
    assert!(process.end().success());
}
