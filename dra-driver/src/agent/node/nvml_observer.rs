//! NVML observations of one GPU, from a thread per GPU: an NVML call that hangs affects no other GPU, and the last
//! observation stays valid.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use drava_nvml::{GpuLibrary, GpuUuid, ProcessMemory, ProcessUtilization};

use crate::inventory::OpenLibrary;
use crate::process::{ProcessInfo, Processes};

/// Time between two process lists. Detection within a second leaves a margin for the scan.
pub const INTERVAL: Duration = Duration::from_millis(950);

/// Time between two readings of utilization: NVML's shortest sample period, of which it reports only the newest.
const SAMPLE: Duration = Duration::from_millis(160);

/// Mean of what NVML's rounding down to whole percents removes, per mille.
const ROUNDING: u32 = 5;

/// Time between two attempts to open a missing library.
const RETRY: Duration = Duration::from_secs(5);

/// A process that NVML lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedProcess {
    /// PID on the host.
    pub pid: u32,
    /// Device memory; `None` if NVML does not report it.
    pub used_bytes: Option<u64>,
    /// Description from `/proc`.
    pub info: ProcessInfo,
}

/// What NVML reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NvmlSample {
    /// The processes of a GPU, once per second.
    Processes(Observation),
    /// The utilization of a GPU, once per sample period.
    Utilization(UtilizationSample),
}

/// The processes of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The GPU.
    pub card: GpuUuid,
    /// Processes with a context; `None` if NVML does not report them.
    pub processes: Option<Vec<ObservedProcess>>,
}

/// Utilization of a GPU in NVML's last sample period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UtilizationSample {
    /// The GPU.
    pub card: GpuUuid,
    /// Part of the time in which a kernel of a process ran, per mille, by PID on the host. A process that is not listed was
    /// idle.
    pub per_mille: BTreeMap<u32, u32>,
}

/// Sends observations to the agent, which can wait for other events at the same time.
#[derive(Debug, Clone)]
pub struct ObservationSender {
    observations: Sender<NvmlSample>,
    wakeup_fd: Option<Arc<OwnedFd>>,
}

impl ObservationSender {
    /// Returns a sender that adds to the eventfd `wakeup_fd` with each observation.
    #[must_use]
    pub fn new(observations: Sender<NvmlSample>, wakeup_fd: Option<Arc<OwnedFd>>) -> Self {
        Self {
            observations,
            wakeup_fd,
        }
    }

    /// Returns whether the observation has a receiver.
    fn send(&self, sample: NvmlSample) -> bool {
        let is_sent = self.observations.send(sample).is_ok();
        if let Some(wakeup_fd) = &self.wakeup_fd {
            // An eventfd that cannot be written is readable already.
            let _ = rustix::io::write(wakeup_fd, &1u64.to_ne_bytes());
        }
        is_sent
    }
}

/// How closely NVML observes a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Not at all: it has no shares.
    None,
    /// Processes and their memory.
    Memory,
    /// Also the utilization by each process: several shares are active.
    Utilization,
}

/// The observer thread of a GPU. It ends when this is dropped, once a hanging call returns.
#[derive(Debug)]
pub struct Observer {
    attention: Arc<AtomicU8>,
    _stop: Sender<()>,
}

