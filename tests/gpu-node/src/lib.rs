//! A node with prepared shares and the node agent, without Kubernetes, containers and privileges.
//!
//! [`Node`] writes the files that the node driver writes, and gives the agent a `/proc` of its own, in which each process
//! is in the container of a claim. Used by the tests and the bench of the agent, and as a program by `cargo xtask gpu`.

mod agent_process;
pub mod mps;
pub mod simulated;
pub mod suspender;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use drava_dra_driver::agent::policy::idle;
use drava_dra_driver::agent::{Config, FollowedRecords};
use drava_dra_driver::node::claim::{ClaimRef, ClaimUid, ShareId};
use drava_dra_driver::node::layout::Layout;
use drava_dra_driver::node::mounts::ClaimsMount;
use drava_dra_driver::node::options::Paths;
use drava_dra_driver::prepare::apply::MissedReclaims;
use drava_dra_driver::prepare::base::CommonEdits;
use drava_dra_driver::prepare::record::{ClaimRecord, Loaded, RecordStore};
use drava_dra_driver::prepare::{Access, Delivery, GpuRef, Prepared, Share};
use drava_nvml::{GpuLibrary, Library, find};
use drava_vgpu_abi::{IdText, Limits, LimitsSpec, REGION_SIZE, decode, encode, paths};
use simulator_machine::testing::poll;
use tokio::sync::watch;

pub use agent_process::{AgentProcess, UsedResources, run_agent};

/// A node. Its claims and shares have numbers.
pub struct Node {
    root: PathBuf,
    layout: Layout,
}

