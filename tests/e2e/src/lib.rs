//! What the end-to-end tests say to the cluster, in the words of a user: `kubectl apply`, `exec`, `describe`, events.
//!
//! `cargo xtask test --only e2e` starts the cluster, installs drava with its chart and runs the tests one after another, each in a
//! namespace of its own. Nothing here knows how drava works inside.

pub mod manifest;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use drava_cluster::Cluster;
use drava_cluster::process::{self, Limit};
use serde_json::Value;

use crate::manifest::pod_with_share;

/// Longest wait for anything that is expected to happen; only a failing test ever waits so long.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// The cluster with drava installed.
pub struct World {
    cluster: Cluster,
}

impl World {
    /// The cluster that `cargo xtask test` started.
    ///
    /// # Errors
    /// When it is not there.
    pub fn attach() -> Result<Self> {
        let state = std::env::var_os("DRAVA_E2E_STATE").context(
            "these tests need a cluster: run them with `cargo xtask test --only e2e [NAME]`",
        )?;
        let cluster = drava_cluster::attach(&PathBuf::from(state))
            .context("find the cluster of the e2e tests")?;
        Ok(Self { cluster })
    }

    /// The cluster itself, to restart parts of it.
    #[must_use]
    pub const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Creates an empty namespace that is deleted with the value.
    ///
    /// # Errors
    /// When the API server refuses.
    pub fn namespace(&self, name: &str) -> Result<Namespace<'_>> {
        let name = format!("e2e-{name}");
        let namespace = Namespace { world: self, name };
        namespace.delete()?;
        self.kubectl(["create", "namespace", &namespace.name])?;
        Ok(namespace)
    }

    /// Runs kubectl and returns what it prints.
    ///
    /// # Errors
    /// When it fails, with what it says.
    pub fn kubectl<I, S>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let mut command = self.cluster.kubectl();
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Runs Helm and returns what it prints.
    ///
    /// # Errors
    /// When it fails, with what it says.
    pub fn helm<I, S>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let mut command = self.cluster.helm();
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Objects of a kind, by kubectl's arguments after `get`.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn get(&self, args: &[&str]) -> Result<Value> {
        let text = self.kubectl(["get", "-o", "json"].iter().chain(args))?;
        serde_json::from_str(&text).with_context(|| format!("read kubectl get {args:?}"))
    }

    /// Runs a program inside the node's namespaces.
    ///
    /// # Errors
    /// When it cannot be run or fails.
    pub fn on_node(&self, program: &str, args: &[&str]) -> Result<String> {
        let mut command = self.cluster.command(program)?;
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Waits until drava's DaemonSet and Deployment are ready.
    ///
    /// # Errors
    /// When they do not become so.
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

    /// Kills every process of a program on the node with SIGKILL, and returns how many there were.
    ///
    /// # Errors
    /// When the node's processes cannot be read.
    pub fn kill_processes(&self, program: &str) -> Result<usize> {
        let script = format!(
            "n=0; for d in /proc/[0-9]*; do read -r c < $d/comm || continue; [ \"$c\" = '{}' ] && kill -9 ${{d#/proc/}} && n=$((n+1)); done 2>/dev/null; echo $n",
            // The kernel cuts a process's name to 15 bytes.
            program.get(..15).unwrap_or(program)
        );
        Ok(self.on_node("sh", &["-c", &script])?.trim().parse()?)
    }
}

/// One test's namespace.
pub struct Namespace<'w> {
    world: &'w World,
    name: String,
}

