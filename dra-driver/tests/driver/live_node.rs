//! A node as it is shipped: the node driver as a process, on the simulated machine, with programs that have shares through
//! `libvgpu.so`. A test may end each of these processes at any moment.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use drava_fake_kubelet::{FakeKubelet, Plugin};
use gpu_tenants::library;
use serde_json::Value;
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;
use tokio::runtime::Handle;

use crate::api_server::{ApiServer, poll};
use crate::cluster::{kubelet_claim, prepare_error};
use crate::driver_process::DriverProcess;
use crate::fixture::{GPU_UUIDS, NODE};
use crate::node::{TestNode, spec_of};

/// Name of the driver, as it registers.
const DRIVER: &str = "gpu.drava.dev";

/// Memory that the shares of a GPU of this node can get, MiB.
pub(crate) const ALLOCATABLE_MIB: u64 = 80_480;

/// The node, with two H100.
pub(crate) struct LiveNode {
    pub(crate) machine: Machine,
    pub(crate) node: TestNode,
    pub(crate) api: ApiServer,
    kubelet: FakeKubelet,
    plugin: Mutex<Plugin>,
    driver: Mutex<Option<DriverProcess>>,
    runtime: Handle,
    next_output: AtomicU32,
}

/// A program in a container of its own. `unshare` becomes the shell, and the shell the program.
pub(crate) struct Program {
    pub(crate) process: Child,
    pub(crate) output: PathBuf,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl LiveNode {
    /// Starts the machine and the node driver, on the present runtime.
    pub(crate) async fn start() -> Self {
        let machine = Machine::start(H100X2).unwrap();
        let mut node = TestNode::new();
        machine.root().clone_into(&mut node.paths.driver_root_mount);
        let image = &node.paths.artifacts_dir;
        fs::copy(library::shipped().unwrap(), image.join("libvgpu.so")).unwrap();
        let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
        let api = ApiServer::start(NODE).await;
        let driver = DriverProcess::start(&node, &api, &[]);
        let plugin = kubelet.register(DRIVER).await.unwrap();
        driver.await_ready().await;
        Self {
            machine,
            node,
            api,
            kubelet,
            plugin: Mutex::new(plugin),
            driver: Mutex::new(Some(driver)),
            runtime: Handle::current(),
            next_output: AtomicU32::new(0),
        }
    }

    /// Prepares a claim, as often as kubelet does.
    pub(crate) async fn prepare(&self, number: u32) {
        poll(&format!("claim-{number} prepared"), async || {
            let plugin = self.plugin.lock().unwrap().clone();
            let prepared = plugin.prepare_one(&kubelet_claim(number)).await;
            prepared.map_err(|error| format!("{error:#}"))
        })
        .await;
    }

    /// As [`Self::prepare`], on a thread outside of the runtime.
    pub(crate) fn prepare_now(&self, number: u32) {
        self.runtime.block_on(self.prepare(number));
    }

    /// Returns why a claim is not prepared, on a thread outside of the runtime.
    pub(crate) fn prepare_error_now(&self, number: u32) -> String {
        let plugin = self.plugin.lock().unwrap().clone();
        self.runtime.block_on(prepare_error(&plugin, number))
    }

    /// Unprepares a claim, as often as kubelet does, on a thread outside of the runtime.
    pub(crate) fn unprepare_now(&self, number: u32) {
        self.runtime.block_on(async {
            poll(&format!("claim-{number} unprepared"), async || {
                let plugin = self.plugin.lock().unwrap().clone();
                let unprepared = plugin.unprepare_one(&kubelet_claim(number)).await;
                unprepared.map_err(|error| format!("{error:#}"))
            })
            .await;
        });
    }

    /// Starts `cuda-probe` with the variables and mounts of the CDI spec of this claim, which has one share of this GPU.
    pub(crate) fn start_program(&self, number: u32, gpu: u32, arguments: &[&str]) -> Program {
        let spec = fs::read(spec_of(&self.node, number)).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        let edits = &spec["devices"][0]["containerEdits"];
        let mut setup = String::from("set -eu\nmount -t tmpfs none /run\n");
        for mount in edits["mounts"].as_array().unwrap() {
            let [from, to] = ["hostPath", "containerPath"].map(|end| mount[end].as_str().unwrap());
            if to.starts_with("/run/") {
                setup += &format!("mkdir -p {to}; mount --bind {from} {to}\n");
            }
        }
        setup += "exec \"$@\"\n";
        let index = self.next_output.fetch_add(1, Ordering::Relaxed);
        let output = self.node.root.path().join(format!("program-{index}"));
        let probe = self.machine.program("cuda-probe").unwrap();
        let variables = edits["env"].as_array().into_iter().flatten();
        let variables = variables.filter_map(|one| one.as_str()?.split_once('='));
        let file = fs::File::create(&output).unwrap();
        let process = self
            .machine
            .command("unshare")
            .args(["--mount", "--propagation", "private"])
            .args(["sh", "-c", &setup, "sh"])
            .arg(probe.get_program())
            .args(arguments)
            .envs(variables)
            .env(
                "CUDA_VISIBLE_DEVICES",
                GPU_UUIDS[usize::try_from(gpu).unwrap()],
            )
            .env("LD_PRELOAD", library::shipped().unwrap())
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Program { process, output }
    }

    /// Ends the node driver with SIGKILL and starts another one, if none is starting. `started` is called when its process runs.
    /// Returns whether one was killed. On a thread outside of the runtime.
    pub(crate) fn kill_driver(&self, started: impl FnOnce()) -> bool {
        let Ok(mut driver) = self.driver.try_lock() else {
            return false;
        };
        drop(driver.take());
        let next = DriverProcess::start(&self.node, &self.api, &[]);
        started();
        self.runtime.block_on(async {
            let plugin = self.kubelet.register(DRIVER).await.unwrap();
            *self.plugin.lock().unwrap() = plugin;
            next.await_ready().await;
        });
        *driver = Some(next);
        true
    }
}
