//! What containers get, compared with NVIDIA's container toolkit on the same driver roots. Needs Go and, once, the module
//! proxy.
//!
//! Each difference has a reason in [`reason`], or the test fails.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use drava_cdi::{ContainerEdits, Driver, DriverRoot, HookProgram, UNMETERED};

use tempfile::TempDir;

use crate::driver_root::{FakeRoot, cannot_create_devices};
use crate::installs::{devices, install};

/// Version of the kernel driver of the installs.
const VERSION: &str = "580.65.06";

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
        (false, "hook", "apply-cuda-memory-limits") => {
            "limits by NVIDIA_GPU_MEMORY_LIMIT; those of drava are limits of a claim"
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

/// Returns the program around the toolkit, built once; `None` without Go.
fn toolkit() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<TempDir>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvcdi");
        let build = Command::new("go")
            .current_dir(source)
            .args(["build", "-o"])
            .arg(dir.path().join("nvcdi"))
            .output();
        let Ok(build) = build else {
            let line =
                b"skipped: comparison with NVIDIA's container toolkit: Go is not installed\n";
            // `eprintln!` would be hidden for a test that passes.
            std::io::stderr().write_all(line).unwrap();
            return None;
        };
        let text = String::from_utf8_lossy(&build.stderr);
        assert!(build.status.success(), "{text}");
        Some(dir)
    });
    built.as_ref().map(TempDir::path)
}

/// Returns the nodes, mounts and hooks that the toolkit gives to containers, or its error.
fn of_toolkit(toolkit: &Path, root: &Path, device_root: &Path) -> Result<BTreeSet<String>, String> {
    let output = Command::new(toolkit.join("nvcdi"))
        .arg(VERSION)
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
    let report = match differences(name, toolkit()?, &install(name), node) {
        Ok(report) => report,
        Err(error) => return Some(error),
    };
    insta::assert_snapshot!(format!("nvcdi_{}", name.replace('-', "_")), report);
    None
}

/// Returns the differences, each with its reason, or the toolkit's error.
fn differences(
    name: &str,
    toolkit: &Path,
    root: &FakeRoot,
    node: Option<&FakeRoot>,
) -> Result<String, String> {
    let open = |root: &FakeRoot| DriverRoot::open(root.path(), "/driver").unwrap();
    let driver = Driver::discover_with_devices(open(root), node.map(open), Some(VERSION)).unwrap();
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let mut edits = driver.edits(UNMETERED, &hook);
    edits.hooks.extend(driver.compat(&hook, None));
    edits.append(driver.gpu(0, "0000:1b:00.0", UNMETERED).unwrap());
    let ours = of_drava(&edits);
    let theirs = of_toolkit(toolkit, root.path(), node.unwrap_or(root).path())?;
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
    Ok(report)
}

/// Number of generated roots.
const ROOTS: u64 = 60;

/// Creates a root with the driver in one of the usual directories, and with what older and newer drivers leave behind.
fn generated(seed: u64) -> FakeRoot {
    const DIRECTORIES: [&str; 3] = [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib64",
        "usr/lib/x86_64-linux-gnu/nvidia/current",
    ];
    const LEFTOVERS: [&str; 4] = ["470.10", "535.54.03", "580.65.05", "590.44.01"];
    // Knuth's generator; its high bits are used.
    let mut state = seed;
    let mut below = |limit: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % limit
    };
    let root = FakeRoot::empty();
    for device in ["nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-uvm-tools"] {
        root.device(&format!("dev/{device}"));
    }
    let home = DIRECTORIES[below(3)];
    root.driver_libraries(home, VERSION);
    for _leftover in 0..below(4) {
        // In the same directory and in others, searched before and after.
        let (directory, version) = (DIRECTORIES[below(3)], LEFTOVERS[below(4)]);
        let stem = ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"][below(3)];
        root.library(
            &format!("{directory}/{stem}.so.{version}"),
            &format!("{stem}.so.1"),
        );
    }
    root
}

#[test]
fn generated_roots_as_with_container_toolkit() {
    if cannot_create_devices() {
        return;
    }
    let Some(toolkit) = toolkit() else { return };
    let mut compared = 0;
    for seed in 0..ROOTS {
        match differences(&format!("root {seed}"), toolkit, &generated(seed), None) {
            Ok(_) => compared += 1,
            // The toolkit searches fewer directories.
            Err(error) => assert!(error.contains("failed to locate"), "root {seed}: {error}"),
        }
    }
    assert!(compared > ROOTS / 2, "{compared} of {ROOTS} roots");
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
