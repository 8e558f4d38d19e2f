//! A node with a simulated machine, prepared shares and the agent.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use drava_dra_driver::agent::{Agent, Config, Finding};
use drava_dra_driver::claim::{ClaimRef, ClaimUid, ShareId};
use drava_dra_driver::layout::Layout;
use drava_dra_driver::mounts::{ClaimsMount, MountedShare};
use drava_dra_driver::options::Paths;
use drava_dra_driver::prepare::record::{ClaimRecord, RecordStore};
use drava_dra_driver::prepare::{Access, CardRef, Delivery, Prepared, Share};
use drava_nvml::{GpuLibrary, Library, find};
use drava_vgpu_abi::page::{
    NOTIFY_OFFSET, OWN_TIME_OFFSET, TOKEN_OFFSET, WINDOW_OFFSET, YIELD_UNTIL_OFFSET,
};
use drava_vgpu_abi::{
    IdText, Limits, LimitsSpec, PageError, PageWrite, REGION_SIZE, decode, encode, paths, retire,
    update,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use gpu_tenants::{Tenant, TestBed, library};

use crate::escape::{self, Escape};

/// UUID of the machine's first GPU.
pub(crate) const CARD: &str = "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01";

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// A node with a simulated machine.
pub(crate) struct TestNode {
    pub(crate) test_bed: TestBed,
    root: tempfile::TempDir,
    layout: Layout,
    pub(crate) findings: Arc<Mutex<Vec<Finding>>>,
    pub(crate) enforcement: Enforcement,
}

/// A running agent, stopped on drop.
pub(crate) struct RunningAgent {
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic of the agent fails the test by the missing effect.
            let _ = thread.join();
        }
    }
}

impl TestNode {
    pub(crate) fn new() -> Self {
        Self::on(TestBed::new(library::shipped().unwrap()).unwrap())
    }

    /// Creates a node with this machine.
    pub(crate) fn on(test_bed: TestBed) -> Self {
        let root = tempfile::tempdir().unwrap();
        let layout = layout(root.path());
        for dir in [layout.claims(), layout.usages(), root.path().join("proc")] {
            fs::create_dir_all(dir).unwrap();
        }
        Self {
            test_bed,
            root,
            layout,
            findings: Arc::default(),
            enforcement: Enforcement::Report,
        }
    }

    fn uid(number: u32) -> ClaimUid {
        ClaimUid::parse(&format!("claim-{number}")).unwrap()
    }

    pub(crate) fn share_id(number: u32) -> ShareId {
        ShareId::parse(&format!("00000000-0000-4000-8000-{number:012}")).unwrap()
    }

    /// Returns the share of a claim with one share, as a process has it.
    pub(crate) fn mounted(number: u32) -> MountedShare {
        MountedShare {
            claim: Self::uid(number),
            share: Self::share_id(number),
        }
    }

    /// Prepares a claim with one share of the first GPU, as the driver does.
    pub(crate) fn prepare(&self, number: u32, limits: &Limits) {
        self.prepare_on(CARD, number, limits);
    }

    /// Prepares a claim with one share of the GPU with this UUID.
    pub(crate) fn prepare_on(&self, card: &str, number: u32, limits: &Limits) {
        self.prepare_shares(number, &[(card, number)], limits);
    }

    /// Prepares a claim with several shares, each with its GPU's UUID and its number.
    pub(crate) fn prepare_shares(&self, number: u32, shares: &[(&str, u32)], limits: &Limits) {
        let uid = Self::uid(number);
        for (card, share) in shares {
            let share = Self::share_id(*share);
            let limits_dir = self.layout.limits(&uid, &share);
            let usage_dir = self.layout.usage(&uid, &share);
            fs::create_dir_all(&limits_dir).unwrap();
            fs::create_dir_all(&usage_dir).unwrap();
            let page = Self::fresh_page(&uid, &share, card, limits);
            fs::write(limits_dir.join(paths::PAGE_FILE), page).unwrap();
            fs::write(usage_dir.join(paths::REGION_FILE), vec![0; REGION_SIZE]).unwrap();
            // The container sees this directory as /run/drava.
            let inside = self.container(number).join(share.as_str());
            fs::create_dir_all(&inside).unwrap();
            symlink(limits_dir, inside.join(paths::LIMITS_DIR)).unwrap();
            symlink(usage_dir, inside.join(paths::USAGE_DIR)).unwrap();
        }
        RecordStore::new(self.layout.claims())
            .save(&self.record(number, shares))
            .unwrap();
    }

