//! Tampering with the files that a tenant may write, and its effects. The claims are those of `docs/security.md`.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};

use drava_vgpu_abi::region::{SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET};
use drava_vgpu_abi::{Limits, REGION_SIZE};

use crate::robustness::{NOBODY, is_root};
use crate::test_process::{Container, ESTIMATE, GIB, GPUS, MIB};

fn writable(container: &Container, share: &str) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(container.region(share))
        .unwrap()
}

/// A program that clears its account can exceed its share. Nothing in its own process can prevent that; the node agent
/// detects it with NVML. Other shares keep their limits and accounts.
#[test]
fn keeps_other_shares_unaffected_by_forged_account() {
    let container = Container::with_memory(GIB);
    let other = Container::with_memory(GIB);
    let mut unlimited = other.process();
    unlimited.alloc(GIB / 2);
    let mut forger = container.process();
    forger.alloc(GIB);
    forger.denied("alloc 1");
    writable(&container, "share")
        .write_all_at(&[0; 8], 128)
        .unwrap();
    forger.alloc(GIB);
    assert!(container.ledger_bytes() > 2 * GIB);
    // The tenant cannot write the limit itself.
    assert_eq!(forger.memory_info().1, GIB);
    assert_eq!(unlimited.memory_info(), (GIB / 2, GIB));
    unlimited.denied(&format!("alloc {GIB}"));
}

#[test]
fn survives_random_bytes_in_region() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    let mut process = container.process();
    process.init(1);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..64 {
        let region = writable(&container, "share");
        for _ in 0..512 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // Any word except magic and version, which are checked when a process starts.
            let word = 2 + seed % (REGION_SIZE as u64 / 8 - 2);
            let value = match seed % 5 {
                0 => 0,
                1 => u64::MAX,
                2 => 1 << 47,
                _ => seed,
            };
            region.write_all_at(&value.to_ne_bytes(), word * 8).unwrap();
        }
        // Any answer is acceptable; a crash is not.
        process.init(0);
        process.query(&format!("alloc {}", 4 * MIB));
        process.query("meminfo");
        process.init(1);
        assert_eq!(process.memory_info(), (GIB, GIB), "round {round}");
    }
    process.alloc(GIB);
    process.denied("alloc 1");
}

#[test]
fn rejects_region_that_is_not_a_regular_file() {
    type Make = fn(&std::path::Path);
    let kinds: [(&str, Make); 3] = [
        ("symbolic link", |path| {
            let target = path.with_file_name("target");
            fs::write(&target, vec![0; REGION_SIZE]).unwrap();
            symlink(target, path).unwrap();
        }),
        ("named pipe", |path| {
            let path = CString::new(path.as_os_str().as_bytes()).unwrap();
            // SAFETY: a terminated path.
            assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o666) }, 0);
        }),
        ("directory", |path| fs::create_dir(path).unwrap()),
    ];
    for (kind, make) in kinds {
        let container = Container::with_memory(GIB);
        make(&container.region("share"));
        let mut process = container.start("dlsym");
        process.init(0);
        process.denied("alloc 1");
        assert!(process.end().success(), "{kind}");
    }
}

fn lock_all_slots(region: &File) {
    // SAFETY: all zeroes is a `struct flock`.
    let mut range = unsafe { std::mem::zeroed::<libc::flock>() };
    range.l_type = libc::F_WRLCK.try_into().unwrap();
    range.l_start = SLOTS_OFFSET.try_into().unwrap();
    range.l_len = (SLOT_COUNT * SLOT_SIZE).try_into().unwrap();
    // SAFETY: fcntl reads one `struct flock`.
    let locked = unsafe { libc::fcntl(region.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    assert_eq!(locked, 0);
}

#[test]
fn limits_effect_of_locked_slots_to_same_share() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    fs::write(container.region("share"), vec![0; REGION_SIZE]).unwrap();
    let region = writable(&container, "share");
    lock_all_slots(&region);
    let mut process = container.process();
    process.denied("alloc 1");
    process.init(1);
    process.alloc(GIB);
    drop(region);
    container.process().alloc(GIB);
}

/// Without Kubernetes the region is in a directory that every user may write. A region of another user is not trusted.
#[test]
fn rejects_region_of_another_user() {
    if !is_root() {
        return;
    }
    let container = Container::new();
    let job = format!("hostile-{}", std::process::id());
    let path = format!("/dev/shm/drava-0-{job}-{}", GPUS[0]);
    fs::write(&path, vec![0; REGION_SIZE]).unwrap();
    std::os::unix::fs::chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    // Keeps the file open: otherwise root removes it as unused.
    let foreign = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    lock_all_slots(&foreign);
    let mut process = container.start_with("dlsym", |command| {
        command
            .env("DRAVA_MEMORY_LIMIT", "1Gi")
            .env("DRAVA_JOB", &job);
    });
    process.init(0);
    process.alloc(GIB - ESTIMATE);
    process.denied("alloc 1");
    let untouched = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // The library falls back to the next directory.
    let _ = fs::remove_file(path.replace("/dev/shm", "/tmp"));
    assert!(untouched.iter().all(|byte| *byte == 0));
}