impl Node {
    /// Returns the node whose files are in `root`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            layout: Layout::new(&Paths {
                kubelet_dir: root.join("kubelet"),
                cdi_dir: root.join("cdi"),
                state_dir: root.join("state"),
                run_dir: root.join("run"),
                driver_root: PathBuf::from("/"),
                driver_root_mount: PathBuf::from("/"),
                dev_root: None,
                dev_root_mount: PathBuf::from("/dev-root"),
                dev_char_dir: None,
                artifacts_dir: root.join("image"),
            }),
        }
    }

    /// Creates the directories of a node in `root`.
    ///
    /// # Errors
    /// If a directory cannot be created.
    pub fn create(root: &Path) -> Result<Self> {
        let node = Self::new(root);
        for dir in [node.layout.claims(), node.layout.usages(), node.proc_root()] {
            fs::create_dir_all(dir)?;
        }
        Ok(node)
    }

    fn proc_root(&self) -> PathBuf {
        self.root.join("proc")
    }

    /// Paths of its claims.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Prepares a claim with several shares, each with its GPU's UUID and its number, as the driver does.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn prepare(
        &self,
        claim: u32,
        shares: &[(&str, u32)],
        limits: &Limits,
        enforcement: Enforcement,
    ) -> Result<()> {
        let uid = claim_uid(claim)?;
        let mut devices = Vec::new();
        for (gpu, number) in shares {
            let share = share_id(*number)?;
            let limits_dir = self.layout.limits(&uid, &share);
            let usage_dir = self.layout.usage(&uid, &share);
            fs::create_dir_all(&limits_dir)?;
            fs::create_dir_all(&usage_dir)?;
            let page = page(claim, *number, gpu, limits)?;
            fs::write(limits_dir.join(paths::PAGE_FILE), page)?;
            fs::write(usage_dir.join(paths::REGION_FILE), vec![0; REGION_SIZE])?;
            // The container sees this directory as /run/drava.
            let inside = self.container(claim).join(share.as_str());
            fs::create_dir_all(&inside)?;
            symlink(limits_dir, inside.join(paths::LIMITS_DIR))?;
            symlink(usage_dir, inside.join(paths::USAGE_DIR))?;
            devices.push(device(gpu, share, limits, enforcement));
        }
        RecordStore::new(self.layout.claims()).save(&record(claim, devices)?)?;
        Ok(())
    }

    /// Adds a whole GPU to a claim, which is prepared if it is not.
    ///
    /// # Errors
    /// If the record cannot be read or written.
    pub fn add_whole_gpu(&self, claim: u32, gpu: &str) -> Result<()> {
        let (store, uid) = (RecordStore::new(self.layout.claims()), claim_uid(claim)?);
        let mut record = match store.load(&uid)? {
            Loaded::Present(record) => *record,
            _ => record(claim, Vec::new())?,
        };
        record.devices.push(Prepared {
            access: Access::Whole,
            ..device(
                gpu,
                share_id(claim)?,
                &Limits::memory(0),
                Enforcement::Report,
            )
        });
        store.save(&record)?;
        Ok(())
    }

    /// Changes the shares in the record of a claim, as the driver does when companion claims add to them.
    ///
    /// # Errors
    /// If the record cannot be read or written.
    pub fn change_record(&self, claim: u32, change: impl Fn(&mut Share)) -> Result<()> {
        let (store, uid) = (RecordStore::new(self.layout.claims()), claim_uid(claim)?);
        let Loaded::Present(mut record) = store.load(&uid)? else {
            anyhow::bail!("claim {uid} has no record");
        };
        let shares = record.devices.iter_mut().filter_map(Prepared::share_mut);
        shares.for_each(change);
        store.save(&record)?;
        Ok(())
    }

    /// The directory that the container of a claim sees as `/run/drava`.
    #[must_use]
    pub fn container(&self, claim: u32) -> PathBuf {
        self.root.join(format!("container-{claim}"))
    }

    /// The limits page of a claim with one share of the same number.
    ///
    /// # Errors
    /// Never, for any number.
    pub fn page_file(&self, claim: u32) -> Result<PathBuf> {
        let limits = self.layout.limits(&claim_uid(claim)?, &share_id(claim)?);
        Ok(limits.join(paths::PAGE_FILE))
    }

    /// The usage region of a claim with one share of the same number.
    ///
    /// # Errors
    /// Never, for any number.
    pub fn region_file(&self, claim: u32) -> Result<PathBuf> {
        let usage = self.layout.usage(&claim_uid(claim)?, &share_id(claim)?);
        Ok(usage.join(paths::REGION_FILE))
    }

    /// Returns the limits in the page of a claim.
    ///
    /// # Errors
    /// If the page cannot be read.
    pub fn limits(&self, claim: u32) -> Result<Limits> {
        let page = fs::read(self.page_file(claim)?)?;
        Ok(decode(&page)?.spec.limits)
    }

    /// Returns a word outside the records of the page of a claim.
    ///
    /// # Errors
    /// If the page cannot be read or ends before the word.
    pub fn word(&self, claim: u32, at: usize) -> Result<u64> {
        let page = fs::read(self.page_file(claim)?)?;
        let word = page.get(at..at + 8).context("a page too short")?;
        Ok(u64::from_le_bytes(word.try_into()?))
    }

    /// Adds a process to the agent's `/proc`, in the container of a claim with one share of the same number.
    ///
    /// # Errors
    /// If the entry cannot be created.
    pub fn add_process(&self, pid: u32, claim: u32) -> Result<()> {
        let real = PathBuf::from(format!("/proc/{pid}"));
        let shown = self.proc_root().join(pid.to_string());
        fs::create_dir_all(&shown)?;
        for name in ["stat", "status", "ns", "cgroup", "task"] {
            symlink(real.join(name), shown.join(name))?;
        }
        let claims = self.layout.claims();
        let limits = self.layout.limits(&claim_uid(claim)?, &share_id(claim)?);
        let (device, root) = ClaimsMount::locate(&claims)?.into_parts();
        let root = root.join(limits.strip_prefix(&claims)?);
        fs::write(shown.join("mountinfo"), mountinfo(&device, &root, claim)?)?;
        Ok(())
    }

    /// Returns the configuration of its agent, with NVML from a driver root.
    #[must_use]
    pub fn config(&self, driver_root: &Path) -> Config {
        let driver_root = driver_root.to_owned();
        let open = move || {
            let path = find(&driver_root).map_err(|error| error.to_string())?;
            let library = Library::open(&path).map_err(|error| error.to_string())?;
            Ok(Box::new(library) as Box<dyn GpuLibrary>)
        };
        Config {
            layout: self.layout.clone(),
            proc_root: self.proc_root(),
            open: Arc::new(open),
            estimate: Arc::new(|_| None),
            allocatable: Arc::new(|_| None),
            missed_reclaims: MissedReclaims::default(),
            metrics: watch::Sender::new(Arc::default()),
            idle_after_us: idle::FIRST_US,
            followed: FollowedRecords::default(),
            terminate: Arc::new(|_, _| {}),
        }
    }
}