    fn fresh_page(uid: &ClaimUid, share: &ShareId, card: &str, limits: &Limits) -> Vec<u8> {
        let spec = LimitsSpec {
            claim_uid: IdText::new(uid.as_str()).unwrap(),
            share_id: IdText::new(share.as_str()).unwrap(),
            device_uuid: card.parse().unwrap(),
            limits: *limits,
        };
        encode(&spec).to_vec()
    }

    /// Replaces the page of a share, as the driver does. The old page is retired first if `retires`; the driver does not
    /// retire damaged pages.
    pub(crate) fn replace_page(&self, card: &str, number: u32, retires: bool, limits: &Limits) {
        let path = self.page_file(number);
        if retires {
            self.write_page(number, retire);
        }
        let page = Self::fresh_page(&Self::uid(number), &Self::share_id(number), card, limits);
        let new = path.with_extension("new");
        fs::write(&new, page).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Changes a page in place, as another writer than the agent would.
    pub(crate) fn change_page(&self, number: u32, change: impl FnOnce(&mut Limits)) {
        let mut limits = self.page(number);
        change(&mut limits);
        self.write_page(number, |content| update(content, &limits));
    }

    fn write_page(
        &self,
        number: u32,
        writes: impl FnOnce(&[u8]) -> Result<[PageWrite; 2], PageError>,
    ) {
        let path = self.page_file(number);
        let page = fs::OpenOptions::new().write(true).open(&path).unwrap();
        for write in writes(&fs::read(path).unwrap()).unwrap() {
            page.write_all_at(write.bytes(), write.offset()).unwrap();
        }
    }

    fn record(&self, number: u32, shares: &[(&str, u32)]) -> ClaimRecord {
        let device = |(card, share): &(&str, u32)| Prepared {
            request: "gpu".to_owned(),
            pool: "node".to_owned(),
            device: "gpu-0-vgpu".to_owned(),
            card: CardRef {
                uuid: (*card).to_owned(),
                minor: 0,
                pci_bus_id: "0000:17:00.0".to_owned(),
            },
            access: Access::Share(Share {
                id: Self::share_id(*share),
                memory_bytes: GIB,
                cores: 0,
                slots: 1,
                compute_policy: ComputePolicy::Balance,
                priority: Priority::default(),
                memory_policy: MemoryPolicy::Hard,
                enforcement: self.enforcement,
                unmetered: false,
            }),
        };
        ClaimRecord {
            claim: ClaimRef {
                namespace: "default".to_owned(),
                name: format!("claim-{number}"),
                uid: Self::uid(number),
            },
            devices: shares.iter().map(device).collect(),
            delivery: Delivery::Preload,
            library: "library".to_owned(),
            hook: "hook".to_owned(),
        }
    }

    /// Unprepares a claim, as the driver does.
    pub(crate) fn unprepare(&self, number: u32) {
        let uid = Self::uid(number);
        fs::remove_file(self.layout.claims().join(format!("{uid}.json"))).unwrap();
        fs::remove_dir_all(self.layout.claim(&uid)).unwrap();
        fs::remove_dir_all(self.layout.claim_usage(&uid)).unwrap();
    }

    fn container(&self, number: u32) -> PathBuf {
        self.root.path().join(format!("container-{number}"))
    }

    fn page_file(&self, number: u32) -> PathBuf {
        self.layout
            .limits(&Self::uid(number), &Self::share_id(number))
            .join(paths::PAGE_FILE)
    }

    pub(crate) fn page(&self, number: u32) -> Limits {
        let page = fs::read(self.page_file(number)).unwrap();
        decode(&page).unwrap().spec.limits
    }

    /// Returns a word of the page outside its records.
    pub(crate) fn word(&self, number: u32, at: usize) -> u64 {
        let page = fs::read(self.page_file(number)).unwrap();
        u64::from_le_bytes(page[at..at + 8].try_into().unwrap())
    }

    /// Returns the token word and the own-time word of the page.
    pub(crate) fn token_words(&self, number: u32) -> [u64; 2] {
        [TOKEN_OFFSET, OWN_TIME_OFFSET].map(|at| self.word(number, at))
    }

    /// Returns the priority words of the page: end of the yield, window, and whether the share notifies the agent.
    pub(crate) fn priority_words(&self, number: u32) -> [u64; 3] {
        [YIELD_UNTIL_OFFSET, WINDOW_OFFSET, NOTIFY_OFFSET].map(|at| self.word(number, at))
    }

    pub(crate) fn region(&self, number: u32) -> PathBuf {
        self.layout
            .usage(&Self::uid(number), &Self::share_id(number))
            .join(paths::REGION_FILE)
    }

    /// Starts a process in the container of a claim, with a context on the first GPU.
    pub(crate) fn tenant(&self, number: u32) -> Tenant {
        self.tenant_on(0, number)
    }

    /// Starts a process in the container of a claim, with a context on the GPU with this index.
    pub(crate) fn tenant_on(&self, card: usize, number: u32) -> Tenant {
        let container = self.container(number);
        let tenant = self.test_bed.tenant_with(None, "dlsym", |command| {
            command
                .env("CUDA_VISIBLE_DEVICES", card.to_string())
                .env("LD_PRELOAD", library::shipped().unwrap())
                .env("DRAVA_RUN_DIR", &container);
        });
        let tenant = tenant.unwrap();
        self.mount(tenant.pid(), number);
        tenant
    }

    /// Starts a process that has allocated `bytes` by `function`, with or without `libvgpu.so`.
    pub(crate) fn escape(
        &self,
        number: u32,
        function: &str,
        bytes: u64,
        preloaded: bool,
    ) -> Escape {
        let mut command = self.test_bed.machine().command(escape::program());
        command
            .arg(function)
            .arg(bytes.to_string())
            .env("CUDA_MODULE_LOADING", "EAGER");
        if preloaded {
            command
                .env("LD_PRELOAD", library::shipped().unwrap())
                .env("DRAVA_RUN_DIR", self.container(number));
        }
        let mut escape = Escape::start(&mut command);
        self.mount(escape.pid(), number);
        assert_eq!(escape.read_result(), 0, "{function} of {bytes} bytes");
        escape
    }

    /// Adds a process to the agent's `/proc`, with the mounts of its container.
    fn mount(&self, pid: u32, number: u32) {
        let real = PathBuf::from(format!("/proc/{pid}"));
        let shown = self.root.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&shown).unwrap();
        for name in ["stat", "status", "ns", "cgroup"] {
            symlink(real.join(name), shown.join(name)).unwrap();
        }
        let limits = self
            .layout
            .limits(&Self::uid(number), &Self::share_id(number));
        let below = limits.strip_prefix(self.layout.claims()).unwrap();
        let (device, claims) = ClaimsMount::locate(&self.layout.claims())
            .unwrap()
            .into_parts();
        let mounts = mountinfo(&device, &claims.join(below), number);
        fs::write(shown.join("mountinfo"), mounts).unwrap();
    }

