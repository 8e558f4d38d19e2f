//! Prepare and unprepare on a node.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use drava_cdi::Spec;
use drava_dra_driver::gpus::inventory::numbers;
use drava_dra_driver::node::artifacts::{self, Artifact};
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::options::Delivery;
use drava_dra_driver::prepare::apply::{Environment, Failure, partitions};
use drava_dra_driver::prepare::base::CommonEdits;
use drava_dra_driver::prepare::record::ClaimRecord;
use drava_dra_driver::prepare::spec;
use drava_vgpu_abi::{REGION_SIZE, page};

use crate::crash::CrashingEffects;
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{claim, claim_ref, h100x2, share_id};
use crate::node::lacks_device_files;
use crate::node::{
    TestNode, base_of, environment, page_of, prepare, record_of, region_of, spec_of,
};
use crate::record::rewritten;

#[test]
fn writes_page_region_and_spec_of_share() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let (_, repairs) = prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    assert_eq!(repairs, Vec::<String>::new());

    let page = page::decode(&fs::read(page_of(&node, 1)).unwrap()).unwrap();
    let limits = page.spec.limits;
    assert_eq!(limits.memory_limit_bytes, Some(8 << 30));
    assert_eq!(limits.driver_reserve_bytes, 528 << 20);
    assert_eq!(limits.cores.percent(), 30);
    assert_eq!(
        page.spec.device_uuid.to_string(),
        crate::fixture::GPU_UUIDS[0]
    );
    let region = fs::metadata(region_of(&node, 1)).unwrap();
    assert_eq!(
        (region.len(), region.mode() & 0o777),
        (REGION_SIZE as u64, 0o666)
    );
    assert_eq!(node.tmpfs.mounted().len(), 1);
    let text = |path: PathBuf| {
        let spec = fs::read_to_string(path).unwrap();
        spec.replace(&*node.root.path().to_string_lossy(), "[node]")
    };
    insta::assert_snapshot!(text(spec_of(&node, 1)));
    insta::assert_snapshot!("base_of_shares", text(base_of(&node, "share-compat")));
}

/// Returns the text of all CDI specs.
fn specs(node: &TestNode) -> String {
    let files = fs::read_dir(&node.paths.cdi_dir).unwrap();
    files
        .map(|file| fs::read_to_string(file.unwrap().path()).unwrap())
        .collect()
}

/// kubelet does not ask again when a container restarts, so the names of the bases that it got must stay valid.
#[test]
fn base_keeps_its_name_and_follows_the_driver() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (record, _) = prepare(&node, &applier, 1, &found).unwrap();
    let ids = |record: &ClaimRecord| spec::device_ids(record, &record.devices[0]);
    let (before, old) = (ids(&record), specs(&node));
    // An upgrade of the hook, and a GPU whose brand is unknown for now.
    fs::write(node.paths.artifacts_dir.join("drava-cdi-hook"), "next").unwrap();
    let mut inventory = h100x2();
    inventory.nvml.gpus[0].brand = "GeForce".to_owned();
    let (driver, installed) = (node.driver(), node.installed());
    let environment = environment(&inventory, &driver, &installed);
    let (again, repairs) = applier
        .prepare(&claim_ref(1), Some(&found), &environment)
        .unwrap();
    assert_eq!(ids(&again), before);
    assert_eq!(
        repairs.0,
        Vec::<String>::new(),
        "an upgrade damages nothing"
    );
    assert_eq!(specs(&node), old.replace(&record.hook, &again.hook));
}

