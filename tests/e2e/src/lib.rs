//! Client side of the end-to-end tests: `kubectl apply`, `exec`, `describe` and events, as a user runs them.
//!
//! `cargo xtask test --only e2e` starts the cluster, installs drava with its chart and runs the tests one after
//! another, each in its own namespace. The tests use no internals of drava.

pub mod docs;
pub mod doctor;
pub mod exporter;
mod go_module;
mod jobs;
mod ledger;
pub mod manifest;
pub mod measurement;
mod node;
mod objects;
mod plugin;
pub mod preparation;
mod program_output;
pub mod prometheus;
mod proxy;
mod replicas;
mod tenant;
pub mod training;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use drava_cluster::Cluster;
use drava_cluster::process::{self, Limit};
use serde_json::Value;

pub use crate::go_module::go_module;
use crate::manifest::pod_with_share;
pub use crate::node::TestNode;
pub use crate::program_output::ProgramOutput;
pub use crate::proxy::Proxy;

/// Longest wait for an expected condition. Only a failing test waits that long.
pub const MAX_WAIT: Duration = Duration::from_secs(240);

/// The cluster with drava installed.
pub struct TestCluster {
    kubernetes: Cluster,
}

impl TestCluster {
    /// Attaches to the cluster that `cargo xtask test` started.
    ///
    /// # Errors
    /// When the cluster does not run.
    pub fn attach() -> Result<Self> {
        let state = std::env::var_os("DRAVA_E2E_STATE").context(
            "these tests need a cluster: run them with `cargo xtask test --only e2e [NAME]`",
        )?;
        let kubernetes = drava_cluster::attach(&PathBuf::from(state))
            .context("find the cluster of the e2e tests")?;
        Ok(Self { kubernetes })
    }

    /// The cluster, for tests that restart its components.
    #[must_use]
    pub const fn kubernetes(&self) -> &Cluster {
        &self.kubernetes
    }

    /// Creates an empty namespace that is deleted with the value.
    ///
    /// # Errors
    /// When the API server rejects the namespace.
    pub fn namespace(&self, name: &str) -> Result<Namespace<'_>> {
        let name = format!("e2e-{name}");
        let namespace = Namespace {
            cluster: self,
            name,
        };
        namespace.delete()?;
        self.kubectl(["create", "namespace", &namespace.name])?;
        // Pods are rejected without it; after an outage of the API server kube-controller-manager takes its time.
        wait("the namespace has its service account", || {
            let account = namespace.find("serviceaccount", "default")?;
            Ok(account.map(drop))
        })?;
        Ok(namespace)
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Errors
    /// When kubectl fails, with its output.
    pub fn kubectl<I, S>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let args: Vec<_> = args
            .into_iter()
            .map(|arg| arg.as_ref().to_owned())
            .collect();
        answer(|| {
            let mut command = self.kubernetes.kubectl();
            command.args(&args).stdin(Stdio::null());
            Ok(command)
        })
    }

    /// Waits until a custom resource definition is established; `object` names it in the arguments of `kubectl get`.
    ///
    /// `kubectl wait --for=condition=Established` fails on a definition whose conditions are still null.
    ///
    /// # Errors
    /// When kubectl fails or the definition is not established in time.
    pub fn wait_for_definition(&self, object: &[&str]) -> Result<()> {
        wait("the definition is established", || {
            let definition = self.get(object)?;
            let conditions = definition["status"]["conditions"].as_array();
            let is_established = conditions.into_iter().flatten().any(|condition| {
                condition["type"] == "Established" && condition["status"] == "True"
            });
            Ok(is_established.then_some(()))
        })
    }

    /// Runs Helm and returns its standard output.
    ///
    /// # Errors
    /// When Helm fails, with its output.
    pub fn helm<I, S>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let mut command = self.kubernetes.helm();
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Returns objects; `args` are kubectl's arguments after `get`.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn get(&self, args: &[&str]) -> Result<Value> {
        let text = self.kubectl(["get", "-o", "json"].iter().chain(args))?;
        serde_json::from_str(&text).with_context(|| format!("read kubectl get {args:?}"))
    }

    /// Runs a program in the namespaces of the first node.
    ///
    /// # Errors
    /// When the program cannot be run or fails.
    pub fn on_node(&self, program: &str, args: &[&str]) -> Result<String> {
        self.first_node().run(program, args)
    }

    /// Waits until drava's DaemonSet and Deployment are ready.
    ///
    /// # Errors
    /// When a workload is not ready within 90 s.
    pub fn drava_ready(&self) -> Result<()> {
        for workload in ["daemonset/drava-dra-driver", "deployment/drava-controller"] {
            self.kubectl([
                "-n",
                "drava-system",
                "rollout",
                "status",
                workload,
                "--timeout=90s",
            ])?;
        }
        Ok(())
    }

    /// Kills every process of a program on the first node with SIGKILL, and returns their number.
    ///
    /// # Errors
    /// When the node's processes cannot be read.
    pub fn kill_processes(&self, program: &str) -> Result<usize> {
        self.first_node().signal(program, "KILL")
    }
}

