//! Sensors, topology and errors through nvidia-ml-py.

use std::process::Command;

use anyhow::Context;
use simulator_machine::description::{
    A30X2, A100_80X8, GB10, H100X2, H200X8, RTX_4090, RTX_PRO_6000X2, T4,
};
use simulator_machine::testing::{Machine, python};

const PRELUDE: &str = r#"
import ctypes, os, pynvml, time
from pynvml import *

nvmlInit()
gpus = [nvmlDeviceGetHandleByIndex(index) for index in range(nvmlDeviceGetCount())]
first, last = gpus[0], gpus[-1]

# nvidia-ml-py has these as tuples, by mistake.
READ, NVLINK = 0, 2

def raw(name, *arguments):
    return pynvml._nvmlGetFunctionPointer(name)(*arguments)

def refusal(function, *arguments):
    try:
        return "answered", function(*arguments)
    except NVMLError as error:
        return error.value
"#;

/// Runs a Python program with assertions.
fn check(yaml: &str, script: &str) -> anyhow::Result<()> {
    let machine = Machine::start(yaml)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", &format!("{PRELUDE}{script}\nprint('checked')")])
        .env("LIBRARY", machine.lib_dir().join("libnvidia-ml.so.1"))
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "checked\n",
        "{error}"
    );
    Ok(())
}

#[test]
fn reports_modes_and_sensors_of_an_idle_gpu() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    check(
        H100X2,
        r#"
assert nvmlDeviceGetTemperature(first, NVML_TEMPERATURE_GPU) == 30
assert nvmlDeviceGetTemperatureThreshold(first, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) == 87
assert nvmlDeviceGetTemperatureThreshold(first, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN) == 92
assert nvmlDeviceGetPowerUsage(first) == 70_000
assert nvmlDeviceGetEnforcedPowerLimit(first) == nvmlDeviceGetPowerManagementLimit(first) == 700_000
assert nvmlDeviceGetPowerManagementLimitConstraints(first) == [350_000, 700_000]
energy = nvmlDeviceGetTotalEnergyConsumption(first)
while nvmlDeviceGetTotalEnergyConsumption(first) <= energy:
    pass
assert nvmlDeviceGetMaxClockInfo(first, NVML_CLOCK_SM) == 1980
assert nvmlDeviceGetClockInfo(first, NVML_CLOCK_MEM) == nvmlDeviceGetMaxClockInfo(first, NVML_CLOCK_MEM) == 2619
assert nvmlDeviceGetEccMode(first) == [1, 1]
assert nvmlDeviceGetTotalEccErrors(first, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) == 0
assert nvmlDeviceGetRemappedRows(first) == (0, 0, 0, 0)
assert nvmlDeviceGetPerformanceState(first) == NVML_PSTATE_0
assert nvmlDeviceGetComputeMode(first) == NVML_COMPUTEMODE_DEFAULT
assert nvmlDeviceGetPersistenceMode(first) == 1
assert nvmlDeviceGetCurrentClocksThrottleReasons(first) == nvmlClocksThrottleReasonGpuIdle
assert nvmlDeviceGetMaxPcieLinkGeneration(first) == nvmlDeviceGetCurrPcieLinkGeneration(first) == 5
assert nvmlDeviceGetMaxPcieLinkWidth(first) == 16
assert nvmlDeviceGetMemoryBusWidth(first) == 5120
assert nvmlDeviceGetVbiosVersion(first) == "96.00.74.00.01"
assert nvmlDeviceGetSerial(last) == "1652823054022"
assert nvmlDeviceGetIndex(nvmlDeviceGetHandleBySerial("1652823054022")) == 1
assert nvmlDeviceGetBoardPartNumber(first) == "692-2G520-0200-000"
assert nvmlSystemGetProcessName(os.getpid()).endswith("python")
"#,
    )
}

#[test]
fn reports_topology_between_gpus() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    // Four GPUs on each of two sockets, all with NVSwitch.
    let linked = r#"
