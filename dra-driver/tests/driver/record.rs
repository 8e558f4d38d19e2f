//! Records that are damaged, lost or written by another build.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use drava_api::config::ComputePolicy;
use drava_api::error::describe;
use drava_dra_driver::prepare::apply::Failure;
use drava_dra_driver::prepare::record::Loaded;
use serde_json::Value;

use crate::crash::CrashingEffects;
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, claim, claim_ref};
use crate::node::lacks_device_files;
use crate::node::{TestNode, page_of, prepare, record_of, region_of, spec_of};

fn damage(node: &TestNode, number: u32) {
    let path = record_of(node, number);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Returns a record file with another version and a changed body, with valid checksums.
pub(crate) fn rewritten(text: &str, version: u32, change: impl FnOnce(&str) -> String) -> String {
    let (header, body) = text.trim_end().split_once('\n').unwrap();
    let (_, header) = header.split_once(' ').unwrap();
    let crc = |text: &str| format!("{:08x}", crc32fast::hash(text.as_bytes()));
    let body = change(body);
    let mut header: Value = serde_json::from_str(header).unwrap();
    header["version"] = version.into();
    header["crc32"] = crc(&body).into();
    let header = header.to_string();
    format!("{} {header}\n{body}\n", crc(&header))
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

    // Free capacity of its GPU is unknown until then.
    let applier = node.applier(node.effects());
    let error = prepare(&node, &applier, 2, &claim(2, &[Share(0, "1Gi", "0")])).unwrap_err();
    assert!(
        matches!(*error.failure, Failure::DamagedRecord(_)),
        "{error}"
    );
    prepare(&node, &applier, 3, &claim(3, &[Whole(1)])).unwrap();

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
    fs::create_dir(temporary_of(&node, 1)).unwrap();
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap_err();
    assert!(page_of(&node, 1).exists() && region_of(&node, 1).exists());
}

/// Returns the temporary file with which this thread writes the CDI spec of a claim.
fn temporary_of(node: &TestNode, number: u32) -> PathBuf {
    let (uid, thread) = (claim_ref(number).uid, rustix::thread::gettid());
    spec_of(node, number).with_file_name(format!(".gpu.drava.dev-claim-{uid}.{thread}.tmp"))
}

#[test]
fn detects_damaged_record() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    let valid = fs::read_to_string(record_of(&node, 1)).unwrap();
    let header = valid.find('\n').unwrap();
    let gpu = BTreeSet::from([GPU_UUIDS[0].to_owned()]);
    for (damaged, reason, gpus) in [
        (String::new(), "damaged header: truncated", None),
        (
            valid[..header / 2].to_owned(),
            "damaged header: checksum",
            None,
        ),
        (
            valid.replacen("version", "versiom", 1),
            "damaged header: checksum",
            None,
        ),
        (valid[..header].to_owned(), "truncated", Some(&gpu)),
        (valid[..valid.len() - 9].to_owned(), "truncated", Some(&gpu)),
        (
            valid.replace("gpu-0-vgpu", "gpu-1-vgpu"),
            "checksum",
            Some(&gpu),
        ),
    ] {
        fs::write(record_of(&node, 1), damaged).unwrap();
        match applier.store().load(&claim_ref(1).uid).unwrap() {
            Loaded::Damaged(damage) => {
                assert!(damage.reason.contains(reason), "{}", damage.reason);
                assert_eq!(damage.gpus.as_ref(), gpus, "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    fs::write(record_of(&node, 2), &valid).unwrap();
    let loaded = applier.store().load(&claim_ref(2).uid).unwrap();
    assert!(matches!(loaded, Loaded::Damaged(_)), "{loaded:?}");
}

#[test]
fn reads_time_slices_of_older_record_as_balance() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    let present = fs::read_to_string(record_of(&node, 1)).unwrap();
    let balance = r#""computePolicy":"balance""#;
    assert!(present.contains(balance), "{present}");
    let older = rewritten(&present, 1, |body| {
        body.replace(balance, r#""computePolicy":"token""#)
    });
    fs::write(record_of(&node, 1), older).unwrap();
    let loaded = applier.store().load(&claim_ref(1).uid).unwrap();
    let Loaded::Present(record) = loaded else {
        panic!("{loaded:?}");
    };
    let share = record.devices[0].share().unwrap();
    assert_eq!(share.compute_policy, ComputePolicy::Balance);
}

#[test]
fn blocks_all_gpus_if_header_and_spec_are_damaged() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    fs::write(record_of(&node, 1), "noise").unwrap();
    let on = |minor, number| prepare(&node, &applier, number, &claim(number, &[Whole(minor)]));
    let is_blocked = |minor, number| match on(minor, number) {
        Err(error) => matches!(*error.failure, Failure::DamagedRecord(_)),
        Ok(_) => false,
    };
    // The CDI spec names the GPU.
    assert!(is_blocked(0, 2));
    on(1, 3).unwrap();
    applier.unprepare(&claim_ref(3)).unwrap();
    fs::remove_file(spec_of(&node, 1)).unwrap();
    assert!(is_blocked(0, 2) && is_blocked(1, 3));
}

#[test]
fn leaves_record_of_another_build_alone() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    prepare(&node, &applier, 1, &found).unwrap();
    let valid = fs::read_to_string(record_of(&node, 1)).unwrap();
    let newer = rewritten(&valid, 2, |_| "binary content".to_owned());
    let unknown_kind = rewritten(&valid, 1, |body| {
        body.replace(r#""kind":"share""#, r#""kind":"slice""#)
    });
    for (record, reason) in [
        (newer, "format version 2, this build reads version 1"),
        (
            unknown_kind,
            "content of another build: unknown variant `slice`",
        ),
    ] {
        fs::write(record_of(&node, 1), &record).unwrap();
        let (files, mounts) = node.claim_state();
        let errors = [
            prepare(&node, &applier, 1, &found).unwrap_err(),
            applier.unprepare(&claim_ref(1)).unwrap_err(),
            prepare(&node, &applier, 2, &claim(2, &[Share(0, "1Gi", "0")])).unwrap_err(),
        ];
        for error in errors {
            let error = describe(&error);
            assert!(
                error.contains(reason) && error.contains("before a downgrade"),
                "{error}"
            );
        }
        assert_eq!(node.claim_state(), (files, mounts));
        assert_eq!(fs::read_to_string(record_of(&node, 1)).unwrap(), record);
        assert_eq!(applier.artifacts_in_use().unwrap(), None);
        // The other GPU is not concerned.
        prepare(&node, &applier, 3, &claim(3, &[Whole(1)])).unwrap();
        applier.unprepare(&claim_ref(3)).unwrap();
    }
    // The build that wrote the record is back.
    fs::write(record_of(&node, 1), valid).unwrap();
    applier.unprepare(&claim_ref(1)).unwrap();
    assert_eq!(node.claim_state(), (Vec::new(), Default::default()));
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
    // The CDI spec cannot be written, but a rollback would succeed. The second attempt finds the rebuilt record.
    let spec = spec_of(&node, 1);
    let obstacle = temporary_of(&node, 1);
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
