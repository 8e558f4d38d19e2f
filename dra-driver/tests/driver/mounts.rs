//! Real tmpfs mounts, in a private mount namespace.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use drava_dra_driver::claim::ShareId;
use drava_dra_driver::prepare::effects::{Effects as _, Ensured, KernelTmpfs, Tmpfs as _};
use drava_vgpu_abi::REGION_SIZE;

use crate::fixture::{claim_ref, share_id};
use crate::node::TestNode;

/// Set in the process inside the namespace.
const INSIDE: &str = "DRAVA_TEST_IN_MOUNT_NAMESPACE";

#[test]
fn mounts_size_limited_tmpfs_per_share() {
    if std::env::var_os(INSIDE).is_some() {
        return check_mounts();
    }
    let program = std::env::current_exe().unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(program)
        .args([
            "--exact",
            "mounts::mounts_size_limited_tmpfs_per_share",
            "--nocapture",
        ])
        .env(INSIDE, "1")
        .output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare failed") => {
            let error = String::from_utf8_lossy(&output.stderr);
            report_skipped(error.lines().next().unwrap_or_default());
        }
        Ok(output) => panic!(
            "{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => report_skipped(&format!("cannot run unshare: {error}")),
    }
}

/// Writes to stderr directly, because `eprintln!` is captured for passing tests.
fn report_skipped(reason: &str) {
    let test = "mounts::mounts_size_limited_tmpfs_per_share";
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

fn check_mounts() {
    let node = TestNode::started();
    let effects = node.effects_with(Box::new(KernelTmpfs));
    let (uid, share) = (claim_ref(1).uid, ShareId::parse(&share_id(1, 0)).unwrap());
    let usage = node.layout().usage(&uid, &share);
    assert_eq!(
        effects.ensure_usage(&uid, &share).unwrap(),
        Ensured::Created
    );
    assert_eq!(
        effects.ensure_usage(&uid, &share).unwrap(),
        Ensured::Present
    );
    assert!(KernelTmpfs.is_mounted(&usage).unwrap());
    assert_eq!(fs::metadata(&usage).unwrap().mode() & 0o7777, 0o1777);

    // The tmpfs holds the whole region and the injection mark, and no more.
    let region = usage.join("region");
    fs::OpenOptions::new()
        .write(true)
        .open(&region)
        .unwrap()
        .write_all(&vec![1; REGION_SIZE])
        .unwrap();
    fs::write(usage.join("temporary"), "").unwrap();
    fs::rename(usage.join("temporary"), usage.join("injected")).unwrap();
    fs::write(usage.join("more"), "").unwrap();
    fs::write(usage.join("too-many"), "").unwrap_err();
    let mut filler = fs::OpenOptions::new()
        .write(true)
        .open(usage.join("more"))
        .unwrap();
    filler.write_all(&vec![1; 8192]).unwrap_err();
    assert_eq!(
        effects.ensure_usage(&uid, &share).unwrap(),
        Ensured::Present
    );

    // A container has the region open, and an interrupted start has mounted a second tmpfs over it.
    let held = fs::File::open(&region).unwrap();
    KernelTmpfs.mount(&usage, 4096, 2).unwrap();
    effects.remove_usage(&uid).unwrap();
    assert!(!usage.exists());
    assert_eq!(held.metadata().unwrap().len(), REGION_SIZE as u64);
    effects.remove_usage(&uid).unwrap();
}
