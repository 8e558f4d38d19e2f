//! Prepare that fails: nothing remains unless containers may use it.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use drava_dra_driver::node::tmpfs::Tmpfs;

use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref, h100x2};
use crate::node::lacks_device_files;
use crate::node::{TestNode, environment, prepare};

#[test]
fn removes_everything_after_failed_first_prepare() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    fs::remove_dir(&node.paths.cdi_dir).unwrap();
    fs::write(&node.paths.cdi_dir, "not a directory").unwrap();
    let error = prepare(
        &node,
        &node.applier(node.effects()),
        1,
        &claim(1, &[Share(0, "8Gi", "30")]),
    )
    .unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(
        error.contains("claim default/claim-1") && error.contains("CDI directory"),
        "{error}"
    );
    assert!(
        error.contains(&*node.paths.cdi_dir.to_string_lossy()),
        "{error}"
    );
    // Removing the spec failed too, but the record remains, so unprepare finds the rest.
    fs::remove_file(&node.paths.cdi_dir).unwrap();
    node.applier(node.effects())
        .unprepare(&claim_ref(1))
        .unwrap();
    assert_eq!(node.claim_files_without_cdi(), Vec::<String>::new());
}

/// A tmpfs whose mounts fail.
#[derive(Debug)]
struct FailingTmpfs;

impl Tmpfs for FailingTmpfs {
    fn mount(&self, _dir: &Path, _size_bytes: u64, _inodes: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(1))
    }

    fn unmount(&self, _dir: &Path) -> io::Result<()> {
        panic!("unmount without a mount");
    }

    fn is_mounted(&self, _dir: &Path) -> io::Result<bool> {
        Ok(false)
    }
}

#[test]
fn rolls_back_failed_prepare_unless_containers_may_run() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let failing = node.effects_with(Arc::new(FailingTmpfs));
    let failing = node.applier(failing);
    let error = prepare(&node, &failing, 1, &found).unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(error.contains("CAP_SYS_ADMIN"), "{error}");
    assert_eq!(node.claim_state().0, Vec::<String>::new());

    // A claim with a damaged record may have running containers.
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    let (complete, _) = node.claim_state();
    let record = node.layout().claims();
    let record = record.join(format!("{}.json", claim_ref(1).uid));
    fs::write(&record, "damaged").unwrap();
    prepare(&node, &failing, 1, &found).unwrap_err();
    let (remaining, _) = node.claim_state();
    for file in &complete {
        assert!(
            remaining.contains(file),
            "{file} was removed: {remaining:?}"
        );
    }
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(node.claim_state().0, complete);
}

#[test]
fn rejects_missing_device_file_before_any_change() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let mut inventory = h100x2();
    inventory.nvml.gpus[1].minor = 7;
    let (driver, installed) = (node.driver(), node.installed());
    let found = claim(1, &[Share(7, "8Gi", "30")]);
    let applier = node.applier(node.effects());
    let error = applier
        .prepare(
            &claim_ref(1),
            Some(&found),
            &environment(&inventory, &driver, &installed),
        )
        .unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(
        error.contains("device gpu-7-vgpu") && error.contains("nvidia7"),
        "{error}"
    );
    assert_eq!(node.claim_state(), (Vec::new(), Default::default()));
}
