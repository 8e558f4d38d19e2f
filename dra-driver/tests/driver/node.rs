//! A node in a temporary directory, with the driver's directories and unprivileged fake mounts.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_cdi::{Driver, DriverRoot};
use drava_dra_driver::gpus::cgroups::Cgroups;
use drava_dra_driver::gpus::inventory::{NodeInventory, OpenLibrary};
use drava_dra_driver::mps::{Daemons, Roots};
use drava_dra_driver::node::artifacts::{self, Installed};
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::layout::Layout;
use drava_dra_driver::node::lock::Locks;
use drava_dra_driver::node::mounts::ClaimsMount;
use drava_dra_driver::node::options::{Delivery, Paths};
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::node::tmpfs::Tmpfs;
use drava_dra_driver::prepare::apply::{Applier, ApplyError, Environment};
use drava_dra_driver::prepare::cgroup_limits::CgroupLimits;
use drava_dra_driver::prepare::effects::{Effects, NodeAccess, NodeEffects};
use drava_dra_driver::prepare::record::ClaimRecord;
use k8s_openapi::api::resource::v1::ResourceClaim;
use simulator_machine::testing::skip;
use tempfile::TempDir;

use crate::cluster::FakeGpus;
use crate::fixture::{POOL, claim_ref, h100x2, machine_root, share_id};

/// Records mounts. Unmounting removes the files, as for a tmpfs.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeTmpfs(Arc<Mutex<BTreeSet<PathBuf>>>);

impl FakeTmpfs {
    /// Returns the mounted directories.
    pub(crate) fn mounted(&self) -> BTreeSet<PathBuf> {
        self.0.lock().unwrap().clone()
    }

    /// Removes all mounts and their files, as a reboot does.
    pub(crate) fn reboot(&self) {
        for dir in std::mem::take(&mut *self.0.lock().unwrap()) {
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}

impl Tmpfs for FakeTmpfs {
    fn mount(&self, dir: &Path, _size_bytes: u64, _inodes: u64) -> io::Result<()> {
        assert!(
            self.0.lock().unwrap().insert(dir.to_owned()),
            "{} is mounted twice",
            dir.display()
        );
        Ok(())
    }

    fn unmount(&self, dir: &Path) -> io::Result<()> {
        if !self.0.lock().unwrap().remove(dir) {
            return Err(io::Error::from_raw_os_error(22));
        }
        for entry in std::fs::read_dir(dir)? {
            std::fs::remove_file(entry?.path())?;
        }
        Ok(())
    }

    fn is_mounted(&self, dir: &Path) -> io::Result<bool> {
        Ok(self.0.lock().unwrap().contains(dir))
    }
}

/// Directory of a node.
pub(crate) enum NodeRoot {
    /// Removed with the value.
    New(TempDir),
    /// Of another process.
    Existing(PathBuf),
}

impl NodeRoot {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::New(dir) => dir.path(),
            Self::Existing(dir) => dir,
        }
    }
}

/// The directories of a node. Drivers can be restarted on it.
pub(crate) struct TestNode {
    pub(crate) root: NodeRoot,
    pub(crate) paths: Paths,
    pub(crate) tmpfs: FakeTmpfs,
}

impl TestNode {
    /// Creates an empty node with the driver root of the simulated machine and an image with artifacts.
    pub(crate) fn new() -> Self {
        let root = NodeRoot::New(tempfile::tempdir().unwrap());
        let node = Self::at(root, machine_root().to_owned());
        let image = &node.paths.artifacts_dir;
        std::fs::create_dir(image).unwrap();
        // The node has a containerd with its defaults.
        let containerd = node.root.path().join("proc/1/root/etc/containerd");
        std::fs::create_dir_all(containerd).unwrap();
        std::fs::write(image.join("libvgpu.so"), "libvgpu").unwrap();
        std::fs::write(image.join("drava-cdi-hook"), "hook").unwrap();
        node
    }

