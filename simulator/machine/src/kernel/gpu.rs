//! One GPU: memory, engine and sensors.

use crate::description::{GpuDescription, GpuModel};
use crate::protocol::{ComputeMode, Nanos, Utilization};

use super::accounting::Accounting;
use super::engine::{Engine, SAMPLE_PERIOD, Sample, Timing};
use super::faults::Faults;
use super::ledger::Ledger;
use super::mig::Partitions;

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) model: GpuModel,
    pub(super) ledger: Ledger,
    pub(super) engine: Engine,
    pub(super) faults: Faults,
    pub(super) accounting: Accounting,
    pub(super) partitions: Partitions,
    pub(super) compute_mode: ComputeMode,
    started: Nanos,
    /// Energy until the last reset, nJ.
    spent_nanojoules: u128,
    /// First unused byte of the memory file. Ranges are never reused: the file is sparse and
    /// practically unlimited, so memory does not fragment.
    next_offset: u64,
}

/// Sensor values.
pub(super) struct Sensors {
    pub(super) utilization: Utilization,
    pub(super) temperature_celsius: u32,
    pub(super) power_milliwatts: u32,
    pub(super) energy_millijoules: u64,
}

impl Gpu {
    pub(super) fn new(model: GpuModel, described: &GpuDescription, now: Nanos) -> Self {
        let perturbation = model.perturbation;
        let timing = Timing {
            slice: Nanos::from(model.compute.time_slice_microseconds) * 1000,
            slice_deviation_percent: perturbation.slice_deviation_percent,
            context_switch: Nanos::from(model.compute.context_switch_microseconds) * 1000,
            event: perturbation.event_nanoseconds,
            records_out_of_slice: perturbation.records_out_of_slice,
        };
        Self {
            ledger: Ledger::new(model.memory.usable_bytes()),
            engine: Engine::new(model.compute.multiprocessors, timing, now),
            faults: Faults::default(),
            accounting: Accounting::default(),
            partitions: Partitions::new(model.mig.clone(), described),
            compute_mode: ComputeMode::default(),
            started: now,
            spent_nanojoules: 0,
            next_offset: 0,
            model,
        }
    }

    /// Returns a fresh range of the memory file.
    pub(super) fn place(&mut self, bytes: u64) -> u64 {
        let offset = self.next_offset;
        self.next_offset = self.next_offset.saturating_add(bytes);
        offset
    }

    /// Closed sampling periods that NVML shows by now, oldest first.
    pub(super) fn samples(&self) -> impl Iterator<Item = &Sample> {
        let delay = self.model.perturbation.nvml_delay_milliseconds * 1_000_000;
        let visible = self.engine.now().saturating_sub(delay);
        let samples = self.engine.samples().iter();
        samples.filter(move |sample| sample.end <= visible)
    }

    /// Returns a part of a sampling period as NVML shows it, percent.
    pub(super) fn percent(&self, busy: Nanos) -> u32 {
        let percent = u32::try_from((busy * 100 / SAMPLE_PERIOD).min(100)).unwrap_or(100);
        let step = self.model.perturbation.nvml_step_percent.max(1);
        percent / step * step
    }

    /// Restarts the counter of energy.
    pub(super) fn reset_energy(&mut self) {
        self.spent_nanojoules = self.nanojoules();
    }

    /// Energy of the whole run, nJ.
    fn nanojoules(&self) -> u128 {
        let power = &self.model.power_milliwatts;
        let uptime = u128::from(self.engine.now() - self.started);
        let busy = u128::from(self.engine.counters(None).weighted);
        uptime * u128::from(power.idle) + busy * u128::from(power.limit.saturating_sub(power.idle))
    }

    /// Temperature and power follow the last sampling period; energy covers the time since the last reset.
    pub(super) fn sensors(&self) -> Sensors {
        let last = self.samples().last();
        let percent = last.map_or(0, |sample| self.percent(sample.total));
        let between = |idle: u32, busy: u32| {
            idle + busy.saturating_sub(idle) / 100 * percent
                + busy.saturating_sub(idle) % 100 * percent / 100
        };
        let (temperature, power) = (
            &self.model.temperature_celsius,
            &self.model.power_milliwatts,
        );
        let nanojoules = self.nanojoules().saturating_sub(self.spent_nanojoules);
        Sensors {
            utilization: Utilization {
                gpu_percent: percent,
                memory_percent: percent / 2,
            },
            temperature_celsius: (self.faults.temperature_celsius)
                .unwrap_or_else(|| between(temperature.idle, temperature.busy)),
            power_milliwatts: between(power.idle, power.limit),
            energy_millijoules: u64::try_from(nanojoules / 1_000_000_000).unwrap_or(u64::MAX),
        }
    }
}