impl Namespace<'_> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs kubectl in the namespace.
    ///
    /// # Errors
    /// When it fails, with what it says.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.world.kubectl(["-n", &self.name].iter().chain(args))
    }

    /// Creates objects from YAML.
    ///
    /// # Errors
    /// When the API server refuses one, with its words.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        let mut command = self.world.cluster.kubectl();
        command
            .args(["-n", &self.name, "apply", "-f", "-"])
            .stdin(process::input(yaml.as_bytes())?);
        let output = process::output(&mut command, Limit::REQUEST)?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// Creates the objects of one of `deploy/examples`.
    ///
    /// # Errors
    /// When the file is missing or refused.
    pub fn example(&self, name: &str) -> Result<()> {
        let path = format!(
            "{}/../../deploy/examples/{name}/{name}.yaml",
            env!("CARGO_MANIFEST_DIR")
        );
        let yaml = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        self.apply(&yaml)
    }

    /// One object, or `None`.
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

    /// All objects of a kind.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn list(&self, kind: &str) -> Result<Vec<Value>> {
        let text = self.kubectl(&["get", kind, "-o", "json"])?;
        let list: Value = serde_json::from_str(&text)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until the pod runs.
    ///
    /// # Errors
    /// When it does not, with its events.
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
    /// When there is none, with the events that there are.
    pub fn event(&self, object: &str, text: &str) -> Result<String> {
        wait(&format!("event on {object} with {text:?}"), || {
            Ok(self
                .events(object)?
                .into_iter()
                .find(|message| message.contains(text)))
        })
        .with_context(|| self.story(object))
    }

    /// Messages of the events of the object with that name, `reason: message` each.
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

    /// The name of the claim that a pod's template generated.
    ///
    /// # Errors
    /// When there is none in time.
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

    /// Card device names that the pod's claim holds, in order.
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
    pub fn exec(&self, pod: &str, container: &str, argv: &[&str]) -> Result<Ran> {
        let mut command = self.world.cluster.kubectl();
        command
            .args(["-n", &self.name, "exec", pod, "-c", container, "--"])
            .args(argv)
            .stdin(Stdio::null());
        let output = process::output(&mut command, Limit::REQUEST)?;
        Ok(Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs pods with shares of so much memory, and makes sure that all are on one card.
    ///
    /// # Errors
    /// When they are not, or one does not run.
    pub fn share_one_card(&self, pods: &[(&str, &str)]) -> Result<()> {
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
        ensure!(is_one, "not on one card: {devices:?}");
        Ok(())
    }

    /// Takes all of a device's memory that a program in the container `app` can get, and makes sure that it is what was
    /// free. Returns that, in MiB.
    ///
    /// # Errors
    /// When it is not, or the program cannot be run.
    pub fn fill(&self, pod: &str, device: usize) -> Result<u64> {
        const MIB: u64 = 1 << 20;
        let device = device.to_string();
        let probe = ["cuda-probe", "fill", "--device", &device, "-o", "json"];
        let filled = self.exec(pod, "app", &probe)?.json()?;
        let free = filled["before"]["freeBytes"].as_u64();
        let free_mib = free.context("before.freeBytes")? / MIB;
        ensure!(
            filled["allocatedBytes"] == free_mib * MIB,
            "what was free is not what could be had: {filled}"
        );
        Ok(free_mib)
    }

    /// The memory of the only device of the container `app`, in MiB, as nvidia-smi has it.
    ///
    /// # Errors
    /// When nvidia-smi fails.
    pub fn total_mib(&self, pod: &str) -> Result<String> {
        let query = "--query-gpu=memory.total";
        let query = ["nvidia-smi", query, "--format=csv,noheader,nounits"];
        let total = self.exec(pod, "app", &query)?.success()?;
        Ok(total.trim().to_owned())
    }

    /// Deletes pods without grace and waits until they are gone.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn delete_pods(&self, pods: &[&str]) -> Result<()> {
        self.kubectl(
            &[
                &["delete", "pod", "--grace-period=1", "--timeout=60s"],
                pods,
            ]
            .concat(),
        )?;
        Ok(())
    }

    /// What kubectl says about an object, for a failed wait.
    fn story(&self, object: &str) -> String {
        let pod = self
            .kubectl(&["describe", "pod", object])
            .unwrap_or_default();
        let claims = self
            .kubectl(&["describe", "resourceclaim"])
            .unwrap_or_default();
        format!("{pod}\n{claims}")
    }

    fn delete(&self) -> Result<()> {
        self.world.kubectl([
            "delete",
            "namespace",
            &self.name,
            "--ignore-not-found",
            "--timeout=90s",
        ])?;
        Ok(())
    }

    /// Deletes pods and claims, which frees the GPUs, and does not wait for the end of the empty namespace: it takes
    /// seconds that no other test needs.
    fn release(&self) -> Result<()> {
        self.kubectl(&[
            "delete",
            "pods",
            "--all",
            "--grace-period=1",
            "--timeout=90s",
        ])?;
        self.kubectl(&["delete", "resourceclaims", "--all", "--timeout=90s"])?;
        let delete = ["delete", "namespace", &self.name, "--ignore-not-found"];
        self.world
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

/// Outcome of a program in a container.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: i32,
    /// What it printed.
    pub stdout: String,
    /// What it complained.
    pub stderr: String,
}

impl Ran {
    /// Its output, when it succeeded.
    ///
    /// # Errors
    /// When it failed.
    pub fn success(self) -> Result<String> {
        ensure!(
            self.code == 0,
            "exit code {}: {}{}",
            self.code,
            self.stdout,
            self.stderr
        );
        Ok(self.stdout)
    }

    /// Its output as JSON, when it succeeded.
    ///
    /// # Errors
    /// When it failed or printed something else.
    pub fn json(self) -> Result<Value> {
        let text = self.success()?;
        serde_json::from_str(&text).with_context(|| format!("read {text:?}"))
    }
}

/// Asks again until there is an answer, for [`PATIENCE`].
///
/// # Errors
/// When asking fails, or there is none in time.
pub fn wait<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            bail!("waited {} s in vain: {what}", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(150));
    }
}

fn stdout(mut command: Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = process::output(&mut command, Limit::REQUEST)?;
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
