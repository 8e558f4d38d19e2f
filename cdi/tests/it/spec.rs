//! Form of a specification: canonical, valid, with the lowest version.

use std::collections::BTreeMap;
use std::path::Path;

use drava_cdi::{
    ContainerEdits, Device, DeviceNode, DeviceNumber, Driver, DriverRoot, Hook, HookName,
    HookProgram, METERED, Mount, ReadError, Spec, UNMETERED, Version,
};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use crate::driver_root::{FakeRoot, cannot_create_devices};

const KIND: &str = "gpu.drava.dev/claim";
const LIBVGPU: &str = "/usr/local/lib/drava/libvgpu.so";

pub(crate) fn device(name: &str, container_edits: ContainerEdits) -> Device {
    Device {
        name: name.into(),
        annotations: BTreeMap::new(),
        container_edits,
    }
}

fn one_node() -> ContainerEdits {
    ContainerEdits {
        device_nodes: vec![DeviceNode::read_write("/dev/nvidia0", "/dev/nvidia0")],
        ..Default::default()
    }
}

/// Returns the specification of a claim with a share of one GPU and another whole GPU.
fn claim(root: &FakeRoot) -> Spec {
    claim_under(root, Path::new("/run/nvidia/driver"))
}

/// As [`claim`], on a node whose driver root is at `node`.
pub(crate) fn claim_under(root: &FakeRoot, node: &Path) -> Spec {
    let driver = Driver::discover(DriverRoot::open(root.path(), node).unwrap()).unwrap();
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let mut share = driver.gpu(0, "0000:1b:00.0", METERED).unwrap();
    share.mounts = vec![
        Mount::read_only("/var/lib/drava/lib/4567/libvgpu.so", LIBVGPU),
        Mount::data(
            "/var/lib/drava/claims/uid/share/limits",
            "/run/drava/share/limits",
        ),
        Mount::read_write("/run/drava/usage/uid/share", "/run/drava/share/usage"),
    ];
    share.hooks = vec![hook.preload(LIBVGPU, &[])];
    let mut whole = driver.gpu(1, "0000:3b:00.0", UNMETERED).unwrap();
    whole.append(driver.edits(UNMETERED, &hook));
    let devices = [
        device("8c5f1b2e-0000-4000-8000-000000000001-whole-gpu-1", whole),
        device(
            "8c5f1b2e-0000-4000-8000-000000000001-share-gpu-0-vgpu-share",
            share,
        ),
    ];
    Spec::new(KIND, devices, driver.edits(METERED, &hook)).unwrap()
}

#[test]
fn writes_spec_of_a_claim() {
    if cannot_create_devices() {
        return;
    }
    insta::assert_snapshot!(claim(&FakeRoot::debian()).to_json());
}

#[test]
fn sorts_and_deduplicates_edits() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let spec = claim(&root);
    let mut devices = spec.devices().to_vec();
    devices.reverse();
    for device in &mut devices {
        let edits = device.container_edits.clone();
        device.container_edits.mounts.reverse();
        device.container_edits.append(edits);
    }
    let again = Spec::new(KIND, devices, spec.container_edits().clone()).unwrap();
    assert_eq!(again.to_json(), spec.to_json());
}

#[test]
fn version_is_the_lowest_sufficient() {
    let edits = |host: &str| ContainerEdits {
        device_nodes: vec![DeviceNode::read_write("/dev/nvidia0", host)],
        ..Default::default()
    };
    let spec = |kind: &str, name: &str, host: &str, annotations: &[(&str, &str)]| {
        let mut device = device(name, edits(host));
        device.annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect();
        Spec::new(kind, [device], ContainerEdits::default())
            .unwrap()
            .version()
    };
    assert_eq!(spec(KIND, "a", "/dev/nvidia0", &[]), Version::V0_3_0);
    assert_eq!(spec(KIND, "0a", "/dev/nvidia0", &[]), Version::V0_5_0);
    assert_eq!(spec(KIND, "a", "/x/dev/nvidia0", &[]), Version::V0_5_0);
    assert_eq!(
        spec("gpu.drava.dev/c.d", "a", "/dev/nvidia0", &[]),
        Version::V0_6_0
    );
    assert_eq!(
        spec(KIND, "0a", "/dev/nvidia0", &[("k", "v")]),
        Version::V0_6_0
    );
}