impl Observer {
    /// Starts to observe `card`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        card: GpuUuid,
        open: OpenLibrary,
        processes: Processes,
        observations: ObservationSender,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let attention = Arc::new(AtomicU8::new(Attention::Memory as u8));
        let mut watch = Watch {
            card,
            open,
            library: None,
            processes,
            listed: None,
            sampled_us: 0,
        };
        let requested = Arc::clone(&attention);
        let observe = move || {
            loop {
                let (samples, wait) = watch.poll(requested.load(Ordering::Relaxed));
                if samples.into_iter().any(|sample| !observations.send(sample)) {
                    return;
                }
                match stopped.recv_timeout(wait) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name("agent-nvml".to_owned());
        thread.stack_size(512 << 10).spawn(observe)?;
        Ok(Self {
            attention,
            _stop: stop,
        })
    }

    /// Sets how closely the GPU is observed. The thread stays, so that a hanging one is not joined by another.
    pub fn set_attention(&self, attention: Attention) {
        self.attention.store(attention as u8, Ordering::Relaxed);
    }
}

struct Watch {
    card: GpuUuid,
    open: OpenLibrary,
    library: Option<Box<dyn GpuLibrary>>,
    processes: Processes,
    /// Time of the last process list.
    listed: Option<Instant>,
    /// Newest sample that was reported, by NVML's clock, µs.
    sampled_us: u64,
}

impl Watch {
    /// Reads what is due. Returns it and the time until the next poll.
    fn poll(&mut self, attention: u8) -> (Vec<NvmlSample>, Duration) {
        if attention == Attention::None as u8 {
            self.library = None;
            return (Vec::new(), INTERVAL);
        }
        let Some(library) = self.library.take().or_else(|| (self.open)().ok()) else {
            // The node driver's condition has the reason.
            return (Vec::new(), RETRY);
        };
        let mut samples = Vec::new();
        let reads_utilization = attention == Attention::Utilization as u8;
        if reads_utilization {
            let sample = self.utilization(library.as_ref());
            samples.extend(sample.map(NvmlSample::Utilization));
        }
        let wait = if reads_utilization { SAMPLE } else { INTERVAL };
        let is_listed = |listed: Instant| listed.elapsed() + wait / 2 < INTERVAL;
        if self.listed.is_some_and(is_listed) {
            self.library = Some(library);
            return (samples, wait);
        }
        self.listed = Some(Instant::now());
        let listed = library.processes(&self.card);
        // A library that has lost the GPU is reopened.
        let is_usable = listed
            .as_ref()
            .map_or_else(|error| error.status.is_absent(), |_| true);
        self.library = is_usable.then_some(library);
        samples.push(NvmlSample::Processes(Observation {
            card: self.card.clone(),
            processes: listed.ok().map(|listed| self.describe(&listed)),
        }));
        (samples, wait)
    }

    /// Returns the utilization, if it is newer than the last one.
    fn utilization(&mut self, library: &dyn GpuLibrary) -> Option<UtilizationSample> {
        let samples = library.process_utilization(&self.card, self.sampled_us);
        let samples = samples.ok().filter(|samples| !samples.is_empty())?;
        let newest_us = samples.iter().map(|sample| sample.timestamp_us).max();
        self.sampled_us = newest_us.unwrap_or(0).max(self.sampled_us);
        Some(UtilizationSample {
            card: self.card.clone(),
            per_mille: per_mille(&samples),
        })
    }

    fn describe(&mut self, listed: &[drava_nvml::Process]) -> Vec<ObservedProcess> {
        let pids: Vec<u32> = listed.iter().map(|process| process.pid).collect();
        self.processes.retain(&pids);
        let describe = |process: &drava_nvml::Process| {
            Some(ObservedProcess {
                pid: process.pid,
                used_bytes: match process.memory {
                    ProcessMemory::Used { bytes } => Some(bytes),
                    ProcessMemory::NotAvailable => None,
                },
                info: self.processes.describe(process.pid)?,
            })
        };
        listed.iter().filter_map(describe).collect()
    }
}

/// Returns the expected utilization behind NVML's whole percents.
fn per_mille(samples: &[ProcessUtilization]) -> BTreeMap<u32, u32> {
    let expected = |sample: &ProcessUtilization| match sample.sm_percent {
        0 => 0,
        percent @ 1..100 => percent * 10 + ROUNDING,
        100.. => 1000,
    };
    samples
        .iter()
        .map(|sample| (sample.pid, expected(sample)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_mean_rounding_error_to_percents() {
        let sample = |(pid, sm_percent)| ProcessUtilization {
            pid,
            timestamp_us: 1,
            sm_percent,
            memory_percent: 0,
            encoder_percent: 0,
            decoder_percent: 0,
        };
        let samples = [(1, 0), (2, 1), (3, 50), (4, 99), (5, 100), (6, u32::MAX)].map(sample);
        let expected = [(1, 0), (2, 15), (3, 505), (4, 995), (5, 1000), (6, 1000)];
        assert_eq!(per_mille(&samples), BTreeMap::from(expected));
    }
}
