//! Observation of the GPUs by a thread per GPU, so that a GPU whose NVML calls hang does not delay the others.
//!
//! A thread reads the sensors each [`INTERVAL`] and waits for events in between. Readings go to the exporter's
//! [`GpuTable`], answers and events to the [`HealthTable`]. The library is opened again after it fails, and an event set
//! after it fails, because an NVIDIA driver that was replaced invalidates both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use drava_api::error::describe;
use drava_nvml::{
    ComputeCapability, Event, EventKind, EventSource, GpuLibrary, GpuUuid, Status, Telemetry,
    WatchError,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpu_health::HealthTable;
use crate::gpu_health::fabric_manager::FabricManager;
use crate::gpu_health::state::{Answer, Observation, Scope};
use crate::gpus::inventory::{OpenLibrary, State};
use crate::metrics::telemetry::GpuTable;

/// Time between two readings of a GPU.
const INTERVAL: Duration = Duration::from_secs(5);

/// Longest wait for an event; a thread ends at most this long after its GPU is removed.
const EVENT_WAIT: Duration = Duration::from_secs(1);

/// Where the threads write.
#[derive(Debug, Clone)]
pub struct Tables {
    /// Telemetry for the exporter.
    pub telemetry: GpuTable,
    /// Health.
    pub health: HealthTable,
}

/// Observes the node's GPUs until `stop`.
pub async fn run(
    tables: Tables,
    mut gpus: watch::Receiver<State>,
    open: OpenLibrary,
    fabric_manager: Arc<FabricManager>,
    stop: CancellationToken,
) {
    let mut threads: BTreeMap<GpuUuid, mpsc::Sender<()>> = BTreeMap::new();
    loop {
        let state = gpus.borrow_and_update().clone();
        match state {
            State::Pending | State::Unknown(_) => {}
            State::Known(node) => {
                tables.telemetry.set_inventory(&node.inventory);
                let now = Instant::now();
                tables.health.set_inventory(&node.inventory, now);
                let gpus = &node.inventory.nvml.gpus;
                threads.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
                for gpu in gpus {
                    if threads.contains_key(&gpu.uuid) {
                        continue;
                    }
                    let monitor = Monitor {
                        gpu: gpu.uuid.clone(),
                        capability: gpu.compute_capability,
                        tables: tables.clone(),
                        fabric_manager: Arc::clone(&fabric_manager),
                        is_watch_reported: false,
                        failing: BTreeSet::new(),
                    };
                    match start(monitor, Arc::clone(&open)) {
                        Ok(thread) => drop(threads.insert(gpu.uuid.clone(), thread)),
                        Err(error) => {
                            tracing::warn!(gpu = %gpu.uuid, %error, "cannot start the thread of the GPU");
                        }
                    }
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = gpus.changed() => if changed.is_err() { return },
        }
    }
}

/// Starts the thread of a GPU. The thread ends after the returned sender is dropped.
fn start(mut monitor: Monitor, open: OpenLibrary) -> std::io::Result<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let thread = std::thread::Builder::new().name("gpu".to_owned());
    thread.stack_size(512 << 10).spawn(move || {
        loop {
            // If the library is unusable, the condition `gpus` reports the reason.
            if let Ok(library) = open() {
                monitor.observe(library.as_ref(), &stopped);
            }
            if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    })?;
    Ok(stop)
}

/// State of the thread of a GPU.
struct Monitor {
    gpu: GpuUuid,
    capability: ComputeCapability,
    tables: Tables,
    fabric_manager: Arc<FabricManager>,
    /// Whether it was reported that the GPU has no events.
    is_watch_reported: bool,
    /// Sensors that failed at the last reading.
    failing: BTreeSet<&'static str>,
}

impl Monitor {
    /// Observes the GPU until its library fails or the thread is stopped.
    fn observe(&mut self, library: &dyn GpuLibrary, stopped: &mpsc::Receiver<()>) {
        let mut events = None;
        loop {
            if events.is_none() {
                events = self.watch(library);
            }
            let telemetry = library.telemetry(&self.gpu);
            let now = Instant::now();
            match telemetry {
                Ok(telemetry) => {
                    let answer = Answer {
                        action: telemetry.recovery_action.clone(),
                        fabric: self
                            .fabric_manager
                            .fabric(&telemetry.fabric, self.capability),
                        fabric_health: telemetry.fabric_health.clone(),
                        memory_repair: telemetry.memory_repair.clone(),
                        energy_millijoules: telemetry.energy_millijoules.clone(),
                    };
                    self.report_failures(&telemetry);
                    self.health(&Observation::Answer(answer), now);
                    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                    let unix = unix.map_or(0.0, |unix| unix.as_secs_f64());
                    self.tables.telemetry.set_sample(&self.gpu, telemetry, unix);
                }
                Err(error) => {
                    let is_absent = error.status.is_absent();
                    self.health(&Observation::Refusal(error.status), now);
                    if !is_absent {
                        return;
                    }
                }
            }
            let until = now + INTERVAL;
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                let wait = left.min(EVENT_WAIT);
                if !self.next_event(library, &mut events, wait)
                    && stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout)
                {
                    return;
                }
                if stopped.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                    return;
                }
            }
        }
    }

    fn health(&self, observation: &Observation, now: Instant) {
        self.tables.health.observe(&self.gpu, observation, now);
    }

    /// Logs each sensor when it begins to fail, and when it is read again.
    fn report_failures(&mut self, telemetry: &Telemetry) {
        let failing: BTreeSet<_> = telemetry.failures().map(|(sensor, _)| sensor).collect();
        for (sensor, error) in telemetry.failures() {
            if !self.failing.contains(sensor) {
                tracing::warn!(gpu = %self.gpu, sensor, %error, "cannot read a sensor of the GPU; its other sensors are used");
            }
        }
        for sensor in self.failing.difference(&failing) {
            tracing::info!(gpu = %self.gpu, sensor, "the sensor of the GPU is read again");
        }
        self.failing = failing;
    }

    /// Registers for events; `None` if the GPU or the NVIDIA driver has none.
    fn watch(&mut self, library: &dyn GpuLibrary) -> Option<Box<dyn EventSource>> {
        let watched = library.watch(std::slice::from_ref(&self.gpu));
        match &watched {
            Ok(_) => self.is_watch_reported = false,
            Err(error) if !self.is_watch_reported => {
                self.is_watch_reported = true;
                tracing::warn!(gpu = %self.gpu, error = describe(error), "no XIDs of the GPU are received");
            }
            Err(_) => {}
        }
        watched.ok()
    }

    /// Waits up to `wait` for an event. Returns whether the GPU has events.
    fn next_event(
        &self,
        library: &dyn GpuLibrary,
        events: &mut Option<Box<dyn EventSource>>,
        wait: Duration,
    ) -> bool {
        let Some(source) = events else {
            return false;
        };
        match source.next(wait) {
            Ok(Some(event)) => self.process(library, &event),
            Ok(None) => {}
            Err(error) => {
                if matches!(error, WatchError::Wait(Status::GpuLost)) {
                    self.health(&Observation::Refusal(Status::GpuLost), Instant::now());
                }
                *events = None;
            }
        }
        true
    }

    fn process(&self, library: &dyn GpuLibrary, event: &Event) {
        if let EventKind::Xid(number) = event.kind {
            self.tables.telemetry.count_xid(&self.gpu, number);
        }
        tracing::info!(
            gpu = %self.gpu,
            event = ?event.kind,
            gpu_instance = event.gpu_instance,
            "NVML event"
        );
        // The slices of an instance that was destroyed meanwhile are unknown: the event then concerns the GPU.
        let scope = event.gpu_instance.and_then(|id| {
            let instances = library.mig_instances(&self.gpu).ok()?;
            let mut instances = instances.into_iter();
            let instance = instances.find(|instance| instance.id == id)?;
            Some(Scope::Slices(instance.placement))
        });
        let scope = scope.unwrap_or(Scope::Gpu);
        self.health(&Observation::Event(event.kind, scope), Instant::now());
    }
}
