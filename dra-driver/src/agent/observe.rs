//! What NVML says about one card, once a second, from a thread of the card's own: one whose calls hang keeps nothing
//! from the others, and its last figures stay.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use drava_nvml::{GpuLibrary, GpuUuid, ProcessMemory, ProcessUtilization};

use crate::inventory::OpenLibrary;
use crate::process::{Described, Processes};

/// Time between two looks: what is promised within a second needs a little for itself.
pub const INTERVAL: Duration = Duration::from_millis(950);

/// Time between two looks at how busy processes are: NVML's shortest sample period. It gives the newest sample only.
const SAMPLE: Duration = Duration::from_millis(160);

/// What is behind NVML's whole percents on average, per mille: it cuts off what does not make one.
const CUT_OFF: u32 = 5;

/// Time between two attempts to open a library that is not there.
const RETRY: Duration = Duration::from_secs(5);

/// A process that NVML lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// PID on the host.
    pub pid: u32,
    /// Device memory; `None` where NVML does not say.
    pub used_bytes: Option<u64>,
    /// What `/proc` says.
    pub described: Described,
}

/// What there was to see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The processes of a card, once a second.
    Processes(Observation),
    /// How busy they were, as often as NVML says.
    Busy(Busy),
}

/// The processes of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The card.
    pub card: GpuUuid,
    /// Processes with a context; `None` where NVML does not say.
    pub processes: Option<Vec<Listed>>,
}

/// How busy a card was in NVML's last sample period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Busy {
    /// The card.
    pub card: GpuUuid,
    /// For which part of the time it ran a kernel of a process, per mille, by PID on the host. A process that is not here
    /// did nothing.
    pub per_mille: BTreeMap<u32, u32>,
}

/// Where observations go. Whoever waits for them can wait for other things at the same time.
#[derive(Debug, Clone)]
pub struct Outbox {
    observations: Sender<Seen>,
    /// An eventfd.
    bell: Option<Arc<OwnedFd>>,
}

impl Outbox {
    /// One that rings `bell` for each.
    #[must_use]
    pub fn new(observations: Sender<Seen>, bell: Option<Arc<OwnedFd>>) -> Self {
        Self { observations, bell }
    }

    /// Whether somebody takes it.
    fn send(&self, seen: Seen) -> bool {
        let is_sent = self.observations.send(seen).is_ok();
        if let Some(bell) = &self.bell {
            // It rings already if it cannot be written.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
        is_sent
    }
}

/// How closely a card is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Not at all: it has no shares.
    None,
    /// Its processes and their memory.
    Memory,
    /// Also how busy each process is: several shares are active.
    Busy,
}

/// The thread of a card. It ends when this is dropped, or when the call that it hangs in does.
#[derive(Debug)]
pub struct Observer {
    attention: Arc<AtomicU8>,
    _stop: Sender<()>,
}

impl Observer {
    /// Starts to watch `card`.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start(
        card: GpuUuid,
        open: OpenLibrary,
        processes: Processes,
        observations: Outbox,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let attention = Arc::new(AtomicU8::new(Attention::Memory as u8));
        let mut watch = Watch {
            card,
            open,
            library: None,
            processes,
            looked: None,
            sampled_us: 0,
        };
        let asked = Arc::clone(&attention);
        let observe = move || {
            loop {
                let (seen, wait) = watch.pass(asked.load(Ordering::Relaxed));
                if seen.into_iter().any(|seen| !observations.send(seen)) {
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

    /// Watches more or less closely. The thread stays, so that one that hangs is not joined by another one.
    pub fn attend(&self, attention: Attention) {
        self.attention.store(attention as u8, Ordering::Relaxed);
    }
}

struct Watch {
    card: GpuUuid,
    open: OpenLibrary,
    library: Option<Box<dyn GpuLibrary>>,
    processes: Processes,
    looked: Option<Instant>,
    /// When the newest sample was taken that NVML has told, by its clock, µs.
    sampled_us: u64,
}

impl Watch {
    /// Does what is due; says what was seen and how long to wait.
    fn pass(&mut self, attention: u8) -> (Vec<Seen>, Duration) {
        if attention == Attention::None as u8 {
            self.library = None;
            return (Vec::new(), INTERVAL);
        }
        let Some(library) = self.library.take().or_else(|| (self.open)().ok()) else {
            // The driver's own condition tells why.
            return (Vec::new(), RETRY);
        };
        let mut seen = Vec::new();
        let is_busy_asked = attention == Attention::Busy as u8;
        if is_busy_asked {
            seen.extend(self.sample(library.as_ref()).map(Seen::Busy));
        }
        let wait = if is_busy_asked { SAMPLE } else { INTERVAL };
        if self
            .looked
            .is_some_and(|looked| looked.elapsed() + wait / 2 < INTERVAL)
        {
            self.library = Some(library);
            return (seen, wait);
        }
        self.looked = Some(Instant::now());
        let listed = library.processes(&self.card);
        // One that lost its card is opened anew.
        let is_usable = listed
            .as_ref()
            .map_or_else(|error| error.status.is_absent(), |_| true);
        self.library = is_usable.then_some(library);
        seen.push(Seen::Processes(Observation {
            card: self.card.clone(),
            processes: listed.ok().map(|listed| self.describe(&listed)),
        }));
        (seen, wait)
    }

    /// How busy processes were, if that was not told before.
    fn sample(&mut self, library: &dyn GpuLibrary) -> Option<Busy> {
        let samples = library.process_utilization(&self.card, self.sampled_us);
        let samples = samples.ok().filter(|samples| !samples.is_empty())?;
        let newest_us = samples.iter().map(|sample| sample.timestamp_us).max();
        self.sampled_us = newest_us.unwrap_or(0).max(self.sampled_us);
        Some(Busy {
            card: self.card.clone(),
            per_mille: per_mille(&samples),
        })
    }

    fn describe(&mut self, listed: &[drava_nvml::Process]) -> Vec<Listed> {
        let pids: Vec<u32> = listed.iter().map(|process| process.pid).collect();
        self.processes.retain(&pids);
        let describe = |process: &drava_nvml::Process| {
            Some(Listed {
                pid: process.pid,
                used_bytes: match process.memory {
                    ProcessMemory::Used { bytes } => Some(bytes),
                    ProcessMemory::NotAvailable => None,
                },
                described: self.processes.describe(process.pid)?,
            })
        };
        listed.iter().filter_map(describe).collect()
    }
}

/// What whole percents mean.
fn per_mille(samples: &[ProcessUtilization]) -> BTreeMap<u32, u32> {
    let busy = |sample: &ProcessUtilization| match sample.sm_percent {
        0 => 0,
        percent @ 1..100 => percent * 10 + CUT_OFF,
        100.. => 1000,
    };
    samples
        .iter()
        .map(|sample| (sample.pid, busy(sample)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_percents_stand_for_what_was_cut_off_too() {
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
