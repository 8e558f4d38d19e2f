//! Closed sampling periods by process.

use std::collections::BTreeMap;

use crate::protocol::{CountersState, GpuIndex, Nanos, ProcessSample, Refusal, Reply, SampleState};

use super::Kernel;
use super::engine::Sample;
use super::gpu::Gpu;

/// Divisor: part of the busy time in which memory is in use.
const MEMORY_SHARE: u32 = 2;

impl Kernel {
    /// Periods closed after `since`. None in MIG mode.
    pub(super) fn samples(&self, index: GpuIndex, since: Nanos) -> Result<Reply, Refusal> {
        let gpu = self.gpu(index)?;
        if gpu.partitions.is_enabled() {
            return Err(Refusal::NotSupported);
        }
        let samples = gpu.samples().filter(|sample| sample.end > since);
        Ok(Reply::Samples(
            samples.map(|sample| self.sample(gpu, sample)).collect(),
        ))
    }

    /// Counters of the whole GPU or of one GPU instance.
    pub(super) fn counters(
        &self,
        index: GpuIndex,
        gpu_instance: Option<u32>,
    ) -> Result<Reply, Refusal> {
        let gpu = self.gpu(index)?;
        let multiprocessors = match gpu_instance {
            None => gpu.model.compute.multiprocessors,
            Some(gpu_instance) => gpu.partitions.multiprocessors_of(gpu_instance)?,
        };
        let counters = gpu.engine.counters(gpu_instance);
        Ok(Reply::Counters(CountersState {
            at: gpu.engine.now(),
            busy_nanos: counters.busy,
            multiprocessor_nanos: counters.occupied,
            multiprocessors,
        }))
    }

    fn sample(&self, gpu: &Gpu, sample: &Sample) -> SampleState {
        let mut by_pid: BTreeMap<u32, Nanos> = BTreeMap::new();
        for (context, busy) in &sample.busy {
            let context = self.contexts.get(context);
            // Ended processes are dropped; the GPU's totals keep their part.
            if let Some(client) = context.and_then(|context| self.clients.get(&context.client)) {
                *by_pid.entry(client.pid).or_default() += busy;
            }
        }
        let processes = by_pid.into_iter().map(|(pid, busy)| ProcessSample {
            pid,
            gpu_percent: gpu.percent(busy),
            memory_percent: gpu.percent(busy) / MEMORY_SHARE,
        });
        SampleState {
            end: sample.end,
            gpu_percent: gpu.percent(sample.total),
            memory_percent: gpu.percent(sample.total) / MEMORY_SHARE,
            processes: processes.collect(),
        }
    }
}