    /// Returns the node at `root`, whose driver root is that of a machine.
    pub(crate) fn at(root: NodeRoot, driver_root_mount: PathBuf) -> Self {
        let dir = |name: &str| root.path().join(name);
        let paths = Paths {
            kubelet_dir: dir("kubelet"),
            cdi_dir: dir("cdi"),
            state_dir: dir("state"),
            run_dir: dir("run"),
            driver_root: PathBuf::from("/opt/gpu-driver"),
            driver_root_mount,
            dev_root: None,
            dev_root_mount: PathBuf::from("/dev-root"),
            dev_char_dir: None,
            artifacts_dir: dir("image"),
        };
        Self {
            root,
            paths,
            tmpfs: FakeTmpfs::default(),
        }
    }

    /// Creates a node with the directories that a started driver creates.
    pub(crate) fn started() -> Self {
        let node = Self::new();
        let layout = node.layout();
        for dir in [
            layout.claims(),
            layout.locks(),
            layout.usages(),
            layout.cdi_dir().to_owned(),
        ] {
            std::fs::create_dir_all(dir).unwrap();
        }
        node
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::new(&self.paths)
    }

    pub(crate) fn installed(&self) -> Installed {
        artifacts::install(&self.paths.artifacts_dir, &self.paths.state_dir).unwrap()
    }

    pub(crate) fn driver(&self) -> Driver {
        let root =
            DriverRoot::open(&self.paths.driver_root_mount, &self.paths.driver_root).unwrap();
        Driver::discover(root).unwrap()
    }

    /// Returns the memory limits by this NVIDIA driver, of cgroups below a directory.
    pub(crate) fn cgroup_limits(&self, open: &OpenLibrary) -> Arc<CgroupLimits> {
        let cgroups = Cgroups::new(self.root.path().join("cgroup"));
        let limits = CgroupLimits::new(self.layout(), cgroups, Arc::clone(open));
        Arc::new(limits)
    }

    /// Returns daemons of MPS whose program is the file `mps` of the node.
    pub(crate) fn mps(&self) -> Arc<Daemons> {
        let roots = Roots {
            driver: self.root.path().join("driver"),
            device: None,
            proc: "/proc".into(),
        };
        let tmpfs = Arc::new(self.tmpfs.clone());
        let program = self.root.path().join("mps");
        Arc::new(Daemons::new(
            self.layout(),
            program,
            roots,
            Labels::Off,
            tmpfs,
        ))
    }

    pub(crate) fn effects(&self) -> NodeEffects {
        self.effects_with(Arc::new(self.tmpfs.clone()))
    }

    /// Returns effects with these mounts, on GPUs without processes.
    pub(crate) fn effects_with(&self, tmpfs: Arc<dyn Tmpfs>) -> NodeEffects {
        let open: OpenLibrary = Arc::new(|| Ok(Box::new(FakeGpus::h100x2())));
        let access = NodeAccess {
            cgroup_limits: self.cgroup_limits(&open),
            mps: self.mps(),
            open,
            proc_root: self.root.path().join("proc"),
            boot_id: "boot".to_owned(),
            labels: Labels::Off,
            device_files: None,
        };
        NodeEffects::new(self.layout(), tmpfs, access)
    }

    /// Returns the applier of a driver that has just started.
    pub(crate) fn applier<E: Effects>(&self, effects: E) -> Applier<E> {
        Applier::new(
            self.layout(),
            Locks::new(self.layout().locks(), Duration::from_secs(5)),
            effects,
        )
    }

    /// Adds a process to the node's `/proc` that has the first share of a claim mounted. Returns its directory.
    pub(crate) fn start_container(&self, pid: u32, number: u32) -> PathBuf {
        let claims = ClaimsMount::locate(&self.layout().claims()).unwrap();
        let (device, claims) = claims.into_parts();
        let root = claims
            .join(claim_ref(number).uid.as_str())
            .join(share_id(number, 0))
            .join("limits");
        let dir = self.root.path().join(format!("proc/{pid}"));
        std::fs::create_dir(&dir).unwrap();
        let line = format!(
            "31 30 {device} {} /run/x ro - ext4 /dev/sda rw\n",
            root.display()
        );
        std::fs::write(dir.join("mountinfo"), line).unwrap();
        dir
    }

