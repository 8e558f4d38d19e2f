//! The whole driver with a fake kubelet and an in-memory API server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_dra_driver::driver::{self, Config, IdleTimes, RunError};
use drava_dra_driver::gpu_health::state::Rules;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::node::options::{Delivery, Scheduling, UnhealthyEffect};
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::publish::profile::{Guard, Intervals};
use drava_dra_driver::report::conditions::{Condition, Conditions};
use drava_fake_kubelet::{Claim, FakeKubelet, Plugin};
use drava_nvml::{
    CgroupMemory, EventSource, GpuError, GpuFault, GpuInstance, GpuLibrary, GpuUuid, Inventory,
    InventoryError, Memory, MigProfile, Placement, Process, ProcessUtilization, Status, Telemetry,
    Utilization, WatchError,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, eventually};
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim, claim_ref, h100x2};
use crate::node::TestNode;

/// GPUs that a test can change while the driver runs.
#[derive(Clone)]
pub(crate) struct FakeGpus {
    /// `None` makes the library fail.
    inventory: Arc<Mutex<Option<Inventory>>>,
    /// GPU whose calls hang.
    hanging: watch::Sender<Option<GpuUuid>>,
    /// Number of process lists that hang.
    hanging_lists: Arc<AtomicUsize>,
    /// Processes on the GPUs, if NVML lists them.
    processes: Arc<Mutex<BTreeMap<GpuUuid, Vec<Process>>>>,
    /// What calls for memory limits return.
    without_limits: Arc<Mutex<Status>>,
}

impl FakeGpus {
    pub(crate) fn h100x2() -> Self {
        Self {
            inventory: Arc::new(Mutex::new(Some(h100x2().nvml))),
            hanging: watch::Sender::default(),
            hanging_lists: Arc::default(),
            processes: Arc::default(),
            without_limits: Arc::new(Mutex::new(Status::MissingSymbol(
                "nvmlDeviceSetMemoryLimits_v1",
            ))),
        }
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Inventory)) {
        change(self.inventory.lock().unwrap().as_mut().unwrap());
    }

    /// Sets the processes that NVML lists on a GPU.
    pub(crate) fn set_processes(&self, gpu: &str, processes: Vec<Process>) {
        let gpu = GpuUuid::new(gpu);
        self.processes.lock().unwrap().insert(gpu, processes);
    }

    /// Sets what calls for memory limits return.
    pub(crate) fn fail_limits(&self, status: Status) {
        *self.without_limits.lock().unwrap() = status;
    }

    /// Makes the library fail from now on.
    pub(crate) fn fail(&self) {
        *self.inventory.lock().unwrap() = None;
    }

    /// Ends [`fail`](Self::fail).
    pub(crate) fn restore(&self) {
        *self.inventory.lock().unwrap() = Some(h100x2().nvml);
    }

    /// Makes the calls for a GPU hang, or for none. NVML lists the GPU as it was read before.
    pub(crate) fn hang(&self, gpu: Option<&str>) {
        self.hanging.send_replace(gpu.map(GpuUuid::new));
    }

    /// Returns how many process lists hang.
    pub(crate) fn hanging_lists(&self) -> usize {
        self.hanging_lists.load(Ordering::Relaxed)
    }

    /// Returns once the calls for a GPU do not hang.
    fn wait(&self, gpu: &GpuUuid) {
        let mut hanging = self.hanging.subscribe();
        let answers = hanging.wait_for(|hanging| hanging.as_ref() != Some(gpu));
        // Fails only without a sender, which is `self`.
        drop(futures::executor::block_on(answers));
    }

    fn unsupported<T>(&self, gpu: &GpuUuid) -> Result<T, GpuError> {
        self.wait(gpu);
        unsupported(gpu)
    }
}

pub(crate) fn unsupported<T>(gpu: &GpuUuid) -> Result<T, GpuError> {
    Err(GpuError {
        operation: "query the fake library".to_owned(),
        gpu: gpu.clone(),
        status: Status::NotSupported,
    })
}

/// As of a driver before 615.
fn without_limits<T>(gpus: &FakeGpus, gpu: &GpuUuid) -> Result<T, GpuError> {
    gpus.wait(gpu);
    Err(GpuError {
        operation: "limit the memory".to_owned(),
        gpu: gpu.clone(),
        status: gpus.without_limits.lock().unwrap().clone(),
    })
}

