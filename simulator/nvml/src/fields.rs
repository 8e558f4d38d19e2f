//! Field values: several values by field id in one call, each with its own result.

use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::field_id;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlFieldValue_t, nvmlReturn_t, nvmlValue_t,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
};
use simulator_machine::description::MigSwitch;
use simulator_machine::protocol::ReportedValue;

use crate::abi::{NvmlResult, Out, code, entry_points};
use crate::error::NvmlError;
use crate::handle::{Device, device};

entry_points! {
    fn nvmlDeviceGetFieldValues(handle: nvmlDevice_t, count: c_int, values: Out<nvmlFieldValue_t>) {
        let device = device(handle)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        for slot in values.elements(count.ok_or(NvmlError::InvalidArgument)?)? {
            let asked = slot.get()?;
            slot.set(answered(device, asked))?;
        }
        Ok(())
    }

    fn nvmlDeviceClearFieldValues(handle: nvmlDevice_t, count: c_int, values: Out<nvmlFieldValue_t>) {
        device(handle)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        for slot in values.elements(count.ok_or(NvmlError::InvalidArgument)?)? {
            let asked = slot.get()?;
            slot.set(nvmlFieldValue_t { nvmlReturn: NvmlError::NotSupported.into(), ..asked })?;
        }
        Ok(())
    }
}

enum Value {
    Int(c_uint),
    Long(c_ulonglong),
}

fn answered(device: Device, asked: nvmlFieldValue_t) -> nvmlFieldValue_t {
    let mut filled = asked;
    filled.timestamp = c_longlong::try_from(device.library.now()).unwrap_or(c_longlong::MAX);
    filled.latencyUsec = 0;
    let mut result: nvmlReturn_t = code(|| Ok(()));
    match value(device, asked.fieldId, asked.scopeId) {
        Ok(Value::Int(value)) => {
            filled.valueType = nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
            filled.value = nvmlValue_t {
                ullVal: value.into(),
            };
        }
        Ok(Value::Long(value)) => {
            filled.valueType = nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            filled.value = nvmlValue_t { ullVal: value };
        }
        Err(error) => result = error.into(),
    }
    filled.nvmlReturn = result;
    filled
}

/// Returns the value of a field id. Fields of hardware that is not simulated are not supported.
fn value(device: Device, field: c_uint, scope: c_uint) -> NvmlResult<Value> {
    use field_id as id;
    let model = device.model()?;
    let ecc = |value| match model.ecc {
        true => Ok(value),
        false => Err(NvmlError::NotSupported),
    };
    let links = model.nvlink;
    let link = || {
        links
            .filter(|nvlink| scope < nvlink.links)
            .ok_or(NvmlError::NotSupported)
    };
    // Bytes of all processes, one for each millijoule.
    let traffic = || -> NvmlResult<Value> {
        let power = device.reporting(ReportedValue::Power)?;
        Ok(Value::Long(power.energy_millijoules))
    };
    match field {
        id::NVML_FI_DEV_ECC_CURRENT | id::NVML_FI_DEV_ECC_PENDING => ecc(Value::Int(1)),
        // Error counts are zero.
        id::NVML_FI_DEV_ECC_SBE_VOL_TOTAL
        | id::NVML_FI_DEV_ECC_DBE_VOL_TOTAL
        | id::NVML_FI_DEV_ECC_SBE_AGG_TOTAL
        | id::NVML_FI_DEV_ECC_DBE_AGG_TOTAL => ecc(Value::Long(0)),
        id::NVML_FI_DEV_REMAPPED_COR | id::NVML_FI_DEV_REMAPPED_UNC => ecc(Value::Int(0)),
        id::NVML_FI_DEV_REMAPPED_PENDING => ecc(Value::Int(device.state()?.repair_pending.into())),
        id::NVML_FI_DEV_REMAPPED_FAILURE => ecc(Value::Int(device.state()?.repair_failed.into())),
        id::NVML_FI_DEV_MEMORY_TEMP => {
            // Only memory on the package has its own sensor.
            if model.memory.bus_width_bits < 2048 {
                return Err(NvmlError::NotSupported);
            }
            Ok(Value::Int(
                device
                    .reporting(ReportedValue::Temperature)?
                    .temperature_celsius,
            ))
        }
        id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION => Ok(Value::Long(
            device.reporting(ReportedValue::Power)?.energy_millijoules,
        )),
        id::NVML_FI_DEV_POWER_AVERAGE | id::NVML_FI_DEV_POWER_INSTANT => Ok(Value::Int(
            device.reporting(ReportedValue::Power)?.power_milliwatts,
        )),
        id::NVML_FI_DEV_POWER_MIN_LIMIT => Ok(Value::Int(model.power_milliwatts.limit / 2)),
        id::NVML_FI_DEV_POWER_MAX_LIMIT
        | id::NVML_FI_DEV_POWER_DEFAULT_LIMIT
        | id::NVML_FI_DEV_POWER_CURRENT_LIMIT
        | id::NVML_FI_DEV_POWER_REQUESTED_LIMIT => Ok(Value::Int(model.power_milliwatts.limit)),
        id::NVML_FI_DEV_NVLINK_LINK_COUNT => match links {
            Some(nvlink) => Ok(Value::Int(nvlink.links)),
            None => Err(NvmlError::NotSupported),
        },
        id::NVML_FI_DEV_NVLINK_GET_STATE => link().map(|_| Value::Int(1)),
        id::NVML_FI_DEV_NVLINK_GET_VERSION => link().map(|nvlink| Value::Int(nvlink.version)),
        id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES | id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES => traffic(),
        id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        | id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        | id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX
        | id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX
        | id::NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS
        | id::NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES
        | id::NVML_FI_DEV_NVLINK_COUNT_RCV_PACKETS
        | id::NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES => {
            links.ok_or(NvmlError::NotSupported).and_then(|_| traffic())
        }
        id::NVML_FI_DEV_PCIE_REPLAY_COUNTER => Ok(Value::Int(0)),
        id::NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED => {
            let switch = model.mig.as_ref().map(|mig| mig.switch);
            Ok(Value::Int((switch == Some(MigSwitch::Live)).into()))
        }
        // Older drivers do not know the number of the field.
        id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION if driver_branch(device) < 565 => {
            Err(NvmlError::InvalidArgument)
        }
        id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => Ok(Value::Int(device.state()?.recovery_action)),
        0 => Err(NvmlError::InvalidArgument),
        field if field >= id::NVML_FI_MAX => Err(NvmlError::InvalidArgument),
        _ => Err(NvmlError::NotSupported),
    }
}

/// Release branch of the simulated driver, such as 580.
pub(crate) fn driver_branch(device: Device) -> u32 {
    let version = &device.library.machine().driver_version;
    let branch = version.split('.').next();
    branch.and_then(|branch| branch.parse().ok()).unwrap_or(0)
}
