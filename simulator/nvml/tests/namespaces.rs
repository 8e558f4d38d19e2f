//! Process visibility by driver version, in PID namespaces.

use std::process::{Child, Stdio};

use anyhow::ensure;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::testing::{Machine, python};

/// Runs in a namespace: starts a program on GPU 0, waits until the program holds memory, and prints
/// its PID and those that NVML shows.
const INSIDE: &str = r#"
import pynvml, subprocess, sys, time
child = subprocess.Popen([sys.argv[1], "alloc", "--mib", "100", "--hold", "600"], stdout=subprocess.DEVNULL)
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
while pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used < int(sys.argv[2]):
    time.sleep(0.01)
    assert child.poll() is None
print(child.pid, *sorted(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)))
child.kill()
"#;

/// A child process that is killed when the test ends.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Seen {
    outside: u32,
    inside: u32,
    shown: Vec<u32>,
}

fn seen_in_a_container(policy: &str) -> anyhow::Result<Seen> {
    let machine = Machine::start(&format!("{H100X2}\nprocessIds: {policy}\n"))?;
    let mut probe = machine.program("cuda-probe")?;
    let hold = probe.args(["alloc", "--mib", "100", "--hold", "600"]);
    let outside = Background(hold.stdout(Stdio::null()).spawn()?);
    let one = machine.wait_for_gpu(0, |gpu| gpu.used_bytes > 100 * MIB)?;
    let mut unshare = machine.command("unshare");
    if !rustix::process::geteuid().is_root() {
        unshare.arg("--map-root-user");
    }
    let output = unshare
        .args(["--pid", "--fork", "--kill-child"])
        .arg(python::clients()?.join("python"))
        .args(["-c", INSIDE])
        .arg(machine.program("cuda-probe")?.get_program())
        .arg((2 * one.used_bytes).to_string())
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{error}");
    let numbers: Result<Vec<u32>, _> = String::from_utf8(output.stdout)?
        .split_whitespace()
        .map(str::parse)
        .collect();
    let (inside, shown) = numbers?
        .split_first()
        .map(|(first, rest)| (*first, rest.to_vec()))
        .unwrap_or_default();
    Ok(Seen {
        outside: outside.0.id(),
        inside,
        shown,
    })
}

#[test]
fn shows_a_container_its_processes_by_its_pids() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let seen = seen_in_a_container("translated")?;
    assert_eq!(seen.shown, [seen.inside]);
    Ok(())
}

#[test]
fn shows_host_pids_with_an_old_driver() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let seen = seen_in_a_container("host")?;
    assert_eq!(seen.shown.len(), 2);
    assert!(seen.shown.contains(&seen.outside));
    // PIDs in the new namespace are small.
    assert!(!seen.shown.contains(&seen.inside));
    Ok(())
}

#[test]
fn hides_processes_from_a_container() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    assert!(seen_in_a_container("hiddenInContainers")?.shown.is_empty());
    Ok(())
}
