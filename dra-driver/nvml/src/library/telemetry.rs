//! Reading of sensors.

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;

use super::{Handle, Shared, call, optional};
use crate::{MemoryRepair, RecoveryAction, Sensor, Status, Telemetry};

impl Shared {
    pub(super) fn telemetry(&self, handle: Handle) -> Result<Telemetry, Status> {
        let device = self.device(handle);
        let ecc = |kind| sensor(read(device.total_ecc_errors(kind, EccCounter::Volatile)));
        let (fabric, fabric_health) = match sensor(self.fabric_state(handle))? {
            Sensor::Value((state, health)) => (Sensor::Value(state), Sensor::Value(health)),
            Sensor::Absent => (Sensor::Absent, Sensor::Absent),
            Sensor::Failed(status) => (Sensor::Failed(status.clone()), Sensor::Failed(status)),
        };
        let telemetry = Telemetry {
            memory: sensor(self.memory(handle).map(Some))?,
            utilization: sensor(self.utilization(handle))?,
            temperature_celsius: sensor(read(device.temperature(TemperatureSensor::Gpu)))?,
            power_milliwatts: sensor(read(device.power_usage()))?,
            energy_millijoules: sensor(read(device.total_energy_consumption()))?,
            sm_clock_mhz: sensor(read(device.clock_info(Clock::SM)))?,
            memory_clock_mhz: sensor(read(device.clock_info(Clock::Memory)))?,
            ecc_corrected: ecc(MemoryError::Corrected)?,
            ecc_uncorrected: ecc(MemoryError::Uncorrected)?,
            recovery_action: sensor(read(recovery_action(&device)).map(Option::flatten))?,
            fabric,
            fabric_health,
            memory_repair: sensor(self.memory_repair(&device, handle))?,
        };
        let failure = telemetry
            .failures()
            .next()
            .map(|(_, status)| status.clone());
        match failure {
            // The library or the GPU fails, not a sensor.
            Some(status) if !telemetry.has_value() => Err(status),
            Some(_) | None => Ok(telemetry),
        }
    }

    fn memory_repair(
        &self,
        device: &Device<'_>,
        handle: Handle,
    ) -> Result<Option<MemoryRepair>, Status> {
        let [mut correctable, mut uncorrectable, mut pending, mut failed] = [0; 4];
        let rows = call!(
            self.lib(),
            nvmlDeviceGetRemappedRows(
                handle.0,
                &raw mut correctable,
                &raw mut uncorrectable,
                &raw mut pending,
                &raw mut failed
            )
        );
        if optional(rows)?.is_some() {
            return Ok(Some(MemoryRepair {
                is_pending: pending != 0,
                has_failed: failed != 0,
            }));
        }
        let pages = read(device.are_pages_pending_retired())?;
        Ok(pages.map(|is_pending| MemoryRepair {
            is_pending,
            has_failed: false,
        }))
    }
}

/// Returns the reading of a sensor. A damaged infoROM or a defect of the NVIDIA driver fails single queries.
///
/// # Errors
/// The error of a query that concerns all of the GPU or the library.
fn sensor<T>(read: Result<Option<T>, Status>) -> Result<Sensor<T>, Status> {
    match read {
        Ok(value) => Ok(value.map_or(Sensor::Absent, Sensor::Value)),
        Err(status) if status.concerns_query() => Ok(Sensor::Failed(status)),
        Err(status) => Err(status),
    }
}

fn read<T>(value: Result<T, NvmlError>) -> Result<Option<T>, Status> {
    optional(value.map_err(Status::from))
}

/// Returns the recovery action; `None` if the field has an unexpected type, or the NVIDIA driver does not know it (before 565).
fn recovery_action(device: &Device<'_>) -> Result<Option<RecoveryAction>, NvmlError> {
    let fields = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)])?;
    let field = match fields.into_iter().next().ok_or(NvmlError::NotSupported)? {
        Err(NvmlError::InvalidArg) => return Ok(None),
        field => field?,
    };
    let value = match field.value? {
        SampleValue::U32(value) => Some(u64::from(value)),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    };
    Ok(value.map(RecoveryAction::from_value))
}