    /// As [`Self::start_container`], with all that the driver reads of a process. It started at time 1.
    pub(crate) fn start_process(&self, pid: u32, number: u32) -> PathBuf {
        let dir = self.start_container(pid, number);
        std::fs::create_dir(dir.join("ns")).unwrap();
        let stat = format!("{pid} (train) S {}", "1 ".repeat(30));
        for (name, text) in [
            ("stat", stat.as_str()),
            ("status", &format!("NSpid:\t{pid}\n")),
            ("ns/pid", ""),
            ("cgroup", "0::/\n"),
        ] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        dir
    }

    /// Returns the files of claims on the node, without CDI specs.
    pub(crate) fn claim_files_without_cdi(&self) -> Vec<String> {
        self.claim_state()
            .0
            .into_iter()
            .filter(|name| !name.starts_with("cdi"))
            .collect()
    }

    /// Returns the files of claims on the node without what they share, and the mounts.
    pub(crate) fn claim_state(&self) -> (Vec<String>, BTreeSet<PathBuf>) {
        let files = crate::fixture::tree(self.root.path()).into_keys();
        let of_claims = |name: &String| {
            ["state/claims/", "run/", "cdi/"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                && !name.starts_with("cdi/gpu.drava.dev-base-")
                && name != "run/cgroup-limits.sock"
        };
        (files.filter(of_claims).collect(), self.tmpfs.mounted())
    }
}

/// Returns the environment of prepare on a node with these GPUs.
pub(crate) fn environment<'a>(
    inventory: &'a NodeInventory,
    driver: &'a Driver,
    installed: &'a Installed,
) -> Environment<'a> {
    Environment {
        pool: POOL,
        inventory,
        driver,
        installed,
        delivery: Delivery::Preload,
    }
}

/// Prepares a claim and returns the record and the repairs.
pub(crate) fn prepare<E: Effects>(
    node: &TestNode,
    applier: &Applier<E>,
    number: u32,
    found: &ResourceClaim,
) -> Result<(ClaimRecord, Vec<String>), ApplyError> {
    let (inventory, driver, installed) = (h100x2(), node.driver(), node.installed());
    let environment = environment(&inventory, &driver, &installed);
    applier
        .prepare(&claim_ref(number), Some(found), &environment)
        .map(|(record, repairs)| (record, repairs.0))
}

/// Returns the limits page of the first share of a claim.
pub(crate) fn page_of(node: &TestNode, number: u32) -> PathBuf {
    let share = ShareId::parse(&share_id(number, 0)).unwrap();
    node.layout()
        .limits(&claim_ref(number).uid, &share)
        .join("page")
}

/// Returns the usage region of the first share of a claim.
pub(crate) fn region_of(node: &TestNode, number: u32) -> PathBuf {
    let share = ShareId::parse(&share_id(number, 0)).unwrap();
    node.layout()
        .usage(&claim_ref(number).uid, &share)
        .join("region")
}

/// Returns the path of a claim's record.
pub(crate) fn record_of(node: &TestNode, number: u32) -> PathBuf {
    let name = format!("{}.json", claim_ref(number).uid);
    node.layout().claims().join(name)
}

/// Returns the path of a claim's CDI spec.
pub(crate) fn spec_of(node: &TestNode, number: u32) -> PathBuf {
    node.paths.cdi_dir.join(format!(
        "gpu.drava.dev-claim-{}.json",
        claim_ref(number).uid
    ))
}

/// Returns the path of the CDI spec of a base.
pub(crate) fn base_of(node: &TestNode, name: &str) -> PathBuf {
    let file = format!("gpu.drava.dev-base-{name}.json");
    node.paths.cdi_dir.join(file)
}

/// Returns true where the simulated machine has no device files, which only root can create, and reports the present
/// test as skipped.
pub(crate) fn lacks_device_files() -> bool {
    let node = machine_root().join("dev/nvidiactl");
    if std::fs::metadata(&node).is_ok_and(|node| node.file_type().is_char_device()) {
        return false;
    }
    skip("device files need root");
    true
}
