//! Utilization samples of GPUs and processes, and field values.

use std::process::{Child, Stdio};

use anyhow::{Context, bail};
use nvml_wrapper::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Sampling;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;
use simulator_machine::control::Command;
use simulator_machine::description::{H100X2, RTX_4090};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{GpuIndex, ReportedValue};
use simulator_machine::testing::{Machine, poll, python};

/// A process that keeps GPU 0 busy until killed.
struct Busy(Child);

impl Busy {
    fn start(machine: &Machine) -> anyhow::Result<Self> {
        let child = machine
            .program("cuda-probe")?
            .args(["launch", "--ms", "20", "--seconds", "600"])
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start() -> anyhow::Result<(Machine, Nvml)> {
    let machine = Machine::start(H100X2)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init()?;
    Ok((machine, nvml))
}

/// Waits until process samples satisfy a condition.
fn wait_for(
    device: &Device<'_>,
    since: u64,
    expected: impl Fn(&[ProcessUtilizationSample]) -> bool,
) -> anyhow::Result<Vec<ProcessUtilizationSample>> {
    poll(|| match device.process_utilization_stats(since) {
        Ok(samples) if expected(&samples) => Ok(Some(samples)),
        // The wrapper asks for the number of samples first, and another one may arrive meanwhile.
        Ok(_) | Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Ok(None),
        Err(error) => bail!(error),
    })
    .context("no sample")
}

#[test]
fn samples_busy_processes_only() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let (gpu, idle) = (nvml.device_by_index(0)?, nvml.device_by_index(1)?);
    assert!(matches!(
        gpu.process_utilization_stats(0),
        Err(NvmlError::NotFound)
    ));
    let busy = Busy::start(&machine)?;
    let samples = wait_for(&gpu, 0, |samples| !samples.is_empty())?;
    let [sample] = &samples[..] else {
        bail!("{samples:?}")
    };
    assert_eq!(sample.pid, busy.0.id());
    assert!((1..=100).contains(&sample.sm_util), "{sample:?}");
    assert!(matches!(
        idle.process_utilization_stats(0),
        Err(NvmlError::NotFound)
    ));
    // Only samples newer than the last one.
    let next = wait_for(&gpu, sample.timestamp, |samples| !samples.is_empty())?;
    assert!(next[0].timestamp > sample.timestamp);
    let gpu_samples = gpu.samples(Sampling::GpuUtilization, None)?;
    let ends: Vec<u64> = gpu_samples.iter().map(|sample| sample.timestamp).collect();
    assert!(ends.is_sorted());
    assert!(
        gpu_samples
            .iter()
            .any(|sample| matches!(sample.value, SampleValue::U32(1..)))
    );
    let last = ends.last().copied().unwrap_or(0);
    let newer = gpu.samples(Sampling::GpuUtilization, last);
    assert!(newer.map_or(true, |newer| {
        newer.iter().all(|sample| sample.timestamp > last)
    }));
    Ok(())
}

#[test]
fn splits_samples_between_two_busy_processes() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let gpu = nvml.device_by_index(0)?;
    let both = [Busy::start(&machine)?, Busy::start(&machine)?];
    let samples = wait_for(&gpu, 0, |samples| samples.len() == 2)?;
    let pids: Vec<u32> = samples.iter().map(|sample| sample.pid).collect();
    for busy in &both {
        assert!(pids.contains(&busy.0.id()), "{pids:?}");
    }
    let sum: u32 = samples
        .iter()
        .filter(|sample| sample.timestamp == samples[0].timestamp)
        .map(|sample| sample.sm_util)
        .sum();
    assert!(sum <= 100, "{samples:?}");
    Ok(())
}

#[test]
fn returns_no_samples_for_an_unsupported_value() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    machine.control(&Command::Break {
        gpu: GpuIndex(0),
        faults: Faults {
            unsupported: [ReportedValue::Utilization].into(),
            ..Faults::default()
        },
    })?;
    let gpu = nvml.device_by_index(0)?;
    assert!(matches!(
        gpu.samples(Sampling::GpuUtilization, None),
        Err(NvmlError::NotSupported)
    ));
    assert!(matches!(
        gpu.process_utilization_stats(0),
        Err(NvmlError::NotSupported)
    ));
    Ok(())
}

/// The versioned struct, as nvidia-ml-py fills it.
#[test]
fn fills_process_utilization_info_of_nvidia_ml_py() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let busy = Busy::start(&machine)?;
    machine.wait_for_gpu(0, |gpu| gpu.gpu_percent > 0)?;
    let script = r#"
import pynvml, ctypes
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
found = pynvml.nvmlDeviceGetProcessesUtilizationInfo(gpu, 0)
print([(sample.pid, sample.smUtil > 0) for sample in found])
wrong = pynvml.c_nvmlProcessesUtilizationInfo_v1_t()
wrong.version = 77
print(pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessesUtilizationInfo")(gpu, ctypes.byref(wrong)))
"#;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", script])
        .output()?;
    let shown = String::from_utf8(output.stdout)?;
    let expected = format!("[({}, True)]\n25\n", busy.0.id());
    assert_eq!(
        shown,
        expected,
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[test]
fn returns_a_result_per_field() -> anyhow::Result<()> {
    let (_machine, nvml) = start()?;
    let fields = [
        field_id::NVML_FI_DEV_ECC_CURRENT,
        field_id::NVML_FI_DEV_MEMORY_TEMP,
        field_id::NVML_FI_DEV_NVLINK_LINK_COUNT,
        field_id::NVML_FI_DEV_POWER_INSTANT,
        field_id::NVML_FI_DEV_C2C_LINK_COUNT,
        field_id::NVML_FI_MAX,
    ];
    let ask = |nvml: &Nvml| -> anyhow::Result<Vec<Result<SampleValue, NvmlError>>> {
        let ids: Vec<FieldId> = fields.map(FieldId).into();
        let values = nvml.device_by_index(0)?.field_values_for(&ids)?;
        Ok(values.into_iter().map(|sample| sample?.value).collect())
    };
    let values = ask(&nvml)?;
    assert!(matches!(
        values[..],
        [
            Ok(SampleValue::U32(1)),
            Ok(SampleValue::U32(30)),
            Ok(SampleValue::U32(18)),
            Ok(SampleValue::U32(70_000)),
            Err(NvmlError::NotSupported),
            Err(NvmlError::InvalidArg)
        ]
    ));
    let machine = Machine::start(RTX_4090)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    let values = ask(&Nvml::builder().lib_path(library.as_os_str()).init()?)?;
    assert!(matches!(
        values[1..3],
        [Err(NvmlError::NotSupported), Err(NvmlError::NotSupported)]
    ));
    Ok(())
}
