//! The daemon process: start, stop, kill.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use simulator_machine::client::Connection;
use simulator_machine::protocol::{ClientKind, GpuIndex, Reply, Request};
use simulator_machine::root::DriverRoot;

const DAEMON: &str = env!("CARGO_BIN_EXE_simulator-machine");
const T4: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/machines/t4.yaml");
const A100: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/machines/a100-80gbx8.yaml");
const H100: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/machines/h100x2.yaml");

fn serve(root: &std::path::Path, machine: &str) -> Command {
    let mut command = Command::new(DAEMON);
    command
        .args(["serve", "--machine", machine, "--root"])
        .arg(root);
    command
}

fn start(root: &std::path::Path, machine: &str) -> anyhow::Result<Child> {
    start_with(root, machine, &[])
}

fn start_with(root: &std::path::Path, machine: &str, more: &[&str]) -> anyhow::Result<Child> {
    let mut command = serve(root, machine);
    let mut child = command.args(more).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().context("no stdout")?).read_line(&mut line)?;
    assert_eq!(line, "ready\n");
    Ok(child)
}

fn status(root: &std::path::Path) -> anyhow::Result<std::process::Output> {
    ctl(root, &["status"])
}

fn ctl(root: &std::path::Path, arguments: &[&str]) -> anyhow::Result<std::process::Output> {
    Ok(Command::new(DAEMON)
        .arg("ctl")
        .arg("--root")
        .arg(root)
        .args(arguments)
        .output()?)
}

#[test]
fn serves_when_ready_and_removes_sockets_at_stop() -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let mut daemon = start(root.path(), T4)?;
    let answer = status(root.path())?;
    let answer: serde_json::Value = serde_json::from_slice(&answer.stdout)?;
    assert_eq!(answer["gpus"][0]["usedBytes"], 0);
    Command::new("kill")
        .args(["-TERM", &daemon.id().to_string()])
        .status()?;
    assert!(daemon.wait()?.success());
    assert!(!root.path().join("run/nvidia-persistenced/socket").exists());
    assert!(!status(root.path())?.status.success());
    Ok(())
}

#[test]
fn allows_one_daemon_per_root_and_replaces_a_killed_one() -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let mut first = start(root.path(), T4)?;
    let second = serve(root.path(), T4).output()?;
    assert!(!second.status.success());
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        message.contains("already serves") && message.contains("--root"),
        "{message}"
    );
    first.kill()?;
    first.wait()?;
    assert!(root.path().join("run/nvidia-persistenced/socket").exists());
    let mut third = start(root.path(), T4)?;
    assert!(status(root.path())?.status.success());
    third.kill()?;
    third.wait()?;
    Ok(())
}

#[test]
fn reports_errors_of_the_machine_file() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("machine.yaml");
    std::fs::write(&file, std::fs::read_to_string(T4)?.replace("ecc:", "eec:"))?;
    let output = Command::new(DAEMON)
        .arg("serve")
        .arg("--machine")
        .arg(&file)
        .arg("--root")
        .arg(directory.path().join("root"))
        .output()?;
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("eec") && message.contains("machine.yaml"),
        "{message}"
    );
    Ok(())
}

#[test]
fn changes_instances_as_administrator() -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let mut daemon = start(root.path(), H100)?;
    let mig = || -> anyhow::Result<serde_json::Value> {
        let answer = serde_json::from_slice::<serde_json::Value>(&status(root.path())?.stdout)?;
        Ok(answer["gpus"][1]["mig"].clone())
    };
    let create = [
        "create-instance",
        "--gpu",
        "1",
        "--profile",
        "19",
        "--start",
        "6",
    ];
    let rejected = ctl(root.path(), &create)?;
    assert!(!rejected.status.success(), "MIG mode is off");
    for command in [
        &["mig-mode", "--gpu", "1", "--enabled", "true"][..],
        &create,
    ] {
        let output = ctl(root.path(), command)?;
        assert!(output.status.success(), "{output:?}");
    }
    let instances = &mig()?["gpuInstances"];
    assert_eq!(instances[0]["id"], 13);
    assert_eq!(instances[0]["start"], 6);
    let destroy = ["destroy-instance", "--gpu", "1", "--instance", "13"];
    assert!(ctl(root.path(), &destroy)?.status.success());
    assert_eq!(mig()?["gpuInstances"], serde_json::json!([]));
    Command::new("kill")
        .args(["-TERM", &daemon.id().to_string()])
        .status()?;
    assert!(daemon.wait()?.success());
    Ok(())
}

#[test]
fn leaves_nothing_and_spares_directories_of_others() -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let entries = || -> anyhow::Result<Vec<String>> {
        let entries = std::fs::read_dir(root.path())?;
        entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    };
    let other = root.path().join("usr/bin");
    std::fs::create_dir_all(&other)?;
    let refused = serve(root.path(), H100).output()?;
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && message.contains("/usr"),
        "{message}"
    );
    assert_eq!(entries()?, ["usr"], "it has written before it refused");
    assert!(other.is_dir());

    std::fs::remove_dir_all(root.path().join("usr"))?;
    let mut daemon = start_with(root.path(), H100, &["--remove-root"])?;
    assert!(root.path().join("sys/bus/pci/devices").is_dir());
    // A killed daemon leaves files, which are its successor's.
    daemon.kill()?;
    daemon.wait()?;
    let mut daemon = start_with(root.path(), H100, &["--remove-root"])?;
    Command::new("kill")
        .args(["-TERM", &daemon.id().to_string()])
        .status()?;
    assert!(daemon.wait()?.success());
    assert_eq!(entries()?, [""; 0]);
    Ok(())
}

#[test]
fn starts_fabric_manager_before_it_is_ready() -> anyhow::Result<()> {
    const NOT_STARTED: Option<u8> = Some(1);
    for (arguments, is_started) in [(&[][..], false), (&["--fabric-manager"], true)] {
        let root = tempfile::tempdir()?;
        let mut daemon = start_with(root.path(), A100, arguments)?;
        let (mut library, _) = Connection::open(&DriverRoot::new(root.path()), ClientKind::Nvml)?;
        let reply = library.request(&Request::GpuState { gpu: GpuIndex(0) })?;
        let Reply::GpuState(state) = reply else {
            anyhow::bail!("{reply:?}");
        };
        assert_eq!(state.fabric_state != NOT_STARTED, is_started);
        Command::new("kill")
            .args(["-TERM", &daemon.id().to_string()])
            .status()?;
        assert!(daemon.wait()?.success());
    }
    Ok(())
}
