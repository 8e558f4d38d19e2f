//! Reading of sensors.

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;

use super::{Handle, Shared, optional};
use crate::{RecoveryAction, Status, Telemetry};

impl Shared {
    pub(super) fn telemetry(&self, handle: Handle) -> Result<Telemetry, Status> {
        let device = self.device(handle);
        let ecc = |kind| read(device.total_ecc_errors(kind, EccCounter::Volatile));
        Ok(Telemetry {
            memory: self.memory(handle)?,
            utilization: self.utilization(handle)?,
            temperature_celsius: read(device.temperature(TemperatureSensor::Gpu))?,
            power_milliwatts: read(device.power_usage())?,
            sm_clock_mhz: read(device.clock_info(Clock::SM))?,
            memory_clock_mhz: read(device.clock_info(Clock::Memory))?,
            ecc_corrected: ecc(MemoryError::Corrected)?,
            ecc_uncorrected: ecc(MemoryError::Uncorrected)?,
            recovery_action: read(recovery_action(&device))?.flatten(),
        })
    }
}

fn read<T>(value: Result<T, NvmlError>) -> Result<Option<T>, Status> {
    optional(value.map_err(Status::from))
}

/// Returns the recovery action; `None` if the field has an unexpected type.
fn recovery_action(device: &Device<'_>) -> Result<Option<RecoveryAction>, NvmlError> {
    let fields = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)])?;
    let field = fields.into_iter().next().ok_or(NvmlError::NotSupported)??;
    let value = match field.value? {
        SampleValue::U32(value) => Some(u64::from(value)),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    };
    Ok(value.map(RecoveryAction::from_value))
}
