//! A node with a simulated machine, prepared shares and the agent.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use drava_api::config::Enforcement;
use drava_dra_driver::agent::{Agent, Config, Finding};
use drava_dra_driver::node::claim::{ClaimUid, ShareId};
use drava_dra_driver::node::mounts::MountedShare;
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::page::{NOTIFY_OFFSET, OWN_TIME_OFFSET, WINDOW_OFFSET, YIELD_UNTIL_OFFSET};
use drava_vgpu_abi::{
    ComputePolicy, Cores, Limits, PageError, PageWrite, Priority, own_time, update,
};
use gpu_node::{AgentProcess, Node, run_agent, simulated};
use tokio_util::sync::CancellationToken;

use gpu_tenants::{Tenant, TestBed, library};

use crate::escape::{self, Escape};

/// UUID of the machine's first GPU.
pub(crate) const GPU: &str = "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01";

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// A node with a simulated machine.
pub(crate) struct TestNode {
    pub(crate) test_bed: TestBed,
    root: tempfile::TempDir,
    pub(crate) node: Node,
    pub(crate) findings: Arc<Mutex<Vec<Finding>>>,
    pub(crate) enforcement: Enforcement,
    /// Whether the NVIDIA driver limits the memory of the shares that are prepared.
    pub(crate) limited_by_driver: bool,
    /// Whether the shares that are prepared are parts of the multiprocessors.
    pub(crate) is_spatial: bool,
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
        let node = Node::create(root.path()).unwrap();
        Self {
            test_bed,
            root,
            node,
            findings: Arc::default(),
            enforcement: Enforcement::Report,
            limited_by_driver: false,
            is_spatial: false,
        }
    }

    fn uid(number: u32) -> ClaimUid {
        gpu_node::claim_uid(number).unwrap()
    }

    pub(crate) fn share_id(number: u32) -> ShareId {
        gpu_node::share_id(number).unwrap()
    }

    /// Damages the record of a claim. Its GPUs stay readable.
    pub(crate) fn damage_record(&self, number: u32) {
        let uid = Self::uid(number);
        let path = self.node.layout().claims().join(format!("{uid}.json"));
        let mut content = fs::read(&path).unwrap();
        content.extend(b"damaged");
        // Replaced, as each write of a record.
        let new = path.with_extension("new");
        fs::write(&new, content).unwrap();
        fs::rename(new, path).unwrap();
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
        self.prepare_on(GPU, number, limits);
    }

    /// Prepares a claim with one share of the GPU with this UUID.
    pub(crate) fn prepare_on(&self, gpu: &str, number: u32, limits: &Limits) {
        self.prepare_shares(number, &[(gpu, number)], limits);
    }

    /// Prepares a claim with several shares, each with its GPU's UUID and its number.
    pub(crate) fn prepare_shares(&self, number: u32, shares: &[(&str, u32)], limits: &Limits) {
        self.node
            .prepare(number, shares, limits, self.enforcement)
            .unwrap();
        if self.limited_by_driver {
            let limited =
                |share: &mut drava_dra_driver::prepare::Share| share.limited_by_driver = true;
            self.node.change_record(number, limited).unwrap();
        }
        if self.is_spatial {
            let spatial = |share: &mut drava_dra_driver::prepare::Share| {
                share.compute_policy = drava_api::config::ComputePolicy::Spatial;
            };
            self.node.change_record(number, spatial).unwrap();
        }
    }

    /// Replaces the page of a share, as the driver does with a damaged page, and its record.
    pub(crate) fn replace_page(&self, gpu: &str, number: u32, limits: &Limits) {
        let changed = self.node.change_record(number, |share| {
            share.memory_bytes = limits.memory_limit_bytes.unwrap_or(0);
            share.cores = limits.cores.percent().into();
        });
        changed.unwrap();
        let path = self.page_file(number);
        let page = gpu_node::page(number, number, gpu, limits).unwrap();
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

    /// Sets which part of its measured time a share is charged, as an earlier agent did.
    pub(crate) fn set_own_time(&self, number: u32, own: OwnTime) {
        let path = self.page_file(number);
        let page = fs::OpenOptions::new().write(true).open(path).unwrap();
        let write = own_time(own);
        page.write_all_at(write.bytes(), write.offset()).unwrap();
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

    /// Unprepares a claim, as the driver does.
    pub(crate) fn unprepare(&self, number: u32) {
        let uid = Self::uid(number);
        fs::remove_file(self.node.layout().claims().join(format!("{uid}.json"))).unwrap();
        fs::remove_dir_all(self.node.layout().claim(&uid)).unwrap();
        fs::remove_dir_all(self.node.layout().claim_usage(&uid)).unwrap();
    }

    fn page_file(&self, number: u32) -> PathBuf {
        self.node.page_file(number).unwrap()
    }

    pub(crate) fn page(&self, number: u32) -> Limits {
        self.node.limits(number).unwrap()
    }

    /// Returns a word of the page outside its records.
    pub(crate) fn word(&self, number: u32, at: usize) -> u64 {
        self.node.word(number, at).unwrap()
    }

    /// Returns the own-time word of the page.
    pub(crate) fn own_time_word(&self, number: u32) -> u64 {
        self.word(number, OWN_TIME_OFFSET)
    }

    /// Returns the priority words of the page: end of the yield, window, and whether the share notifies the agent.
    pub(crate) fn priority_words(&self, number: u32) -> [u64; 3] {
        [YIELD_UNTIL_OFFSET, WINDOW_OFFSET, NOTIFY_OFFSET].map(|at| self.word(number, at))
    }

    pub(crate) fn region(&self, number: u32) -> PathBuf {
        self.node.region_file(number).unwrap()
    }

    /// Starts a process in the container of a claim, with a context on the first GPU.
    pub(crate) fn tenant(&self, number: u32) -> Tenant {
        simulated::start_tenant(&self.node, &self.test_bed, 0, number).unwrap()
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
                .env("DRAVA_RUN_DIR", self.node.container(number));
        }
        let mut escape = Escape::start(&mut command);
        self.node.add_process(escape.pid(), number).unwrap();
        assert_eq!(escape.read_result(), 0, "{function} of {bytes} bytes");
        escape
    }

    /// Mounts a volume of the process over the limits directory of a share.
    pub(crate) fn forge_mount(&self, pid: u32, number: u32) {
        let shown = self.root.path().join(format!("proc/{pid}/mountinfo"));
        let mut mounts = fs::read_to_string(&shown).unwrap_or_default();
        mounts.push_str(&gpu_node::mountinfo("0:77", Path::new("/"), number).unwrap());
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
        self.node.config(self.test_bed.machine().root())
    }

    /// Starts an agent in a separate process. Its findings are discarded.
    pub(crate) fn agent_process(&self) -> AgentProcess {
        let test = [
            "--ignored",
            "--exact",
            "node::runs_agent_until_stdin_closes",
        ];
        AgentProcess::start(&self.node, self.test_bed.machine().root(), &test).unwrap()
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

/// Returns the limits of a share with 1 GiB.
pub(crate) fn limits(policy: ComputePolicy, percent: u32, priority: i32) -> Limits {
    Limits {
        cores: Cores::new(percent).unwrap(),
        compute_policy: policy,
        priority: Priority::new(priority).unwrap(),
        ..Limits::memory(GIB)
    }
}

/// The agent of [`TestNode::agent_process`].
#[test]
#[ignore = "a process that other tests start"]
fn runs_agent_until_stdin_closes() {
    assert!(run_agent().unwrap());
}

/// Waits up to 60 s until `condition` returns a value.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    gpu_node::eventually(what, condition).unwrap()
}
