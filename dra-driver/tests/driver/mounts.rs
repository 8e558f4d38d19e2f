//! Real tmpfs mounts, in a private mount namespace.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::tmpfs::{KernelTmpfs, Tmpfs as _};
use drava_dra_driver::prepare::effects::{Effects as _, Ensured};
use drava_vgpu_abi::REGION_SIZE;

use crate::fixture::{claim_ref, share_id};
use crate::namespace::in_mount_namespace;
use crate::node::TestNode;

#[test]
fn mounts_size_limited_tmpfs_per_share() {
    in_mount_namespace("mounts::mounts_size_limited_tmpfs_per_share", check_mounts);
}

fn check_mounts() {
    let node = TestNode::started();
    let effects = node.effects_with(Arc::new(KernelTmpfs::default()));
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
    assert!(KernelTmpfs::default().is_mounted(&usage).unwrap());
    assert_eq!(fs::metadata(&usage).unwrap().mode() & 0o7777, 0o1777);

    // No monitoring of the node calls the tmpfs full.
    let space = rustix::fs::statvfs(&usage).unwrap();
    let (free, all) = (space.f_bavail, space.f_blocks);
    assert!(2 * free > all, "{free} of {all} blocks are free");

    // In a pod with a user namespace, the hook is another user.
    let pending = usage.join("pending");
    assert_eq!(fs::metadata(&pending).unwrap().mode() & 0o777, 0o666);
    assert!(!fs::read(&pending).unwrap().is_empty());
    // A tenant can create one more file, and fill the tmpfs.
    let mut filler = fs::File::create(usage.join("more")).unwrap();
    fs::write(usage.join("too-many"), "").unwrap_err();
    while filler.write_all(&[1; 4096]).is_ok() {}
    assert!(filler.metadata().unwrap().len() < 1 << 20);

    // The region has its memory from the start: a write to its mapping would raise SIGBUS otherwise.
    let region = usage.join("region");
    fs::OpenOptions::new()
        .write(true)
        .open(&region)
        .unwrap()
        .write_all(&vec![1; REGION_SIZE])
        .unwrap();
    assert_eq!(
        effects.ensure_usage(&uid, &share).unwrap(),
        Ensured::Present
    );

    // A container has the region open, and an interrupted start has mounted a second tmpfs over it.
    let held = fs::File::open(&region).unwrap();
    KernelTmpfs::default().mount(&usage, 4096, 2).unwrap();
    effects.remove_usage(&uid).unwrap();
    assert!(!usage.exists());
    assert_eq!(held.metadata().unwrap().len(), REGION_SIZE as u64);
    effects.remove_usage(&uid).unwrap();
}
