//! NVML observations of one GPU, from a thread per GPU: an NVML call that hangs affects no other GPU, and the last
//! observation stays valid.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use drava_nvml::{GpuLibrary, GpuUuid, ProcessMemory};

use super::now_us;
use crate::gpus::inventory::OpenLibrary;
use crate::node::process::{ProcessInfo, Processes};

/// Time between two process lists. Detection within a second leaves a margin for the scan.
pub const INTERVAL: Duration = Duration::from_millis(950);

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

/// The processes of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The GPU.
    pub gpu: GpuUuid,
    /// When the list was requested, µs of `CLOCK_MONOTONIC`.
    pub requested_us: u64,
    /// Whether it was requested by [`Observer::request`]. Decisions that count observations, one per second, ignore it.
    pub is_extra: bool,
    /// Whether `processes` has all that NVML lists: one that is ending may still hold memory when `/proc` no longer describes it.
    pub is_complete: bool,
    /// Processes with a context; `None` if NVML does not report them.
    pub processes: Option<Vec<ObservedProcess>>,
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
        // A library that has lost the GPU is reopened.
        let is_usable = listed
            .as_ref()
            .map_or_else(|error| error.status.is_absent(), |_| true);
        self.library = is_usable.then_some(library);
        let processes = listed.ok().map(|listed| {
            let described = self.describe(&listed);
            (described.len() == listed.len(), described)
        });
        let observation = Observation {
            gpu: self.gpu.clone(),
            requested_us,
            is_extra,
            is_complete: processes
                .as_ref()
                .is_some_and(|(is_complete, _)| *is_complete),
            processes: processes.map(|(_, processes)| processes),
        };
        (Some(observation), INTERVAL)
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