    /// Mounts a volume of the process over the limits directory of a share.
    pub(crate) fn forge_mount(&self, pid: u32, number: u32) {
        let shown = self.root.path().join(format!("proc/{pid}/mountinfo"));
        let mut mounts = fs::read_to_string(&shown).unwrap_or_default();
        mounts.push_str(&mountinfo("0:77", Path::new("/"), number));
        fs::write(shown, mounts).unwrap();
    }

    /// Starts an agent.
    pub(crate) fn agent(&self) -> RunningAgent {
        self.agent_with(self.config())
    }

    /// Starts an agent with this config.
    pub(crate) fn agent_with(&self, config: Config) -> RunningAgent {
        let (stop, findings) = (CancellationToken::new(), Arc::clone(&self.findings));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            Agent::new(config).run(&stopped, |finding| findings.lock().unwrap().push(finding));
        });
        RunningAgent {
            stop,
            thread: Some(thread),
        }
    }

    /// Returns the config of an agent of this node.
    pub(crate) fn config(&self) -> Config {
        config(self.root.path(), self.test_bed.machine().root())
    }

    /// Starts an agent in a separate process. Its findings are discarded.
    pub(crate) fn agent_process(&self) -> AgentProcess {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "node::runs_agent_until_stdin_closes",
            ])
            .env(NODE_VARIABLE, self.root.path())
            .env(DRIVER_VARIABLE, self.test_bed.machine().root())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        AgentProcess(child.unwrap())
    }

    /// Waits for a finding that `matches` accepts.
    pub(crate) fn await_finding(&self, what: &str, matches: impl Fn(&Finding) -> bool) -> Finding {
        eventually(what, || {
            self.findings
                .lock()
                .unwrap()
                .iter()
                .find(|finding| matches(finding))
                .cloned()
        })
    }

    /// Returns the percentage of the GPU that each process gets, measured by the simulated machine.
    pub(crate) fn percents(
        &self,
        tenants: &[&Tenant],
        settle: Duration,
        measure: Duration,
    ) -> Vec<f64> {
        self.test_bed.percents(tenants, settle, measure).unwrap()
    }

    /// Returns the rates in the pages.
    pub(crate) fn rates(&self, numbers: &[u32]) -> BTreeMap<u32, Option<u32>> {
        numbers
            .iter()
            .map(|number| (*number, self.page(*number).rate_us_per_s))
            .collect()
    }
}

