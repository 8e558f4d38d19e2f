//! What NVML says about one card, once a second, from a thread of the card's own: one whose calls hang keeps nothing
//! from the others, and its last figures stay.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use drava_nvml::{GpuLibrary, GpuUuid, ProcessMemory, ProcessUtilization};

use super::process::{Described, Processes};

/// Time between two looks: what is promised within a second needs a little for itself.
pub const INTERVAL: Duration = Duration::from_millis(950);

/// Time between two looks at how busy processes are: NVML's shortest sample period. It gives the newest sample only.
const SAMPLE: Duration = Duration::from_millis(160);

/// Fewer samples than this say nothing about a second.
const SAMPLES: u32 = 3;

/// Time between two attempts to open a library that is not there.
const RETRY: Duration = Duration::from_secs(5);

/// Opens the GPU library, for one thread.
pub type Open = Arc<dyn Fn() -> Result<Box<dyn GpuLibrary>, String> + Send + Sync>;

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

/// One look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The card.
    pub card: GpuUuid,
    /// Percent of the last second in which it ran a kernel of a process, by PID on the host; `None` where nobody asked,
    /// or NVML does not say.
    pub busy: Option<BTreeMap<u32, u32>>,
    /// Processes with a context; `None` where NVML does not say.
    pub processes: Option<Vec<Listed>>,
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
        open: Open,
        proc_root: PathBuf,
        observations: Sender<Observation>,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let attention = Arc::new(AtomicU8::new(Attention::Memory as u8));
        let mut watch = Watch {
            card,
            open,
            library: None,
            processes: Processes::new(proc_root),
            looked: None,
            busy: Busy::default(),
        };
        let asked = Arc::clone(&attention);
        let observe = move || {
            loop {
                let (observation, wait) = watch.pass(asked.load(Ordering::Relaxed));
                if let Some(observation) = observation
                    && observations.send(observation).is_err()
                {
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
    open: Open,
    library: Option<Box<dyn GpuLibrary>>,
    processes: Processes,
    looked: Option<Instant>,
    busy: Busy,
}

impl Watch {
    /// Does what is due; says what was seen and how long to wait.
    fn pass(&mut self, attention: u8) -> (Option<Observation>, Duration) {
        if attention == Attention::None as u8 {
            return (None, INTERVAL);
        }
        let Some(library) = self.library.take().or_else(|| (self.open)().ok()) else {
            // The driver's own condition tells why.
            return (None, RETRY);
        };
        let is_busy_asked = attention == Attention::Busy as u8;
        if is_busy_asked {
            self.busy.sample(library.as_ref(), &self.card);
        }
        let wait = if is_busy_asked { SAMPLE } else { INTERVAL };
        if self
            .looked
            .is_some_and(|looked| looked.elapsed() + wait / 2 < INTERVAL)
        {
            self.library = Some(library);
            return (None, wait);
        }
        self.looked = Some(Instant::now());
        let listed = library.processes(&self.card);
        // One that lost its card is opened anew.
        let is_usable = listed
            .as_ref()
            .map_or_else(|error| error.status.is_absent(), |_| true);
        self.library = is_usable.then_some(library);
        let observation = Observation {
            card: self.card.clone(),
            busy: self.busy.take(),
            processes: listed.ok().map(|listed| self.describe(&listed)),
        };
        (Some(observation), wait)
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

/// How busy processes were, from several samples.
#[derive(Debug, Default)]
struct Busy {
    since_us: u64,
    samples: u32,
    percents: BTreeMap<u32, u32>,
}

impl Busy {
    fn sample(&mut self, library: &dyn GpuLibrary, card: &GpuUuid) {
        let Ok(samples) = library.process_utilization(card, self.since_us) else {
            return;
        };
        if samples.is_empty() {
            return;
        }
        self.samples += 1;
        for ProcessUtilization {
            pid,
            timestamp_us,
            sm_percent,
            ..
        } in samples
        {
            self.since_us = self.since_us.max(timestamp_us);
            let percent = self.percents.entry(pid).or_default();
            *percent = percent.saturating_add(sm_percent);
        }
    }

    /// Means, in whole percents. A process that is in no sample did nothing then.
    fn take(&mut self) -> Option<BTreeMap<u32, u32>> {
        let (samples, percents) = (self.samples, std::mem::take(&mut self.percents));
        self.samples = 0;
        let mean = |(pid, sum): (u32, u32)| (pid, (sum + samples / 2) / samples.max(1));
        (samples >= SAMPLES).then(|| percents.into_iter().map(mean).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_busy_processes_were_is_the_mean_of_enough_samples() {
        let seen = |samples| Busy {
            since_us: 0,
            samples,
            percents: BTreeMap::from([(1, 100), (2, 5)]),
        };
        for few in 0..SAMPLES {
            assert_eq!(seen(few).take(), None, "{few} samples");
        }
        let mut busy = seen(4);
        assert_eq!(busy.take(), Some(BTreeMap::from([(1, 25), (2, 1)])));
        assert_eq!(busy.take(), None, "each sample counts once");
    }
}
