//! Changes of prepare and unprepare on the node, one effect per call.
//!
//! Each call is idempotent and atomic. After a crash between two calls the next prepare or reconciliation completes or
//! removes the state. Only records are written durably: the other effects compare what is on the node with the record, so
//! they also repair what a power failure lost or damaged. Tests inject crashes through the trait [`Effects`];
//! [`NodeEffects`] is the real node.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drava_cdi::{Spec, SpecDir};
use drava_nvml::{GpuError, GpuInstance, GpuLibrary, GpuUuid, Status};
use drava_vgpu_abi::{LimitsSpec, REGION_SIZE, page, paths};

use super::base::Base;
use super::cgroup_limits::{CgroupLimits, LimitError};
use super::record::{ClaimRecord, RecordError, RecordStore};
use super::{Partition, Prepared};
use crate::gpus::device_files::DeviceFiles;
use crate::gpus::inventory::OpenLibrary;
use crate::mps::{Daemons, MpsError};
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::files;
use crate::node::gpu_users;
use crate::node::layout::{BASE_PREFIX, Layout, PENDING, SPEC_PREFIX};
use crate::node::lock::LockError;
use crate::node::selinux::{LabelError, Labels};
use crate::node::tmpfs::Tmpfs;
use crate::prepare::liveness::{Held, Inspector, Liveness};

mod region;

/// An effect failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EffectError {
    /// The claim record could not be written or removed.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The CDI spec could not be read, written or removed.
    #[error("cannot use the CDI directory {}", dir.display())]
    Spec {
        /// The directory.
        dir: PathBuf,
        /// Error of the operation.
        #[source]
        source: drava_cdi::StoreError,
    },
    /// A memory limit by the NVIDIA driver could not be removed.
    #[error(transparent)]
    CgroupLimit(#[from] LimitError),
    /// The MPS daemon of a GPU could not be started or stopped.
    #[error(transparent)]
    Mps(#[from] MpsError),
    /// NVML could not be opened.
    #[error("cannot open NVML to change MIG instances: {0}")]
    Library(String),
    /// A MIG instance could not be listed, created or destroyed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A program or a MIG instance holds the GPU in its present MIG mode.
    #[error(
        "cannot switch MIG mode of GPU {gpu} {} while it is in use: {holders}; end that use, or delete the pod to release the \
         allocation",
        if *.enabled { "on" } else { "off" }
    )]
    MigModeHeld {
        /// UUID of the GPU.
        gpu: GpuUuid,
        /// The wanted mode.
        enabled: bool,
        /// What holds the GPU.
        holders: String,
    },
    /// A program holds a MIG instance.
    #[error(
        "cannot destroy MIG instance {id} of GPU {gpu}: it is held by {holders}; restart these programs"
    )]
    InstanceHeld {
        /// UUID of the GPU.
        gpu: GpuUuid,
        /// ID of the GPU instance.
        id: u32,
        /// What holds the instance.
        holders: String,
    },
    /// The lock of a GPU was not acquired.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A file for containers did not get its label.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// A file operation failed.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Operation and object.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The tmpfs of a share could not be mounted.
    #[error(
        "cannot mount a tmpfs on {} for the usage region; the driver needs CAP_SYS_ADMIN (securityContext.privileged) \
         and mountPropagation: Bidirectional on its run directory",
        path.display()
    )]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Outcome of an effect that ensures state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    /// The state existed and is unchanged.
    Present,
    /// The state was missing and was created.
    Created,
    /// The state was valid, but not what is wanted now, and was replaced.
    Updated,
    /// The state was damaged and was replaced.
    Replaced,
}