/// The administrator shall look for a program that changes the driver's directories only where one does.
#[test]
fn reports_repair_of_shared_spec_only_if_it_was_damaged() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let found = |number| claim(number, &[Share(0, "8Gi", "30")]);
    prepare(&node, &applier, 1, &found(1)).unwrap();
    // A base outlives its claims.
    applier.unprepare(&claim_ref(1)).unwrap();
    fs::write(node.paths.artifacts_dir.join("drava-cdi-hook"), "next").unwrap();
    let (_, repairs) = prepare(&node, &applier, 2, &found(2)).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
    let base = base_of(&node, "share-compat");
    let whole = fs::read(&base).unwrap();
    fs::write(&base, "{").unwrap();
    let (_, repairs) = prepare(&node, &applier, 2, &found(2)).unwrap();
    assert_eq!(repairs, ["replaced the damaged CDI spec that claims share"]);
    fs::remove_file(&base).unwrap();
    let (_, repairs) = prepare(&node, &applier, 2, &found(2)).unwrap();
    assert_eq!(
        repairs,
        ["recreated the missing CDI spec that claims share"]
    );
    assert_eq!(fs::read(&base).unwrap(), whole);
}

/// A second upgrade comes before the CDI specs follow it, for example because NVML is unusable.
#[test]
fn keeps_hook_that_specs_name_after_two_upgrades() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let applier = node.applier(node.effects());
    let upgrade = |version| {
        let hook = node.paths.artifacts_dir.join("drava-cdi-hook");
        fs::write(hook, version).unwrap();
        node.installed()
    };
    upgrade("first");
    prepare(&node, &applier, 1, &found).unwrap();
    let second = upgrade("second");
    prepare(&node, &applier, 1, &found).unwrap();
    let third = upgrade("third");
    let state_dir = &node.paths.state_dir;
    let named = Artifact::Hook.path(state_dir, &second.hook);
    assert!(specs(&node).contains(&*named.to_string_lossy()));

    let mut in_use = applier.artifacts_in_use().unwrap().unwrap();
    in_use.insert(third.hook);
    artifacts::remove_unused(state_dir, &in_use).unwrap();
    assert!(named.exists());

    // When no spec names it any more, the next start removes it.
    prepare(&node, &applier, 1, &found).unwrap();
    let in_use = applier.artifacts_in_use().unwrap().unwrap();
    assert!(!in_use.contains(&second.hook), "{in_use:?}");
    // A spec that cannot be read may name any version.
    fs::write(base_of(&node, "whole"), "{").unwrap();
    assert_eq!(applier.artifacts_in_use().unwrap(), None);
}

/// kubelet knows only one CDI device of each device of these claims.
#[test]
fn keeps_whole_spec_of_claim_of_older_build() {
    if lacks_device_files() {
        return;
    }
    for delivery in [Delivery::Preload, Delivery::Shim] {
        let node = TestNode::started();
        let found = claim(1, &[Share(0, "8Gi", "30"), Whole(1)]);
        let applier = node.applier(node.effects());
        let (inventory, driver, installed) = (h100x2(), node.driver(), node.installed());
        let environment = Environment {
            delivery,
            ..environment(&inventory, &driver, &installed)
        };
        let prepare = || applier.prepare(&claim_ref(1), Some(&found), &environment);
        prepare().unwrap();
        fs::remove_dir_all(&node.paths.cdi_dir).unwrap();
        let path = record_of(&node, 1);
        let text = fs::read_to_string(&path).unwrap();
        let old = rewritten(&text, 1, |body| {
            body.replace(r#","common":{"inBases":{"compat":true}}"#, "")
        });
        assert!(!old.contains("inBases"), "{old}");
        fs::write(&path, old).unwrap();

        let (record, _) = prepare().unwrap();
        let ids: Vec<_> = record
            .devices
            .iter()
            .map(|device| spec::device_ids(&record, device))
            .collect();
        assert!(ids.iter().all(|ids| ids.len() == 1), "{ids:?}");
        let spec = Spec::from_json(&fs::read(spec_of(&node, 1)).unwrap()).unwrap();
        for device in spec.devices() {
            let text = format!("{:?}", device.container_edits);
            let is_share = device.name.contains("-gpu-0-");
            assert!(
                text.contains("/dev/nvidiactl") && text.contains("\"ldcache\""),
                "{text}"
            );
            assert_eq!(text.contains("\"mark\""), is_share, "{text}");
            let stub = text.contains("/usr/local/lib/drava/driver/libcuda.so.1");
            assert_eq!(stub, is_share && delivery == Delivery::Shim, "{text}");
        }
        assert_eq!(specs(&node), spec.to_json(), "no base");
        // The spec says so when the record is lost.
        fs::write(&path, "damaged").unwrap();
        let (rebuilt, _) = prepare().unwrap();
        assert_eq!(rebuilt.common, CommonEdits::InClaim);
        assert_eq!(specs(&node), spec.to_json());
    }
}

#[test]
fn claims_of_one_base_are_prepared_at_once() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let appliers: Vec<_> = (0..8).map(|_| node.applier(node.effects())).collect();
    for _ in 0..10 {
        std::thread::scope(|scope| {
            for (number, applier) in (1..).zip(&appliers) {
                let found = claim(number, &[Share(number % 2, "4Gi", "0")]);
                let node = &node;
                scope.spawn(move || prepare(node, applier, number, &found).unwrap());
            }
        });
        let base = fs::read(base_of(&node, "share-compat")).unwrap();
        Spec::from_json(&base).unwrap();
        for (number, applier) in (1..).zip(&appliers) {
            applier.unprepare(&claim_ref(number)).unwrap();
        }
        fs::remove_file(base_of(&node, "share-compat")).unwrap();
    }
}

