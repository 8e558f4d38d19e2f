//! Delivery by stubs: the CDI spec, and the delivery mode of prepared claims.

use std::fs;
use std::path::PathBuf;

use drava_cdi::{ContainerEdits, Spec};
use drava_dra_driver::node::artifacts::{Artifact, Stubs};
use drava_dra_driver::node::options::Delivery as Mode;
use drava_dra_driver::prepare::Delivery;
use drava_dra_driver::prepare::apply::Environment;
use drava_dra_driver::prepare::record::{ClaimRecord, Loaded};
use drava_nvml::ComputeMode;
use drava_vgpu_abi::paths;
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{claim, claim_ref, h100x2};
use crate::node::lacks_device_files;
use crate::node::{TestNode, base_of, environment};
use crate::record::rewritten;

/// Prepares with this delivery mode and returns the record and the repairs.
fn prepare(
    node: &TestNode,
    mode: Mode,
    number: u32,
    found: &ResourceClaim,
) -> (ClaimRecord, Vec<String>) {
    let (inventory, driver, installed) = (h100x2(), node.driver(), node.installed());
    let environment = Environment {
        delivery: mode,
        ..environment(&inventory, &driver, &installed)
    };
    let applier = node.applier(node.effects());
    let (record, repairs) = applier
        .prepare(&claim_ref(number), Some(found), &environment)
        .unwrap();
    (record, repairs.0)
}

fn spec_path(node: &TestNode, number: u32) -> PathBuf {
    let uid = claim_ref(number).uid;
    node.paths
        .cdi_dir
        .join(format!("gpu.drava.dev-claim-{uid}.json"))
}

fn spec_of(node: &TestNode, number: u32) -> Spec {
    Spec::from_json(&fs::read(spec_path(node, number)).unwrap()).unwrap()
}

/// Returns the host paths mounted at a path in the container.
fn mounted_at(edits: &[&ContainerEdits], path: &str) -> Vec<String> {
    edits
        .iter()
        .flat_map(|edits| &edits.mounts)
        .filter(|mount| mount.container_path == path)
        .map(|mount| mount.host_path.clone())
        .collect()
}

/// Returns the actions of the hook of a base, which is one process.
fn actions(base: &Spec) -> Vec<&[String]> {
    let [hook] = &base.container_edits().hooks[..] else {
        panic!("one process: {base:?}")
    };
    hook.args[1..]
        .split(|argument| argument == drava_cdi::THEN)
        .collect()
}

#[test]
fn mounts_stubs_over_nvidia_libraries_for_share() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let share = claim(1, &[Share(0, "8Gi", "30")]);
    let (record, _) = prepare(&node, Mode::Shim, 1, &share);
    let stubs = node.installed().stubs;
    assert_eq!(record.delivery, Delivery::Shim(stubs.clone()));
    let spec = fs::read_to_string(spec_path(&node, 1)).unwrap();
    // The hashes change with each build.
    let spec = spec
        .replace(&*node.root.path().to_string_lossy(), "[node]")
        .replace(&stubs.cuda, "[hash]")
        .replace(&stubs.nvml, "[hash]");
    insta::assert_snapshot!(spec);
}

#[test]
fn writes_same_spec_for_whole_gpu_in_both_modes() {
    if lacks_device_files() {
        return;
    }
    let specs = [Mode::Preload, Mode::Shim].map(|mode| {
        let node = TestNode::started();
        prepare(&node, mode, 1, &claim(1, &[Whole(1)]));
        let spec = fs::read_to_string(spec_path(&node, 1)).unwrap();
        spec.replace(&*node.root.path().to_string_lossy(), "[node]")
    });
    assert_eq!(specs[0], specs[1]);
    assert!(!specs[1].contains("/usr/local/lib/drava"), "{}", specs[1]);
}

