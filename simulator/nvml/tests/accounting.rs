//! Accounting, performance monitoring and process details.

use std::ffi::c_uint;
use std::process::{Child, Stdio};

use anyhow::{Context, bail, ensure};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlAccountingStats_t, nvmlDevice_t, nvmlGpmMetricsGet_t, nvmlGpmSample_t,
    nvmlGpmSupport_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_t,
};
use simulator_machine::client::Connection;
use simulator_machine::description::{A100_80X8, H100X2, T4};
use simulator_machine::kernel::ProcessStatus;
use simulator_machine::protocol::{ClientKind, GpuIndex, MigReply, MigRequest, Reply, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::{Machine, poll, skips_without_root};

const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const NOT_FOUND: c_uint = 6;
const INSUFFICIENT_SIZE: c_uint = 7;
const VERSION_MISMATCH: c_uint = 25;

/// A child process that is killed when the test ends.
struct Running(Child);

impl Running {
    fn start(machine: &Machine, arguments: &[&str], visible: Option<&str>) -> anyhow::Result<Self> {
        let mut command = machine.program("cuda-probe")?;
        command.args(arguments).stdout(Stdio::null());
        if let Some(visible) = visible {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        }
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn open(machine: &Machine) -> anyhow::Result<(NvmlLib, nvmlDevice_t)> {
    // SAFETY: the library under test, whose functions have these types.
    let library = unsafe { NvmlLib::new(machine.lib_dir().join("libnvidia-ml.so.1")) }?;
    let mut device = std::ptr::null_mut();
    // SAFETY: as above.
    ensure!(unsafe { library.nvmlInit_v2() } == 0);
    // SAFETY: writes one handle.
    ensure!(unsafe { library.nvmlDeviceGetHandleByIndex_v2(0, &raw mut device) } == 0);
    Ok((library, device))
}

fn pids(library: &NvmlLib, device: nvmlDevice_t) -> Result<Vec<c_uint>, c_uint> {
    let mut pids = vec![0; 64];
    let mut count = 64;
    // SAFETY: an array of that length.
    match unsafe { library.nvmlDeviceGetAccountingPids(device, &raw mut count, pids.as_mut_ptr()) }
    {
        0 => {
            pids.truncate(count as usize);
            Ok(pids)
        }
        code => Err(code),
    }
}

fn stats(
    library: &NvmlLib,
    device: nvmlDevice_t,
    pid: c_uint,
) -> Result<nvmlAccountingStats_t, c_uint> {
    let mut stats = nvmlAccountingStats_t {
        gpuUtilization: 0,
        memoryUtilization: 0,
        maxMemoryUsage: 0,
        time: 0,
        startTime: 0,
        isRunning: 9,
        reserved: [0; 5],
    };
    // SAFETY: writes one struct.
    match unsafe { library.nvmlDeviceGetAccountingStats(device, pid, &raw mut stats) } {
        0 => Ok(stats),
        code => Err(code),
    }
}

#[test]
fn keeps_accounting_of_ended_processes() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let (library, device) = open(&machine)?;
    let mode = || {
        let mut mode = 9;
        // SAFETY: writes one number.
        let code = unsafe { library.nvmlDeviceGetAccountingMode(device, &raw mut mode) };
        (code, mode)
    };
    assert_eq!(mode(), (0, 0));
    assert_eq!(pids(&library, device), Err(NOT_SUPPORTED));
    assert_eq!(stats(&library, device, 1).err(), Some(NOT_SUPPORTED));
    let earlier = Running::start(&machine, &["alloc", "--mib", "1", "--hold", "600"], None)?;
    machine.wait_for_gpu(0, |gpu| gpu.processes.len() == 1)?;
    // SAFETY: no pointers.
    let set = |mode| unsafe { library.nvmlDeviceSetAccountingMode(device, mode) };
    assert_eq!(set(7), INVALID_ARGUMENT);
    assert_eq!(set(1), 0);
    assert_eq!(mode(), (0, 1));

    let busy = Running::start(
        &machine,
        &["launch", "--ms", "20", "--seconds", "600"],
        None,
    )?;
    let pid = busy.0.id();
    // Processes that started before are not accounted.
    assert_eq!(
        poll(|| Ok(pids(&library, device).ok().filter(|pids| !pids.is_empty())))?,
        [pid]
    );
    let running = poll(|| {
        let found = stats(&library, device, pid);
        Ok(found.ok().filter(|stats| stats.gpuUtilization > 0))
    })?;
    assert_eq!((running.isRunning, running.time), (1, 0));
    // Durations are whole milliseconds: a kernel of 20 ms has to run first.
    let is_done = |process: &ProcessStatus| process.pid == pid && process.kernels > 0;
    let gpu = machine.wait_for_gpu(0, |gpu| gpu.processes.iter().any(is_done))?;
    let used = gpu.processes.iter().find(|process| process.pid == pid);
    let used = used.context("missing process on the GPU")?.used_bytes;
    assert!(running.maxMemoryUsage >= used, "{running:?} {used}");
    drop(busy);
    let gone = poll(|| {
        let found = stats(&library, device, pid);
        Ok(found.ok().filter(|stats| stats.isRunning == 0))
    })?;
    assert!(
        gone.time > 0 && gone.maxMemoryUsage >= used,
        "{gone:?} {used}"
    );
    assert_eq!(gone.startTime, running.startTime);
    assert_eq!(pids(&library, device), Ok(vec![pid]));
    let mut size = 0;
    // SAFETY: writes one number.
    let code = unsafe { library.nvmlDeviceGetAccountingBufferSize(device, &raw mut size) };
    assert_eq!(code, 0);
    assert_eq!(size, 4000);
    // SAFETY: no pointers.
    assert_eq!(unsafe { library.nvmlDeviceClearAccountingPids(device) }, 0);
    assert_eq!(pids(&library, device), Ok(Vec::new()));
    assert_eq!(stats(&library, device, pid).err(), Some(NOT_FOUND));
    drop(earlier);
    Ok(())
}

fn sample(library: &NvmlLib) -> nvmlGpmSample_t {
    let mut sample = std::ptr::null_mut();
    // SAFETY: writes one handle.
    assert_eq!(unsafe { library.nvmlGpmSampleAlloc(&raw mut sample) }, 0);
    sample
}

/// Return codes and values of metrics by id.
fn metrics(
    library: &NvmlLib,
    [first, second]: [nvmlGpmSample_t; 2],
    ids: &[c_uint],
) -> Result<Vec<(c_uint, f64)>, c_uint> {
    // SAFETY: numbers and pointers, all of which may be zero.
    let mut asked: nvmlGpmMetricsGet_t = unsafe { std::mem::zeroed() };
    asked.version = 1;
    asked.numMetrics = c_uint::try_from(ids.len()).unwrap_or(0);
    (asked.sample1, asked.sample2) = (first, second);
    for (metric, id) in asked.metrics.iter_mut().zip(ids) {
        metric.metricId = *id;
    }
    // SAFETY: reads and writes one struct.
    match unsafe { library.nvmlGpmMetricsGet(&raw mut asked) } {
        0 => Ok(asked
            .metrics
            .iter()
            .take(ids.len())
            .map(|one| (one.nvmlReturn, one.value))
            .collect()),
        code => Err(code),
    }
}

const GRAPHICS: c_uint = 1;
const MULTIPROCESSORS: c_uint = 2;
const TENSOR: c_uint = 5;

#[test]
fn separates_busy_time_from_occupancy() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let (library, device) = open(&machine)?;
    let samples = [sample(&library), sample(&library)];
    // SAFETY: no pointers of ours.
    let take = |sample| unsafe { library.nvmlGpmSampleGet(device, sample) };
    assert_eq!(
        metrics(&library, samples, &[GRAPHICS]),
        Err(INVALID_ARGUMENT)
    );
    // One block: always busy, on one of 132 multiprocessors.
    let busy = Running::start(
        &machine,
        &["launch", "--ms", "20", "--seconds", "600", "--blocks", "1"],
        None,
    )?;
    machine.wait_for_gpu(0, |gpu| gpu.busy_nanos > 0)?;
    assert_eq!(take(samples[0]), 0);
    let before = machine.gpu(0)?.busy_nanos;
    machine.wait_for_gpu(0, |gpu| gpu.busy_nanos > before + 200_000_000)?;
    assert_eq!(take(samples[1]), 0);
    let read = metrics(&library, samples, &[GRAPHICS, MULTIPROCESSORS, TENSOR]);
    let read = read.map_err(|code| anyhow::anyhow!("NVML answers {code}"))?;
    let [(0, time), (0, occupied), (NOT_SUPPORTED, _)] = read[..] else {
        bail!("{read:?}");
    };
    assert!(time > 0.0 && time <= 100.0, "{time}");
    let ratio = time / occupied;
    assert!((125.0..140.0).contains(&ratio), "{time} {occupied}");
    drop(busy);
    for sample in samples {
        // SAFETY: allocated above.
        assert_eq!(unsafe { library.nvmlGpmSampleFree(sample) }, 0);
        // SAFETY: no longer a valid sample.
        let code = unsafe { library.nvmlGpmSampleFree(sample) };
        assert_eq!(code, INVALID_ARGUMENT);
    }
    Ok(())
}

#[test]
fn samples_concurrent_gpu_instances_separately() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let (mut setup, _welcome) =
        Connection::open(&DriverRoot::new(machine.root()), ClientKind::Nvml)?;
    let gpu = GpuIndex(0);
    let mut ask = |request| setup.request(&Request::Mig { gpu, request });
    ask(MigRequest::SetMode { enabled: true })?;
    let mut gpus = Vec::new();
    for _ in 0..2 {
        // 3g.40gb with all of its slices.
        let Reply::Mig(MigReply::Created(gpu_instance)) = ask(MigRequest::CreateGpuInstance {
            profile: 9,
            start: None,
        })?
        else {
            bail!("no GPU instance");
        };
        ask(MigRequest::CreateComputeInstance {
            gpu_instance,
            profile: 2,
            start: None,
        })?;
        gpus.push(gpu_instance);
    }
    let uuids: Vec<(u32, String)> = machine
        .gpu(0)?
        .mig
        .gpu_instances
        .into_iter()
        .map(|gpu_instance| {
            (
                gpu_instance.id,
                gpu_instance.compute_instances[0].uuid.clone(),
            )
        })
        .collect();
    let (library, device) = open(&machine)?;
    // SAFETY: no pointers of ours.
    let take =
        |gpu_instance, sample| unsafe { library.nvmlGpmMigSampleGet(device, gpu_instance, sample) };
    let samples: Vec<[nvmlGpmSample_t; 2]> = gpus
        .iter()
        .map(|_| [sample(&library), sample(&library)])
        .collect();
    assert_eq!(take(99, samples[0][0]), INVALID_ARGUMENT);
    let mut processes = Vec::new();
    for (_, uuid) in &uuids {
        // Eight blocks fill a multiprocessor.
        let arguments = [
            "launch",
            "--ms",
            "50",
            "--seconds",
            "600",
            "--blocks",
            "480",
        ];
        processes.push(Running::start(&machine, &arguments, Some(uuid))?);
    }
    let both = |gpu: &simulator_machine::kernel::GpuStatus, more: &[u64]| {
        gpu.processes.len() == 2
            && gpu
                .processes
                .iter()
                .zip(more)
                .all(|(process, more)| process.busy_nanos > *more)
    };
    machine.wait_for_gpu(0, |gpu| both(gpu, &[0, 0]))?;
    for (gpu_instance, [first, _]) in gpus.iter().zip(&samples) {
        assert_eq!(take(*gpu_instance, *first), 0);
    }
    let before = machine.gpu(0)?;
    let target: Vec<u64> = before
        .processes
        .iter()
        .map(|one| one.busy_nanos + 500_000_000)
        .collect();
    let after = machine.wait_for_gpu(0, |gpu| both(gpu, &target))?;
    for (gpu_instance, [_, second]) in gpus.iter().zip(&samples) {
        assert_eq!(take(*gpu_instance, *second), 0);
    }
    let sum = |gpu: &simulator_machine::kernel::GpuStatus| -> u64 {
        gpu.processes.iter().map(|process| process.busy_nanos).sum()
    };
    let (together, gpu_time) = (
        sum(&after) - sum(&before),
        after.busy_nanos - before.busy_nanos,
    );
    // Alternating, both together would have the GPU's time.
    assert!(together * 10 > gpu_time * 13, "{together} {gpu_time}");
    for pair in samples {
        let read = metrics(&library, pair, &[GRAPHICS, MULTIPROCESSORS]);
        let read = read.map_err(|code| anyhow::anyhow!("NVML answers {code}"))?;
        // Kernels fill the instance: busy time equals occupied time, independent of the other
        // instance.
        let [(0, time), (0, occupied)] = read[..] else {
            bail!("{read:?}");
        };
        assert!(
            time > 0.0 && (time - occupied).abs() < 1.0,
            "{time} {occupied}"
        );
    }
    Ok(())
}

