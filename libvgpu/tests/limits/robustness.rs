//! What programs do that interposers stumble over.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use drava_vgpu_abi::{Limits, REGION_SIZE};

use crate::interposer;
use crate::loaders::build_library;
use crate::subject::{CARDS, Container, GIB, MIB, Subject};

/// A process with a context on the first card whose functions come by `route`.
pub(crate) fn by_route(container: &Container, route: &str) -> Subject {
    let mut process = container.start(route);
    process.init(0);
    process
}

/// A process that may not make some of the library's system calls, and what it says on standard error.
fn in_a_sandbox(container: &Container, forbidden: &str) -> (Subject, PathBuf) {
    let errors = container.run_dir().join(format!("stderr-{forbidden}"));
    let process = container.start_with("dlsym", |command| {
        command
            .env("SUBJECT_FORBIDS", forbidden)
            .stderr(fs::File::create(&errors).unwrap());
    });
    (process, errors)
}

#[test]
fn a_sandbox_that_forbids_what_is_not_essential_changes_nothing() {
    let container = Container::with_memory(GIB);
    // As the driver leaves it.
    fs::write(container.region("share"), vec![0; REGION_SIZE]).unwrap();
    let (mut process, errors) = in_a_sandbox(&container, "inessential");
    process.init(0);
    process.alloc(GIB);
    let (mut other, _) = in_a_sandbox(&container, "inessential");
    other.init(0);
    other.refused("alloc 1");
    process.kill();
    container.wait_until_taken(crate::subject::CONTEXT_BYTES);
    other.alloc(GIB);
    assert_eq!(fs::read_to_string(errors).unwrap(), "");
}

/// What the account needs, a sandbox may forbid: then nothing is counted, so nothing is granted, and the program is
/// told. It is never ended, and never without a limit.
#[test]
fn a_sandbox_that_forbids_what_is_essential_refuses_memory() {
    for (forbidden, says) in [
        ("status", "limits page of share"),
        ("open", "cannot be opened"),
        ("map", "cannot be mapped"),
        ("lock", "has no free slot"),
    ] {
        let container = Container::with_memory(GIB);
        let (mut process, errors) = in_a_sandbox(&container, forbidden);
        let has_context = process.ask("init 0")[0] == 0;
        if has_context {
            process.refused("alloc 1");
            process.refused(&format!("create {} 0 1", 2 * MIB));
        }
        assert!(process.end().success(), "{forbidden}");
        let errors = fs::read_to_string(errors).unwrap();
        assert!(errors.contains(says), "{forbidden}: {errors}");
        assert!(
            errors.contains("GPU memory is refused"),
            "{forbidden}: {errors}"
        );
    }
}

/// Shares that cannot be looked for are not "no shares".
#[test]
fn shares_that_cannot_be_looked_for_refuse_memory() {
    for obstacle in ["directory", "rundir", "no descriptors"] {
        let container = Container::with_memory(GIB);
        let errors = container.run_dir().join("stderr");
        let mut process = container.start_with("dlsym", |command| {
            match obstacle {
                "no descriptors" => command.env("SUBJECT_STARVES", "yes"),
                forbidden => command.env("SUBJECT_FORBIDS", forbidden),
            };
            command.stderr(fs::File::create(&errors).unwrap());
        });
        process.refused("init 0");
        assert!(process.end().success(), "{obstacle}");
        let errors = fs::read_to_string(errors).unwrap();
        assert!(errors.contains("GPU memory is refused"), "{errors}");
    }
}

#[test]
fn a_child_of_vfork_may_be_the_first_to_ask_for_a_function() {
    let container = Container::with_memory(GIB);
    let mut process = container.start("dlsym");
    process.ok("vforklookup");
    process.init(0);
    process.alloc(GIB);
    process.refused("alloc 1");
    let mut other = container.process();
    other.refused("alloc 1");
    process.kill();
    container.wait_until_taken(crate::subject::CONTEXT_BYTES);
    other.alloc(GIB);
}

#[test]
fn a_region_that_grows_in_use_changes_nothing() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB / 2);
    let region = fs::File::options()
        .write(true)
        .open(container.region("share"))
        .unwrap();
    region.set_len(4 * REGION_SIZE as u64).unwrap();
    process.refused(&format!("alloc {GIB}"));
    let mut other = container.process();
    assert_eq!(other.memory_info(), (GIB / 2, GIB));
    other.alloc(GIB / 2);
    process.refused("alloc 1");
    other.kill();
    process.alloc(GIB / 2);
}

/// Preloaded twice, by two names, as where a user's `LD_PRELOAD` comes to the container's `/etc/ld.so.preload`: the
/// first one counts, once.
#[test]
fn two_of_the_library_count_once() {
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
            let place = process.alloc(GIB / 2);
            assert_eq!(process.memory_info(), (GIB / 2, GIB), "{preload} {route}");
            process.refused(&format!("alloc {GIB}"));
            process.ok(&format!("free {place}"));
            assert_eq!(process.memory_info(), (GIB, GIB), "{preload} {route}");
            assert!(process.end().success());
        }
    }
}

/// What a program takes by addresses that it found by itself is not counted, as `docs/security.md` says. What it
/// takes in any other way still is, and so is what others of its share take.
#[test]
fn calls_by_address_are_not_counted() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let address = process.ok("addressof cuMemAlloc_v2")[0];
    assert_ne!(address, 0);
    process.ok(&format!("allocat {address} {}", 2 * GIB));
    assert!(container.taken() > 2 * GIB);
    assert_eq!(process.memory_info(), (GIB, GIB));
    process.alloc(GIB);
    process.refused("alloc 1");
    container.process().refused("alloc 1");
}