#[test]
fn errors_name_the_invalid_field() {
    let spec = |kind: &str, devices: Vec<Device>, edits: ContainerEdits| {
        Spec::new(kind, devices, edits).unwrap_err().to_string()
    };
    let with = |edits: ContainerEdits| spec(KIND, vec![device("a", one_node())], edits);
    for (error, expected) in [
        (
            spec("drava", vec![device("a", one_node())], Default::default()),
            "kind: \"drava\" is not",
        ),
        (
            spec(
                "1.dev/claim",
                vec![device("a", one_node())],
                Default::default(),
            ),
            "kind: \"1.dev\" must start with a letter",
        ),
        (spec(KIND, vec![], Default::default()), "devices: is empty"),
        (
            spec(KIND, vec![device("a/b", one_node())], Default::default()),
            "devices[a/b].name: \"a/b\"",
        ),
        (
            spec(KIND, vec![device("a-", one_node())], Default::default()),
            "devices[a-].name: \"a-\"",
        ),
        (
            spec(KIND, vec![device("", one_node())], Default::default()),
            "devices[].name: \"\"",
        ),
        (
            spec(
                KIND,
                vec![device("a", one_node()), device("a", one_node())],
                Default::default(),
            ),
            "devices[a]: occurs twice",
        ),
        (
            spec(
                KIND,
                vec![device("a", Default::default())],
                Default::default(),
            ),
            "devices[a].containerEdits: is empty",
        ),
        (
            with(ContainerEdits {
                env: vec!["A".into()],
                ..Default::default()
            }),
            "containerEdits.env: \"A\" is not NAME=value",
        ),
        (
            with(ContainerEdits {
                env: vec!["A=1".into(), "A=2".into()],
                ..Default::default()
            }),
            "A is set to two values",
        ),
        (
            with(ContainerEdits {
                mounts: vec![Mount::data("relative", "/x")],
                ..Default::default()
            }),
            "containerEdits.mounts[/x].hostPath: \"relative\"",
        ),
        (
            with(ContainerEdits {
                mounts: vec![Mount::data("/a", "/x/../y")],
                ..Default::default()
            }),
            "containerEdits.mounts[/x/../y].containerPath",
        ),
        (
            with(ContainerEdits {
                mounts: vec![Mount::data("/a", "/x"), Mount::data("/b", "/x")],
                ..Default::default()
            }),
            "containerEdits.mounts[/x]: occurs twice",
        ),
        (
            with(ContainerEdits {
                device_nodes: vec![DeviceNode {
                    path: "/dev/x".into(),
                    host_path: None,
                    number: None,
                    permissions: Some("rx".into()),
                }],
                ..Default::default()
            }),
            "containerEdits.deviceNodes[/dev/x].permissions",
        ),
        (
            with(ContainerEdits {
                device_nodes: vec![DeviceNode::numbered(
                    "/dev/x",
                    DeviceNumber { major: 0, minor: 1 },
                )],
                ..Default::default()
            }),
            "containerEdits.deviceNodes[/dev/x].major: is 0",
        ),
        (
            with(ContainerEdits {
                hooks: vec![Hook {
                    hook_name: HookName::CreateContainer,
                    path: "hook".into(),
                    args: vec![],
                    env: vec![],
                }],
                ..Default::default()
            }),
            "containerEdits.hooks[].path: \"hook\"",
        ),
    ] {
        assert!(
            error.contains(expected),
            "{error:?} does not contain {expected:?}"
        );
    }
}

#[test]
fn rejects_foreign_files() {
    let json = Spec::new(KIND, [device("0", one_node())], ContainerEdits::default())
        .unwrap()
        .to_json();
    assert!(Spec::from_json(json.as_bytes()).is_ok());
    let unknown = json.replacen("\"name\"", "\"unknown\": 1, \"name\"", 1);
    assert!(matches!(
        Spec::from_json(unknown.as_bytes()),
        Err(ReadError::Parse(_))
    ));
    for version in ["0.4.0", "7.0.0", ""] {
        let old = json.replacen("0.5.0", version, 1);
        assert!(
            matches!(
                Spec::from_json(old.as_bytes()),
                Err(ReadError::Version { .. })
            ),
            "{version}"
        );
    }
    assert!(
        Spec::from_json(json.replacen("0.5.0", "v0.6.0", 1).as_bytes()).is_ok(),
        "newer and with the prefix v"
    );
    let invalid = json.replacen("/dev/nvidia0", "dev", 1);
    assert!(matches!(
        Spec::from_json(invalid.as_bytes()),
        Err(ReadError::Invalid(_))
    ));
}

fn edits() -> impl Strategy<Value = ContainerEdits> {
    let path = || "(/[a-z]{1,3}){1,3}";
    let node = (path(), path()).prop_map(|(path, host)| DeviceNode::read_write(path, host));
    let mount = (path(), path()).prop_map(|(host, path)| Mount::data(host, path));
    let hook = (path(), vec("[ -~]{0,6}", 0..4)).prop_map(|(path, args)| Hook {
        hook_name: HookName::CreateContainer,
        path,
        args,
        env: Vec::new(),
    });
    (
        btree_map("[A-Z]{1,2}", "[ -~]{0,4}", 0..3),
        vec(node, 0..3),
        vec(hook, 0..3),
        vec(mount, 0..3),
    )
        .prop_map(|(env, device_nodes, hooks, mounts)| ContainerEdits {
            env: env
                .into_iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
            device_nodes,
            hooks,
            mounts,
        })
}

proptest! {
    #[test]
    fn round_trips_any_valid_spec(
        devices in btree_map("[a-z0-9]([a-z0-9.:_-]{0,4}[a-z0-9])?", (edits(), btree_map("[a-z]{1,4}", ".{0,4}", 0..2)), 1..4),
        common in edits(),
    ) {
        let devices = devices.into_iter().map(|(name, (container_edits, annotations))| Device { name, annotations, container_edits });
        // Contradictory or empty edits are rejected, which another test covers.
        if let Ok(spec) = Spec::new(KIND, devices, common) {
            let json = spec.to_json();
            let read = Spec::from_json(json.as_bytes()).unwrap();
            prop_assert_eq!(&read, &spec);
            prop_assert_eq!(read.to_json(), json);
        }
    }
}