/// One test's namespace.
pub struct Namespace<'c> {
    cluster: &'c TestCluster,
    name: String,
}

impl Namespace<'_> {
    /// Name of the namespace.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs kubectl in the namespace.
    ///
    /// # Errors
    /// When kubectl fails, with its output.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.cluster.kubectl(["-n", &self.name].iter().chain(args))
    }

    /// Returns an object, or `None` if it does not exist.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn find(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        let text = self.kubectl(&["get", kind, name, "-o", "json", "--ignore-not-found"])?;
        if text.trim().is_empty() {
            Ok(None)
        } else {
            Ok(Some(serde_json::from_str(&text)?))
        }
    }

    /// Returns all objects of a kind.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn list(&self, kind: &str) -> Result<Vec<Value>> {
        let text = self.kubectl(&["get", kind, "-o", "json"])?;
        let list: Value = serde_json::from_str(&text)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until the pod is running.
    ///
    /// # Errors
    /// When the pod does not run in time, with its events.
    pub fn running(&self, pod: &str) -> Result<()> {
        wait(&format!("pod {pod} runs"), || {
            let Some(found) = self.find("pod", pod)? else {
                return Ok(None);
            };
            let ready = found["status"]["containerStatuses"]
                .as_array()
                .is_some_and(|all| all.iter().all(|c| c["ready"] == true));
            Ok((found["status"]["phase"] == "Running" && ready).then_some(()))
        })
        .with_context(|| self.story(pod))
    }

    /// Waits for an event on the object whose message contains `text`, and returns the message.
    ///
    /// # Errors
    /// When the event does not appear in time, with the events of the object.
    pub fn event(&self, object: &str, text: &str) -> Result<String> {
        wait(&format!("event on {object} with {text:?}"), || {
            Ok(self
                .events(object)?
                .into_iter()
                .find(|message| message.contains(text)))
        })
        .with_context(|| self.story(object))
    }

    /// Returns the events of the object with that name, each as `reason: message`.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn events(&self, object: &str) -> Result<Vec<String>> {
        Ok(self
            .list("events")?
            .iter()
            .filter(|event| event["involvedObject"]["name"] == object)
            .map(|event| {
                let word = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
                format!("{}: {}", word("reason"), word("message"))
            })
            .collect())
    }

    /// Returns the name of the claim generated from a pod's template.
    ///
    /// # Errors
    /// When the claim does not appear in time.
    pub fn claim_of(&self, pod: &str) -> Result<String> {
        wait(&format!("claim of pod {pod}"), || {
            let Some(found) = self.find("pod", pod)? else {
                return Ok(None);
            };
            Ok(
                found["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
                    .as_str()
                    .map(str::to_owned),
            )
        })
    }

    /// Returns the names of the devices allocated to the pod's claim, in order.
    ///
    /// # Errors
    /// When the pod has no allocated claim in time.
    pub fn devices_of(&self, pod: &str) -> Result<Vec<String>> {
        let claim = self.claim_of(pod)?;
        wait(&format!("allocation of claim {claim}"), || {
            let Some(found) = self.find("resourceclaim", &claim)? else {
                return Ok(None);
            };
            let Some(results) = found["status"]["allocation"]["devices"]["results"].as_array()
            else {
                return Ok(None);
            };
            Ok(Some(
                results
                    .iter()
                    .filter_map(|result| result["device"].as_str())
                    .map(str::to_owned)
                    .collect(),
            ))
        })
    }

    /// Runs a program in a container.
    ///
    /// # Errors
    /// When kubectl cannot be run.
    pub fn exec(&self, pod: &str, container: &str, argv: &[&str]) -> Result<ProgramOutput> {
        let (_, output) = connected(|| {
            let mut command = self.cluster.kubernetes.kubectl();
            command
                .args(["-n", &self.name, "exec", pod, "-c", container, "--"])
                .args(argv)
                .stdin(Stdio::null());
            Ok(command)
        })?;
        Ok(ProgramOutput {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Creates pods with shares of the given memory and checks that all run on one GPU.
    ///
    /// # Errors
    /// When a pod does not run or the pods use several GPUs.
    pub fn share_one_gpu(&self, pods: &[(&str, &str)]) -> Result<()> {
        for (pod, memory) in pods {
            let capacity = format!("{{memory: {memory}}}");
            self.apply(&pod_with_share(pod, "vgpu.drava.dev", &capacity))?;
        }
        let mut devices = Vec::new();
        for (pod, _) in pods {
            self.running(pod)?;
            devices.push(self.devices_of(pod)?);
        }
        let is_one = devices.windows(2).all(|pair| pair[0] == pair[1]);
        ensure!(is_one, "pods use several GPUs: {devices:?}");
        Ok(())
    }

    /// Allocates all memory of a device that a program in the container `app` can get, and checks that the amount
    /// equals the free memory. Returns the amount in MiB.
    ///
    /// # Errors
    /// When the amounts differ or the program cannot be run.
    pub fn fill(&self, pod: &str, device: usize) -> Result<u64> {
        const MIB: u64 = 1 << 20;
        let device = device.to_string();
        let probe = ["cuda-probe", "fill", "--device", &device, "-o", "json"];
        let filled = self.exec(pod, "app", &probe)?.json()?;
        let free = filled["before"]["freeBytes"].as_u64();
        let free_mib = free.context("before.freeBytes")? / MIB;
        ensure!(
            filled["allocatedBytes"] == free_mib * MIB,
            "allocated memory differs from free memory: {filled}"
        );
        Ok(free_mib)
    }

    /// Returns the memory of the only device of the container `app` in MiB, as reported by nvidia-smi.
    ///
    /// # Errors
    /// When nvidia-smi fails.
    pub fn total_mib(&self, pod: &str) -> Result<String> {
        let query = "--query-gpu=memory.total";
        let query = ["nvidia-smi", query, "--format=csv,noheader,nounits"];
        let total = self.exec(pod, "app", &query)?.success()?;
        Ok(total.trim().to_owned())
    }

    /// Deletes pods without a grace period and waits until they are gone. After an outage of the API server, kubelet's watch starts
    /// again up to a minute later (seen with 1.37.1: the pause doubles to 30 s, and up to as much is added).
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn delete_pods(&self, pods: &[&str]) -> Result<()> {
        self.kubectl(
            &[
                &["delete", "pod", "--grace-period=1", "--timeout=180s"],
                pods,
            ]
            .concat(),
        )?;
        Ok(())
    }

    /// Returns kubectl's description of an object, for the error of a failed wait.
    #[must_use]
    pub fn story(&self, object: &str) -> String {
        let pod = self
            .kubectl(&["describe", "pod", object])
            .unwrap_or_default();
        let claims = self
            .kubectl(&["describe", "resourceclaim"])
            .unwrap_or_default();
        format!("{pod}\n{claims}")
    }

    fn delete(&self) -> Result<()> {
        self.cluster.kubectl([
            "delete",
            "namespace",
            &self.name,
            "--ignore-not-found",
            "--timeout=90s",
        ])?;
        Ok(())
    }

    /// Deletes pods and claims, which frees the GPUs, without waiting for the end of the empty namespace, which takes
    /// seconds that no other test needs.
    fn release(&self) -> Result<()> {
        // Foreground: controllers would replace deleted pods.
        self.kubectl(&[
            "delete",
            "deployments,jobs",
            "--all",
            "--cascade=foreground",
            "--timeout=90s",
        ])?;
        self.kubectl(&[
            "delete",
            "pods",
            "--all",
            "--grace-period=1",
            "--timeout=90s",
        ])?;
        self.kubectl(&["delete", "resourceclaims", "--all", "--timeout=90s"])?;
        let delete = ["delete", "namespace", &self.name, "--ignore-not-found"];
        self.cluster
            .kubectl(delete.into_iter().chain(["--wait=false"]))?;
        Ok(())
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            eprintln!("cannot delete namespace {}: {error:#}", self.name);
        }
    }
}

/// Polls `poll` until it returns a value, at most for [`MAX_WAIT`].
///
/// # Errors
/// When `poll` fails or returns no value in time.
pub fn wait<T>(what: &str, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + MAX_WAIT;
    loop {
        if let Some(value) = poll()? {
            return Ok(value);
        }
        if Instant::now() > deadline {
            bail!("not within {} s: {what}", MAX_WAIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(150));
    }
}

/// What kubectl says when the API server had no processor time for a new connection: nothing was sent.
const NO_CONNECTION: &str = "TLS handshake timeout";

/// Attempts to connect. One takes ten seconds.
const CONNECTIONS: u32 = 6;

/// Runs a command that `make` returns, again as long as it gets no connection: machines with few processors start many programs at once.
fn connected(make: impl Fn() -> Result<Command>) -> Result<(Command, Output)> {
    let mut attempt = 1;
    loop {
        let mut command = make()?;
        let output = process::output(&mut command, Limit::REQUEST)?;
        let is_refused = String::from_utf8_lossy(&output.stderr).contains(NO_CONNECTION);
        if output.status.success() || !is_refused || attempt == CONNECTIONS {
            return Ok((command, output));
        }
        attempt += 1;
    }
}

/// Returns the standard output of a command that `make` returns.
fn answer(make: impl Fn() -> Result<Command>) -> Result<String> {
    let (command, output) = connected(make)?;
    text(&command, output)
}

fn stdout(mut command: Command) -> Result<String> {
    let output = process::output(&mut command, Limit::REQUEST)?;
    text(&command, output)
}

fn text(command: &Command, output: Output) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = output;
    if status.success() {
        Ok(String::from_utf8(stdout)?)
    } else {
        Err(anyhow!(
            "{command:?}: {}{}",
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        ))
    }
}