numa = [nvmlDeviceGetNumaNodeId(gpu) for gpu in gpus]
assert numa == [0] * (len(gpus) // 2) + [1] * (len(gpus) // 2), numa
for gpu, node in zip(gpus, numa):
    for other, of_other in zip(gpus, numa):
        level = nvmlDeviceGetTopologyCommonAncestor(gpu, other)
        near = NVML_TOPOLOGY_NODE if node == of_other else NVML_TOPOLOGY_SYSTEM
        assert level == (NVML_TOPOLOGY_INTERNAL if gpu is other else near), level
        if gpu is not other:
            assert nvmlDeviceGetP2PStatus(gpu, other, NVLINK) == 0
            assert nvmlDeviceGetP2PStatus(gpu, other, READ) == 0
uuids = {nvmlDeviceGetUUID(gpu) for gpu in nvmlDeviceGetTopologyNearestGpus(first, NVML_TOPOLOGY_NODE)}
assert uuids == {nvmlDeviceGetUUID(gpu) for gpu, node in zip(gpus[1:], numa[1:]) if node == 0}, uuids
assert nvmlDeviceGetMemoryAffinity(last, 1, 0)[0] == 0b10
"#;
    let links = |count: u32, version: u32| {
        format!(
            "
for link in range({count}):
    assert nvmlDeviceGetNvLinkState(first, link) == 1
    assert nvmlDeviceGetNvLinkVersion(first, link) == {version}
assert refusal(nvmlDeviceGetNvLinkState, first, {count}) == NVML_ERROR_INVALID_ARGUMENT
"
        )
    };
    check(H200X8, &format!("{linked}{}", links(18, 4)))?;
    check(A100_80X8, &format!("{linked}{}", links(12, 3)))?;
    check(A30X2, &links(4, 3))?;
    // Two GPUs without NVLink on two sockets.
    check(
        RTX_PRO_6000X2,
        "
assert nvmlDeviceGetTopologyCommonAncestor(first, last) == NVML_TOPOLOGY_SYSTEM
assert nvmlDeviceGetP2PStatus(first, last, NVLINK) == 5
assert refusal(nvmlDeviceGetNvLinkState, first, 0) == NVML_ERROR_NOT_SUPPORTED
",
    )
}

#[test]
fn reports_missing_hardware_as_not_supported() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let lacking = |names: &str| {
        format!(
            "
for function in ({names},):
    assert refusal(function, first) == NVML_ERROR_NOT_SUPPORTED, function.__name__
"
        )
    };
    let none = "assert nvmlDeviceGetMaxMigDeviceCount(first) == 0";
    check(T4, &format!("{}{none}", lacking("nvmlDeviceGetMigMode")))?;
    let consumer = lacking("nvmlDeviceGetSerial, nvmlDeviceGetEccMode, nvmlDeviceGetNumaNodeId");
    check(RTX_4090, &consumer)?;
    // No GPU memory: neither version reports a size.
    let uma = lacking("nvmlDeviceGetMemoryInfo, nvmlDeviceGetEccMode, nvmlDeviceGetBAR1MemoryInfo");
    let v2 = "\nassert refusal(nvmlDeviceGetMemoryInfo, first, nvmlMemory_v2) == NVML_ERROR_NOT_SUPPORTED\n";
    check(GB10, &format!("{uma}{v2}"))
}

#[test]
fn returns_the_error_codes_of_the_real_library() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    check(
        H100X2,
        r#"
small = ctypes.create_string_buffer(8)
assert raw("nvmlDeviceGetName", first, small, 8) == NVML_ERROR_INSUFFICIENT_SIZE
assert raw("nvmlDeviceGetUUID", first, small, 8) == NVML_ERROR_INSUFFICIENT_SIZE
assert raw("nvmlDeviceGetName", first, None, 64) == NVML_ERROR_INVALID_ARGUMENT
assert raw("nvmlDeviceGetMemoryInfo", first, None) == NVML_ERROR_INVALID_ARGUMENT
assert raw("nvmlDeviceGetCount_v2", None) == NVML_ERROR_INVALID_ARGUMENT
invalid = ctypes.c_uint()
assert raw("nvmlDeviceGetIndex", None, ctypes.byref(invalid)) == NVML_ERROR_INVALID_ARGUMENT
handle = c_nvmlDevice_t()
assert raw("nvmlDeviceGetHandleByIndex_v2", 2, ctypes.byref(handle)) == NVML_ERROR_INVALID_ARGUMENT
assert raw("nvmlDeviceGetHandleByUUID", b"GPU-0", ctypes.byref(handle)) == NVML_ERROR_NOT_FOUND
assert raw("nvmlDeviceGetHandleByPciBusId_v2", b"0000:ff:00.0", ctypes.byref(handle)) == NVML_ERROR_NOT_FOUND
# What sets something is there and is not supported.
assert raw("nvmlDeviceSetPowerManagementLimit", first, 1) == NVML_ERROR_NOT_SUPPORTED
texts = [pynvml.nvmlErrorString(code) for code in (0, 1, 3, 7, 15, 999)]
assert texts == ["Success", "Uninitialized", "Not Supported", "Insufficient Size", "GPU is lost", "Unknown Error"], texts
nvmlInit()
nvmlShutdown()
assert nvmlDeviceGetCount() == 2, "initialised twice, shut down once"
nvmlShutdown()
library = ctypes.CDLL(os.environ["LIBRARY"])
assert library.nvmlDeviceGetCount_v2(ctypes.byref(invalid)) == NVML_ERROR_UNINITIALIZED
assert library.nvmlShutdown() == NVML_ERROR_UNINITIALIZED
"#,
    )
}

