//! Records damaged by a disk or written by another version.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use drava_dra_driver::prepare::apply::Failure;
use drava_dra_driver::prepare::record::Loaded;

use crate::crash::CrashingEffects;
use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref};
use crate::node::lacks_device_files;
use crate::node::{TestNode, page_of, prepare, region_of, spec_of};

fn damage(node: &TestNode, number: u32) {
    let path = node
        .layout()
        .claims()
        .join(format!("{}.json", claim_ref(number).uid));
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn rebuilds_damaged_record_without_disrupting_containers() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (first, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    let page = fs::metadata(page_of(&node, 1)).unwrap().ino();
    damage(&node, 1);

    // Free capacity is unknown until then.
    let error = prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Share(0, "1Gi", "0")]),
    )
    .unwrap_err();
    assert!(
        matches!(*error.failure, Failure::DamagedRecord(_)),
        "{error}"
    );

    // An interrupted rebuild keeps the files of running containers.
    let _ = prepare(
        &node,
        &node.applier(CrashingEffects::after(1, node.effects())),
        1,
        &found,
    );
    assert!(page_of(&node, 1).exists() && region_of(&node, 1).exists());

    let (again, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(again, first);
    assert_eq!(fs::metadata(page_of(&node, 1)).unwrap().ino(), page);
    assert!(
        node.applier(node.effects())
            .store()
            .list()
            .unwrap()
            .quarantined
            .is_empty()
    );
    prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Share(0, "1Gi", "0")]),
    )
    .unwrap();
}

#[test]
fn keeps_files_of_running_containers_if_rebuild_fails() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    damage(&node, 1);
    fs::remove_dir_all(&node.paths.cdi_dir).unwrap();
    fs::write(&node.paths.cdi_dir, "not a directory").unwrap();
    for _ in 0..2 {
        prepare(&node, &node.applier(node.effects()), 1, &found).unwrap_err();
        assert!(page_of(&node, 1).exists() && region_of(&node, 1).exists());
    }
    // The broken CDI directory also prevents a rollback. Here only the decision not to roll back keeps the files.
    fs::remove_file(&node.paths.cdi_dir).unwrap();
    fs::create_dir(&node.paths.cdi_dir).unwrap();
    fs::create_dir(
        spec_of(&node, 1).with_file_name(format!(".gpu.drava.dev-claim-{}.tmp", claim_ref(1).uid)),
    )
    .unwrap();
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap_err();
    assert!(page_of(&node, 1).exists() && region_of(&node, 1).exists());
}

#[test]
fn detects_damaged_record() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    let path = |number| {
        node.layout()
            .claims()
            .join(format!("{}.json", claim_ref(number).uid))
    };
    let valid = fs::read(path(1)).unwrap();
    let damaged = |bytes: &[u8], reason: &str| {
        fs::write(path(1), bytes).unwrap();
        match applier.store().load(&claim_ref(1).uid).unwrap() {
            Loaded::Corrupt(found) => assert!(found.contains(reason), "{found}"),
            other => panic!("{other:?}"),
        }
    };
    damaged(b"", "header");
    damaged(&valid[..valid.len() / 2], "truncated");
    let text = String::from_utf8(valid.clone()).unwrap();
    damaged(
        text.replace("\"version\":1", "\"version\":2").as_bytes(),
        "version 2",
    );
    damaged(
        text.replace("gpu-0-vgpu", "gpu-1-vgpu").as_bytes(),
        "checksum",
    );
    fs::write(path(2), &valid).unwrap();
    assert!(matches!(
        applier.store().load(&claim_ref(2).uid).unwrap(),
        Loaded::Corrupt(_)
    ));
}

#[test]
fn keeps_files_of_lost_record_if_rebuild_fails() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (first, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    fs::remove_file(
        node.layout()
            .claims()
            .join(format!("{}.json", claim_ref(1).uid)),
    )
    .unwrap();
    let error = prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Share(0, "1Gi", "0")]),
    )
    .unwrap_err();
    assert!(
        matches!(*error.failure, Failure::DamagedRecord(_)),
        "{error}"
    );
    // The CDI spec cannot be written, but a rollback would succeed. The second attempt finds a record with stage intent.
    let spec = spec_of(&node, 1);
    let obstacle = spec.with_file_name(format!(".gpu.drava.dev-claim-{}.tmp", claim_ref(1).uid));
    fs::remove_file(&spec).unwrap();
    fs::create_dir(&obstacle).unwrap();
    for _ in 0..2 {
        prepare(&node, &node.applier(node.effects()), 1, &found).unwrap_err();
        assert!(page_of(&node, 1).exists() && region_of(&node, 1).exists());
    }
    fs::remove_dir(obstacle).unwrap();
    let (again, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(again, first);
}
