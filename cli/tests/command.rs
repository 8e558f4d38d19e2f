//! Commands that need no cluster, as programs.
#![expect(clippy::expect_used, reason = "tests")]

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Output, Stdio};

fn run(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"))
        .args(args)
        .env_remove("KUBECONFIG")
        .env("HOME", "/nonexistent")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kubectl-drava starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A program that does not read its input closes the pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    child.wait_with_output().expect("kubectl-drava ends")
}

/// A path need not be UTF-8, and another argument that is not is refused.
#[test]
fn accepts_arguments_that_are_not_utf8() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join(OsStr::from_bytes(b"pod-\xff.yaml"));
    std::fs::write(&path, pod("1")).expect("written");
    let run = |args: &[&OsStr]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"));
        command.args(args).output().expect("kubectl-drava runs")
    };
    let output = run(&["migrate".as_ref(), "-f".as_ref(), path.as_os_str()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("kind: ResourceClaimTemplate"), "{text}");

    let name = OsStr::from_bytes(b"pod/\xff");
    let output = run(&["explain".as_ref(), name]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stderr.starts_with(b"error: "), "{output:?}");
}

fn pod(amount: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{containers: [{{name: app, resources: {{limits: {{nvidia.com/gpu: {amount}}}}}}}]}}}}"
    )
}

#[test]
fn migrates_without_cluster() {
    let output = run(&["migrate", "-f", "-"], &pod("1"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("kind: ResourceClaimTemplate"), "{text}");
    assert!(!text.contains("nvidia.com/gpu"), "{text}");
    assert_eq!(output.stderr, b"", "{output:?}");
}

#[test]
fn exits_with_3_when_an_object_is_refused() {
    let output = run(&["migrate", "-f", "-"], &pod("0.5"));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let report = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        report,
        "refused: Pod p: spec.containers[0].resources.limits[nvidia.com/gpu]: 0.5 is not a whole number; use one, such as 1\n"
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("nvidia.com/gpu: 0.5"));
}

#[test]
fn reads_settings_of_the_translation() {
    let settings = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(settings.path(), "replacedSchedulers: [volcano]\n").expect("written");
    let path = settings.path().to_str().expect("a path");
    let output = run(&["migrate", "-f", "-", "--settings", path], &pod("1"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    std::fs::write(settings.path(), "replacedScheduler: []\n").expect("written");
    let output = run(&["migrate", "-f", "-", "--settings", path], &pod("1"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("replacedScheduler"), "{error}");
}

#[test]
fn writes_completion_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completion", shell], "");
        let script = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && script.contains("kubectl-drava"),
            "{shell}"
        );
        assert!(script.contains("migrate"), "{shell}");
    }
}

#[test]
fn writes_a_manual_page_per_command() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("man1");
    let output = run(&["man", path.to_str().expect("a path")], "");
    assert!(output.status.success(), "{output:?}");
    for page in [
        "kubectl-drava.1",
        "kubectl-drava-doctor.1",
        "kubectl-drava-migrate.1",
    ] {
        let text = std::fs::read_to_string(path.join(page)).expect(page);
        assert!(text.contains(".TH"), "{page}");
    }
}

#[test]
fn refuses_options_without_meaning() {
    for (args, expected) in [
        (
            &["console", "-o", "json"][..],
            "error: console serves a page; it has no output format\n",
        ),
        (
            &["top", "-o", "opencost"],
            "error: -o opencost is a format of `kubectl drava cost` only\n",
        ),
    ] {
        let output = run(args, "");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    }
    for kind in ["pod", "job", "claim"] {
        let output = run(&["explain", kind, "research/x"], "");
        let error = String::from_utf8_lossy(&output.stderr);
        let expected = "a name has no slash; did you mean x -n research?";
        assert!(error.contains(expected), "{error}");
    }
}
