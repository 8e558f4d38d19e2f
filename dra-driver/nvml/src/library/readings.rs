//! Reading of each GPU on its own thread, so that a GPU whose NVML calls hang does not delay the others.
//!
//! A thread that hangs stays until its call returns; the next inventory takes its result. Until then the GPU is listed as it
//! was read last, with a fault; a GPU that was never read has the fault only.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Handle, Shared};
use crate::{Card, CardFault, Status};

/// Longest wait for all GPUs of one inventory. Reading a GPU takes milliseconds, and up to seconds without persistence mode.
const WAIT: Duration = Duration::from_secs(10);

/// Query of the fault of a GPU that does not answer.
const QUERY: &str = "the GPU";

/// Result of reading a GPU.
pub(super) type Reading = Result<(Card, Handle), CardFault>;

/// Readings of the GPUs, by NVML index.
#[derive(Default)]
pub(super) struct Readings {
    /// Readings that did not end in time.
    pending: HashMap<u32, Receiver<Reading>>,
    /// Last successful reading.
    last: HashMap<u32, (Card, Handle)>,
}

impl Shared {
    /// Reads the GPUs with the indices below `count`. A GPU that does not answer has a fault, and its last reading if there is
    /// one.
    pub(super) fn read_cards(
        self: &Arc<Self>,
        count: u32,
    ) -> (Vec<(Card, Handle)>, Vec<CardFault>) {
        let mut readings = self.readings();
        let deadline = Instant::now() + WAIT;
        let started: Vec<_> = (0..count)
            .map(|index| match readings.pending.remove(&index) {
                // The call hung before: it gets no second wait.
                Some(pending) => (index, Ok(pending), Duration::ZERO),
                None => (index, self.start_reading(index), WAIT),
            })
            .collect();
        let (mut cards, mut faults) = (Vec::new(), Vec::new());
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
                    cards.push(read);
                }
                Err(fault) => {
                    let last = readings.last.get(&index);
                    // Indices can change while a GPU hangs.
                    let last = last.filter(|(card, _)| {
                        fault.status == Status::Timeout
                            && cards
                                .iter()
                                .all(|(read, _): &(Card, _)| read.uuid != card.uuid)
                    });
                    cards.extend(last.cloned());
                    faults.push(fault);
                }
            }
        }
        (cards, faults)
    }

    fn start_reading(self: &Arc<Self>, index: u32) -> Result<Receiver<Reading>, CardFault> {
        let (sender, reading) = mpsc::sync_channel(1);
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("nvml-gpu".to_owned());
        let started = thread.spawn(move || {
            // Fails if the library was dropped meanwhile.
            let _ = sender.send(shared.read_card(index));
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

fn fault(index: u32, last: Option<&(Card, Handle)>, status: Status) -> CardFault {
    CardFault {
        index,
        card: last.map(|(card, _)| card.uuid.clone()),
        query: QUERY,
        status,
    }
}
