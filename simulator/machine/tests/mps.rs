//! The programs of the multi-process service in a driver root.

use std::process::Command;

use simulator_machine::description::T4;
use simulator_machine::testing::{Machine, skips_without_root};

const CONTROL: &str = "nvidia-cuda-mps-control";

#[test]
fn runs_after_chroot_to_the_driver_root() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let machine = Machine::start(T4)?;
    let mut command = Command::new("chroot");
    command.arg(machine.root()).arg(CONTROL);
    let output = command.env("CUDA_MPS_PIPE_DIRECTORY", "/none").output()?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = String::from_utf8(output.stderr)?;
    assert_eq!(message, "Cannot find MPS control daemon process\n");
    assert!(machine.root().join("dev/shm").is_dir());
    Ok(())
}

#[test]
fn driver_root_can_lack_the_programs() -> anyhow::Result<()> {
    let machine = Machine::start(&format!("mps: {{installed: false}}\n{T4}"))?;
    assert!(!machine.root().join("usr/bin").join(CONTROL).exists());
    let machine = Machine::start(T4)?;
    assert!(machine.root().join("usr/bin").join(CONTROL).exists());
    Ok(())
}

#[test]
fn starts_in_the_background_and_once() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let directory = tempfile::tempdir()?;
    let program = || {
        let mut command = Command::new(machine.root().join("usr/bin").join(CONTROL));
        command.env("CUDA_MPS_PIPE_DIRECTORY", directory.path().join("pipe"));
        command.env("CUDA_MPS_LOG_DIRECTORY", directory.path().join("log"));
        command
    };
    // It accepts clients once the command has returned.
    assert!(program().arg("-d").status()?.success());
    let shell = |command: &str| {
        let mut shell = Command::new("sh");
        let pipe = directory.path().join("pipe");
        shell.env("CUDA_MPS_PIPE_DIRECTORY", pipe);
        shell.args(["-c", "echo \"$1\" | \"$0\""]);
        shell
            .arg(machine.root().join("usr/bin").join(CONTROL))
            .arg(command);
        shell.output()
    };
    let percentage = shell("get_default_active_thread_percentage")?;
    assert_eq!(String::from_utf8(percentage.stdout)?, "100.0\n");
    let again = program().arg("-d").output()?;
    assert_eq!(again.status.code(), Some(1));
    let message = String::from_utf8(again.stderr)?;
    assert_eq!(message, "An instance of this daemon is already running\n");
    let unknown = shell("dance")?;
    assert!(unknown.status.success());
    assert_eq!(
        String::from_utf8(unknown.stdout)?,
        "Unrecognized command: dance\n"
    );
    assert!(shell("quit")?.status.success());
    assert!(!shell("get_server_list")?.status.success());
    Ok(())
}