#[test]
fn prefers_newer_libraries_of_images_except_on_consumer_gpus() {
    if lacks_device_files() {
        return;
    }
    for (brand, is_supported) in [
        ("Nvidia", true),
        ("Tesla", true),
        ("GeForceRTX", false),
        ("NvidiaRTX", false),
        ("Unknown", false),
    ] {
        let node = TestNode::started();
        let mut inventory = h100x2();
        inventory.nvml.gpus[0].brand = brand.to_owned();
        let (driver, installed) = (node.driver(), node.installed());
        let found = claim(1, &[Share(0, "8Gi", "30")]);
        let environment = environment(&inventory, &driver, &installed);
        node.applier(node.effects())
            .prepare(&claim_ref(1), Some(&found), &environment)
            .unwrap();
        let specs = specs(&node);
        assert_eq!(specs.contains("\"compat\""), is_supported, "{brand}");
    }
}

#[test]
fn injects_no_libvgpu_for_whole_gpu() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Whole(1)])).unwrap();
    let spec = specs(&node);
    assert!(spec.contains("/dev/nvidia1") && !spec.contains("/dev/nvidia0"));
    assert!(!spec.contains("libvgpu") && !spec.contains("preload") && !spec.contains("/run/drava"));
    assert!(node.tmpfs.mounted().is_empty());
}

#[test]
fn exposes_only_requested_devices_to_container() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(
        &node,
        &applier,
        1,
        &claim(1, &[Share(0, "8Gi", "0"), Whole(1)]),
    )
    .unwrap();
    let spec = Spec::from_json(&fs::read(spec_of(&node, 1)).unwrap()).unwrap();
    for device in spec.devices() {
        let text = format!("{:?}", device.container_edits);
        let (own, other) = if device.name.contains("-gpu1-") {
            ("/dev/nvidia1", "/dev/nvidia0")
        } else {
            ("/dev/nvidia0", "/dev/nvidia1")
        };
        assert!(
            text.contains(own) && !text.contains(other),
            "{}: {text}",
            device.name
        );
    }
    for base in ["share-compat", "whole-compat"] {
        let base = fs::read_to_string(base_of(&node, base)).unwrap();
        assert!(!base.contains("/dev/nvidia0") && !base.contains("/dev/nvidia1"));
    }
}

#[test]
fn repeats_prepare_without_changes() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let first = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    let page = fs::metadata(page_of(&node, 1)).unwrap();
    // A program of the claim writes to the region.
    fs::write(region_of(&node, 1), vec![7; REGION_SIZE]).unwrap();
    for _ in 0..3 {
        let again = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
        assert_eq!(again, first);
    }
    let after = fs::metadata(page_of(&node, 1)).unwrap();
    assert_eq!(
        (after.ino(), after.mtime_nsec()),
        (page.ino(), page.mtime_nsec()),
        "the live page was rewritten"
    );
    assert_eq!(
        fs::read(region_of(&node, 1)).unwrap(),
        vec![7; REGION_SIZE],
        "the live region was changed"
    );
}

