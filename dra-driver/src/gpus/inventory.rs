//! Discovery of the node's GPUs: NVML's inventory, PCIe topology, and the NVIDIA driver's user-space files.
//!
//! NVML calls block, some for seconds, so a thread named `nvml` owns the library and makes the calls. The rest of the
//! driver sees a [`watch`] channel with an inventory, or the reason why there is none. The thread scans every [`RESCAN`]
//! and on request; a library that appears late, or disappears during an upgrade of the NVIDIA driver, changes the state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Duration;

use drava_api::config::MemoryEnforcement;
use drava_api::error::describe;
use drava_api::node_profile::{GpuSettings, NodeSettings};
use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_cdi::{Driver, DriverRoot};
use drava_nvml::{
    ComputeMode, Gpu, GpuInstance, GpuLibrary, GpuUuid, Inventory, Library, Memory, Mig, Placement,
    Status,
};
use tokio::sync::{oneshot, watch};

use crate::gpus::capacity::ShareTotals;
use crate::gpus::cgroups::{CGROUP_ROOT, Cgroups};
use crate::gpus::coexistence::OtherOwners;
use crate::gpus::device_files::DeviceFiles;
use crate::gpus::driver_limits::{self, DriverLimits};
use crate::gpus::gpu_plan::GpuPlan;
use crate::gpus::{mps_directories, mps_programs};

pub mod numbers;

use numbers::Numbers;

/// Default time between two scans.
pub const RESCAN: Duration = Duration::from_secs(30);

/// First number of the compute capability of Volta, from which on MPS separates its clients.
const VOLTA: u32 = 7;

/// Time between two scans while the library is missing.
const RETRY: Duration = Duration::from_secs(5);

/// GPUs of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInventory {
    /// NVML's inventory.
    pub nvml: Inventory,
    /// Numbers of GPUs in device names; a GPU without an entry has its minor number.
    pub numbers: Numbers,
    /// PCIe root complex of each GPU (`pci0000:00`), where sysfs has one.
    pub pcie_roots: BTreeMap<GpuUuid, String>,
    /// MIG instances that drava did not create, by GPU.
    pub foreign_instances: BTreeMap<GpuUuid, Vec<GpuInstance>>,
    /// Settings of the node profiles; `None` until the profiles and the labels of the node are known.
    pub settings: Option<NodeSettings>,
    /// Whether the NVIDIA driver can limit memory by cgroup.
    pub driver_limits: DriverLimits,
    /// Why no GPU has shares with `computePolicy: spatial`.
    pub mps: Result<(), SpatialObstacle>,
    /// Other owners of the GPUs.
    pub other_owners: OtherOwners,
    /// Totals of shares that are published as before although the settings changed, by GPU.
    pub retained_totals: BTreeMap<GpuUuid, ShareTotals>,
}

impl NodeInventory {
    /// Returns the plan of a GPU of this inventory.
    #[must_use]
    pub fn plan(&self, gpu: &Gpu) -> GpuPlan {
        let foreign = self.foreign_instances.get(&gpu.uuid);
        let foreign = foreign.map_or(&[][..], Vec::as_slice);
        let settings = self.gpu_settings(gpu.uuid.as_str());
        let confidential_computing = self.nvml.confidential_computing;
        let plan = GpuPlan::new(
            gpu,
            self.number(gpu),
            confidential_computing,
            foreign,
            &settings,
        );
        match self.other_owners.reason(&gpu.uuid) {
            Some(reason) if !settings.is_excluded => plan.without_offer(reason),
            _ => plan,
        }
    }

    /// Returns the number of a GPU in the names of its devices.
    #[must_use]
    pub fn number(&self, gpu: &Gpu) -> u32 {
        self.numbers.get(&gpu.uuid).copied().unwrap_or(gpu.minor)
    }

    /// Returns the settings of a GPU.
    #[must_use]
    pub fn gpu_settings(&self, uuid: &str) -> GpuSettings {
        let settings = self.settings.as_ref();
        settings.map_or_else(GpuSettings::default, |settings| settings.gpu(uuid))
    }

    /// Returns the totals that the shares of a GPU must not exceed: those of its plan, or those that allocations before a
    /// change of the settings used.
    #[must_use]
    pub fn share_limits(&self, plan: &GpuPlan, uuid: &str) -> Option<ShareTotals> {
        let planned = plan.share_offer()?.totals;
        let retained = self.retained_totals.get(&GpuUuid::new(uuid));
        Some(retained.map_or(planned, |retained| planned.max(*retained)))
    }

