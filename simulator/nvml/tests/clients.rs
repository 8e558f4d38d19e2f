//! Unmodified client programs: nvidia-ml-py, gpustat, nvitop, go-nvml.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

use anyhow::{Context, ensure};
use simulator_machine::description::{A30X2, BUNDLED, H100X2, MIB, T4};
use simulator_machine::testing::{Machine, python, skip, skips_without_root};

fn text(output: &Output) -> anyhow::Result<String> {
    let text = String::from_utf8(output.stdout.clone())?;
    ensure!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text)
}

/// A child process that is killed when the test ends.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that holds 1000 MiB of GPU 0, and its entry on the GPU.
fn holder(machine: &Machine) -> anyhow::Result<(Background, u64)> {
    let mut probe = machine.program("cuda-probe")?;
    let hold = probe.args(["alloc", "--mib", "1000", "--hold", "600"]);
    let child = Background(hold.stdout(Stdio::null()).spawn()?);
    let gpu = machine.wait_for_gpu(0, |gpu| gpu.used_bytes > 1000 * MIB)?;
    Ok((child, gpu.used_bytes))
}

#[test]
fn shows_memory_and_process_in_gpustat() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let (child, used) = holder(&machine)?;
    let output = machine
        .command(python::clients()?.join("gpustat"))
        .arg("--json")
        .output()?;
    let shown: serde_json::Value = serde_json::from_str(&text(&output)?)?;
    assert_eq!(shown["gpus"][0]["memory.used"], used / MIB);
    assert_eq!(shown["gpus"][0]["memory.total"], 81559);
    assert_eq!(shown["gpus"][0]["processes"][0]["pid"], child.0.id());
    assert_eq!(shown["gpus"][0]["processes"][0]["command"], "cuda-probe");
    assert_eq!(shown["gpus"][1]["processes"], serde_json::json!([]));
    Ok(())
}

#[test]
fn shows_gpus_in_nvitop() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let (child, used) = holder(&machine)?;
    let output = machine
        .command(python::clients()?.join("nvitop"))
        .args(["--once", "--ascii"])
        .output()?;
    let shown = text(&output)?;
    assert!(shown.contains("H100 80GB HBM3"), "{shown}");
    assert!(
        shown.contains(&format!("{}MiB / 79.65GiB", used / MIB)),
        "{shown}"
    );
    assert!(shown.contains(&format!("{} C", child.0.id())), "{shown}");
    Ok(())
}

/// Calls every getter of nvidia-ml-py whose only parameter is a device, on every bundled machine:
/// each returns a value or "not supported".
#[test]
fn answers_every_getter_of_nvidia_ml_py() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let script = r#"
import inspect, pynvml
pynvml.nvmlInit()
answered = 0
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    for name in dir(pynvml):
        function = getattr(pynvml, name)
        if not name.startswith("nvmlDeviceGet") or not inspect.isfunction(function):
            continue
        required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if required not in (["handle"], ["device"]):
            continue
        try:
            function(handle)
            answered += 1
        except pynvml.NVMLError_NotSupported:
            pass
pynvml.nvmlShutdown()
print(answered)
"#;
    let python = python::clients()?.join("python");
    for (name, yaml) in BUNDLED {
        let machine = Machine::start(yaml)?;
        let output = machine.command(&python).args(["-c", script]).output()?;
        let answered: usize = text(&output)
            .with_context(|| name.to_string())?
            .trim()
            .parse()?;
        assert!(answered >= 50, "{name}: {answered}");
    }
    Ok(())
}

/// Creates a 3g and a 1g instance on GPU 0 with nvidia-ml-py, then calls every getter for both MIG
/// devices.
const PARTITION: &str = r#"
import inspect, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
for kind in (pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE, pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE):
    profile = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, kind)
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, profile.id)
    largest = {1: 0, 3: 2}[profile.sliceCount]
    shape = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, largest, 0)
    pynvml.nvmlGpuInstanceCreateComputeInstance(instance, shape.id)
"#;

#[test]
fn answers_every_nvidia_ml_py_getter_for_mig_devices() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let script = r#"
for index in range(2):
    device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    answered = []
    for name in dir(pynvml):
        function = getattr(pynvml, name)
        if not name.startswith("nvmlDeviceGet") or not inspect.isfunction(function):
            continue
        required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if required not in (["handle"], ["device"]):
            continue
        try:
            function(device)
            answered.append(name)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            pass
    for name in ("Name", "UUID", "Index", "MemoryInfo", "Attributes", "GpuInstanceId", "ComputeInstanceId"):
        assert f"nvmlDeviceGet{name}" in answered, (name, answered)
    print(pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetMemoryInfo(device).total >> 20)
"#;
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", &format!("{PARTITION}{script}")])
        .output()?;
    assert_eq!(
        text(&output)?,
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb 40448\nNVIDIA H100 80GB HBM3 MIG 1g.10gb 9984\n"
    );
    Ok(())
}

#[test]
fn shows_mig_devices_in_nvitop() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", PARTITION])
        .output()?;
    text(&output)?;
    let output = machine
        .command(python::clients()?.join("nvitop"))
        .args(["--once", "--ascii"])
        .output()?;
    let shown = text(&output)?;
    for expected in ["3g.40gb", "1g.10gb", "0B / 39.50GiB", "0B /  9984MiB"] {
        assert!(shown.contains(expected), "{shown}");
    }
    let output = machine
        .command(python::clients()?.join("gpustat"))
        .arg("--json")
        .output()?;
    let shown: serde_json::Value = serde_json::from_str(&text(&output)?)?;
    assert_eq!(shown["gpus"][0]["utilization.gpu"], serde_json::Value::Null);
    assert_eq!(shown["gpus"][1]["utilization.gpu"], 0);
    Ok(())
}

/// go-nvml looks up every symbol at start.
/// Builds the client with go-nvml. Returns `None` without Go, and then reports the present test as skipped.
fn go_client() -> anyhow::Result<Option<PathBuf>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/go-client");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-client");
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock();
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(".")
        .current_dir(&sources)
        .env("GOFLAGS", "-mod=readonly")
        .output();
    match built {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            skip("no Go");
            return Ok(None);
        }
        built => drop(text(&built.context("run go build")?)?),
    };
    Ok(Some(program))
}

#[test]
fn lists_gpus_with_go_nvml() -> anyhow::Result<()> {
    let Some(client) = go_client()? else {
        return Ok(());
    };
    let machine = Machine::start(T4)?;
    let output = machine.command(client).output()?;
    assert_eq!(
        text(&output)?,
        "Tesla T4 15360 GPU-2b8e5d14-9c03-4f6a-b7d1-40a8e6c31f03\n"
    );
    Ok(())
}

#[test]
fn creates_mig_instances_with_go_nvml() -> anyhow::Result<()> {
    let Some(client) = go_client()?.filter(|_| !skips_without_root()) else {
        return Ok(());
    };
    let machine = Machine::start(A30X2)?;
    let output = machine.command(client).arg("mig").output()?;
    let shown = text(&output)?;
    let partitions: Vec<&str> = shown.lines().filter(|line| line.contains("MIG")).collect();
    assert_eq!(partitions, ["NVIDIA A30 MIG 1g.6gb 5952 4 1 1"; 2]);
    Ok(())
}
