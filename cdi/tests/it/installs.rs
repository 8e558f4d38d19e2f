//! What containers get of real installs of the NVIDIA driver. The files in `tests/installs` have names only.

use std::fmt::Write as _;
use std::path::Path;

use drava_cdi::{ContainerEdits, Driver, DriverRoot, HookProgram, METERED, UNMETERED};

use crate::driver_root::{FakeRoot, cannot_create_devices};

/// Creates the driver root of an install.
pub(crate) fn install(name: &str) -> FakeRoot {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/installs/{name}.txt"));
    let root = FakeRoot::empty();
    for line in std::fs::read_to_string(list).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["#", ..] => {}
            ["library", path, "other-machine"] => root.library_of_other_machine(path),
            ["library", path, soname] => root.library(path, soname),
            ["link", path, target] => root.link(path, target),
            ["file", path] if path.contains("bin/") => root.program(path),
            ["file", path] => root.file(path, b""),
            ["device", path] => root.device(path),
            ["socket", path] => root.socket(path),
            _ => panic!("{name}: {line}"),
        }
    }
    root
}

/// Returns what a container gets, one line per node, mount or link.
fn view(driver: &Driver, edits: &ContainerEdits) -> String {
    let gpu = driver.gpu(0, "0000:1b:00.0", METERED).unwrap();
    let mut view = String::new();
    for node in gpu.device_nodes.iter().chain(&edits.device_nodes) {
        writeln!(view, "device {}", node.path).unwrap();
    }
    for mount in &edits.mounts {
        writeln!(view, "mount {}", mount.container_path).unwrap();
    }
    view
}

fn check(name: &str) {
    if cannot_create_devices() {
        return;
    }
    let root = install(name);
    let driver = Driver::discover(DriverRoot::open(root.path(), "/driver").unwrap()).unwrap();
    assert_eq!(driver.version(), Some("580.65.06"));
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let metered = view(&driver, &driver.edits(METERED, &hook));
    let all = view(&driver, &driver.edits(UNMETERED, &hook));
    let only_whole: String = all
        .lines()
        .filter(|line| !metered.lines().any(|of_share| of_share == *line))
        .flat_map(|line| [line, "\n"])
        .collect();
    assert!(
        metered
            .lines()
            .all(|line| all.lines().any(|other| other == line))
    );
    let view = format!("shares and whole GPUs:\n{metered}\nwhole GPUs only:\n{only_whole}");
    insta::assert_snapshot!(format!("install_{}", name.replace('-', "_")), view);
}

#[test]
fn injects_ubuntu_packages() {
    check("ubuntu");
}

#[test]
fn injects_rhel_packages_of_this_machine_only() {
    check("rhel");
}

#[test]
fn injects_driver_container_of_gpu_operator() {
    check("gpu-operator");
}

#[test]
fn injects_talos_extension() {
    check("talos");
}

/// Creates a root with device files only, as the node of a GKE cluster.
pub(crate) fn devices() -> FakeRoot {
    let root = FakeRoot::empty();
    for device in ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
        root.device(&format!("dev/{device}"));
    }
    root
}

#[test]
fn injects_gke_directory_with_device_files_of_the_node() {
    if cannot_create_devices() {
        return;
    }
    let root = install("gke");
    let open = || DriverRoot::open(root.path(), "/home/kubernetes/bin/nvidia").unwrap();
    let error = Driver::discover(open()).unwrap_err().to_string();
    assert!(
        error.contains("no /dev/nvidiactl") && error.contains("set --dev-root"),
        "{error}"
    );

    let node = devices();
    let device_root = DriverRoot::open(node.path(), "/").unwrap();
    let driver = Driver::discover_with_devices(open(), Some(device_root), None).unwrap();
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let edits = driver.edits(UNMETERED, &hook);
    let gpu = driver.gpu(0, "0000:1b:00.0", METERED).unwrap();
    for node in gpu.device_nodes.iter().chain(&edits.device_nodes) {
        assert_eq!(node.host_path, None, "{node:?} is not a device of the node");
    }
    for mount in &edits.mounts {
        assert!(
            mount.host_path == "/dev/null"
                || mount.host_path.starts_with("/home/kubernetes/bin/nvidia/"),
            "{mount:?}"
        );
    }
    insta::assert_snapshot!("install_gke", view(&driver, &edits));
    let error = driver
        .gpu(3, "0000:1b:00.0", METERED)
        .unwrap_err()
        .to_string();
    assert!(error.contains(&*node.path().to_string_lossy()), "{error}");
}
