//! Processes that a program sees on the GPU: those of its share, by the PIDs of the container.

use std::process::Command;

use drava_vgpu_abi::Limits;
use simulator_machine::description::H100X2;
use simulator_machine::testing::{Machine, python};

use crate::test_process::{Container, GIB, GPUS, MIB};

/// Prelude of the scripts: every version of every list as sorted (PID, MiB) pairs, without wrappers that choose a
/// version.
pub(crate) const LISTS: &str = r#"
import pynvml as n, ctypes, sys, subprocess, time
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
class V1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]
class V2(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]
def ask(name, kind, capacity=64, gpu=gpu):
    count, array = ctypes.c_uint(capacity), (kind * 64)()
    result = n._nvmlGetFunctionPointer(name)(gpu, ctypes.byref(count), array)
    written = [p for p in array if p.pid]
    assert all(p.gi == p.ci == 0xffffffff for p in written if kind is V2), name
    return result, count.value, sorted((p.pid, p.used >> 20) for p in written)
def lists(what, gpu=gpu):
    name = f"nvmlDeviceGet{what}RunningProcesses"
    answers = [ask(name, V1, gpu=gpu), ask(name + "_v2", V2, gpu=gpu), ask(name + "_v3", V2, gpu=gpu)]
    assert answers[0] == answers[1] == answers[2], answers
    assert answers[0][0] == 0, answers
    return answers[0][2]
def compute():
    return ask("nvmlDeviceGetComputeRunningProcesses_v3", V2)[2]
"#;

/// Runs a script in the container and returns its output.
pub(crate) fn script(mut command: Command, text: &str) -> String {
    let output = command.args(["-c", &format!("{LISTS}{text}")]).output();
    let output = output.unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(!error.contains("libvgpu"), "{error}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn python(container: &Container) -> Command {
    container.command(python::clients().unwrap().join("python"))
}

fn shown(processes: &[(i32, u64)]) -> String {
    let mut processes = processes.to_vec();
    processes.sort_unstable();
    let shown = processes.iter().map(|(pid, mib)| format!("({pid}, {mib})"));
    format!("[{}]", shown.collect::<Vec<_>>().join(", "))
}

#[test]
fn lists_only_processes_of_share_in_every_version() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let mut first = container.process();
    first.alloc(3 * GIB);
    let mut second = container.process();
    second.alloc(GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(5 * GIB);
    let own = [(first.pid(), 3072), (second.pid(), 1024)];
    let every = "print(lists('Compute')); assert lists('Graphics') == lists('MPSCompute') == []";
    assert_eq!(script(python(&container), every), shown(&own));
    // A short array returns the required size and is not overrun; a null array returns the size.
    let little = "
for name, kind in (('', V1), ('_v2', V2), ('_v3', V2)):
    name = 'nvmlDeviceGetComputeRunningProcesses' + name
    result, count, got = ask(name, kind, 1)
    assert (result, count, len(got)) == (7, 2, 1), (result, count, got)
    count = ctypes.c_uint(0)
    assert n._nvmlGetFunctionPointer(name)(gpu, ctypes.byref(count), None) == 7
    assert count.value == 2
    assert n._nvmlGetFunctionPointer(name)(gpu, None, None) == 2
    assert n._nvmlGetFunctionPointer(name)(None, ctypes.byref(count), None) == 2
print('done')";
    assert_eq!(script(python(&container), little), "done");
}

#[test]
fn omits_dead_process_from_next_list() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    // The viewer runs before and after, so no other process reclaims the dead one.
    let text = "
child = subprocess.Popen([sys.argv[1], 'alloc', '--mib', '1024', '--hold', '600'], stdout=subprocess.DEVNULL)
while compute() != [(child.pid, 1024)]:
    time.sleep(0.01)
    assert child.poll() is None
child.kill()
child.wait()
print(lists('Compute'), n.nvmlDeviceGetMemoryInfo(gpu).used)";
    let probe = container.machine.program("cuda-probe").unwrap();
    let text = format!(
        "import sys; sys.argv = ['', {:?}]\n{text}",
        probe.get_program()
    );
    assert_eq!(script(python(&container), &text), "[] 0");
}

#[test]
fn shows_gpu_without_share_unchanged() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.init(1);
    unlimited.alloc(GIB);
    let other =
        "other = n.nvmlDeviceGetHandleByIndex(1); print(*(p for p, _ in lists('Compute', other)))";
    let shown = script(python(&container), other);
    assert_eq!(shown, unlimited.pid().to_string());
}