/// A container with only the whole GPU gets NVIDIA's libraries. For a container with both devices, the hook finds out
/// which of the two files is mounted. The stubs come after the libraries of the base, whose place they take.
#[test]
fn mounts_stubs_for_share_alongside_whole_gpu() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let both = claim(1, &[Share(0, "8Gi", "0"), Whole(1)]);
    prepare(&node, Mode::Shim, 1, &both);
    let spec = spec_of(&node, 1);
    let driver = node.driver();
    let library = &driver.library("libcuda.so.1").unwrap().path;
    let stub = Artifact::CudaStub.path(&node.paths.state_dir, &node.installed().stubs.cuda);
    let both = ["share-compat", "whole-compat"].map(|base| {
        let base = Spec::from_json(&fs::read(base_of(&node, base)).unwrap()).unwrap();
        let mounted = mounted_at(&[base.container_edits()], library);
        assert!(mounted[0].starts_with("/opt/gpu-driver/"), "{mounted:?}");
        base
    });
    let [share, whole] = &both;
    let names = |actions: &[&[String]]| {
        actions
            .iter()
            .map(|action| action[0].clone())
            .collect::<Vec<_>>()
    };
    let common = ["symlinks", "ldcache", "params", "compat"];
    assert_eq!(names(&actions(whole)), common);
    let [.., preload, mark] = &actions(share)[..] else {
        panic!("{share:?}")
    };
    assert_eq!(names(&actions(share))[..4], common);
    let nvml = &driver.library("libnvidia-ml.so.1").unwrap().path;
    let expected = [
        "preload",
        "--library",
        paths::LIBRARY,
        "--stub",
        library,
        "--stub",
        nvml,
    ];
    assert_eq!(*preload, expected);
    assert_eq!(*mark, ["mark", "--files", "/run/drava/*/usage/pending"]);
    for device in spec.devices() {
        let edits = [&device.container_edits];
        let is_share = !mounted_at(&edits, paths::LIBRARY).is_empty();
        let original = mounted_at(&edits, paths::CUDA_STUB.original_path.to_str().unwrap());
        let mounted = mounted_at(&edits, library);
        assert!(device.container_edits.hooks.is_empty());
        if is_share {
            assert_eq!(mounted, [stub.display().to_string()]);
            assert_eq!(original.len(), 1);
        } else {
            assert!(mounted.is_empty() && original.is_empty());
        }
    }
}

#[test]
fn keeps_delivery_mode_of_prepared_claim() {
    if lacks_device_files() {
        return;
    }
    for (first, then) in [(Mode::Preload, Mode::Shim), (Mode::Shim, Mode::Preload)] {
        let node = TestNode::started();
        let found = claim(1, &[Share(0, "8Gi", "30")]);
        let (record, _) = prepare(&node, first, 1, &found);
        let before = fs::read_to_string(spec_path(&node, 1)).unwrap();

        let (again, repairs) = prepare(&node, then, 1, &found);
        assert_eq!((&again, repairs), (&record, Vec::new()));
        assert_eq!(fs::read_to_string(spec_path(&node, 1)).unwrap(), before);
        // Recreated, as after a reboot with the new mode.
        fs::remove_file(spec_path(&node, 1)).unwrap();
        prepare(&node, then, 1, &found);
        assert_eq!(fs::read_to_string(spec_path(&node, 1)).unwrap(), before);

        // New claims get the new mode.
        let (next, _) = prepare(&node, then, 2, &claim(2, &[Share(0, "8Gi", "30")]));
        assert_ne!(next.delivery, record.delivery);
    }
}

