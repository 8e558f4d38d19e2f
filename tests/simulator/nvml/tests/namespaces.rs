//! Which processes a container sees: each kind of driver in a PID namespace of its own.

use std::process::{Child, Stdio};

use anyhow::ensure;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::testing::{Machine, python};

/// Runs in a namespace of its own: starts a program on card 0, waits until that holds memory
/// beside the one outside, and prints its PID and those that NVML shows.
const INSIDE: &str = r#"
import pynvml, subprocess, sys, time
child = subprocess.Popen([sys.argv[1], "alloc", "--mib", "100", "--hold", "600"], stdout=subprocess.DEVNULL)
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
while pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).used < int(sys.argv[2]):
    time.sleep(0.01)
    assert child.poll() is None
print(child.pid, *sorted(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)))
child.kill()
"#;

/// A program that does not outlive the test, however that ends.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // It may have ended by itself.
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
    let one = machine.wait_for_card(0, |card| card.used_bytes > 100 * MIB)?;
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
fn a_container_sees_its_own_processes_by_its_own_pids() -> anyhow::Result<()> {
    let seen = seen_in_a_container("translated")?;
    assert_eq!(seen.shown, [seen.inside]);
    Ok(())
}

#[test]
fn with_an_old_driver_a_container_sees_the_hosts_pids() -> anyhow::Result<()> {
    let seen = seen_in_a_container("host")?;
    assert_eq!(seen.shown.len(), 2);
    assert!(seen.shown.contains(&seen.outside));
    // In the namespace it is one of the first processes.
    assert!(!seen.shown.contains(&seen.inside));
    Ok(())
}

#[test]
fn a_container_may_see_nothing() -> anyhow::Result<()> {
    assert!(seen_in_a_container("hiddenInContainers")?.shown.is_empty());
    Ok(())
}
