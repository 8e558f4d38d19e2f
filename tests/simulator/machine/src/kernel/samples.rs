//! Closed sampling periods by process.

use std::collections::BTreeMap;

use crate::protocol::{
    CardIndex, CountersState, Nanos, ProcessSample, Refusal, Reply, SampleState,
};

use super::Kernel;
use super::card::Card;
use super::engine::Sample;

/// Divisor: part of the busy time in which memory is in use.
const MEMORY_SHARE: u32 = 2;

impl Kernel {
    /// Periods closed after `since`. None in MIG mode.
    pub(super) fn samples(&self, index: CardIndex, since: Nanos) -> Result<Reply, Refusal> {
        let card = self.card(index)?;
        if card.partitions.is_enabled() {
            return Err(Refusal::NotSupported);
        }
        let samples = card.samples().filter(|sample| sample.end > since);
        Ok(Reply::Samples(
            samples.map(|sample| self.sample(card, sample)).collect(),
        ))
    }

    /// Counters of the whole GPU or of one GPU instance.
    pub(super) fn counters(&self, index: CardIndex, gpu: Option<u32>) -> Result<Reply, Refusal> {
        let card = self.card(index)?;
        let multiprocessors = match gpu {
            None => card.model.compute.multiprocessors,
            Some(gpu) => card.partitions.multiprocessors_of(gpu)?,
        };
        let counters = card.engine.counters(gpu);
        Ok(Reply::Counters(CountersState {
            at: card.engine.now(),
            busy_nanos: counters.busy,
            multiprocessor_nanos: counters.occupied,
            multiprocessors,
        }))
    }

    fn sample(&self, card: &Card, sample: &Sample) -> SampleState {
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
            gpu_percent: card.percent(busy),
            memory_percent: card.percent(busy) / MEMORY_SHARE,
        });
        SampleState {
            end: sample.end,
            gpu_percent: card.percent(sample.total),
            memory_percent: card.percent(sample.total) / MEMORY_SHARE,
            processes: processes.collect(),
        }
    }
}
