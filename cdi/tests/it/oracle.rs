//! The specification as runtimes read it: parsed and injected by the CDI project's library, which containerd and CRI-O
//! use. Needs Go and, once, the module proxy.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use drava_cdi::SpecDir;
use serde_json::Value;

use crate::driver_root::{FakeRoot, cannot_create_devices};
use crate::spec::claim_under;

#[test]
fn runtimes_inject_the_spec() {
    if cannot_create_devices() {
        return;
    }
    if Command::new("go").arg("version").output().is_err() {
        // `eprintln!` would be hidden for a test that passes.
        let skipped = b"skipped: oracle::runtimes_inject_the_spec: Go is not installed\n";
        std::io::stderr().write_all(skipped).unwrap();
        return;
    }
    let root = FakeRoot::debian();
    // Runtimes read the device numbers from the node, here the fake root.
    let spec = claim_under(&root, root.path());
    let dir = tempfile::tempdir().unwrap();
    SpecDir::new(dir.path(), "gpu.drava.dev-claim-")
        .write("uid", &spec)
        .unwrap();

    let [share, whole] = spec.devices() else {
        panic!("{spec:?}")
    };
    assert!(share.name.contains("-share-"));
    let of_share = injected(dir.path(), &[spec.qualified_name(share)]);
    let of_both = injected(
        dir.path(),
        &[spec.qualified_name(share), spec.qualified_name(whole)],
    );
    let node = root.path().to_str().unwrap();
    insta::assert_snapshot!(
        serde_json::to_string_pretty(&of_share)
            .unwrap()
            .replace(node, "<driver root>")
    );

    assert_eq!(
        devices(&of_share),
        [
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidia0"
        ]
    );
    assert!(devices(&of_both).contains(&"/dev/nvidia1"));
    let mounts = of_both["mounts"].as_array().unwrap();
    let mut targets: Vec<_> = mounts
        .iter()
        .map(|mount| mount["destination"].as_str().unwrap())
        .collect();
    targets.sort_unstable();
    let all = targets.len();
    targets.dedup();
    assert_eq!(targets.len(), all, "a mount of one device hides another's");
}

fn devices(oci: &Value) -> Vec<&str> {
    let mut paths: Vec<&str> = oci["linux"]["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["path"].as_str().unwrap())
        .collect();
    paths.sort_unstable_by_key(|path| {
        (
            path.starts_with("/dev/nvidia0"),
            path.starts_with("/dev/nvidia-"),
            *path,
        )
    });
    paths
}

fn injected(dir: &Path, devices: &[String]) -> Value {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle");
    let output = Command::new("go")
        .current_dir(oracle)
        .args(["run", "."])
        .arg(dir)
        .args(devices)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}
