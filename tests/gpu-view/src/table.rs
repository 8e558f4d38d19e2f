//! The default table: GPUs, MIG devices, processes.

use nvml_wrapper::enum_wrappers::device::{PerformanceState, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::{ViewError, partitions};

const MIB: u64 = 1 << 20;
const RULE: &str =
    "+-----------------------------------------------------------------------------------------+";
const COLUMNS: &str =
    "+-----------------------------------------+------------------------+----------------------+";

pub(crate) fn table(nvml: &Nvml, devices: &[Device<'_>]) -> Result<String, ViewError> {
    let now = jiff::Zoned::now()
        .strftime("%a %b %e %H:%M:%S %Y")
        .to_string();
    let mut lines = vec![now, RULE.to_owned(), title(nvml)?];
    lines.extend(
        [
            COLUMNS,
            "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
            "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
            "|                                         |                        |               MIG M. |",
            "|=========================================+========================+======================|",
        ]
        .map(str::to_owned),
    );
    for device in devices {
        lines.extend(gpu(device)?);
        lines.push(COLUMNS.to_owned());
    }
    lines.extend(mig_devices(devices)?);
    lines.extend(
        [
            "",
            RULE,
            "| Processes:                                                                              |",
            "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
            "|        ID   ID                                                               Usage      |",
            "|=========================================================================================|",
        ]
        .map(str::to_owned),
    );
    lines.extend(processes(nvml, devices)?);
    lines.push(RULE.to_owned());
    Ok(lines.into_iter().map(|line| line + "\n").collect())
}

fn title(nvml: &Nvml) -> Result<String, ViewError> {
    let view = concat!("GPU-VIEW ", env!("CARGO_PKG_VERSION"));
    let driver = nvml.sys_driver_version()?;
    let cuda = nvml.sys_cuda_driver_version()?;
    let cuda = format!("{}.{}", cuda / 1000, cuda % 1000 / 10);
    Ok(format!(
        "| {view:<33} Driver Version: {driver:<14} CUDA Version: {cuda:<8} |"
    ))
}

/// Returns the value as text; a value that the GPU does not support is `N/A`.
fn or_not_available<T>(
    value: Result<T, NvmlError>,
    text: impl Fn(T) -> String,
) -> Result<String, ViewError> {
    match value {
        Ok(value) => Ok(text(value)),
        Err(NvmlError::NotSupported) => Ok("N/A".to_owned()),
        Err(error) => Err(error.into()),
    }
}

fn gpu(device: &Device<'_>) -> Result<[String; 3], ViewError> {
    let index = device.index()?;
    let name = device.name()?;
    let persistence = on_off(device.is_in_persistent_mode().unwrap_or(false));
    let bus_id = device.pci_info()?.bus_id;
    let display = on_off(device.is_display_active().unwrap_or(false));
    let ecc = or_not_available(device.is_ecc_enabled(), |ecc| {
        if ecc.currently_enabled {
            "0".to_owned()
        } else {
            "Off".to_owned()
        }
    })?;
    let temperature = or_not_available(device.temperature(TemperatureSensor::Gpu), |celsius| {
        format!("{celsius}C")
    })?;
    let state = or_not_available(device.performance_state(), performance_state)?;
    let draw = or_not_available(device.power_usage(), |milliwatts| {
        format!("{}W", milliwatts / 1000)
    })?;
    let limit = or_not_available(device.enforced_power_limit(), |milliwatts| {
        format!("{}W", milliwatts / 1000)
    })?;
    let memory = or_not_available(device.memory_info(), |memory| {
        format!("{}MiB / {:>6}MiB", memory.used / MIB, memory.total / MIB)
    })?;
    let utilization = or_not_available(device.utilization_rates(), |rates| {
        format!("{}%", rates.gpu)
    })?;
    let mig = or_not_available(device.mig_mode(), |mode| {
        if mode.current == 1 {
            "Enabled".to_owned()
        } else {
            "Disabled".to_owned()
        }
    })?;
    Ok([
        format!("|{index:>4}  {name:<30}{persistence:>3}  |   {bus_id} {display:>3} | {ecc:>20} |"),
        format!(
            "| N/A {temperature:>5}    {state:<3} {draw:>14} / {limit:>5} | {memory:>22} | {utilization:>7}      Default |"
        ),
        format!("|{:41}|{:24}|{mig:>21} |", "", ""),
    ])
}

/// Returns the section of MIG devices; empty without MIG devices.
fn mig_devices(devices: &[Device<'_>]) -> Result<Vec<String>, ViewError> {
    let mut lines = Vec::new();
    for gpu in devices {
        for (index, device) in partitions::of(gpu)? {
            let gpu = gpu.index()?;
            let profile = partitions::profile(&device)?;
            let memory = or_not_available(device.memory_info(), |memory| {
                format!("{}MiB / {:>6}MiB", memory.used / MIB, memory.total / MIB)
            })?;
            let multiprocessors = device.attributes()?.multiprocessor_count;
            lines.push(format!(
                "|{gpu:>5}   {index:>3}   {profile:<41}{memory:>22}{multiprocessors:>10}  |"
            ));
        }
    }
    if lines.is_empty() {
        return Ok(lines);
    }
    let head = [
        "",
        RULE,
        "| MIG devices:                                                                            |",
        "|  GPU   Dev   Name                                                Memory-Usage        SM  |",
        "|=========================================================================================|",
    ];
    let mut section: Vec<String> = head.map(str::to_owned).into();
    section.append(&mut lines);
    section.push(RULE.to_owned());
    Ok(section)
}

fn on_off(on: bool) -> &'static str {
    if on { "On" } else { "Off" }
}

fn performance_state(state: PerformanceState) -> String {
    format!("P{}", state.as_c())
}

fn processes(nvml: &Nvml, devices: &[Device<'_>]) -> Result<Vec<String>, ViewError> {
    let mut lines = Vec::new();
    for device in devices {
        let index = device.index()?;
        for process in device.running_compute_processes()? {
            let memory = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => format!("{}MiB", bytes / MIB),
                UsedGpuMemory::Unavailable => "N/A".to_owned(),
            };
            // The process may have exited or be in another PID namespace.
            let name = nvml
                .sys_process_name(process.pid, 256)
                .unwrap_or_else(|_| "[Not Found]".to_owned());
            let instance = |id: Option<u32>| id.map_or("N/A".to_owned(), |id| id.to_string());
            let (gpu_instance, compute_instance) = (
                instance(process.gpu_instance_id),
                instance(process.compute_instance_id),
            );
            lines.push(format!(
                "|{index:>5}   {gpu_instance:<4} {compute_instance:<4} {pid:>14}      C   {name:<34}{memory:>11} |",
                pid = process.pid,
                name = shorten(&name, 34),
            ));
        }
    }
    if lines.is_empty() {
        lines.push("|  No running processes found                                                             |".to_owned());
    }
    Ok(lines)
}

/// Shortens a long name to its end, which contains the program's name.
fn shorten(name: &str, limit: usize) -> String {
    let length = name.chars().count();
    if length <= limit {
        return name.to_owned();
    }
    let tail: String = name.chars().skip(length - (limit - 3)).collect();
    format!("...{tail}")
}
