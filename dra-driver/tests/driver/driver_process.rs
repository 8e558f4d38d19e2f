//! The shipped program as a process on a node of a test.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::api_server::{ApiServer, eventually, poll};
use crate::cluster::{free_address, get};
use crate::fixture::NODE;
use crate::namespace::has_own_dev;
use crate::node::TestNode;

/// Unit of CPU times in `/proc`: `USER_HZ`, the same on all machines.
const TICKS_PER_SECOND: u64 = 100;

/// The running program, killed with the value.
pub(crate) struct DriverProcess {
    process: Child,
    pub(crate) address: SocketAddr,
    log: PathBuf,
}

impl DriverProcess {
    /// Starts the program with more environment variables, in a namespace for tests: it creates device files in `/dev`.
    pub(crate) fn start(node: &TestNode, api: &ApiServer, variables: &[(&str, &str)]) -> Self {
        assert!(has_own_dev(), "use in_mount_namespace");
        let kubeconfig = node.root.path().join("kubeconfig");
        fs::write(&kubeconfig, api.kubeconfig()).unwrap();
        let address = free_address();
        let paths = &node.paths;
        let log = node.root.path().join(format!("log-{}", address.port()));
        let stderr = fs::File::create(&log).unwrap();
        let option = |name: &str, path: &PathBuf| format!("--{name}={}", path.display());
        let process = Command::new(env!("CARGO_BIN_EXE_drava-dra-driver"))
            .args([
                format!("--node-name={NODE}"),
                option("kubelet-dir", &paths.kubelet_dir),
                option("cdi-dir", &paths.cdi_dir),
                option("state-dir", &paths.state_dir),
                option("run-dir", &paths.run_dir),
                option("driver-root", &paths.driver_root),
                option("driver-root-mount", &paths.driver_root_mount),
                option("artifacts-dir", &paths.artifacts_dir),
                format!("--listen={address}"),
                format!("--log-filter-listen={}", free_address()),
            ])
            .env("KUBECONFIG", kubeconfig)
            // As in the chart.
            .env("MALLOC_ARENA_MAX", "2")
            .env("RUST_LOG", "warn")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self {
            process,
            address,
            log,
        }
    }

    /// Waits until the readiness of the program contains `text`, and returns it.
    pub(crate) async fn await_readiness(&self, text: &str) -> String {
        self.await_response("/readyz", text).await
    }

    /// Waits until the program is the active instance: only this one reads the sensors of the GPUs.
    #[cfg(debug_assertions)]
    pub(crate) async fn await_active(&self) {
        self.await_response("/metrics", "\ndrava_gpu_sample_timestamp_seconds{")
            .await;
    }

    /// Waits until the metrics contain `text`.
    pub(crate) async fn await_metrics(&self, text: &str) {
        self.await_response("/metrics", text).await;
    }

    async fn await_response(&self, path: &str, text: &str) -> String {
        poll(&format!("{text:?}"), async || {
            let is_bound = tokio::net::TcpStream::connect(self.address).await.is_ok();
            let mut response = String::new();
            if is_bound {
                response = get(self.address, path).await;
            }
            if response.contains(text) {
                Ok(response)
            } else {
                Err(format!("{response:?}:\n{}", self.log()))
            }
        })
        .await
    }

    pub(crate) async fn await_ready(&self) {
        self.await_readiness("HTTP/1.0 200").await;
    }

    /// Ends the program as kubelet does, and waits for its end.
    pub(crate) async fn terminate(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        eventually("the end of the process", || {
            self.process.try_wait().unwrap()
        })
        .await
    }

    /// Returns the lines that the program has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Returns a field of `/proc/<pid>/status` in KiB.
    pub(crate) fn status_kib(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let line = line.unwrap().trim_start_matches(':').trim();
        line.trim_end_matches(" kB").parse().unwrap()
    }

    /// Returns the CPU time of the process, with that of threads that have ended.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        // The fields after the name, from the state on: user and system time are fields 14 and 15 of the line.
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let ticks = fields.split(' ').skip(11).take(2);
        let ticks: u64 = ticks.map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
    }
}

impl Drop for DriverProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