    /// Returns what can limit the memory of shares of a GPU at best.
    #[must_use]
    pub fn memory_enforcement(&self, gpu: &GpuUuid) -> MemoryEnforcement {
        match self.driver_limit(gpu) {
            Ok(()) => MemoryEnforcement::Driver,
            Err(_) => MemoryEnforcement::Library,
        }
    }

    /// Returns why the NVIDIA driver does not limit the memory of shares of a GPU.
    ///
    /// # Errors
    /// The obstacle.
    pub fn driver_limit(&self, gpu: &GpuUuid) -> Result<(), LimitObstacle> {
        let tried = self.driver_limits.get(gpu);
        tried.copied().unwrap_or(Err(LimitObstacle::NotTried))
    }

    /// Returns whether a GPU that has shares can have some with `computePolicy: spatial`.
    ///
    /// # Errors
    /// The obstacle.
    pub fn spatial(&self, gpu: &Gpu) -> Result<(), SpatialObstacle> {
        match gpu.compute_mode {
            ComputeMode::ExclusiveProcess => Err(SpatialObstacle::Exclusive),
            ComputeMode::Prohibited => Err(SpatialObstacle::Prohibited),
            ComputeMode::Default | ComputeMode::Unknown if gpu.has_mps_clients => {
                Err(SpatialObstacle::OtherMps)
            }
            ComputeMode::Default | ComputeMode::Unknown if gpu.compute_capability.major < VOLTA => {
                Err(SpatialObstacle::OldGpu)
            }
            ComputeMode::Default | ComputeMode::Unknown => self.mps,
        }
    }

    /// Returns the GPU with this UUID.
    #[must_use]
    pub fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.nvml.gpus.iter().find(|gpu| gpu.uuid.as_str() == uuid)
    }

    /// Returns the GPU with the device file `/dev/nvidia<minor>`.
    #[must_use]
    pub fn gpu_by_minor(&self, minor: u32) -> Option<&Gpu> {
        self.nvml.gpus.iter().find(|gpu| gpu.minor == minor)
    }
}

/// GPUs and NVIDIA driver of the node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The GPUs.
    pub inventory: NodeInventory,
    /// User-space files of the NVIDIA driver, which are mounted into containers.
    pub driver: Arc<Driver>,
}

/// State of GPU discovery.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// The first scan is not complete.
    Pending,
    /// Discovery failed. The text has the cause and the remedy.
    Unknown(String),
    /// Discovery succeeded.
    Known(Arc<Node>),
}

/// Opens the GPU library on the calling thread.
pub type OpenLibrary = Arc<dyn Fn() -> Result<Box<dyn GpuLibrary>, String> + Send + Sync>;

/// Identity of a MIG instance in one boot of the node: GPU, profile, placement.
pub type InstanceKey = (GpuUuid, u32, Placement);

/// Content of the claim records that discovery needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// MIG instances that drava created or is creating in this boot of the node.
    pub instances: BTreeSet<InstanceKey>,
    /// Numbers in the names of held devices.
    pub numbers: Numbers,
    /// GPUs with spatial shares, whose programs are clients of MPS.
    pub spatial: BTreeSet<GpuUuid>,
}

/// Reads the claim records.
pub type ReadRecords = Box<dyn Fn() -> Recorded + Send>;

/// Sources of GPU discovery.
pub struct Source {
    /// Opens the GPU library for discovery; called again after a failure.
    pub open: Box<dyn FnMut() -> Result<Box<dyn GpuLibrary>, String> + Send>,
    /// Opens the GPU library for the node agent.
    pub observe: OpenLibrary,
    /// Root of the NVIDIA driver's user-space files on the node.
    pub driver_root: PathBuf,
    /// Path of the driver root inside this container.
    pub driver_root_mount: PathBuf,
    /// Path of the device root inside this container and on the node; `None` where it is the driver root.
    pub device_root: Option<(PathBuf, PathBuf)>,
    /// Device files that are created before each scan; `None` for a container that has all of them.
    pub device_files: Option<DeviceFiles>,
    /// Mount point of sysfs.
    pub sysfs: PathBuf,
    /// Cgroups of the node.
    pub cgroups: Cgroups,
    /// Directories of the daemons of MPS.
    pub mps: PathBuf,
    /// Time between two scans.
    pub rescan: Duration,
}

