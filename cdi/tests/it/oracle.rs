//! The specification as runtimes read it: parsed and injected by the CDI project's library, which containerd and CRI-O
//! use. Needs Go and, once, the module proxy.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use drava_cdi::{
    ContainerEdits, Driver, DriverRoot, HookProgram, METERED, Spec, SpecDir, Substitute,
};
use serde_json::{Value, json};

use crate::driver_root::{FakeRoot, cannot_create_devices};
use crate::spec::{claim_under, device};

/// Returns true, and reports the tests as skipped, where the CDI project's library cannot run.
fn lacks_oracle() -> bool {
    if cannot_create_devices() {
        return true;
    }
    let lacks_go = Command::new("go").arg("version").output().is_err();
    if lacks_go {
        // `eprintln!` would be hidden for a test that passes.
        let skipped = b"skipped: oracle: Go is not installed\n";
        std::io::stderr().write_all(skipped).unwrap();
    }
    lacks_go
}

/// kubelet passes the base of a device before the device, for each device of the container.
#[test]
fn runtimes_apply_base_once_and_claims_after_it() {
    if lacks_oracle() {
        return;
    }
    let root = FakeRoot::debian();
    let driver = Driver::discover(DriverRoot::open(root.path(), root.path()).unwrap()).unwrap();
    let hook = HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook");
    let mut common = driver.edits(METERED, &hook);
    common.hooks = hook.joined(common.hooks);
    let env = ContainerEdits {
        env: std::mem::take(&mut common.env),
        ..Default::default()
    };
    let base = Spec::new("gpu.drava.dev/base", [device("share", env)], common).unwrap();
    let substitute = Substitute {
        soname: "libcuda.so.1".to_owned(),
        host_path: "/var/lib/drava/lib/0123/libcuda.so.1".to_owned(),
        original: "/usr/local/lib/drava/driver/libcuda.so.1".to_owned(),
    };
    let shares = [0, 1].map(|minor| {
        let mut edits = driver.gpu(minor, "0000:1b:00.0", METERED).unwrap();
        edits.mounts = driver.substituted(std::slice::from_ref(&substitute));
        device(&format!("share-{minor}"), edits)
    });
    let claim = Spec::new("gpu.drava.dev/claim", shares, ContainerEdits::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    SpecDir::new(dir.path(), "base-")
        .write("share", &base)
        .unwrap();
    SpecDir::new(dir.path(), "claim-")
        .write("uid", &claim)
        .unwrap();

    let [base] = base.devices() else { panic!() };
    let base = format!("gpu.drava.dev/base={}", base.name);
    let mut ids = Vec::new();
    for share in claim.devices() {
        ids.extend([base.clone(), claim.qualified_name(share)]);
    }
    let oci = injected(dir.path(), &ids);
    assert_eq!(oci["hooks"]["createContainer"].as_array().unwrap().len(), 1);
    assert_eq!(
        oci["process"]["env"],
        json!(["NVIDIA_VISIBLE_DEVICES=void"])
    );
    assert!(devices(&oci).contains(&"/dev/nvidia0") && devices(&oci).contains(&"/dev/nvidia1"));
    assert!(devices(&oci).contains(&"/dev/nvidiactl"));
    let library = &driver.library("libcuda.so.1").unwrap().path;
    let mounts = oci["mounts"].as_array().unwrap().iter();
    let at_library: Vec<_> = mounts
        .filter(|mount| mount["destination"] == library.as_str())
        .map(|mount| mount["source"].as_str().unwrap())
        .collect();
    assert_eq!(at_library, [substitute.host_path]);
}

#[test]
fn runtimes_inject_the_spec() {
    if lacks_oracle() {
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