/// Truncates the record of a claim.
fn damage(node: &TestNode, number: u32) {
    let uid = claim_ref(number).uid;
    let path = node.layout().claims().join(format!("{uid}.json"));
    let bytes = fs::read(&path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

/// Replaces libvgpu and the hook in the image by another version.
fn upgrade(node: &TestNode) {
    for artifact in ["libvgpu.so", "drava-cdi-hook"] {
        fs::write(node.paths.artifacts_dir.join(artifact), "new version").unwrap();
    }
}

#[test]
fn rebuilds_record_from_cdi_spec() {
    if lacks_device_files() {
        return;
    }
    let shares: &[fn() -> ResourceClaim] = &[
        || claim(1, &[Share(0, "8Gi", "30")]),
        || claim(1, &[Share(0, "8Gi", "30"), Whole(1)]),
    ];
    for (first, then) in [(Mode::Preload, Mode::Shim), (Mode::Shim, Mode::Preload)] {
        for found in shares {
            let (node, found) = (TestNode::started(), found());
            let (mut record, _) = prepare(&node, first, 1, &found);
            let before = fs::read_to_string(spec_path(&node, 1)).unwrap();
            upgrade(&node);
            damage(&node, 1);

            let (rebuilt, repairs) = prepare(&node, then, 1, &found);
            // The hook is that of the driver which writes the specs.
            record.hook.clone_from(&rebuilt.hook);
            // What another libvgpu can do is not in the spec.
            record.can_wait = false;
            assert_eq!(rebuilt, record);
            assert!(
                repairs.len() == 1 && repairs[0].contains("rebuilt the damaged claim record"),
                "{repairs:?}"
            );
            assert_eq!(fs::read_to_string(spec_path(&node, 1)).unwrap(), before);
        }
    }
}

#[test]
fn rebuilds_record_with_stubs_of_older_version() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (mut record, _) = prepare(&node, Mode::Shim, 1, &found);
    let older = Stubs {
        cuda: "1".repeat(32),
        nvml: "2".repeat(32),
    };
    for (artifact, hash) in [
        (Artifact::CudaStub, &older.cuda),
        (Artifact::NvmlStub, &older.nvml),
    ] {
        let path = artifact.path(&node.paths.state_dir, hash);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "an older stub").unwrap();
    }
    record.delivery = Delivery::Shim(older);
    let applier = node.applier(node.effects());
    applier.store().save(&record).unwrap();
    prepare(&node, Mode::Shim, 1, &found);

    damage(&node, 1);
    assert_eq!(prepare(&node, Mode::Shim, 1, &found).0, record);
}

#[test]
fn rebuilds_record_as_new_claim_without_usable_cdi_spec() {
    if lacks_device_files() {
        return;
    }
    let damages: [fn(&TestNode); 3] = [
        |node| fs::remove_file(spec_path(node, 1)).unwrap(),
        |node| fs::write(spec_path(node, 1), "noise").unwrap(),
        // A spec of an earlier allocation.
        |node| {
            let path = spec_path(node, 1);
            let spec = fs::read_to_string(&path).unwrap();
            fs::write(&path, spec.replace("5a5a5a5a", "a5a5a5a5")).unwrap();
        },
    ];
    for lose in damages {
        let node = TestNode::started();
        let found = claim(1, &[Share(0, "8Gi", "30")]);
        prepare(&node, Mode::Preload, 1, &found);
        upgrade(&node);
        damage(&node, 1);
        lose(&node);

        let (rebuilt, repairs) = prepare(&node, Mode::Shim, 1, &found);
        let now = node.installed();
        assert_eq!(rebuilt.delivery, Delivery::Shim(now.stubs));
        assert_eq!((rebuilt.library, rebuilt.hook), (now.library, now.hook));
        assert!(
            repairs
                .iter()
                .any(|repair| repair.contains("using those of a new claim")),
            "{repairs:?}"
        );
    }
}

#[test]
fn rebuilds_record_on_gpu_that_became_unavailable() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (record, _) = prepare(&node, Mode::Preload, 1, &found);
    damage(&node, 1);
    let (mut inventory, driver, installed) = (h100x2(), node.driver(), node.installed());
    inventory.nvml.gpus[0].compute_mode = ComputeMode::Prohibited;
    let environment = environment(&inventory, &driver, &installed);
    let applier = node.applier(node.effects());
    let prepared = applier.prepare(&claim_ref(1), Some(&found), &environment);
    assert_eq!(prepared.unwrap().0, record);
}