/// The faults listed in the README, from a shell.
#[test]
fn sets_and_clears_faults_from_the_command_line() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let ctl = |arguments: &str| -> anyhow::Result<std::process::Output> {
        let program = simulator_machine::testing::built()?.join("simulator-machine");
        let mut command = Command::new(program);
        command.arg("ctl").arg("--root").arg(machine.root());
        command.args(arguments.split(' '));
        command.output().context("run simulator-machine")
    };
    let python = python::clients()?.join("python");
    let says = |expression: &str| -> anyhow::Result<String> {
        let script = format!("{PRELUDE}print({expression})");
        let output = machine.command(&python).args(["-c", &script]).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        Ok(format!(
            "{}{error}",
            String::from_utf8_lossy(&output.stdout)
        ))
    };
    let memory = "refusal(nvmlDeviceGetMemoryInfo, last)";
    assert!(
        ctl("break --gpu 1 --unsupported memory,power")?
            .status
            .success()
    );
    assert_eq!(says(memory)?, "3\n");
    assert_eq!(says("refusal(nvmlDeviceGetPowerUsage, last)")?, "3\n");
    assert_eq!(says("nvmlDeviceGetTemperature(last, 0)")?, "30\n");
    assert_eq!(
        says("refusal(nvmlDeviceGetPowerUsage, first)[0]")?,
        "answered\n"
    );
    assert!(ctl("break --gpu 1")?.status.success());
    assert_eq!(says("nvmlDeviceGetMemoryInfo(last).used >> 30")?, "0\n");
    assert!(ctl("break --gpu 1 --lost")?.status.success());
    let script = "
import pynvml
pynvml.nvmlInit()
try:
    pynvml.nvmlDeviceGetHandleByIndex(1)
except pynvml.NVMLError_GpuIsLost as error:
    print(error.value)
";
    let output = machine.command(&python).args(["-c", script]).output()?;
    assert_eq!(String::from_utf8_lossy(&output.stdout), "15\n");
    assert!(ctl("status")?.status.success());
    assert!(ctl("break --gpu 1 --refuses-contexts")?.status.success());
    let probe = |gpu: &str| -> anyhow::Result<bool> {
        let mut probe = machine.program("cuda-probe")?;
        probe.args(["alloc", "--mib", "1", "--device", gpu]);
        Ok(probe.output()?.status.success())
    };
    assert!(!probe("1")? && probe("0")?);
    assert!(
        ctl("break --gpu 1 --delay-milliseconds 300")?
            .status
            .success()
    );
    let slow = "(begun := time.monotonic(), refusal(nvmlDeviceGetMemoryInfo, last), time.monotonic() - begun)[2] >= 0.3";
    assert_eq!(says(slow)?, "True\n");
    assert!(ctl("xid --gpu 0 --code 79")?.status.success());
    for wrong in [
        "xid --gpu 2 --code 79",
        "break --gpu 2",
        "break --gpu 0 --unsupported smell",
    ] {
        assert!(!ctl(wrong)?.status.success(), "{wrong}");
    }
    Ok(())
}