/// Changes on the node.
pub trait Effects: Send + Sync + 'static {
    /// Writes a claim's record durably.
    ///
    /// # Errors
    /// When the record cannot be written.
    fn save_record(&self, record: &ClaimRecord) -> Result<(), EffectError>;

    /// Ensures that a share has a limits page. A valid page of this share is never written: processes map it.
    ///
    /// # Errors
    /// When the page cannot be read or written.
    fn ensure_page(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        spec: &LimitsSpec,
    ) -> Result<Ensured, EffectError>;

    /// Ensures that a share has a usage region on its own tmpfs. An existing region keeps its content.
    ///
    /// # Errors
    /// When the tmpfs cannot be mounted or the region cannot be created.
    fn ensure_usage(&self, uid: &ClaimUid, share: &ShareId) -> Result<Ensured, EffectError>;

    /// Creates the device files of MIG instances on the node, as far as it allows.
    fn create_device_files(&self, spec: &Spec);

    /// Ensures that the CDI spec of a base equals `spec`. Other claims may do so at the same time.
    ///
    /// # Errors
    /// When the spec cannot be read or written.
    fn ensure_base(&self, base: Base, spec: &Spec) -> Result<Ensured, EffectError>;

    /// Ensures that the claim's CDI spec equals `spec`.
    ///
    /// # Errors
    /// When the spec cannot be read or written.
    fn ensure_spec(&self, uid: &ClaimUid, spec: &Spec) -> Result<Ensured, EffectError>;

    /// Ensures that the MPS daemon of a GPU runs. The caller holds the lock of the GPU.
    ///
    /// # Errors
    /// When it does not start.
    fn ensure_mps(&self, gpu: &str) -> Result<Ensured, EffectError>;

    /// Ends the MPS daemon of a GPU. The caller holds the lock of the GPU.
    ///
    /// # Errors
    /// When a file cannot be removed.
    fn stop_mps(&self, gpu: &str) -> Result<(), EffectError>;

    /// Returns the boot of the node.
    fn boot_id(&self) -> &str;

    /// Returns whether containers or GPU processes of a claim with these devices are on the node. Blocks as long as NVML does.
    fn liveness(&self, uid: &ClaimUid, devices: &[Prepared]) -> Liveness;

    /// Returns the MIG instances of a GPU.
    ///
    /// # Errors
    /// When NVML cannot be opened or cannot list them.
    fn instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, EffectError>;

    /// Ensures that MIG mode of the GPU with the device file `/dev/nvidia<minor>` is on or off.
    ///
    /// # Errors
    /// When a program or a MIG instance holds the GPU, or NVML cannot switch the mode.
    fn ensure_mig_mode(&self, gpu: &GpuUuid, minor: u32, enabled: bool) -> Result<(), EffectError>;

    /// Creates the MIG instance of a partition.
    ///
    /// # Errors
    /// When slices or engines are in use, or NVML cannot create it.
    fn create_instance(
        &self,
        gpu: &GpuUuid,
        partition: &Partition,
    ) -> Result<GpuInstance, EffectError>;

    /// Destroys the MIG instance `id`. Succeeds when it does not exist.
    ///
    /// # Errors
    /// When a process uses it, or NVML cannot destroy it.
    fn destroy_instance(&self, gpu: &GpuUuid, id: u32) -> Result<(), EffectError>;

    /// Removes the claim's CDI spec.
    ///
    /// # Errors
    /// When the file exists and cannot be removed.
    fn remove_spec(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Removes the memory limits that the NVIDIA driver holds for containers of the claim.
    ///
    /// # Errors
    /// When the file that names them cannot be removed.
    fn remove_cgroup_limits(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Unmounts and removes all usage regions of the claim.
    ///
    /// # Errors
    /// When a file exists and cannot be removed.
    fn remove_usage(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Removes all limits pages of the claim.
    ///
    /// # Errors
    /// When a file exists and cannot be removed.
    fn remove_pages(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Removes the claim's record.
    ///
    /// # Errors
    /// When the file exists and cannot be removed.
    fn remove_record(&self, uid: &ClaimUid) -> Result<(), EffectError>;
}

/// Size of a share's tmpfs. The region is about a quarter of it: alerts on full file systems fire from 85% to 97%. Memory that no
/// file uses costs nothing.
const USAGE_BYTES: u64 = 1 << 20;

const _: () = assert!(3 * REGION_SIZE as u64 <= USAGE_BYTES);

/// Inodes of a share's tmpfs: the root, the region, the file for the CDI hook, and one more for a region that is created anew.
const USAGE_INODES: u64 = 4;

/// Access to the GPUs and processes of the node.
#[derive(Clone)]
pub struct NodeAccess {
    /// Opens the GPU library.
    pub open: OpenLibrary,
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Boot of the node.
    pub boot_id: String,
    /// Labels of the files that containers use.
    pub labels: Labels,
    /// Memory limits by the NVIDIA driver.
    pub cgroup_limits: Arc<CgroupLimits>,
    /// Daemons of MPS.
    pub mps: Arc<Daemons>,
    /// Device files of the node; `None` to create none.
    pub device_files: Option<DeviceFiles>,
}

/// Effects on the real node.
pub struct NodeEffects {
    layout: Layout,
    store: RecordStore,
    specs: SpecDir,
    bases: SpecDir,
    tmpfs: Arc<dyn Tmpfs>,
    access: NodeAccess,
}

impl NodeEffects {
    /// Returns the effects for this layout.
    #[must_use]
    pub fn new(layout: Layout, tmpfs: Arc<dyn Tmpfs>, access: NodeAccess) -> Self {
        let store = RecordStore::new(layout.claims());
        let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX);
        let bases = SpecDir::new(layout.cdi_dir(), BASE_PREFIX);
        Self {
            layout,
            store,
            specs,
            bases,
            tmpfs,
            access,
        }
    }

    fn library(&self) -> Result<Box<dyn GpuLibrary>, EffectError> {
        (self.access.open)().map_err(EffectError::Library)
    }

    /// Returns the programs that hold a MIG instance, as text.
    fn holders(&self, library: &dyn GpuLibrary, gpu: &GpuUuid, id: u32) -> String {
        let processes = library.processes(gpu).unwrap_or_default();
        let of_instance = processes.iter().filter(|one| one.gpu_instance == Some(id));
        let pids: Vec<u32> = of_instance.map(|process| process.pid).collect();
        let inventory = library.inventory().ok();
        let gpus = inventory.iter().flat_map(|inventory| &inventory.gpus);
        let minor = gpus
            .clone()
            .find(|one| one.uuid == *gpu)
            .map(|gpu| gpu.minor);
        let files = minor.map_or_else(Vec::new, |minor| {
            gpu_users::capability_files(&self.access.proc_root, minor, id)
        });
        gpu_users::describe(&self.access.proc_root, &files, &pids)
    }

    fn ensure(&self, specs: &SpecDir, id: &str, spec: &Spec) -> Result<Ensured, EffectError> {
        let outcome = match specs.read(id) {
            Ok(Some(present)) if present == *spec => return Ok(Ensured::Present),
            Ok(None) => Ensured::Created,
            Ok(Some(_)) => Ensured::Updated,
            Err(drava_cdi::StoreError::Read { .. }) => Ensured::Replaced,
            Err(error) => return Err(self.spec_error(error)),
        };
        specs
            .write(id, spec)
            .map_err(|error| self.spec_error(error))?;
        Ok(outcome)
    }

    fn spec_error(&self, source: drava_cdi::StoreError) -> EffectError {
        EffectError::Spec {
            dir: self.layout.cdi_dir().to_owned(),
            source,
        }
    }
}

impl Effects for NodeEffects {
    fn save_record(&self, record: &ClaimRecord) -> Result<(), EffectError> {
        Ok(self.store.save(record)?)
    }

    fn ensure_page(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        spec: &LimitsSpec,
    ) -> Result<Ensured, EffectError> {
        let dir = self.layout.limits(uid, share);
        let path = dir.join(paths::PAGE_FILE);
        let present = match fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => {
                return Err(EffectError::File {
                    operation: "read the limits page",
                    path,
                    source,
                });
            }
        };
        let outcome = match present.as_deref().map(page::decode) {
            Some(Ok(page))
                if page.spec.claim_uid == spec.claim_uid && page.spec.share_id == spec.share_id =>
            {
                self.access.labels.ensure(&dir)?;
                self.access.labels.ensure(&path)?;
                return Ok(Ensured::Present);
            }
            Some(_) => Ensured::Replaced,
            None => Ensured::Created,
        };
        let failed = |source| EffectError::File {
            operation: "write the limits page",
            path: path.clone(),
            source,
        };
        fs::create_dir_all(&dir).map_err(failed)?;
        // A new file has the label of its directory.
        self.access.labels.ensure(&dir)?;
        files::write_atomically(&path, &page::encode(spec), 0o644).map_err(failed)?;
        self.access.labels.ensure(&path)?;
        Ok(outcome)
    }

    fn ensure_usage(&self, uid: &ClaimUid, share: &ShareId) -> Result<Ensured, EffectError> {
        let dir = self.layout.usage(uid, share);
        let file = |operation, path: &Path, source| EffectError::File {
            operation,
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(&dir)
            .map_err(|source| file("create the usage directory", &dir, source))?;
        let mounted = self
            .tmpfs
            .is_mounted(&dir)
            .map_err(|source| file("check the mount of the usage directory", &dir, source))?;
        if !mounted {
            self.tmpfs
                .mount(&dir, USAGE_BYTES, USAGE_INODES)
                .map_err(|source| EffectError::Mount {
                    path: dir.clone(),
                    source,
                })?;
            // Only here: a container of the claim can have removed the file since. With a spec, containers can run whose hooks
            // have ended.
            if !matches!(self.specs.read(uid.as_str()), Ok(Some(_))) {
                let path = dir.join(PENDING);
                region::create_pending(&path)
                    .map_err(|source| file("create the file for the CDI hook", &path, source))?;
            }
        }
        let path = dir.join(paths::REGION_FILE);
        region::ensure(&path).map_err(|source| file("create the usage region", &path, source))
    }

    fn create_device_files(&self, spec: &Spec) {
        if let Some(files) = &self.access.device_files {
            for device in spec.devices() {
                files.create(&device.container_edits.device_nodes);
            }
        }
    }

    fn ensure_base(&self, base: Base, spec: &Spec) -> Result<Ensured, EffectError> {
        self.ensure(&self.bases, base.name(), spec)
    }

    fn ensure_spec(&self, uid: &ClaimUid, spec: &Spec) -> Result<Ensured, EffectError> {
        self.ensure(&self.specs, uid.as_str(), spec)
    }

    fn boot_id(&self) -> &str {
        &self.access.boot_id
    }

    fn liveness(&self, uid: &ClaimUid, devices: &[Prepared]) -> Liveness {
        let inspector = Inspector {
            proc_root: self.access.proc_root.clone(),
            claims: self.layout.claims(),
            open: self.access.open.clone(),
        };
        inspector.liveness(&Held::new(uid, devices))
    }

    fn instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, EffectError> {
        Ok(self.library()?.mig_instances(gpu)?)
    }

    fn ensure_mig_mode(&self, gpu: &GpuUuid, minor: u32, enabled: bool) -> Result<(), EffectError> {
        let library = self.library()?;
        if library.is_mig_enabled(gpu)? == enabled {
            return Ok(());
        }
        let held = |holders| EffectError::MigModeHeld {
            gpu: gpu.clone(),
            enabled,
            holders,
        };
        // NVIDIA's driver would destroy the instances.
        if let Some(instance) = library.mig_instances(gpu)?.first() {
            let GpuInstance { id, placement, .. } = instance;
            return Err(held(format!("MIG instance {id} (slices {placement})")));
        }
        match library.set_mig_mode(gpu, enabled) {
            Err(error) if error.status == Status::InUse => {
                let processes = library.processes(gpu).unwrap_or_default();
                let pids: Vec<u32> = processes.iter().map(|process| process.pid).collect();
                let file = PathBuf::from(format!("/dev/nvidia{minor}"));
                let holders = gpu_users::describe(&self.access.proc_root, &[file], &pids);
                Err(held(holders))
            }
            switched => {
                switched?;
                tracing::info!(gpu.uuid = %gpu, enabled, "switched MIG mode");
                Ok(())
            }
        }
    }

    fn create_instance(
        &self,
        gpu: &GpuUuid,
        partition: &Partition,
    ) -> Result<GpuInstance, EffectError> {
        let library = self.library()?;
        Ok(library.create_mig(gpu, partition.profile_id, partition.placement())?)
    }

    fn destroy_instance(&self, gpu: &GpuUuid, id: u32) -> Result<(), EffectError> {
        let library = self.library()?;
        match library.destroy_mig(gpu, id) {
            Err(error) if error.status == Status::InUse => Err(EffectError::InstanceHeld {
                gpu: gpu.clone(),
                id,
                holders: self.holders(library.as_ref(), gpu, id),
            }),
            destroyed => Ok(destroyed?),
        }
    }

    fn remove_spec(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.specs
            .remove(uid.as_str())
            .map(drop)
            .map_err(|error| self.spec_error(error))
    }

    fn ensure_mps(&self, gpu: &str) -> Result<Ensured, EffectError> {
        Ok(match self.access.mps.ensure(gpu)? {
            true => Ensured::Created,
            false => Ensured::Present,
        })
    }

    fn stop_mps(&self, gpu: &str) -> Result<(), EffectError> {
        Ok(self.access.mps.stop(gpu)?)
    }

    fn remove_cgroup_limits(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        Ok(self.access.cgroup_limits.remove(uid)?)
    }

    fn remove_usage(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let dir = self.layout.claim_usage(uid);
        let file = |operation, path: &Path, source| EffectError::File {
            operation,
            path: path.to_owned(),
            source,
        };
        let shares = match fs::read_dir(&dir) {
            Ok(shares) => shares,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(file("list the usage directories in", &dir, source)),
        };
        for share in shares {
            let share = share
                .map_err(|source| file("list the usage directories in", &dir, source))?
                .path();
            let unmount = || {
                // After a crash a mount can lie on another mount.
                while self.tmpfs.is_mounted(&share)? {
                    self.tmpfs.unmount(&share)?;
                }
                fs::remove_dir_all(&share)
            };
            unmount().map_err(|source| file("remove the usage directory", &share, source))?;
        }
        fs::remove_dir(&dir).map_err(|source| file("remove the usage directories in", &dir, source))
    }

    fn remove_pages(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let dir = self.layout.claim(uid);
        match fs::remove_dir_all(&dir) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(EffectError::File {
                operation: "remove the limits pages in",
                path: dir,
                source,
            }),
        }
    }

    fn remove_record(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        Ok(self.store.remove(uid)?)
    }
}