impl GpuLibrary for FakeGpus {
    fn inventory(&self) -> Result<Inventory, InventoryError> {
        let status = Status::NotSupported;
        let query = "the number of GPUs";
        let inventory = self.inventory.lock().unwrap().clone();
        let mut inventory = inventory.ok_or(InventoryError { query, status })?;
        let hanging = self.hanging.borrow().clone();
        inventory.faults.extend(hanging.map(|gpu| GpuFault {
            index: 0,
            gpu: Some(gpu),
            query: "the GPU",
            status: Status::Timeout,
        }));
        Ok(inventory)
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<Memory, GpuError> {
        self.unsupported(gpu)
    }

    fn set_memory_limit(&self, gpu: &GpuUuid, _: &Path, _: Option<u64>) -> Result<(), GpuError> {
        without_limits(self, gpu)
    }

    fn cgroup_memory(&self, gpu: &GpuUuid, _: &Path) -> Result<CgroupMemory, GpuError> {
        without_limits(self, gpu)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<Process>, GpuError> {
        self.hanging_lists.fetch_add(1, Ordering::Relaxed);
        self.wait(gpu);
        self.hanging_lists.fetch_sub(1, Ordering::Relaxed);
        let listed = self.processes.lock().unwrap().get(gpu).cloned();
        listed.map_or_else(|| unsupported(gpu), Ok)
    }

    fn utilization(&self, gpu: &GpuUuid) -> Result<Option<Utilization>, GpuError> {
        self.unsupported(gpu)
    }

    fn telemetry(&self, gpu: &GpuUuid) -> Result<Telemetry, GpuError> {
        self.unsupported(gpu)
    }

    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        _since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, GpuError> {
        self.unsupported(gpu)
    }

    fn watch(&self, _gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError> {
        Err(WatchError::Create(Status::NotSupported))
    }

    fn mig_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.unsupported(gpu)
    }

    fn create_mig(&self, gpu: &GpuUuid, _: u32, _: Placement) -> Result<GpuInstance, GpuError> {
        self.unsupported(gpu)
    }

    fn destroy_mig(&self, gpu: &GpuUuid, _id: u32) -> Result<(), GpuError> {
        self.unsupported(gpu)
    }

    fn is_mig_enabled(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.unsupported(gpu)
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, _enabled: bool) -> Result<(), GpuError> {
        self.unsupported(gpu)
    }

    fn mig_remaining(&self, gpu: &GpuUuid, _profile: &MigProfile) -> Result<u32, GpuError> {
        self.unsupported(gpu)
    }
}

/// A node with its kubelet and the API server. Tests start and stop drivers on it.
pub(crate) struct TestCluster {
    pub(crate) node: TestNode,
    pub(crate) api: ApiServer,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) gpus: FakeGpus,
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        // The runtime waits for threads of the driver.
        self.gpus.hang(None);
    }
}

/// A running driver.
pub(crate) struct Running {
    pub(crate) conditions: Conditions,
    stop: CancellationToken,
    task: JoinHandle<Result<(), RunError>>,
}

impl TestCluster {
    pub(crate) async fn new() -> Self {
        let node = TestNode::new();
        let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
        Self {
            api: ApiServer::start(NODE).await,
            kubelet,
            gpus: FakeGpus::h100x2(),
            node,
        }
    }

    pub(crate) fn config(&self) -> Config {
        Config {
            node: NODE.to_owned(),
            pod_uid: None,
            scheduling: Scheduling::Managed,
            delivery: Delivery::Preload,
            paths: self.node.paths.clone(),
            proc_root: self.node.root.path().join("proc"),
            boot_id_file: PathBuf::from(driver::BOOT_ID),
            program: PathBuf::from(env!("CARGO_BIN_EXE_drava-dra-driver")),
            labels: Labels::Off,
            runtime_classes: vec!["kata-with-cdi".to_owned()],
            listen: ([127, 0, 0, 1], 0).into(),
            orphan_grace: Duration::ZERO,
            release_wait: Duration::ZERO,
            retained_grace: Duration::from_secs(3600),
            health: Rules::default(),
            unhealthy_effect: UnhealthyEffect::NoSchedule,
            metric_aliases: false,
            guard: Guard::Refuse,
            profile_intervals: Intervals {
                missing: Duration::from_millis(100),
                entries: Duration::from_secs(3600),
            },
            idle: IdleTimes::default(),
        }
    }