impl Source {
    /// Returns the sources of a real node: NVML of the driver root.
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
            device_root: None,
            device_files: None,
            sysfs: PathBuf::from("/sys"),
            cgroups: Cgroups::new(CGROUP_ROOT),
            mps: Path::new(drava_vgpu_abi::paths::RUN_DIR).join("mps"),
            rescan: RESCAN,
        }
    }
}

/// Handle of the NVML thread. The thread ends when the handle is dropped.
#[derive(Debug)]
pub struct InventoryThread {
    state: watch::Receiver<State>,
    commands: Arc<mpsc::Sender<Rescan>>,
}

/// Request of a scan; answered when the scan is complete.
type Rescan = oneshot::Sender<()>;

impl InventoryThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the operating system cannot create the thread.
    pub fn start(source: Source, records: ReadRecords) -> std::io::Result<Self> {
        let (commands, requests) = mpsc::channel();
        let (publish, state) = watch::channel(State::Pending);
        std::thread::Builder::new()
            .name("nvml".to_owned())
            .spawn(move || run(source, &records, &requests, &publish))?;
        Ok(Self {
            state,
            commands: Arc::new(commands),
        })
    }

    /// Returns a receiver of the state.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Returns a sender of requests. The thread ends although senders exist.
    #[must_use]
    pub fn requests(&self) -> RescanRequests {
        RescanRequests(Arc::downgrade(&self.commands))
    }

    /// Scans now; returns when the scan is complete.
    pub async fn rescan(&self) {
        self.requests().rescan().await;
    }
}

/// Sender of requests to the NVML thread.
#[derive(Debug, Clone)]
pub struct RescanRequests(Weak<mpsc::Sender<Rescan>>);

impl RescanRequests {
    /// Scans now; returns when the scan is complete, or at once without the thread.
    pub async fn rescan(&self) {
        let (done, wait) = oneshot::channel();
        // Without the thread the last state remains.
        let sent = self.0.upgrade().map(|commands| commands.send(done));
        if let Some(Ok(())) = sent {
            let _ = wait.await;
        }
    }
}