#[test]
fn rejects_performance_monitoring_before_hopper() -> anyhow::Result<()> {
    for (machine, expected) in [(H100X2, 1), (A100_80X8, 0), (T4, 0)] {
        let machine = Machine::start(machine)?;
        let (library, device) = open(&machine)?;
        let mut support = nvmlGpmSupport_t {
            version: 1,
            isSupportedDevice: 9,
        };
        // SAFETY: reads and writes one struct.
        let code = unsafe { library.nvmlGpmQueryDeviceSupport(device, &raw mut support) };
        assert_eq!(code, 0);
        assert_eq!(support.isSupportedDevice, expected);
        support.version = 2;
        // SAFETY: as above.
        let code = unsafe { library.nvmlGpmQueryDeviceSupport(device, &raw mut support) };
        assert_eq!(code, VERSION_MISMATCH);
        let sample = sample(&library);
        // SAFETY: no pointers of ours.
        let code = unsafe { library.nvmlGpmSampleGet(device, sample) };
        assert_eq!(code, if expected == 1 { 0 } else { NOT_SUPPORTED });
    }
    Ok(())
}

#[test]
fn lists_processes_in_detail() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let (library, device) = open(&machine)?;
    let process = Running::start(&machine, &["alloc", "--mib", "100", "--hold", "600"], None)?;
    machine.wait_for_gpu(0, |gpu| gpu.used_bytes > 600 << 20)?;
    let empty = nvmlProcessDetail_v1_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
        usedGpuCcProtectedMemory: 9,
    };
    let mut room = [empty; 4];
    let version = c_uint::try_from(size_of::<nvmlProcessDetailList_t>())? | 1 << 24;
    let mut list = |version, mode, entries| {
        let mut list = nvmlProcessDetailList_t {
            version,
            mode,
            numProcArrayEntries: entries,
            procArray: room.as_mut_ptr(),
        };
        // SAFETY: reads and writes the struct and its array.
        let code = unsafe { library.nvmlDeviceGetRunningProcessDetailList(device, &raw mut list) };
        (code, list.numProcArrayEntries, room[0])
    };
    assert_eq!(list(version, 0, 0).0, INSUFFICIENT_SIZE);
    assert_eq!(list(version, 0, 0).1, 1);
    assert_eq!(list(1, 0, 4).0, VERSION_MISMATCH);
    assert_eq!(list(version, 3, 4).0, INVALID_ARGUMENT);
    let (code, count, first) = list(version, 0, 4);
    assert_eq!((code, count, first.pid), (0, 1, process.0.id()));
    assert_eq!(first.usedGpuMemory, machine.gpu(0)?.processes[0].used_bytes);
    assert_eq!(first.usedGpuCcProtectedMemory, 0);
    for mode in [1, 2] {
        assert_eq!(list(version, mode, 4).1, 0);
    }
    Ok(())
}
