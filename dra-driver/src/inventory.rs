//! What the node has: the cards as NVML lists them, where they hang on the PCI bus, and the user-space driver.
//!
//! NVML calls block, some for seconds, so they are made on one thread of their own, named `nvml`, that also owns the
//! library. The rest of the driver sees a [`watch`] channel: either an inventory, or the reason why there is none.
//! The thread looks again every [`RESCAN`] and on request; a library that appears late, or goes away with a driver
//! upgrade, is only a change of state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use drava_api::error::describe;
use drava_cdi::{Driver, DriverRoot};
use drava_nvml::{Card, GpuLibrary, GpuUuid, Inventory, Library, Memory};
use tokio::sync::{oneshot, watch};

/// Time between two looks at the cards, unless a test wants them more often.
pub const RESCAN: Duration = Duration::from_secs(30);

/// Time between two attempts to find a library that is not there.
const RETRY: Duration = Duration::from_secs(5);

/// The node's cards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInventory {
    /// What NVML says.
    pub gpus: Inventory,
    /// PCIe root complex of each card (`pci0000:00`), where sysfs shows one.
    pub pcie_roots: BTreeMap<GpuUuid, String>,
}

impl NodeInventory {
    /// The card with this UUID.
    #[must_use]
    pub fn card(&self, uuid: &str) -> Option<&Card> {
        self.gpus
            .cards
            .iter()
            .find(|card| card.uuid.as_str() == uuid)
    }

    /// The card whose device file is `/dev/nvidia<minor>`.
    #[must_use]
    pub fn card_by_minor(&self, minor: u32) -> Option<&Card> {
        self.gpus.cards.iter().find(|card| card.minor == minor)
    }
}

/// All that claims need of the node's GPUs.
#[derive(Debug)]
pub struct Node {
    /// The cards.
    pub inventory: NodeInventory,
    /// The user-space driver that containers get.
    pub driver: Driver,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        let driver = |node: &Self| {
            (
                node.driver.version().map(str::to_owned),
                node.driver.libraries().to_vec(),
            )
        };
        self.inventory == other.inventory && driver(self) == driver(other)
    }
}

/// Whether the node's GPUs are known.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Nobody has looked yet.
    Pending,
    /// They are not, and why; what a person must do is in the text.
    Unknown(String),
    /// They are.
    Known(Arc<Node>),
}

/// Opens the GPU library on the calling thread.
pub type OpenLibrary = Arc<dyn Fn() -> Result<Box<dyn GpuLibrary>, String> + Send + Sync>;

/// What the thread looks at.
pub struct Source {
    /// Opens the GPU library; called again after a failure.
    pub open: Box<dyn FnMut() -> Result<Box<dyn GpuLibrary>, String> + Send>,
    /// Opens it for the node agent, in whichever thread asks.
    pub observe: OpenLibrary,
    /// Root of the user-space driver, as the node sees it.
    pub driver_root: PathBuf,
    /// The same, as this process sees it.
    pub driver_root_mount: PathBuf,
    /// `/sys`.
    pub sysfs: PathBuf,
    /// Time between two looks at the cards.
    pub rescan: Duration,
}

impl Source {
    /// NVML of the driver root.
    #[must_use]
    pub fn nvml(driver_root: PathBuf, driver_root_mount: PathBuf) -> Self {
        let mount = driver_root_mount.clone();
        let open = Arc::new(move || {
            let path = drava_nvml::find(&mount).map_err(|error| describe(&error))?;
            let library = Library::open(&path).map_err(|error| describe(&error))?;
            Ok(Box::new(library) as Box<dyn GpuLibrary>)
        });
        let observe = Arc::clone(&open);
        Self {
            open: Box::new(move || open()),
            observe,
            driver_root,
            driver_root_mount,
            sysfs: PathBuf::from("/sys"),
            rescan: RESCAN,
        }
    }
}

/// Handle on the thread that talks to NVML. The thread ends when the handle is dropped.
#[derive(Debug)]
pub struct InventoryThread {
    state: watch::Receiver<State>,
    commands: mpsc::Sender<Rescan>,
}