#[test]
fn rebuilds_two_damaged_records_independently() {
    if lacks_device_files() {
        return;
    }
    for keeps_spec in [true, false] {
        let node = TestNode::started();
        let shares = [1, 2].map(|number| claim(number, &[Share(0, "30Gi", "0")]));
        for (number, found) in (1..).zip(&shares) {
            prepare(&node, Mode::Preload, number, found);
        }
        for number in [1, 2] {
            damage(&node, number);
            if !keeps_spec {
                fs::remove_file(spec_path(&node, number)).unwrap();
            }
        }
        let (inventory, driver, installed) = (h100x2(), node.driver(), node.installed());
        let environment = environment(&inventory, &driver, &installed);
        let applier = node.applier(node.effects());
        let try_prepare = |number, found: &ResourceClaim| {
            let prepared = applier.prepare(&claim_ref(number), Some(found), &environment);
            prepared
                .map(drop)
                .map_err(|error| error.failure.to_string())
        };
        // A new claim is rejected until the free capacity is known.
        let third = claim(3, &[Share(0, "30Gi", "0")]);
        let error = try_prepare(3, &third).unwrap_err();
        assert!(error.contains("is damaged"), "{error}");
        for (number, found) in (1..).zip(&shares) {
            try_prepare(number, found).unwrap();
        }
        let error = try_prepare(3, &third).unwrap_err();
        assert!(error.contains("is prepared for other claims"), "{error}");
    }
}

#[test]
fn reads_record_without_delivery_as_preload() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    prepare(&node, Mode::Preload, 1, &found);
    let before = fs::read_to_string(spec_path(&node, 1)).unwrap();
    let uid = claim_ref(1).uid;
    let path = node.layout().claims().join(format!("{uid}.json"));
    let text = fs::read_to_string(&path).unwrap();
    let old = rewritten(&text, 1, |body| {
        body.replace(r#","delivery":"preload""#, "")
    });
    assert!(!old.contains("delivery"), "{old}");
    fs::write(&path, old).unwrap();

    let applier = node.applier(node.effects());
    let Loaded::Present(record) = applier.store().load(&uid).unwrap() else {
        panic!("cannot read the older record");
    };
    assert_eq!(record.delivery, Delivery::Preload);
    prepare(&node, Mode::Shim, 1, &found);
    assert_eq!(fs::read_to_string(spec_path(&node, 1)).unwrap(), before);
}

#[test]
fn keeps_stubs_in_use_and_replaces_missing_stubs() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (record, _) = prepare(&node, Mode::Shim, 1, &found);
    let Delivery::Shim(stubs) = &record.delivery else {
        panic!("not delivered by stubs: {record:?}");
    };
    let in_use = || node.applier(node.effects()).artifacts_in_use().unwrap();
    let all = in_use().unwrap();
    for hash in [&stubs.cuda, &stubs.nvml] {
        assert!(all.contains(hash), "{all:?}");
    }
    // Stubs of a version whose files are missing.
    let mut lost = record.clone();
    let gone = "0".repeat(32);
    if let Delivery::Shim(stubs) = &mut lost.delivery {
        stubs.cuda.clone_from(&gone);
        stubs.nvml.clone_from(&gone);
    }
    let applier = node.applier(node.effects());
    applier.store().save(&lost).unwrap();
    prepare(&node, Mode::Preload, 1, &found);
    let spec = fs::read_to_string(spec_path(&node, 1)).unwrap();
    assert!(
        !spec.contains(&gone) && spec.contains(&stubs.cuda) && spec.contains(&stubs.nvml),
        "{spec}"
    );

    // Artifacts in use are unknown while a record is damaged.
    damage(&node, 1);
    assert_eq!(in_use(), None);
}