#[test]
fn keeps_changed_limits_of_live_page() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    // The agent changes the page in place.
    let mut bytes = fs::read(page_of(&node, 1)).unwrap();
    let mut limits = page::decode(&bytes).unwrap().spec.limits;
    limits.rate_us_per_s = Some(1);
    for write in page::update(&bytes, &limits).unwrap() {
        let start = usize::try_from(write.offset()).unwrap();
        bytes[start..start + write.bytes().len()].copy_from_slice(write.bytes());
    }
    fs::write(page_of(&node, 1), &bytes).unwrap();
    let (_, repairs) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert!(repairs.is_empty(), "{repairs:?}");
    assert_eq!(fs::read(page_of(&node, 1)).unwrap(), bytes);
}

#[test]
fn recreates_and_reports_missing_files() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (first, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    let complete = node.claim_state();
    let spec = fs::read(spec_of(&node, 1)).unwrap();

    let base = base_of(&node, "share-compat");
    fs::remove_file(&base).unwrap();
    fs::remove_file(spec_of(&node, 1)).unwrap();
    node.tmpfs.reboot();
    fs::remove_file(page_of(&node, 1)).unwrap();
    let (again, repairs) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(again, first);
    assert_eq!(node.claim_state(), complete);
    assert_eq!(fs::read(spec_of(&node, 1)).unwrap(), spec);
    let objects = [
        "limits page",
        "usage region",
        "CDI spec",
        "CDI spec that claims share",
    ];
    for what in objects {
        assert!(
            repairs
                .iter()
                .any(|repair| repair == &format!("recreated the missing {what}")),
            "{what}: {repairs:?}"
        );
    }

    fs::write(&base, "{").unwrap();
    fs::write(spec_of(&node, 1), "{").unwrap();
    fs::write(page_of(&node, 1), "damaged").unwrap();
    fs::write(region_of(&node, 1), "cut").unwrap();
    let (_, repairs) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(repairs.len(), 4, "{repairs:?}");
    assert_eq!(node.claim_state(), complete);
    assert_eq!(
        fs::metadata(region_of(&node, 1)).unwrap().len(),
        REGION_SIZE as u64
    );
}

#[test]
fn replaces_symlinked_region_without_following_it() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    let victim = node.root.path().join("victim");
    fs::write(&victim, "host file").unwrap();
    fs::remove_file(region_of(&node, 1)).unwrap();
    std::os::unix::fs::symlink(&victim, region_of(&node, 1)).unwrap();
    prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "host file");
    assert!(fs::symlink_metadata(region_of(&node, 1)).unwrap().is_file());
}

#[test]
fn unprepares_completely_and_repeatedly() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(
        &node,
        &applier,
        1,
        &claim(1, &[Share(0, "8Gi", "30"), Share(1, "8Gi", "30")]),
    )
    .unwrap();
    prepare(&node, &applier, 2, &claim(2, &[Share(0, "8Gi", "30")])).unwrap();
    let (both, _) = node.claim_state();
    applier.unprepare(&claim_ref(1)).unwrap();
    applier.unprepare(&claim_ref(1)).unwrap();
    applier.unprepare(&claim_ref(3)).unwrap();
    let (remaining, mounted) = node.claim_state();
    assert!(
        remaining.len() < both.len()
            && remaining
                .iter()
                .all(|name| name.contains(claim_ref(2).uid.as_str())),
        "{remaining:?}"
    );
    assert_eq!(mounted.len(), 1);
    applier.unprepare(&claim_ref(2)).unwrap();
    assert_eq!(node.claim_state(), (Vec::new(), Default::default()));
}

