//! What containers get, compared with NVIDIA's container toolkit on the same driver roots. Needs Go and, once, the module
//! proxy.
//!
//! Each difference has a reason in [`reason`], or the test fails.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use drava_cdi::{ContainerEdits, Driver, DriverRoot, HookProgram, UNMETERED};

use crate::driver_root::{FakeRoot, cannot_create_devices};
use crate::installs::{devices, install};

/// Hooks of the toolkit and of drava with the same purpose.
const HOOKS: [(&str, &str); 4] = [
    ("create-symlinks", "symlinks"),
    ("update-ldcache", "ldcache"),
    ("enable-cuda-compat", "compat"),
    ("disable-device-node-modification", "params"),
];

/// Returns the reason why only the toolkit, or only drava, gives containers this node, mount or hook.
fn reason(is_of_drava: bool, line: &str) -> Option<&'static str> {
    let (kind, name) = line.split_once(' ')?;
    let file = name.rsplit_once('/').map_or(name, |(_, file)| file);
    Some(match (is_of_drava, kind, file) {
        (false, "hook", "update-application-profile") => {
            "selects GPUs of EGL; a container has no device file of another GPU"
        }
        (false, "mount", "nvidia-persistenced") => "a daemon of the node",
        (false, "mount", _) if name.contains("/X11/") => "configures X servers, which run on nodes",
        (_, "mount", _)
            if name.starts_with("/bin/nvidia-") || name.starts_with("/usr/bin/nvidia-") =>
        {
            "drava mounts programs in /usr/bin, wherever the driver root has them"
        }
        (true, "mount", _) if file.starts_with("libnvidia-api.so") => {
            "the toolkit mounts it behind the feature enable-explicit-driver-libraries"
        }
        (true, "mount", _) if file.starts_with("libnvidia-nscq.so") => {
            "queries of NVSwitches, as libnvidia-container mounts it"
        }
        _ => return None,
    })
}

/// Returns the nodes, mounts and hooks that the toolkit gives to containers, or its error.
fn of_toolkit(root: &Path, device_root: &Path) -> Result<BTreeSet<String>, String> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvcdi");
    let output = Command::new("go")
        .current_dir(program)
        .args(["run", "."])
        .args([root, device_root])
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let lines = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| {
        let hook = line.strip_prefix("hook ");
        let known = hook.and_then(|hook| HOOKS.iter().find(|(toolkit, _)| *toolkit == hook));
        known.map_or_else(|| line.to_owned(), |(_, name)| format!("hook {name}"))
    };
    Ok(lines.lines().map(line).collect())
}

fn of_drava(edits: &ContainerEdits) -> BTreeSet<String> {
    let nodes = edits.device_nodes.iter();
    let nodes = nodes.map(|node| format!("device {}", node.path));
    let mounts = edits.mounts.iter();
    let mounts = mounts.map(|mount| format!("mount {}", mount.container_path));
    let hooks = edits
        .hooks
        .iter()
        .map(|hook| format!("hook {}", hook.args[1]));
    nodes.chain(mounts).chain(hooks).collect()
}

/// Compares an install, with the device files below `node` if they are apart. Returns the toolkit's error.
fn compare(name: &str, node: Option<&FakeRoot>) -> Option<String> {
    if cannot_create_devices() {
        return None;
    }
    if Command::new("go").arg("version").output().is_err() {
        let test = std::thread::current();
        let test = test.name().unwrap_or("a test");
        let line = format!("skipped: {test}: Go is not installed\n");
        // `eprintln!` would be hidden for a test that passes.
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    }
    let root = install(name);
    let open = |root: &FakeRoot| DriverRoot::open(root.path(), "/driver").unwrap();
    let driver = Driver::discover_with_devices(open(&root), node.map(open)).unwrap();
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let ours = of_drava(&driver.edits(UNMETERED, &[], &hook));
    let theirs = match of_toolkit(root.path(), node.unwrap_or(&root).path()) {
        Ok(theirs) => theirs,
        Err(error) => return Some(error),
    };
    let mut report = format!("the same: {}\n", ours.intersection(&theirs).count());
    for (is_of_drava, who, lines) in [
        (false, "toolkit", theirs.difference(&ours)),
        (true, "drava", ours.difference(&theirs)),
    ] {
        for line in lines {
            let reason = reason(is_of_drava, line);
            let reason = reason.unwrap_or_else(|| panic!("{name}: only {who}: {line}"));
            writeln!(report, "only {who}: {line} ({reason})").unwrap();
        }
    }
    insta::assert_snapshot!(format!("nvcdi_{}", name.replace('-', "_")), report);
    None
}

#[test]
fn ubuntu_as_with_container_toolkit() {
    assert_eq!(compare("ubuntu", None), None);
}

#[test]
fn rhel_as_with_container_toolkit() {
    assert_eq!(compare("rhel", None), None);
}

#[test]
fn gpu_operator_as_with_container_toolkit() {
    assert_eq!(compare("gpu-operator", None), None);
}

#[test]
fn gke_as_with_container_toolkit() {
    if cannot_create_devices() {
        return;
    }
    assert_eq!(compare("gke", Some(&devices())), None);
}

/// The toolkit needs a cache of the loader for the directory of Talos.
#[test]
fn talos_is_found_without_loader_cache() {
    if let Some(error) = compare("talos", None) {
        assert!(error.contains("failed to locate"), "{error}");
    }
}