/// Returns a mountinfo with one mount on the limits directory of a share.
fn mountinfo(device: &str, root: &Path, number: u32) -> String {
    let (share, root) = (TestNode::share_id(number), root.display());
    let point = format!("{}/{share}/{}", paths::RUN_DIR, paths::LIMITS_DIR);
    format!("31 30 {device} {root} {point} ro - ext4 /dev/sda rw\n")
}

const NODE_VARIABLE: &str = "DRAVA_TEST_NODE";
const DRIVER_VARIABLE: &str = "DRAVA_TEST_DRIVER";

/// The agent of [`TestNode::agent_process`].
#[test]
#[ignore = "a process that other tests start"]
fn runs_agent_until_stdin_closes() {
    let path = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let config = config(&path(NODE_VARIABLE), &path(DRIVER_VARIABLE));
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let agent = std::thread::spawn(move || Agent::new(config).run(&stopped, |_| {}));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    stop.cancel();
    agent.join().unwrap();
}

/// An agent process, killed on drop.
pub(crate) struct AgentProcess(Child);

impl AgentProcess {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn layout(root: &Path) -> Layout {
    Layout::new(&Paths {
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
    })
}

/// Returns the config of the agent of the node at `root`, with NVML from the driver root `driver`.
fn config(root: &Path, driver: &Path) -> Config {
    let driver = driver.to_owned();
    let open = move || {
        let path = find(&driver).map_err(|error| error.to_string())?;
        let library = Library::open(&path).map_err(|error| error.to_string())?;
        Ok(Box::new(library) as Box<dyn GpuLibrary>)
    };
    Config {
        layout: layout(root),
        proc_root: root.join("proc"),
        open: Arc::new(open),
        estimate: Arc::new(|_| None),
        metrics: watch::Sender::new(Arc::default()),
    }
}

/// Waits up to 60 s until `condition` returns a value.
pub(crate) fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