#[test]
fn a_child_of_vfork_leaves_its_parent_as_it_was() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB / 2);
    process.ok("vfork");
    assert_eq!(process.memory_info(), (GIB / 2, GIB));
    let mut other = container.process();
    other.refused(&format!("alloc {GIB}"));
    other.alloc(GIB / 2);
}

#[test]
fn a_program_that_closes_descriptors_it_does_not_know_harms_nobody() {
    let container = Container::with_memory(GIB);
    let mut living = container.process();
    living.alloc(GIB / 2);
    let mut process = container.process();
    process.alloc(GIB / 4);
    assert_eq!(process.ok("closeregion"), [1]);
    // Locks on whatever has the number now do not say that the other is dead,
    process.refused(&format!("alloc {GIB}"));
    assert_eq!(process.memory_info().0, GIB / 4);
    // and the one without the descriptor is still known to live.
    living.refused(&format!("alloc {GIB}"));
    assert_eq!(living.memory_info().0, GIB / 4);
    // It still notices deaths.
    living.kill();
    process.alloc(3 * GIB / 4);
}

#[test]
fn a_region_of_the_wrong_size_is_given_the_right_one() {
    for size in [0, 1, 4096, REGION_SIZE - 1, REGION_SIZE + 4096] {
        let container = Container::with_memory(GIB);
        fs::write(container.region("share"), vec![0; size]).unwrap();
        let mut process = container.process();
        process.alloc(GIB);
        process.refused("alloc 1");
        let length = fs::metadata(container.region("share")).unwrap().len();
        assert_eq!(length, REGION_SIZE.max(size) as u64);
    }
}

#[test]
fn a_region_truncated_in_use_costs_only_its_own_share() {
    let container = Container::with_memory(GIB);
    container.add_share("other", CARDS[1], &Limits::memory(GIB));
    let mut victim = container.process();
    victim.alloc(MIB);
    let neighbours = Container::with_memory(GIB);
    let mut neighbour = neighbours.process();
    let region = fs::File::options()
        .write(true)
        .open(container.region("share"))
        .unwrap();
    region.set_len(0).unwrap();
    // There is no memory behind the mapping any more: the kernel ends the process at its next request.
    assert_eq!(victim.try_say("alloc 4096"), None);
    neighbour.alloc(GIB);
    neighbour.refused("alloc 1");
    // Whoever comes next finds an empty region.
    drop(victim);
    container.wait_until_taken(0);
    container.process().alloc(GIB);
}

/// Whether this process may change to other users and mount namespaces; if not, the test that asks is skipped.
pub(crate) fn is_root() -> bool {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        skipped("not root: users and mounts cannot be changed");
    }
    is_root
}

/// Says that the present test ends without a check: `cargo xtask test` counts it as skipped and says why. What is
/// written with `eprintln!` is hidden for tests that pass.
pub(crate) fn skipped(reason: &str) {
    use std::io::Write;
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

pub(crate) const NOBODY: u32 = 65534;

/// What other users need in order to reach what lies in root's directories.
fn open_to_all(path: &Path) {
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
fn users_share_a_region() {
    if !is_root() {
        return;
    }
    for (first, second) in [(0, NOBODY), (NOBODY, 0), (NOBODY, NOBODY - 1)] {
        let container = Container::with_memory(GIB);
        open_to_all(container.machine.root());
        open_to_all(&container.run_dir().join("share/usage"));
        open_to_all(&container.run_dir().join("share/limits"));
        // A mount of its own that all may write to, as the driver makes it.
        let usage = container.run_dir().join("share/usage");
        fs::set_permissions(&usage, fs::Permissions::from_mode(0o777)).unwrap();
        let files = tempfile::tempdir().unwrap();
        open_to_all(files.path());
        let copy = |file: &Path| {
            let target = files.path().join(file.file_name().unwrap());
            fs::copy(file, &target).unwrap();
            target
        };
        let (library, program) = (copy(interposer::library()), copy(interposer::subject()));
        let start = |user: u32| {
            let mut command = container.command(&program);
            command
                .arg("dlsym")
                .env("LD_PRELOAD", &library)
                .uid(user)
                .gid(user);
            let mut process = Subject::spawn(command);
            process.init(0);
            process
        };
        let mut one = start(first);
        one.alloc(GIB);
        let mut other = start(second);
        other.refused("alloc 1");
        one.kill();
        container.wait_until_taken(crate::subject::CONTEXT_BYTES);
        other.alloc(GIB);
    }
}

/// As in a container with `readOnlyRootFilesystem`, an empty environment and the driver's `/etc/ld.so.preload`,
/// in which another library was named already.
#[test]
fn a_container_with_a_read_only_root_and_no_environment_is_limited() {
    if !is_root() {
        return;
    }
    let container = Container::with_memory(GIB);
    let files = tempfile::tempdir().unwrap();
    let other = build_library(files.path(), "other", "int other_library;", &[]);
    let preload = files.path().join("ld.so.preload");
    let content = format!("{}\n{}\n", interposer::library().display(), other.display());
    fs::write(&preload, content).unwrap();
    // The standard place, since there is no environment that could name another.
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
        subject = interposer::subject().display(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    let mut process = Subject::spawn(command);
    process.init(0);
    process.alloc(GIB);
    process.refused("alloc 1");
    assert_eq!(process.memory_info(), (0, GIB));
    assert!(process.end().success());
}
