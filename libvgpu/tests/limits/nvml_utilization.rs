//! GPU utilization that a program sees: that of its share, relative to the share's cores.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use simulator_machine::description::H100X2;
use simulator_machine::testing::{Machine, python};

use crate::nvml_processes::script;
use crate::nvml_records::RECORDS;
use crate::test_process::{Container, GIB, GPUS, TestProcess};

/// A program that keeps GPU 0 busy; killed when dropped.
pub(crate) struct Busy(Child);

impl Busy {
    fn start(mut command: Command) -> Self {
        let launch = command.args(["launch", "--ms", "100", "--seconds", "600"]);
        Self(launch.stdout(Stdio::null()).spawn().unwrap())
    }

    /// Runs in the container.
    pub(crate) fn inside(container: &Container) -> Self {
        let probe = container.machine.program("cuda-probe").unwrap();
        Self::start(container.command(probe.get_program()))
    }

    /// Runs outside of the container.
    pub(crate) fn outside(container: &Container) -> Self {
        Self::start(container.machine.program("cuda-probe").unwrap())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn python(container: &Container) -> Command {
    container.command(python::clients().unwrap().join("python"))
}

/// A container with a share of 50% that is not enforced.
pub(crate) fn half_of_gpu() -> Container {
    let container = Container::new();
    let limits = Limits {
        cores: Cores::new(50).unwrap(),
        driver_reserve_bytes: GIB / 2,
        ..Limits::memory(8 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    container
}

/// A share with an idle process, on a GPU that a process of another share uses by more than half.
pub(crate) fn idle_beside_busy() -> (Container, TestProcess, Busy) {
    let container = half_of_gpu();
    let idle = container.process();
    let busy = Busy::outside(&container);
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.gpu_percent > 50)
        .unwrap();
    (container, idle, busy)
}

#[test]
fn hides_utilization_of_other_shares() {
    if python::is_unavailable() {
        return;
    }
    let (container, _idle, _busy) = idle_beside_busy();
    let text = "
for attempt in range(20):
    rates = n.nvmlDeviceGetUtilizationRates(gpu)
    assert (rates.gpu, rates.memory) == (0, 0), rates
    for kind in (n.NVML_GPU_UTILIZATION_SAMPLES, n.NVML_MEMORY_UTILIZATION_SAMPLES):
        _, samples = n.nvmlDeviceGetSamples(gpu, kind, 0)
        assert [sample.sampleValue.uiVal for sample in samples] == [0], samples
    for ask in (n.nvmlDeviceGetProcessUtilization, n.nvmlDeviceGetProcessesUtilizationInfo):
        try:
            print(ask(gpu, 0))
        except n.NVMLError_NotFound:
            pass
    time.sleep(0.02)
print('nothing')";
    assert_eq!(script(python(&container), text), "nothing");
}

#[test]
fn reports_fully_used_share_as_100_percent() {
    if python::is_unavailable() {
        return;
    }
    let container = half_of_gpu();
    let busy = Busy::inside(&container);
    // Alone on the GPU it uses more than its 50%.
    let text = "
deadline = time.time() + 60
while n.nvmlDeviceGetUtilizationRates(gpu).gpu < 100:
    assert time.time() < deadline, n.nvmlDeviceGetUtilizationRates(gpu).gpu
    time.sleep(0.02)
_, samples = n.nvmlDeviceGetSamples(gpu, n.NVML_GPU_UTILIZATION_SAMPLES, 0)
assert len(samples) == 1 and samples[0].sampleValue.uiVal > 0
try:
    n.nvmlDeviceGetSamples(gpu, n.NVML_GPU_UTILIZATION_SAMPLES, samples[0].timeStamp + 60_000_000)
    raise SystemExit('a sample of the future')
except n.NVMLError_NotFound:
    pass
print(*(sample.pid for sample in n.nvmlDeviceGetProcessUtilization(gpu, 0)))";
    let pids = script(python(&container), text);
    assert_eq!(pids, busy.0.id().to_string());
}

/// NVML's accounting has percentages and sums of samples; both are relative to the share's cores. Beside another process the
/// share uses about its 50%, so that no limit of 100% hides a difference.
#[test]
fn scales_sums_of_accounting_to_share() {
    if python::is_unavailable() {
        return;
    }
    let container = half_of_gpu();
    let outside = container
        .machine
        .command(python::clients().unwrap().join("python"));
    let on = "n.nvmlDeviceSetAccountingMode(gpu, 1); print('on')";
    assert_eq!(script(outside, on), "on");
    let _other = Busy::outside(&container);
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.gpu_percent > 50)
        .unwrap();
    let busy = Busy::inside(&container);
    let text = format!(
        "{RECORDS}
deadline = time.time() + 60
found = Stats2({})
while found.gpu == 0:
    assert time.time() < deadline
    time.sleep(0.02)
    call('nvmlDeviceGetAccountingStats_v2', gpu, ctypes.byref(found))
assert found.samples > 0
assert found.gpu_sum == found.samples * found.gpu * 100, (found.gpu, found.samples, found.gpu_sum)
print('scaled')",
        busy.0.id()
    );
    assert_eq!(script(python(&container), &text), "scaled");
}

/// Samples of a process over time, as `timestamp percent` lines. The client first requests their number, so there may
/// be more when it requests the samples.
const WATCH: &str = "
seen = {}
for attempt in range(80):
    try:
        for sample in n.nvmlDeviceGetProcessUtilization(gpu, 0):
            if sample.pid == PID:
                seen[sample.timeStamp] = sample.smUtil
    except (n.NVMLError_NotFound, n.NVMLError_InsufficientSize):
        pass
    time.sleep(0.025)
for at, percent in seen.items():
    print(at, percent)";

fn samples(output: &str) -> Vec<(u64, u64)> {
    output
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(at, percent)| (at.parse().unwrap(), percent.parse().unwrap()))
        .collect()
}

#[test]
fn scales_process_samples_to_share() {
    if python::is_unavailable() {
        return;
    }
    let container = half_of_gpu();
    let busy = Busy::inside(&container);
    // Two other processes, so that it gets a third of the GPU.
    let _others = [Busy::outside(&container), Busy::outside(&container)];
    container
        .machine
        .wait_for_gpu(0, |gpu| {
            gpu.processes
                .iter()
                .filter(|one| one.busy_nanos > 0)
                .count()
                == 3
        })
        .unwrap();
    let text = WATCH.replace("PID", &busy.0.id().to_string());
    let (inside, outside) = std::thread::scope(|scope| {
        let inside = scope.spawn(|| script(python(&container), &text));
        let direct = container
            .machine
            .command(python::clients().unwrap().join("python"));
        let outside = script(direct, &text);
        (samples(&inside.join().unwrap()), samples(&outside))
    });
    // Pairs samples of the same period; both libraries report its time to the millisecond.
    let pairs: Vec<(u64, u64)> = inside
        .iter()
        .filter_map(|(at, percent)| {
            let same = outside
                .iter()
                .find(|(other, _)| at.abs_diff(*other) < 1000)?;
            Some((same.1, *percent))
        })
        .collect();
    assert!(
        pairs.iter().any(|(of_gpu, _)| (1..50).contains(of_gpu)),
        "{pairs:?}"
    );
    for (of_gpu, of_share) in &pairs {
        assert_eq!(*of_share, (2 * of_gpu).min(100), "{pairs:?}");
    }
}

#[test]
fn rejects_struct_of_unknown_version() {
    if python::is_unavailable() {
        return;
    }
    let container = half_of_gpu();
    let _idle = container.process();
    let text = "
info = n.c_nvmlProcessesUtilizationInfo_v1_t()
ask = n._nvmlGetFunctionPointer('nvmlDeviceGetProcessesUtilizationInfo')
info.version = 77
wrong = ask(gpu, ctypes.byref(info))
info.version = n.ProcessesUtilizationInfo_v1
print(wrong, ask(gpu, ctypes.byref(info)), ask(gpu, None))
memory = n.c_nvmlMemory_v2_t()
memory.version = 77
print(n._nvmlGetFunctionPointer('nvmlDeviceGetMemoryInfo_v2')(gpu, ctypes.byref(memory)))
print(n._nvmlGetFunctionPointer('nvmlDeviceGetUtilizationRates')(gpu, None))";
    assert_eq!(script(python(&container), text), "3 7 2\n25\n2");
}

/// Returns a container with a metered share of 50%, and its process.
fn metered_half(machine: Machine) -> (Container, TestProcess) {
    let container = Container::on(machine);
    let limits = Limits {
        cores: Cores::new(50).unwrap(),
        compute_policy: ComputePolicy::Fixed,
        ..Limits::memory(8 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    process.alloc(GIB);
    (container, process)
}

/// Returns the output of `client` while the share uses 25% of the GPU, by its own account.
fn while_using_a_quarter(container: &Container, client: impl FnOnce() -> String) -> String {
    let [owner] = container.processes_of("share")[..] else {
        panic!("one process")
    };
    let region = OpenOptions::new()
        .write(true)
        .open(container.region("share"));
    let region = region.unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) {
                let used = u64::try_from(begin.elapsed().as_micros()).unwrap() / 4;
                let place = owner.slot.offset() as u64 + 136;
                region.write_all_at(&used.to_ne_bytes(), place).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let output = std::panic::catch_unwind(std::panic::AssertUnwindSafe(client));
        done.store(true, Ordering::Relaxed);
        output.unwrap()
    })
}

/// 25% of the GPU is 50% of the share.
fn assert_about_half(output: &str) {
    let percent: u32 = output.parse().unwrap();
    assert!((35..=65).contains(&percent), "{percent}");
}

/// By NVML's samples the process does nothing.
#[test]
fn prefers_meter_of_share_over_samples() {
    if python::is_unavailable() {
        return;
    }
    let (container, _process) = metered_half(Machine::start(H100X2).unwrap());
    let text = "
n.nvmlDeviceGetUtilizationRates(gpu)
time.sleep(1.5)
print(n.nvmlDeviceGetUtilizationRates(gpu).gpu)";
    let output = while_using_a_quarter(&container, || script(python(&container), text));
    assert_about_half(&output);
}

/// The share's meter answers where the driver shows a container no processes.
#[test]
fn reports_metered_utilization_without_samples() {
    if python::is_unavailable() {
        return;
    }
    let machine = Machine::start(&format!("{H100X2}\nprocessIds: hiddenInContainers\n")).unwrap();
    let (container, _process) = metered_half(machine);
    let mut unshare = container.command("unshare");
    // SAFETY: no arguments, cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        unshare.arg("--map-root-user");
    }
    unshare
        .args(["--pid", "--fork", "--kill-child"])
        .arg(python::clients().unwrap().join("python"));
    let text = "
child = subprocess.Popen([sys.argv[1], 'alloc', '--mib', '100', '--hold', '600'], stdout=subprocess.DEVNULL)
while not compute():
    time.sleep(0.01)
    assert child.poll() is None
n.nvmlDeviceGetUtilizationRates(gpu)
time.sleep(1.5)
print(n.nvmlDeviceGetUtilizationRates(gpu).gpu)
child.kill()";
    let probe = container.machine.program("cuda-probe").unwrap();
    let text = format!(
        "import sys; sys.argv = ['', {:?}]\n{text}",
        probe.get_program()
    );
    let output = while_using_a_quarter(&container, || script(unshare, &text));
    assert_about_half(&output);
}
