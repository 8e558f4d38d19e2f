//! The hooks as crun runs them. Releases before 1.26 make a read-only root read-only before they run hooks, as bundles of
//! CRI-O with `readOnlyRootFilesystem` have it.

use std::io::Write as _;
use std::process::Command;

use crate::bundle::{Bundle, OURS, stderr};

const DRIVER: &str = "/opt/driver/libanswer.so.1";

/// Runs crun in a mount namespace that hides the cgroups of this machine: the test needs none, and crun rejects some layouts.
const RUN: &str = r#"mount -t tmpfs none /sys/fs/cgroup && exec crun --root "$STATE" --cgroup-manager=disabled run \
    --bundle "$BUNDLE" "drava-$$""#;

fn is_missing() -> bool {
    let version = Command::new("crun").arg("--version").output();
    let is_root = rustix::process::geteuid().is_root();
    let reason = match version {
        Ok(_) if is_root => return false,
        Ok(_) => "crun needs root here",
        Err(_) => "crun is not installed",
    };
    let line = format!("skipped: crun: {reason}\n");
    // `eprintln!` would be hidden for a test that passes.
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    true
}

/// Returns `config.json` with hooks of these command lines and a read-only root.
fn config(hooks: &[&[&str]]) -> String {
    let hook = |arguments: &&[&str]| {
        let arguments = [&["drava-cdi-hook"], *arguments].concat();
        serde_json::json!({"path": env!("CARGO_BIN_EXE_drava-cdi-hook"), "args": arguments})
    };
    let hooks: Vec<_> = hooks.iter().map(hook).collect();
    serde_json::json!({
        "ociVersion": "1.0.0",
        "root": {"path": "rootfs", "readonly": true},
        "process": {"cwd": "/", "user": {"uid": 0, "gid": 0}, "args": ["/bin/probe", "libanswer.so.1"]},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        ],
        "hooks": {"createContainer": hooks},
        "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}]},
    })
    .to_string()
}

#[test]
fn works_after_crun_made_root_read_only() {
    if is_missing() {
        return;
    }
    let bundle = Bundle::new();
    bundle.hello("first", OURS);
    bundle.answer(DRIVER);
    let link = "libanswer.so.1::/opt/driver/libanswer.so";
    let hooks: [&[&str]; 3] = [
        &["symlinks", "--link", link],
        &["ldcache", "--library", DRIVER],
        &["preload", "--library", OURS],
    ];
    std::fs::write(bundle.outside("config.json"), config(&hooks)).unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-euc", RUN])
        .env("STATE", bundle.outside("state"))
        .env("BUNDLE", bundle.outside(""))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines, format!("first\nlibanswer.so.1: {DRIVER}\n"));
    assert!(bundle.at("/opt/driver/libanswer.so").is_symlink());
}
