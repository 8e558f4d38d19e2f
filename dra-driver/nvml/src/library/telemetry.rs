//! Reading of sensors.

use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;

use super::{Handle, Shared, optional};
use crate::{Status, Telemetry};

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
        })
    }
}

fn read<T>(value: Result<T, NvmlError>) -> Result<Option<T>, Status> {
    optional(value.map_err(Status::from))
}