/// Waits until `condition` returns a value.
///
/// # Errors
/// As [`poll`].
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
    poll(|| Ok(condition())).with_context(|| format!("waiting for {what}"))
}

/// Returns the UID of a claim.
///
/// # Errors
/// Never, for any number.
pub fn claim_uid(claim: u32) -> Result<ClaimUid> {
    Ok(ClaimUid::parse(&format!("claim-{claim}"))?)
}

/// Returns the ID of a share.
///
/// # Errors
/// Never, for any number.
pub fn share_id(share: u32) -> Result<ShareId> {
    Ok(ShareId::parse(&format!(
        "00000000-0000-4000-8000-{share:012}"
    ))?)
}

/// Returns a new limits page of a share.
///
/// # Errors
/// If `gpu` is not the UUID of a GPU.
pub fn page(claim: u32, share: u32, gpu: &str, limits: &Limits) -> Result<Vec<u8>> {
    let spec = LimitsSpec {
        claim_uid: IdText::new(claim_uid(claim)?.as_str()).context("a UID too long")?,
        share_id: IdText::new(share_id(share)?.as_str()).context("an ID too long")?,
        device_uuid: gpu
            .parse()
            .map_err(|error| anyhow::anyhow!("{gpu:?} is not the UUID of a GPU: {error}"))?,
        limits: *limits,
    };
    Ok(encode(&spec).to_vec())
}

/// Returns a mountinfo with one mount on the limits directory of a share.
///
/// # Errors
/// Never, for any number.
pub fn mountinfo(device: &str, root: &Path, share: u32) -> Result<String> {
    let (share, root) = (share_id(share)?, root.display());
    let point = format!("{}/{share}/{}", paths::RUN_DIR, paths::LIMITS_DIR);
    Ok(format!(
        "31 30 {device} {root} {point} ro - ext4 /dev/sda rw\n"
    ))
}

fn record(claim: u32, devices: Vec<Prepared>) -> Result<ClaimRecord> {
    Ok(ClaimRecord {
        claim: ClaimRef {
            namespace: "default".to_owned(),
            name: format!("claim-{claim}"),
            uid: claim_uid(claim)?,
        },
        devices,
        delivery: Delivery::Preload,
        common: CommonEdits::InClaim,
        can_wait: true,
        library: "library".to_owned(),
        hook: "hook".to_owned(),
    })
}

fn device(gpu: &str, id: ShareId, limits: &Limits, enforcement: Enforcement) -> Prepared {
    Prepared {
        request: "gpu".to_owned(),
        pool: "node".to_owned(),
        device: "gpu-0-vgpu".to_owned(),
        gpu: GpuRef {
            uuid: gpu.to_owned(),
            minor: 0,
            pci_bus_id: "0000:17:00.0".to_owned(),
        },
        access: Access::Share(Share {
            id,
            memory_bytes: limits.memory_limit_bytes.unwrap_or(0),
            limit_bytes: None,
            bursts_idle: false,
            lends_idle: false,
            can_suspend: limits.can_suspend,
            cores: limits.cores.percent().into(),
            slots: 1,
            compute_policy: ComputePolicy::Balance,
            priority: Priority::default(),
            memory_policy: MemoryPolicy::Hard,
            limited_by_driver: false,
            enforcement,
            unmetered: false,
            grants: Vec::new(),
            suspension: None,
        }),
    }
}