/// A request to look now; answered when done.
type Rescan = oneshot::Sender<()>;

impl InventoryThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start(source: Source) -> std::io::Result<Self> {
        let (commands, requests) = mpsc::channel();
        let (publish, state) = watch::channel(State::Pending);
        std::thread::Builder::new()
            .name("nvml".to_owned())
            .spawn(move || run(source, &requests, &publish))?;
        Ok(Self { state, commands })
    }

    /// The present state, and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Looks at the cards now, and returns when that is done.
    pub async fn rescan(&self) {
        let (done, wait) = oneshot::channel();
        // A thread that is gone leaves the last state; the driver's own health reports that.
        if self.commands.send(done).is_ok() {
            let _ = wait.await;
        }
    }
}

fn run(mut source: Source, requests: &mpsc::Receiver<Rescan>, publish: &watch::Sender<State>) {
    let mut library = None;
    let mut answer: Option<Rescan> = None;
    loop {
        let state = look(&mut library, &mut source)
            .map_or_else(State::Unknown, |node| State::Known(Arc::new(node)));
        let wait = match &state {
            State::Known(_) => source.rescan,
            State::Pending | State::Unknown(_) => RETRY.min(source.rescan),
        };
        publish.send_if_modified(|present| {
            let changed = *present != state;
            if changed {
                *present = state;
            }
            changed
        });
        if let Some(answer) = answer.take() {
            // Whoever asked may have gone.
            let _ = answer.send(());
        }
        match requests.recv_timeout(wait) {
            Ok(request) => answer = Some(request),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn look(library: &mut Option<Box<dyn GpuLibrary>>, source: &mut Source) -> Result<Node, String> {
    let present = library.take().map_or_else(&mut source.open, Ok)?;
    // Where this fails the library is closed, and opened anew at the next look: after a driver upgrade the old one
    // answers nothing.
    let gpus = present.inventory().map_err(|error| describe(&error))?;
    *library = Some(present);
    let root = DriverRoot::open(&source.driver_root_mount, &source.driver_root)
        .map_err(|error| describe(&error))?;
    let driver = Driver::discover(root).map_err(|error| describe(&error))?;
    Ok(Node {
        inventory: settle(gpus, &source.sysfs),
        driver,
    })
}

/// Adds what sysfs knows and takes out what changes all the time, so that equal states are equal.
fn settle(mut gpus: Inventory, sysfs: &Path) -> NodeInventory {
    for card in &mut gpus.cards {
        if let Memory::Dedicated { used_bytes, .. } = &mut card.memory {
            *used_bytes = 0;
        }
    }
    let pcie_roots = gpus
        .cards
        .iter()
        .filter_map(|card| Some((card.uuid.clone(), pcie_root(sysfs, &card.pci_bus_id)?)))
        .collect();
    NodeInventory { gpus, pcie_roots }
}

/// The root complex above a PCI address: the first `pci<domain>:<bus>` of its device path.
fn pcie_root(sysfs: &Path, pci_bus_id: &str) -> Option<String> {
    let device = std::fs::canonicalize(sysfs.join("bus/pci/devices").join(pci_bus_id)).ok()?;
    device
        .components()
        .filter_map(|component| component.as_os_str().to_str())
        .find(|name| {
            name.strip_prefix("pci")
                .is_some_and(|rest| rest.contains(':'))
        })
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_complex_is_read_from_the_device_path() {
        let sysfs = tempfile::tempdir().unwrap();
        let device = sysfs
            .path()
            .join("devices/pci0000:16/0000:16:01.0/0000:1b:00.0");
        std::fs::create_dir_all(&device).unwrap();
        let links = sysfs.path().join("bus/pci/devices");
        std::fs::create_dir_all(&links).unwrap();
        std::os::unix::fs::symlink(&device, links.join("0000:1b:00.0")).unwrap();

        assert_eq!(
            pcie_root(sysfs.path(), "0000:1b:00.0").as_deref(),
            Some("pci0000:16")
        );
        assert_eq!(pcie_root(sysfs.path(), "0000:9d:00.0"), None);
    }
}