    /// Returns a source with the fake GPUs and the libraries of the simulated machine.
    pub(crate) fn source(&self) -> Source {
        let (gpus, observed) = (self.gpus.clone(), self.gpus.clone());
        Source {
            open: Box::new(move || Ok(Box::new(gpus.clone()))),
            observe: Arc::new(move || Ok(Box::new(observed.clone()))),
            rescan: Duration::from_millis(100),
            ..Source::nvml(
                self.node.paths.driver_root.clone(),
                self.node.paths.driver_root_mount.clone(),
            )
        }
    }

    pub(crate) fn start(&self) -> Running {
        self.start_with(self.config(), self.source())
    }

    pub(crate) fn start_with(&self, config: Config, source: Source) -> Running {
        let (conditions, stop) = (Conditions::default(), CancellationToken::new());
        let task = tokio::spawn(driver::run(
            config,
            self.api.client(),
            source,
            Arc::new(self.node.tmpfs.clone()),
            conditions.clone(),
            stop.clone(),
        ));
        Running {
            conditions,
            stop,
            task,
        }
    }

    /// Starts a driver, registers it and waits until it is ready.
    pub(crate) async fn start_ready(&self) -> (Running, Plugin) {
        let running = self.start();
        let plugin = self.kubelet.register("gpu.drava.dev").await.unwrap();
        running.await_ready().await;
        (running, plugin)
    }

    /// Prepares claims with one share each.
    pub(crate) async fn prepare_shares(&self, plugin: &Plugin, numbers: &[u32]) {
        for &number in numbers {
            self.api.put_claim(&claim(number, &[Share(0, "8Gi", "30")]));
            plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        }
    }

    /// Returns the tmpfs with the usage region of a claim with one share.
    pub(crate) fn usage_dir(&self, number: u32) -> PathBuf {
        let uid = claim_ref(number).uid;
        let mut mounted = self.node.tmpfs.mounted().into_iter();
        let is_of_claim = |path: &PathBuf| path.to_string_lossy().contains(uid.as_str());
        mounted.find(is_of_claim).unwrap()
    }

    /// Returns the path of a claim's CDI spec.
    pub(crate) fn spec_file(&self, number: u32) -> PathBuf {
        self.node.paths.cdi_dir.join(format!(
            "gpu.drava.dev-claim-{}.json",
            claim_ref(number).uid
        ))
    }

    /// Returns the path of a claim's record.
    pub(crate) fn record_file(&self, number: u32) -> PathBuf {
        self.node
            .layout()
            .claims()
            .join(format!("{}.json", claim_ref(number).uid))
    }
}

impl Running {
    pub(crate) async fn await_ready(&self) {
        let ready = tokio::time::timeout(Duration::from_secs(60), self.conditions.ready()).await;
        assert!(ready.is_ok(), "not ready: {:?}", self.conditions.unmet());
    }

    /// Waits until `condition` is unmet for a reason that contains `text`, and returns the reason.
    pub(crate) async fn await_unmet(&self, condition: Condition, text: &str) -> String {
        let reason = || {
            let unmet = self.conditions.unmet();
            unmet
                .into_iter()
                .find(|(unmet, reason)| *unmet == condition && reason.contains(text))
                .map(|(_, r)| r)
        };
        eventually(
            &format!("condition {condition} unmet with reason {text:?}"),
            reason,
        )
        .await
    }

    /// Stops as on SIGTERM.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Stops as on SIGKILL, without cleanup.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Returns a claim as kubelet passes it.
pub(crate) fn kubelet_claim(number: u32) -> Claim {
    let claim = claim_ref(number);
    Claim {
        namespace: claim.namespace,
        uid: claim.uid.to_string(),
        name: claim.name,
    }
}

/// Prepares a claim and returns the error that kubelet receives.
pub(crate) async fn prepare_error(plugin: &Plugin, number: u32) -> String {
    let outcome = plugin.prepare_one(&kubelet_claim(number)).await;
    outcome.unwrap_err().to_string()
}

/// Returns the inode of a file.
pub(crate) fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap())
}

/// Sends an HTTP/1.0 request and returns the response, head and body.
pub(crate) async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream
        .write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Returns a local address with a free port.
pub(crate) fn free_address() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}