#[test]
fn replaces_limits_page_of_another_share() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let (first, second) = (
        claim(1, &[Share(0, "8Gi", "30"), Share(0, "4Gi", "0")]),
        claim(2, &[Share(0, "8Gi", "30")]),
    );
    prepare(&node, &applier, 1, &first).unwrap();
    prepare(&node, &applier, 2, &second).unwrap();
    let own = fs::read(page_of(&node, 1)).unwrap();
    let other_share = ShareId::parse(&share_id(1, 1)).unwrap();
    let other_share = node.layout().limits(&claim_ref(1).uid, &other_share);
    for other in [other_share.join("page"), page_of(&node, 2)] {
        fs::copy(other, page_of(&node, 1)).unwrap();
        let (_, repairs) = prepare(&node, &applier, 1, &first).unwrap();
        assert_eq!(repairs, ["replaced the damaged limits page"]);
        assert_eq!(fs::read(page_of(&node, 1)).unwrap(), own);
    }
}

#[test]
fn prepares_one_of_two_conflicting_concurrent_claims() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let (first, second) = (node.applier(node.effects()), node.applier(node.effects()));
    for round in 0..20 {
        let (a, b) = (2 * round + 1, 2 * round + 2);
        let outcomes = std::thread::scope(|scope| {
            let a = scope
                .spawn(|| prepare(&node, &first, a, &claim(a, &[Share(0, "50Gi", "0")])).is_ok());
            let b = scope
                .spawn(|| prepare(&node, &second, b, &claim(b, &[Share(0, "50Gi", "0")])).is_ok());
            [a.join().unwrap(), b.join().unwrap()]
        });
        assert_eq!(
            outcomes.iter().filter(|prepared| **prepared).count(),
            1,
            "round {round}"
        );
        first.unprepare(&claim_ref(a)).unwrap();
        first.unprepare(&claim_ref(b)).unwrap();
    }
}

#[test]
fn replaces_preparation_of_reallocated_claim() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    let (record, repairs) =
        prepare(&node, &applier, 1, &claim(1, &[Share(1, "4Gi", "0")])).unwrap();
    assert_eq!(record.devices[0].gpu.minor, 1);
    assert_eq!(repairs, ["removed the state of an earlier allocation"]);
    let page = page::decode(&fs::read(page_of(&node, 1)).unwrap()).unwrap();
    assert_eq!(page.spec.limits.memory_limit_bytes, Some(4 << 30));
}

#[test]
fn rejects_reallocated_claim_while_containers_run() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &claim(1, &[Share(0, "8Gi", "30")])).unwrap();
    let container = node.start_container(7, 1);
    let (before, page) = (node.claim_state(), fs::read(page_of(&node, 1)).unwrap());
    let again = claim(1, &[Share(1, "4Gi", "0")]);
    let error = prepare(&node, &applier, 1, &again).unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(
        error.contains("claim default/claim-1") && error.contains("a container mounts its share"),
        "{error}"
    );
    assert_eq!(node.claim_state(), before);
    assert_eq!(fs::read(page_of(&node, 1)).unwrap(), page);

    fs::remove_dir_all(container).unwrap();
    prepare(&node, &applier, 1, &again).unwrap();
}