#[test]
fn lists_process_of_several_shares_once() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    container.add_share("first", GPUS[0], &Limits::memory(GIB));
    container.add_share("second", GPUS[0], &Limits::memory(2 * GIB));
    let mut process = container.process();
    // A part of its memory in each share.
    process.alloc(3 * GIB);
    let listed = script(python(&container), "print(lists('Compute'))");
    assert_eq!(listed, shown(&[(process.pid(), 3072)]));
}

#[test]
fn lists_nothing_with_unusable_region() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(GIB);
    std::fs::write(container.region("share"), vec![0xee; 300_000]).unwrap();
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(GIB);
    let mut command = python(&container);
    command.stderr(std::process::Stdio::null());
    let text = "print(ask('nvmlDeviceGetComputeRunningProcesses_v3', V2)[0])";
    let output = command.args(["-c", &format!("{LISTS}{text}")]).output();
    assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), "3\n");
}

/// A program with memory in its own PID namespace, and one outside of it in the same share. Prints what the process
/// lists and process samples show inside.
const INSIDE: &str = r#"
child = subprocess.Popen([sys.argv[1], "launch", "--ms", "50", "--seconds", "600"], stdout=subprocess.DEVNULL)
while not compute():
    time.sleep(0.01)
    assert child.poll() is None
print(child.pid, *(pid for pid, _ in compute()))
def rates():
    try:
        return n.nvmlDeviceGetUtilizationRates(gpu).gpu > 0
    except n.NVMLError_NotSupported:
        return None
deadline = time.time() + 60
while rates() == False and time.time() < deadline:
    time.sleep(0.05)
try:
    samples = [sample.pid for sample in n.nvmlDeviceGetProcessUtilization(gpu, 0)]
except n.NVMLError_NotSupported:
    samples = None
print(rates(), samples == [child.pid] if samples is not None else None)
child.kill()
"#;

#[test]
fn reports_pids_of_the_container_namespace() {
    if python::is_unavailable() {
        return;
    }
    for (policy, expected) in [
        ("translated", "True True"),
        // The owner of the samples is unknown.
        ("host", "None None"),
        ("hiddenInContainers", "None None"),
    ] {
        let machine = Machine::start(&format!("{H100X2}\nprocessIds: {policy}\n")).unwrap();
        let container = Container::on(machine);
        let limits = Limits {
            driver_reserve_bytes: 512 * MIB,
            ..Limits::memory(8 * GIB)
        };
        container.add_share("share", GPUS[0], &limits);
        let mut outside = container.process();
        outside.alloc(GIB);
        let mut unlimited = container.unlimited_process();
        unlimited.alloc(GIB);
        let mut unshare = container.command("unshare");
        // SAFETY: no arguments, cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            unshare.arg("--map-root-user");
        }
        unshare
            .args(["--pid", "--fork", "--kill-child"])
            .arg(python::clients().unwrap().join("python"));
        let probe = container.machine.program("cuda-probe").unwrap();
        let text = format!(
            "import sys; sys.argv = ['', {:?}]\n{INSIDE}",
            probe.get_program()
        );
        let output = script(unshare, &text);
        let (listed, sampled) = output.split_once('\n').unwrap();
        let (pid, listed) = listed.split_once(' ').unwrap();
        assert_eq!(pid, listed, "{policy}");
        assert_eq!(sampled, expected, "{policy}");
    }
}

#[test]
fn returns_same_handle_by_every_lookup() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let text = "
for index in range(n.nvmlDeviceGetCount()):
    one = n.nvmlDeviceGetHandleByIndex(index)
    others = [n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(one)), n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo(one).busId)]
    for other in others:
        assert n.nvmlDeviceGetIndex(other) == index
        assert n.nvmlDeviceGetMemoryInfo(other).total == n.nvmlDeviceGetMemoryInfo(one).total
    print(index, n.nvmlDeviceGetMemoryInfo(one).total >> 30)";
    assert_eq!(script(python(&container), text), "0 8\n1 79");
    // Only the second GPU has a device file: it has index 0 and no share.
    std::fs::remove_file(container.machine.root().join("dev/nvidia0")).unwrap();
    assert_eq!(script(python(&container), text), "0 79");
}

#[test]
fn changes_nothing_without_limits() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    let mut process = container.process();
    process.alloc(GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(GIB);
    let both = script(
        python(&container),
        "print(*(p for p, _ in lists('Compute')))",
    );
    let pids: Vec<i32> = both.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(
        pids.contains(&process.pid()) && pids.contains(&unlimited.pid()),
        "{both}"
    );
}
