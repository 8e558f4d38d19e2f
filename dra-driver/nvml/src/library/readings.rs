//! Reading of each GPU on its own thread, so that a GPU whose NVML calls hang does not delay the others.
//!
//! A thread that hangs stays until its call returns; the next inventory takes its result. Until then the GPU is listed as it
//! was read last, with a fault; a GPU that was never read has the fault only.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Handle, Shared};
use crate::{Gpu, GpuFault, Status};

/// Longest wait for all GPUs of one inventory. Reading a GPU takes milliseconds, and up to seconds without persistence mode.
const WAIT: Duration = Duration::from_secs(10);

/// Query of the fault of a GPU that does not answer.
const QUERY: &str = "the GPU";

/// Result of reading a GPU.
pub(super) type Reading = Result<(Gpu, Handle), GpuFault>;

/// Readings of the GPUs, by NVML index.
#[derive(Default)]
pub(super) struct Readings {
    /// Readings that did not end in time.
    pending: HashMap<u32, Receiver<Reading>>,
    /// Last successful reading.
    last: HashMap<u32, (Gpu, Handle)>,
}

impl Shared {
    /// Reads the GPUs with the indices below `count`. A GPU that does not answer has a fault, and its last reading if there is
    /// one.
    pub(super) fn read_gpus(self: &Arc<Self>, count: u32) -> (Vec<(Gpu, Handle)>, Vec<GpuFault>) {
        let mut readings = self.readings();
        let deadline = Instant::now() + WAIT;
        let started: Vec<_> = (0..count)
            .map(|index| match readings.pending.remove(&index) {
                // The call hung before: it gets no second wait.
                Some(pending) => (index, Ok(pending), Duration::ZERO),
                None => (index, self.start_reading(index), WAIT),
            })
            .collect();
        let (mut gpus, mut faults) = (Vec::new(), Vec::new());
        for (index, reading, wait) in started {
            let left = deadline.saturating_duration_since(Instant::now());
            let outcome = reading.and_then(|reading| match reading.recv_timeout(wait.min(left)) {
                Ok(outcome) => outcome,
                Err(RecvTimeoutError::Timeout) => {
                    readings.pending.insert(index, reading);
                    let last = readings.last.get(&index);
                    Err(fault(index, last, Status::Timeout))
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = Status::Other("a thread panicked".to_owned());
                    Err(fault(index, None, status))
                }
            });
            match outcome {
                Ok(read) => {
                    readings.last.insert(index, read.clone());
                    gpus.push(read);
                }
                Err(fault) => {
                    let last = readings.last.get(&index);
                    // Indices can change while a GPU hangs.
                    let last = last.filter(|(gpu, _)| {
                        fault.status == Status::Timeout
                            && gpus
                                .iter()
                                .all(|(read, _): &(Gpu, _)| read.uuid != gpu.uuid)
                    });
                    gpus.extend(last.cloned());
                    faults.push(fault);
                }
            }
        }
        (gpus, faults)
    }

    fn start_reading(self: &Arc<Self>, index: u32) -> Result<Receiver<Reading>, GpuFault> {
        let (sender, reading) = mpsc::sync_channel(1);
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("nvml-gpu".to_owned());
        let started = thread.spawn(move || {
            // Fails if the library was dropped meanwhile.
            let _ = sender.send(shared.read_gpu(index));
        });
        match started {
            Ok(_) => Ok(reading),
            Err(error) => Err(fault(index, None, Status::Other(error.to_string()))),
        }
    }

    fn readings(&self) -> MutexGuard<'_, Readings> {
        // After a panic the readings are those of complete inventories.
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fault(index: u32, last: Option<&(Gpu, Handle)>, status: Status) -> GpuFault {
    GpuFault {
        index,
        gpu: last.map(|(gpu, _)| gpu.uuid.clone()),
        query: QUERY,
        status,
    }
}
