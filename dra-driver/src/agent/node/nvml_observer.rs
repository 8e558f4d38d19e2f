//! NVML observations of one GPU, from a thread per GPU: an NVML call that hangs affects no other GPU, and the last
//! observation stays valid.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use drava_nvml::{GpuLibrary, GpuUuid, ProcessMemory};

use super::now_us;
use crate::gpus::inventory::OpenLibrary;
use crate::node::mounts::MountedShare;
use crate::node::process::{ProcessInfo, Processes};

/// Time between two process lists. Detection within a second leaves a margin for the scan.
pub const INTERVAL: Duration = Duration::from_millis(950);

/// Regular lists of processes per reading of the utilization, whose samples NVML keeps for longer.
const POLLS_PER_SAMPLE: u64 = 4;

/// Time between two attempts to open a missing library.
const RETRY: Duration = Duration::from_secs(5);

/// Time after which a listed process that `/proc` never described is taken for none of a container, µs. It holds up what other shares
/// give back until then.
const UNKNOWN_US: u64 = 10_000_000;

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

/// Which processes have run kernels since this was read last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BusyProcesses {
    /// It was not read this time.
    NotRead,
    /// NVML does not tell.
    Unknown,
    /// The PIDs of these.
    Known(BTreeSet<u32>),
}

/// The processes of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The GPU.
    pub gpu: GpuUuid,
    /// When the list was requested, µs of `CLOCK_MONOTONIC`.
    pub requested_us: u64,
    /// Whether it was requested by [`Observer::request`]. Decisions that count observations, one per second, ignore it.
    pub is_extra: bool,
    /// Whether the shares of all processes are known that NVML lists, but for those that `/proc` has lacked for [`UNKNOWN_US`].
    pub is_complete: bool,
    /// Shares of listed processes that `/proc` no longer describes: they may still hold memory.
    pub ending: Vec<MountedShare>,
    /// Processes with a context; `None` if NVML does not report them.
    pub processes: Option<Vec<ObservedProcess>>,
    /// Which of them run kernels.
    pub busy: BusyProcesses,
}

/// Sends observations to the agent, which can wait for other events at the same time.
#[derive(Debug, Clone)]
pub struct ObservationSender {
    observations: Sender<Observation>,
    wakeup_fd: Option<Arc<OwnedFd>>,
}

impl ObservationSender {
    /// Returns a sender that adds to the eventfd `wakeup_fd` with each observation.
    #[must_use]
    pub fn new(observations: Sender<Observation>, wakeup_fd: Option<Arc<OwnedFd>>) -> Self {
        Self {
            observations,
            wakeup_fd,
        }
    }

    /// Returns whether the observation has a receiver.
    fn send(&self, observation: Observation) -> bool {
        let is_sent = self.observations.send(observation).is_ok();
        if let Some(wakeup_fd) = &self.wakeup_fd {
            // An eventfd that cannot be written is readable already.
            let _ = rustix::io::write(wakeup_fd, &1u64.to_ne_bytes());
        }
        is_sent
    }
}

/// The observer thread of a GPU. It ends when this is dropped, once a hanging call returns.
#[derive(Debug)]
pub struct Observer {
    /// Whether the GPU has shares.
    is_needed: Arc<AtomicBool>,
    requests: SyncSender<()>,
}

impl Observer {
    /// Starts to observe `gpu`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        gpu: GpuUuid,
        open: OpenLibrary,
        processes: Processes,
        observations: ObservationSender,
    ) -> io::Result<Self> {
        let (requests, requested) = mpsc::sync_channel::<()>(1);
        let is_needed = Arc::new(AtomicBool::new(true));
        let mut watch = Watch {
            gpu,
            open,
            library: None,
            processes,
            unknown: UnknownPids::default(),
            sampled_us: 0,
            polls: 0,
        };
        let needed = Arc::clone(&is_needed);
        let observe = move || {
            let mut is_extra = false;
            let mut next = Instant::now();
            loop {
                let (observation, wait) = watch.poll(needed.load(Ordering::Relaxed), is_extra);
                if !is_extra {
                    next = Instant::now() + wait;
                }
                if observation.is_some_and(|seen| !observations.send(seen)) {
                    return;
                }
                let wait = next.saturating_duration_since(Instant::now());
                is_extra = match requested.recv_timeout(wait) {
                    Err(RecvTimeoutError::Timeout) => false,
                    Ok(()) => true,
                    Err(RecvTimeoutError::Disconnected) => return,
                };
            }
        };
        let thread = std::thread::Builder::new().name("agent-nvml".to_owned());
        thread.stack_size(512 << 10).spawn(observe)?;
        Ok(Self {
            is_needed,
            requests,
        })
    }

    /// Requests a list of the processes now.
    pub fn request(&self) {
        // One request is enough while a call hangs, and a thread that has ended lists nothing any more.
        let _ = self.requests.try_send(());
    }

    /// Sets whether the GPU is observed. The thread stays, so that a hanging one is not joined by another.
    pub fn set_needed(&self, is_needed: bool) {
        self.is_needed.store(is_needed, Ordering::Relaxed);
    }
}

