//! `--query-gpu`: selected fields as CSV.

use std::fmt::Display;
use std::str::FromStr;

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::ViewError;

/// Parts of the CSV output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    header: bool,
    units: bool,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        if parts.next() != Some("csv") {
            return Err("only csv is supported".to_owned());
        }
        let mut format = Self {
            header: true,
            units: true,
        };
        for part in parts {
            match part {
                "noheader" => format.header = false,
                "nounits" => format.units = false,
                other => return Err(format!("unknown part {other:?}")),
            }
        }
        Ok(format)
    }
}

/// A value with its unit; the unit may be empty.
type Value = Result<(String, &'static str), NvmlError>;

/// A field of `--query-gpu`.
struct Field {
    name: &'static str,
    unit: &'static str,
    read: fn(&Nvml, &Device<'_>) -> Value,
}

const MIB: u64 = 1 << 20;

/// Supported fields.
const FIELDS: &[Field] = &[
    Field {
        name: "index",
        unit: "",
        read: |_, device| plain(device.index()?),
    },
    Field {
        name: "name",
        unit: "",
        read: |_, device| plain(device.name()?),
    },
    Field {
        name: "uuid",
        unit: "",
        read: |_, device| plain(device.uuid()?),
    },
    Field {
        name: "serial",
        unit: "",
        read: |_, device| plain(device.serial()?),
    },
    Field {
        name: "count",
        unit: "",
        read: |nvml, _| plain(nvml.device_count()?),
    },
    Field {
        name: "driver_version",
        unit: "",
        read: |nvml, _| plain(nvml.sys_driver_version()?),
    },
    Field {
        name: "pci.bus_id",
        unit: "",
        read: |_, device| plain(device.pci_info()?.bus_id),
    },
    Field {
        name: "compute_cap",
        unit: "",
        read: |_, device| {
            let capability = device.cuda_compute_capability()?;
            plain(format!("{}.{}", capability.major, capability.minor))
        },
    },
    Field {
        name: "memory.total",
        unit: "MiB",
        read: |_, device| mebibytes(device.memory_info()?.total),
    },
    Field {
        name: "memory.reserved",
        unit: "MiB",
        read: |_, device| mebibytes(device.memory_info()?.reserved),
    },
    Field {
        name: "memory.used",
        unit: "MiB",
        read: |_, device| mebibytes(device.memory_info()?.used),
    },
    Field {
        name: "memory.free",
        unit: "MiB",
        read: |_, device| mebibytes(device.memory_info()?.free),
    },
    Field {
        name: "utilization.gpu",
        unit: "%",
        read: |_, device| Ok((device.utilization_rates()?.gpu.to_string(), "%")),
    },
    Field {
        name: "utilization.memory",
        unit: "%",
        read: |_, device| Ok((device.utilization_rates()?.memory.to_string(), "%")),
    },
    Field {
        name: "temperature.gpu",
        unit: "",
        read: |_, device| plain(device.temperature(TemperatureSensor::Gpu)?),
    },
    Field {
        name: "power.draw",
        unit: "W",
        read: |_, device| watts(device.power_usage()?),
    },
    Field {
        name: "power.limit",
        unit: "W",
        read: |_, device| watts(device.enforced_power_limit()?),
    },
    Field {
        name: "clocks.sm",
        unit: "MHz",
        read: |_, device| Ok((device.clock_info(Clock::SM)?.to_string(), "MHz")),
    },
    Field {
        name: "clocks.mem",
        unit: "MHz",
        read: |_, device| Ok((device.clock_info(Clock::Memory)?.to_string(), "MHz")),
    },
    Field {
        name: "mig.mode.current",
        unit: "",
        read: |_, device| {
            plain(if device.mig_mode()?.current == 1 {
                "Enabled"
            } else {
                "Disabled"
            })
        },
    },
];

fn plain(value: impl Display) -> Value {
    Ok((format!("{value}"), ""))
}

fn mebibytes(bytes: u64) -> Value {
    Ok(((bytes / MIB).to_string(), "MiB"))
}

fn watts(milliwatts: u32) -> Value {
    Ok((
        format!("{}.{:02}", milliwatts / 1000, milliwatts % 1000 / 10),
        "W",
    ))
}

pub(crate) fn query(
    nvml: &Nvml,
    devices: &[Device<'_>],
    names: &[String],
    format: Format,
) -> Result<String, ViewError> {
    let fields = names
        .iter()
        .map(|name| field(name.trim()))
        .collect::<Result<Vec<_>, _>>()?;
    let mut lines = Vec::new();
    if format.header {
        lines.push(
            fields
                .iter()
                .map(|field| header(field, format))
                .collect::<Vec<_>>()
                .join(", "),
        );
    }
    for device in devices {
        let values = fields
            .iter()
            .map(|field| value(field, nvml, device, format));
        lines.push(values.collect::<Result<Vec<_>, _>>()?.join(", "));
    }
    Ok(lines.into_iter().map(|line| line + "\n").collect())
}

fn field(name: &str) -> Result<&'static Field, ViewError> {
    let alias = match name {
        "gpu_name" => "name",
        "gpu_uuid" => "uuid",
        "gpu_bus_id" => "pci.bus_id",
        name => name,
    };
    let found = FIELDS.iter().find(|field| field.name == alias);
    found.ok_or_else(|| ViewError::UnknownField(name.to_owned()))
}

fn header(field: &Field, format: Format) -> String {
    match field.unit {
        "" => field.name.to_owned(),
        _ if !format.units => field.name.to_owned(),
        unit => format!("{} [{unit}]", field.name),
    }
}

/// Returns the value as text; a value that the GPU does not support is `[N/A]`.
fn value(
    field: &Field,
    nvml: &Nvml,
    device: &Device<'_>,
    format: Format,
) -> Result<String, ViewError> {
    match (field.read)(nvml, device) {
        Ok((value, unit)) if unit.is_empty() || !format.units => Ok(value),
        Ok((value, unit)) => Ok(format!("{value} {unit}")),
        Err(NvmlError::NotSupported) => Ok("[N/A]".to_owned()),
        Err(error) => Err(error.into()),
    }
}