fn run(
    mut source: Source,
    records: &ReadRecords,
    requests: &mpsc::Receiver<Rescan>,
    publish: &watch::Sender<State>,
) {
    let mut library = None;
    let mut before = Before::default();
    let mut answer: Option<Rescan> = None;
    loop {
        let state = scan(&mut library, &mut source, records, &mut before)
            .map_or_else(State::Unknown, |node| State::Known(Arc::new(node)));
        let wait = match &state {
            State::Known(node) if !has_hanging(&node.inventory) => source.rescan,
            State::Known(_) | State::Pending | State::Unknown(_) => RETRY.min(source.rescan),
        };
        publish.send_if_modified(|present| {
            let changed = *present != state;
            if changed {
                *present = state;
            }
            changed
        });
        if let Some(answer) = answer.take() {
            // The receiver may be dropped.
            let _ = answer.send(());
        }
        match requests.recv_timeout(wait) {
            Ok(request) => answer = Some(request),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// MIG instances that drava did not create, by GPU.
type Foreign = BTreeMap<GpuUuid, Vec<GpuInstance>>;

/// What a scan takes from the scan before.
#[derive(Default)]
struct Before {
    /// `None` before the first scan.
    mps: Option<Result<(), SpatialObstacle>>,
    driver_limits: DriverLimits,
    numbers: Numbers,
    foreign: Foreign,
}

fn scan(
    library: &mut Option<Box<dyn GpuLibrary>>,
    source: &mut Source,
    records: &ReadRecords,
    before: &mut Before,
) -> Result<Node, String> {
    if let Some(files) = &source.device_files {
        files.refresh();
    }
    let is_new = library.is_none();
    let present = library.take().map_or_else(&mut source.open, Ok)?;
    // On an error the library is closed and the next scan opens it: after an upgrade of the NVIDIA driver the loaded
    // library fails every call.
    let mut nvml = present.inventory().map_err(|error| describe(&error))?;
    ignore_own_clients(&mut nvml.gpus, records);
    let foreign = foreign_instances(present.as_ref(), &nvml, records, &before.foreign);
    let known = if is_new {
        DriverLimits::new()
    } else {
        before.driver_limits.clone()
    };
    let driver_limits = driver_limits::update(present.as_ref(), &nvml, &source.cgroups, &known);
    report_limits(&before.driver_limits, &driver_limits);
    before.driver_limits.clone_from(&driver_limits);
    *library = Some(present);
    before.numbers = numbered(&nvml.gpus, &before.numbers, records);
    before.foreign.clone_from(&foreign);
    let mps = mps_of_node(source);
    report_mps(before.mps, mps);
    before.mps = Some(mps);
    let root = DriverRoot::open(&source.driver_root_mount, &source.driver_root)
        .map_err(|error| describe(&error))?;
    let device_root = source.device_root.as_ref();
    let device_root = device_root.map(|(mount, on_node)| DriverRoot::open(mount, on_node));
    let device_root = device_root.transpose().map_err(|error| describe(&error))?;
    let kernel_version = Some(nvml.driver_version.as_str());
    let driver = Driver::discover_with_devices(root, device_root, kernel_version);
    let driver = driver.map_err(|error| describe(&error))?;
    Ok(Node {
        inventory: NodeInventory {
            numbers: before.numbers.clone(),
            driver_limits,
            mps,
            ..normalize(nvml, foreign, &source.sysfs)
        },
        driver: Arc::new(driver),
    })
}

/// Forgets clients of MPS on GPUs with spatial shares: other clients exclude shares.
fn ignore_own_clients(gpus: &mut [Gpu], records: &ReadRecords) {
    let has_clients = |gpu: &&mut Gpu| gpu.has_mps_clients;
    let mut with_clients = gpus.iter_mut().filter(has_clients).peekable();
    if with_clients.peek().is_none() {
        return;
    }
    let spatial = records().spatial;
    with_clients.for_each(|gpu| gpu.has_mps_clients = !spatial.contains(&gpu.uuid));
}

/// Logs what changed about the limits of the NVIDIA driver.
fn report_limits(before: &DriverLimits, now: &DriverLimits) {
    for (gpu, limits) in now.iter().filter(|(gpu, now)| before.get(gpu) != Some(now)) {
        match limits {
            Ok(()) => {
                tracing::info!(gpu.uuid = %gpu, "the NVIDIA driver can limit memory by cgroup")
            }
            Err(obstacle) => tracing::info!(
                gpu.uuid = %gpu, reason = obstacle.problem(), remedy = obstacle.remedy(), "the NVIDIA driver cannot limit memory by cgroup; libvgpu alone limits shares"
            ),
        }
    }
}

/// Returns whether the node can have daemons of MPS.
fn mps_of_node(source: &Source) -> Result<(), SpatialObstacle> {
    mps_programs::check(&source.driver_root_mount)?;
    mps_directories::check_all(&source.mps).map_err(|error| {
        tracing::debug!(error = describe(&error), "a directory of MPS is not safe");
        SpatialObstacle::Directory
    })
}

/// Logs a new obstacle of all GPUs of the node.
fn report_mps(before: Option<Result<(), SpatialObstacle>>, now: Result<(), SpatialObstacle>) {
    if before != Some(now)
        && let Err(obstacle) = now
    {
        tracing::info!(
            reason = obstacle.problem(),
            remedy = obstacle.remedy(),
            "no GPU of the node has shares with computePolicy: spatial"
        );
    }
}

/// Returns whether a GPU does not answer.
fn has_hanging(inventory: &NodeInventory) -> bool {
    let mut faults = inventory.nvml.faults.iter();
    faults.any(|fault| fault.status == Status::Timeout)
}

/// Returns the numbers of the GPUs. The records are read when a GPU appears: the numbers of the others stay.
fn numbered(gpus: &[Gpu], before: &Numbers, records: &ReadRecords) -> Numbers {
    let is_new = |gpu: &Gpu| !before.contains_key(&gpu.uuid);
    if !gpus.iter().any(is_new) && gpus.len() == before.len() {
        return before.clone();
    }
    let mut known = before.clone();
    known.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
    known.extend(records().numbers);
    numbers::assign(gpus, &known)
}

/// Returns the MIG instances that drava did not create. The records are read before and after the instances: prepare
/// writes the record first, and unprepare removes it last.
fn foreign_instances(
    library: &dyn GpuLibrary,
    nvml: &Inventory,
    records: &ReadRecords,
    before: &Foreign,
) -> Foreign {
    let is_partitioned = |gpu: &&Gpu| matches!(gpu.mig, Mig::Capable { enabled: true, .. });
    // Of a GPU that does not answer the instances are those of the last scan.
    let is_hanging = |gpu: &Gpu| {
        let mut faults = nvml.faults.iter();
        faults.any(|fault| fault.gpu.as_ref() == Some(&gpu.uuid))
    };
    let mut partitioned = nvml.gpus.iter().filter(is_partitioned).peekable();
    if partitioned.peek().is_none() {
        return BTreeMap::new();
    }
    let mut known = records().instances;
    let listed: Vec<_> = partitioned
        .filter(|gpu| !is_hanging(gpu))
        .map(|gpu| (gpu.uuid.clone(), library.mig_instances(&gpu.uuid)))
        .collect();
    known.extend(records().instances);
    let mut foreign = before.clone();
    foreign.retain(|uuid, _| {
        nvml.gpus
            .iter()
            .any(|gpu| gpu.uuid == *uuid && is_hanging(gpu))
    });
    for (gpu, instances) in listed {
        match instances {
            Ok(mut instances) => {
                instances.retain(|instance| {
                    let key = (gpu.clone(), instance.profile_id, instance.placement);
                    !known.contains(&key)
                });
                if !instances.is_empty() {
                    foreign.insert(gpu, instances);
                }
            }
            Err(error) => {
                // Prepare lists the instances again before it creates one.
                tracing::warn!(gpu.uuid = %gpu, error = describe(&error), "cannot list the MIG instances");
            }
        }
    }
    foreign
}

/// Adds the PCIe roots and clears the used memory, so that only relevant changes compare unequal.
fn normalize(
    mut nvml: Inventory,
    foreign_instances: BTreeMap<GpuUuid, Vec<GpuInstance>>,
    sysfs: &Path,
) -> NodeInventory {
    for gpu in &mut nvml.gpus {
        if let Memory::Dedicated { used_bytes, .. } = &mut gpu.memory {
            *used_bytes = 0;
        }
    }
    let pcie_roots = nvml
        .gpus
        .iter()
        .filter_map(|gpu| Some((gpu.uuid.clone(), pcie_root(sysfs, &gpu.pci_bus_id)?)))
        .collect();
    NodeInventory {
        nvml,
        numbers: Numbers::new(),
        pcie_roots,
        foreign_instances,
        settings: None,
        driver_limits: DriverLimits::new(),
        mps: Err(SpatialObstacle::NoMps),
        other_owners: OtherOwners::default(),
        retained_totals: BTreeMap::new(),
    }
}

/// Returns the root complex of a PCI address: the first `pci<domain>:<bus>` of the device path.
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

/// Inventories for tests.
#[cfg(test)]
pub(crate) mod fixture {
    use drava_nvml::{ComputeCapability, ComputeMode, CudaVersion};

    use super::*;

    /// Returns the inventory of a node with one GPU of 80 GiB.
    pub(crate) fn one_gpu() -> NodeInventory {
        let gpu = Gpu {
            index: 0,
            minor: 0,
            uuid: GpuUuid::new("GPU-0"),
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Hopper".to_owned(),
            compute_capability: ComputeCapability { major: 9, minor: 0 },
            pci_bus_id: "0000:1b:00.0".to_owned(),
            numa_node: None,
            memory: Memory::Dedicated {
                total_bytes: 80 << 30,
                reserved_bytes: 0,
                used_bytes: 0,
            },
            multiprocessors: None,
            addressing_mode: None,
            compute_mode: ComputeMode::Default,
            has_mps_clients: false,
            mig: Mig::NotCapable,
            fabric: None,
        };
        NodeInventory {
            nvml: Inventory {
                driver_version: "580.65.06".to_owned(),
                cuda_driver_version: Some(CudaVersion {
                    major: 13,
                    minor: 0,
                }),
                nvml_version: "13.580.65.06".to_owned(),
                confidential_computing: false,
                gpus: vec![gpu],
                faults: Vec::new(),
            },
            numbers: BTreeMap::new(),
            pcie_roots: BTreeMap::new(),
            foreign_instances: BTreeMap::new(),
            settings: None,
            driver_limits: DriverLimits::new(),
            mps: Ok(()),
            other_owners: OtherOwners::default(),
            retained_totals: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_root_complex_from_device_path() {
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