struct Watch {
    gpu: GpuUuid,
    open: OpenLibrary,
    library: Option<Box<dyn GpuLibrary>>,
    processes: Processes,
    unknown: UnknownPids,
    /// Time of the newest sample of utilization, µs of NVML's clock.
    sampled_us: u64,
    /// Regular lists of processes so far.
    polls: u64,
}

/// Listed PIDs that `/proc` never described, with when each was first listed, µs.
#[derive(Debug, Default)]
struct UnknownPids(BTreeMap<u32, u64>);

impl UnknownPids {
    /// Applies the PIDs of a list. Returns whether all were listed [`UNKNOWN_US`] ago.
    fn update(&mut self, now_us: u64, pids: &[u32]) -> bool {
        self.0.retain(|pid, _| pids.contains(pid));
        let since = pids.iter().map(|pid| *self.0.entry(*pid).or_insert(now_us));
        // Each is entered.
        let latest_us = since.max();
        latest_us.is_none_or(|latest_us| latest_us.saturating_add(UNKNOWN_US) <= now_us)
    }
}

impl Watch {
    /// Lists the processes, if that is needed. Returns them and the time until the next poll.
    fn poll(&mut self, is_needed: bool, is_extra: bool) -> (Option<Observation>, Duration) {
        if !is_needed {
            self.library = None;
            return (None, INTERVAL);
        }
        let Some(library) = self.library.take().or_else(|| (self.open)().ok()) else {
            // The node driver's condition has the reason.
            return (None, RETRY);
        };
        let requested_us = now_us();
        let listed = library.processes(&self.gpu);
        self.polls = self.polls.wrapping_add(u64::from(!is_extra));
        let busy = match !is_extra && self.polls.is_multiple_of(POLLS_PER_SAMPLE) {
            true => self.busy(&*library),
            false => BusyProcesses::NotRead,
        };
        // A library that has lost the GPU is reopened.
        let is_usable = listed
            .as_ref()
            .map_or_else(|error| error.status.is_absent(), |_| true);
        self.library = is_usable.then_some(library);
        let processes = listed.ok().map(|listed| self.describe(&listed));
        let (mut ending, mut unknown) = (Vec::new(), Vec::new());
        for pid in processes.iter().flat_map(|(_, missing)| missing) {
            match self.processes.last(*pid) {
                Some(last) => ending.extend(last.shares.iter().cloned()),
                None => unknown.push(*pid),
            }
        }
        let is_complete = self.unknown.update(requested_us, &unknown);
        let observation = Observation {
            gpu: self.gpu.clone(),
            requested_us,
            is_extra,
            is_complete: is_complete && processes.is_some(),
            ending,
            processes: processes.map(|(processes, _)| processes),
            busy,
        };
        (Some(observation), INTERVAL)
    }

    /// Returns which processes have run kernels since the last call.
    fn busy(&mut self, library: &dyn GpuLibrary) -> BusyProcesses {
        let Ok(samples) = library.process_utilization(&self.gpu, self.sampled_us) else {
            return BusyProcesses::Unknown;
        };
        let newest_us = samples.iter().map(|sample| sample.timestamp_us).max();
        self.sampled_us = newest_us.unwrap_or(self.sampled_us);
        let busy = samples.iter().filter(|sample| sample.sm_percent > 0);
        BusyProcesses::Known(busy.map(|sample| sample.pid).collect())
    }

    /// Returns the processes, and the PIDs of those that `/proc` lacks.
    fn describe(&mut self, listed: &[drava_nvml::Process]) -> (Vec<ObservedProcess>, Vec<u32>) {
        let pids: Vec<u32> = listed.iter().map(|process| process.pid).collect();
        self.processes.retain(&pids);
        let (mut described, mut missing) = (Vec::new(), Vec::new());
        for process in listed {
            match self.processes.describe(process.pid) {
                Some(info) => described.push(ObservedProcess {
                    pid: process.pid,
                    used_bytes: match process.memory {
                        ProcessMemory::Used { bytes } => Some(bytes),
                        ProcessMemory::NotAvailable => None,
                    },
                    info,
                }),
                None => missing.push(process.pid),
            }
        }
        (described, missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_pid_holds_up_others_for_a_while_only() {
        let mut unknown = UnknownPids::default();
        assert!(unknown.update(1, &[]));
        assert!(!unknown.update(2, &[7]));
        assert!(!unknown.update(UNKNOWN_US + 1, &[7]));
        assert!(unknown.update(UNKNOWN_US + 2, &[7]));
        assert!(!unknown.update(UNKNOWN_US + 3, &[7, 8]));
        // Listed anew, it may be another process.
        assert!(unknown.update(UNKNOWN_US + 4, &[]));
        assert!(!unknown.update(UNKNOWN_US + 5, &[7]));
    }
}
