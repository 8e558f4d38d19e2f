//! Telemetry of the GPUs: sensor readings and XIDs, read by a thread per GPU, so that a GPU whose NVML calls hang does
//! not delay the others.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use drava_nvml::{EventKind, EventSource, GpuLibrary, GpuUuid, Telemetry};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::inventory::{NodeInventory, OpenLibrary, State};

/// Time between two readings of a GPU.
const INTERVAL: Duration = Duration::from_secs(5);

/// Longest wait for an event; a thread ends at most this long after its GPU is removed.
const EVENT_WAIT: Duration = Duration::from_secs(1);

/// Maximum number of distinct XIDs of a GPU; further numbers are counted as [`Xid::Other`].
const MAX_XIDS: usize = 32;

/// Identity of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// NVML index.
    pub index: u32,
    /// Marketing name.
    pub model: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// Version of the NVIDIA driver.
    pub driver_version: String,
}

/// Number of a critical error of the NVIDIA driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Xid {
    /// A number.
    Number(u64),
    /// A number beyond the first [`MAX_XIDS`].
    Other,
}

/// A GPU with its telemetry.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuEntry {
    /// Identity; `None` for a GPU that was never readable.
    pub info: Option<GpuInfo>,
    /// Whether NVML can read the GPU.
    pub is_healthy: bool,
    /// Last reading, and the Unix time of it in seconds.
    pub sample: Option<(Telemetry, f64)>,
    /// Number of XIDs.
    pub xids: BTreeMap<Xid, u64>,
}

/// GPUs by UUID; clones share the table.
#[derive(Debug, Clone, Default)]
pub struct GpuTable(Arc<Mutex<BTreeMap<GpuUuid, GpuEntry>>>);

impl GpuTable {
    /// Returns the GPUs.
    #[must_use]
    pub fn entries(&self) -> BTreeMap<GpuUuid, GpuEntry> {
        self.lock().clone()
    }

    /// Sets which GPUs exist. Removed GPUs disappear with their counts.
    pub fn set_inventory(&self, inventory: &NodeInventory) {
        let gpus = &inventory.gpus;
        let mut table = self.lock();
        table.retain(|uuid, _| {
            gpus.cards.iter().any(|card| card.uuid == *uuid)
                || gpus
                    .faults
                    .iter()
                    .any(|fault| fault.card.as_ref() == Some(uuid))
        });
        for card in &gpus.cards {
            let entry = table.entry(card.uuid.clone()).or_insert_with(GpuEntry::new);
            entry.is_healthy = true;
            entry.info = Some(GpuInfo {
                index: card.index,
                model: card.name.clone(),
                pci_bus_id: card.pci_bus_id.clone(),
                driver_version: gpus.driver_version.clone(),
            });
        }
        for uuid in gpus.faults.iter().filter_map(|fault| fault.card.clone()) {
            table.entry(uuid).or_insert_with(GpuEntry::new).is_healthy = false;
        }
    }

    /// Marks all GPUs as unreadable: discovery failed.
    pub fn set_unreadable(&self) {
        for entry in self.lock().values_mut() {
            entry.is_healthy = false;
        }
    }

    /// Sets the reading of a GPU.
    pub fn set_sample(&self, card: &GpuUuid, telemetry: Telemetry, unix_seconds: f64) {
        if let Some(entry) = self.lock().get_mut(card) {
            entry.sample = Some((telemetry, unix_seconds));
        }
    }

    /// Counts an XID of a GPU.
    pub fn count_xid(&self, card: &GpuUuid, number: u64) {
        if let Some(entry) = self.lock().get_mut(card) {
            let xid = Xid::Number(number);
            let is_full = entry.xids.len() >= MAX_XIDS && !entry.xids.contains_key(&xid);
            *entry
                .xids
                .entry(if is_full { Xid::Other } else { xid })
                .or_default() += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, GpuEntry>> {
        // The table is valid after a panic: every change is one operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GpuEntry {
    fn new() -> Self {
        Self {
            info: None,
            is_healthy: true,
            sample: None,
            xids: BTreeMap::new(),
        }
    }
}

/// Reads the telemetry of the node's GPUs into `table`, until `stop`.
pub async fn run(
    table: GpuTable,
    mut gpus: watch::Receiver<State>,
    open: OpenLibrary,
    stop: CancellationToken,
) {
    let mut readers: BTreeMap<GpuUuid, mpsc::Sender<()>> = BTreeMap::new();
    loop {
        let state = gpus.borrow_and_update().clone();
        match state {
            State::Pending => {}
            State::Unknown(_) => table.set_unreadable(),
            State::Known(node) => {
                table.set_inventory(&node.inventory);
                let cards = &node.inventory.gpus.cards;
                readers.retain(|uuid, _| cards.iter().any(|card| card.uuid == *uuid));
                for card in cards {
                    if readers.contains_key(&card.uuid) {
                        continue;
                    }
                    match start(card.uuid.clone(), Arc::clone(&open), table.clone()) {
                        Ok(reader) => drop(readers.insert(card.uuid.clone(), reader)),
                        Err(error) => {
                            tracing::warn!(gpu = %card.uuid, %error, "cannot start the telemetry thread");
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
fn start(card: GpuUuid, open: OpenLibrary, table: GpuTable) -> std::io::Result<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let thread = std::thread::Builder::new().name("telemetry".to_owned());
    thread.stack_size(512 << 10).spawn(move || {
        loop {
            if let Ok(library) = open() {
                read(&card, library.as_ref(), &table, &stopped);
            }
            // The library was unusable; the condition `gpus` reports the reason.
            if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    })?;
    Ok(stop)
}

/// Reads a GPU until its library fails or the thread is stopped.
fn read(card: &GpuUuid, library: &dyn GpuLibrary, table: &GpuTable, stopped: &mpsc::Receiver<()>) {
    let mut events = library.watch(std::slice::from_ref(card)).ok();
    while let Ok(telemetry) = library.telemetry(card) {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        table.set_sample(card, telemetry, unix.map_or(0.0, |unix| unix.as_secs_f64()));
        let until = Instant::now() + INTERVAL;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            let wait = left.min(EVENT_WAIT);
            if !count_next(card, &mut events, table, wait)
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

/// Waits up to `wait` for an event and counts it. Returns whether the GPU has events.
fn count_next(
    card: &GpuUuid,
    events: &mut Option<Box<dyn EventSource>>,
    table: &GpuTable,
    wait: Duration,
) -> bool {
    let Some(source) = events else {
        return false;
    };
    match source.next(wait) {
        Ok(Some(event)) => match event.kind {
            EventKind::Xid(number) => table.count_xid(card, number),
            EventKind::DoubleBitEcc
            | EventKind::MigConfigChange
            | EventKind::Unavailable
            | EventKind::RecoveryAction(_)
            | EventKind::Lost
            | EventKind::Other(_) => {}
        },
        Ok(None) => {}
        Err(_) => *events = None,
    }
    true
}