#[test]
fn follows_gpu_whose_minor_number_shifted() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &found).unwrap();
    // After a reboot the first GPU is the second one.
    let mut inventory = h100x2();
    for (gpu, minor) in inventory.nvml.gpus.iter_mut().zip([1, 0]) {
        gpu.minor = minor;
    }
    let recorded = partitions::recorded(applier.store(), "boot", |_| false).unwrap();
    inventory.numbers = numbers::assign(&inventory.nvml.gpus, &recorded.numbers);
    let (driver, installed) = (node.driver(), node.installed());
    let environment = environment(&inventory, &driver, &installed);
    let (record, repairs) = applier
        .prepare(&claim_ref(1), Some(&found), &environment)
        .unwrap();
    let gpu = &record.devices[0].gpu;
    assert_eq!(
        (gpu.uuid.as_str(), gpu.minor),
        (crate::fixture::GPU_UUIDS[0], 1)
    );
    assert_eq!(repairs.0, ["replaced the outdated CDI spec"]);
    let spec = fs::read_to_string(spec_of(&node, 1)).unwrap();
    assert!(spec.contains("/dev/nvidia1") && !spec.contains("/dev/nvidia0"));

    // The other GPU has the free number, and a claim of its device gets its device file.
    let (other, _) = applier
        .prepare(
            &claim_ref(2),
            Some(&claim(2, &[Share(1, "8Gi", "30")])),
            &environment,
        )
        .unwrap();
    assert_eq!(other.devices[0].gpu.uuid, crate::fixture::GPU_UUIDS[1]);

    // The first GPU is gone, and the second one has its device file.
    let mut inventory = inventory.clone();
    inventory.nvml.gpus.remove(0);
    inventory.nvml.gpus[0].minor = 1;
    let environment = Environment {
        inventory: &inventory,
        ..environment
    };
    let error = applier.complete(record, &environment).unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(error.contains("is not on this node"), "{error}");
}

#[test]
fn keeps_library_and_replaces_hook_of_claim_on_upgrade() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let (before, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    for artifact in ["libvgpu.so", "drava-cdi-hook"] {
        let artifact = node.paths.artifacts_dir.join(artifact);
        fs::write(artifact, "next version").unwrap();
    }
    let (after, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!(after.library, before.library);
    assert_ne!(after.hook, before.hook, "a hook of its own arguments");
    let (other, _) = prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Share(0, "8Gi", "30")]),
    )
    .unwrap();
    assert_ne!(other.library, before.library);
    assert_eq!(other.hook, after.hook);
    let in_use = node
        .applier(node.effects())
        .artifacts_in_use()
        .unwrap()
        .unwrap();
    for hash in [&before.library, &other.library, &other.hook] {
        assert!(in_use.contains(hash), "{in_use:?}");
    }
    // Removed artifacts are replaced by the installed ones.
    let state_dir = &node.paths.state_dir;
    fs::remove_file(Artifact::Library.path(state_dir, &before.library)).unwrap();
    let (moved, _) = prepare(&node, &node.applier(node.effects()), 1, &found).unwrap();
    assert_eq!((moved.library, moved.hook), (other.library, other.hook));
}

#[test]
fn counts_prepared_and_interrupted_claims_for_overcommit() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let half = claim(1, &[Share(0, "40Gi", "50")]);
    // Interrupted after the intent record.
    let _ = prepare(
        &node,
        &node.applier(CrashingEffects::after(1, node.effects())),
        1,
        &half,
    );
    let error = prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Share(0, "41Gi", "0")]),
    )
    .unwrap_err();
    assert!(matches!(*error.failure, Failure::Conflict(_)), "{error}");
    let error = prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Whole(0)]),
    )
    .unwrap_err();
    assert!(matches!(*error.failure, Failure::Conflict(_)), "{error}");
    node.applier(node.effects())
        .unprepare(&claim_ref(1))
        .unwrap();
    prepare(
        &node,
        &node.applier(node.effects()),
        2,
        &claim(2, &[Whole(0)]),
    )
    .unwrap();
}

/// Containers run without the file, and their hooks have ended.
#[test]
fn marks_no_remounted_share_as_pending() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &found).unwrap();
    let share = ShareId::parse(&share_id(1, 0)).unwrap();
    let pending = node.layout().pending(&claim_ref(1).uid, &share);
    assert!(pending.exists());
    node.tmpfs.reboot();
    prepare(&node, &applier, 1, &found).unwrap();
    assert!(region_of(&node, 1).exists() && !pending.exists());

    // No container can have a claim whose CDI spec is missing, as after a reboot.
    node.tmpfs.reboot();
    fs::remove_file(spec_of(&node, 1)).unwrap();
    prepare(&node, &applier, 1, &found).unwrap();
    assert!(pending.exists());
}
