//! The control plane under measurement, its nodes and its slices.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Cluster, Component, Node as ClusterNode, http};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::decisions::Decisions;
use crate::watched::Watched;
use drava_planning::objects::{self, Mode, NAMESPACE, Shape, object};

/// Requests in flight.
const CONCURRENCY: usize = 64;
/// Unit of processor time in `/proc/PID/stat` on Linux.
const TICKS_PER_SECOND: u32 = 100;
/// Size of a page, the unit of resident memory in `/proc/PID/stat`.
const PAGES_PER_MIB: u64 = 256;
/// Time limit for the control plane to see new slices.
const READY: Duration = Duration::from_secs(120);

/// See the [module](self).
pub(crate) struct ControlPlane {
    /// Client of the administrator.
    pub(crate) client: Client,
    kubeconfig: PathBuf,
    controller: PathBuf,
    cluster: Cluster,
    node: ClusterNode,
    nodes: usize,
    shape: Shape,
}

/// Processor time and memory of a process.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    /// Seconds of processor time.
    pub(crate) cpu_seconds: f64,
    /// Resident memory in MiB.
    pub(crate) resident_mib: u64,
}

/// A running controller, which ends when the value is dropped.
pub(crate) struct Controller {
    process: Child,
    /// Address of its metrics.
    address: String,
}

impl Drop for Controller {
    fn drop(&mut self) {
        // SIGTERM releases the lease, so that the next controller leads at once.
        let _ = kill_process(Pid::from_child(&self.process), Signal::TERM);
        let _ = self.process.wait();
    }
}

impl Controller {
    /// Returns what the controller has used so far.
    pub(crate) fn usage(&self) -> Result<Usage> {
        let file = format!("/proc/{}/stat", self.process.id());
        let text = std::fs::read_to_string(&file).with_context(|| format!("read {file}"))?;
        let (_, usage) = parse_stat(&text).context("read the usage of the controller")?;
        Ok(usage)
    }

    /// Returns the durations of its passes of decisions so far.
    pub(crate) fn decisions(&self) -> Result<Decisions> {
        Decisions::scrape(&self.address)
    }
}

/// Runs requests concurrently.
pub(crate) async fn concurrently<T, F>(
    items: impl IntoIterator<Item = T>,
    request: impl Fn(T) -> F,
) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    let requests = futures::stream::iter(items).map(request);
    requests.buffer_unordered(CONCURRENCY).try_collect().await
}

impl ControlPlane {
    /// Attaches to the cluster, and stops what is not measured.
    pub(crate) async fn prepare(state: &Path, controller: &Path) -> Result<Self> {
        let cluster = drava_cluster::attach(state)?;
        let kubeconfig = cluster.kubeconfig();
        let options = KubeConfigOptions::default();
        let config =
            Config::from_custom_kubeconfig(Kubeconfig::read_from(&kubeconfig)?, &options).await?;
        let client = Client::try_from(config)?;
        let namespace: Namespace = object(json!({"metadata": {"name": NAMESPACE}}))?;
        let namespaces = Api::<Namespace>::all(client.clone());
        let created = namespaces.create(&PostParams::default(), &namespace).await;
        created.context("create the namespace")?;
        // Pods are rejected without it.
        let accounts = Api::<ServiceAccount>::namespaced(client.clone(), NAMESPACE);
        while accounts.get_opt("default").await?.is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let node = cluster.control_plane();
        for component in [Component::Kubelet, Component::KubeControllerManager] {
            node.stop(component)?;
        }
        let plane = Self {
            client,
            kubeconfig,
            controller: controller.to_owned(),
            cluster,
            node,
            nodes: 0,
            shape: Shape::Shares,
        };
        plane
            .create_all(
                objects::classes()?,
                Api::<DeviceClass>::all(plane.client.clone()),
            )
            .await?;
        Ok(plane)
    }

    async fn create_all<K>(&self, objects: Vec<K>, api: Api<K>) -> Result<()>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + serde::Serialize
            + serde::de::DeserializeOwned
            + std::fmt::Debug,
    {
        concurrently(objects, |object| {
            let api = api.clone();
            async move {
                let name = object.name_any();
                let created = api.create(&PostParams::default(), &object).await;
                created.map(drop).with_context(|| format!("create {name}"))
            }
        })
        .await
    }

    /// Number of nodes with GPUs.
    pub(crate) const fn nodes(&self) -> usize {
        self.nodes
    }

    /// What the nodes publish.
    pub(crate) const fn shape(&self) -> Shape {
        self.shape
    }

    /// Creates or deletes nodes until there are that many.
    pub(crate) async fn use_nodes(&mut self, nodes: usize, shape: Shape) -> Result<()> {
        self.clear_slices().await?;
        let api = Api::<Node>::all(self.client.clone());
        concurrently(self.nodes..nodes, |index| {
            let api = api.clone();
            async move {
                let node = objects::node(index)?;
                api.create(&PostParams::default(), &node).await?;
                // Admission taints a new node until kube-controller-manager has seen that it is ready.
                let untaint = Patch::Merge(json!({"spec": {"taints": null}}));
                api.patch(
                    &objects::node_name(index),
                    &PatchParams::default(),
                    &untaint,
                )
                .await?;
                Ok(())
            }
        })
        .await
        .context("create nodes")?;
        concurrently(nodes..self.nodes, |index| {
            let api = api.clone();
            async move {
                let name = objects::node_name(index);
                api.delete(&name, &DeleteParams::default()).await?;
                Ok(())
            }
        })
        .await
        .context("delete nodes")?;
        (self.nodes, self.shape) = (nodes, shape);
        Ok(())
    }

    async fn clear_slices(&self) -> Result<()> {
        let api = Api::<ResourceSlice>::all(self.client.clone());
        let all = ListParams::default();
        api.delete_collection(&DeleteParams::default(), &all)
            .await?;
        Ok(())
    }

    /// Publishes the devices of all nodes for that mode.
    pub(crate) async fn publish(&self, mode: Mode) -> Result<()> {
        self.clear_slices().await?;
        let mut slices = Vec::new();
        for index in 0..self.nodes {
            slices.extend(objects::slices(index, self.shape, mode)?);
        }
        let api = Api::<ResourceSlice>::all(self.client.clone());
        self.create_all(slices, api).await
    }

    /// Creates that many claims with one request.
    pub(crate) async fn create_claims(&self, claims: Vec<ResourceClaim>) -> Result<()> {
        let api = Api::namespaced(self.client.clone(), NAMESPACE);
        self.create_all(claims, api).await
    }

    /// Creates pods with the claims of their names.
    pub(crate) async fn create_pods(&self, names: &[String], is_gated: bool) -> Result<()> {
        let pods: Result<Vec<Pod>> = names
            .iter()
            .map(|name| objects::pod(name, is_gated))
            .collect();
        let api = Api::namespaced(self.client.clone(), NAMESPACE);
        self.create_all(pods?, api).await
    }

    /// Deletes pods and their claims at once, as kube-controller-manager does after their end.
    pub(crate) async fn delete(&self, names: &[String]) -> Result<()> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), NAMESPACE);
        let claims = Api::<ResourceClaim>::namespaced(self.client.clone(), NAMESPACE);
        concurrently(names, |name| {
            let (pods, claims) = (pods.clone(), claims.clone());
            async move {
                let now = DeleteParams::default().grace_period(0);
                ignore_missing(pods.delete(name, &now).await.map(drop))?;
                let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                claims
                    .patch_metadata(name, &PatchParams::default(), &release)
                    .await?;
                claims.delete(name, &now).await?;
                Ok(())
            }
        })
        .await
        .context("delete pods and claims")
    }

    /// Starts or stops kube-scheduler.
    pub(crate) fn set_scheduler(&self, runs: bool) -> Result<()> {
        if runs {
            self.node.start(Component::KubeScheduler)
        } else {
            self.node.stop(Component::KubeScheduler)
        }
    }

    /// Returns the program of the controller.
    pub(crate) fn controller(&self) -> &Path {
        &self.controller
    }

    /// Puts the chart's admission policy for claims into force, or removes it.
    pub(crate) async fn set_policy(&self, is_there: bool) -> Result<()> {
        let file = drava_cluster::workspace_root().join("deploy/kustomize/drava.yaml");
        let chart =
            std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let objects = chart.split("\n---\n");
        let policy: Vec<&str> = objects
            .filter(|object| object.contains("\nkind: MutatingAdmissionPolicy"))
            .collect();
        ensure!(
            policy.len() == 2,
            "no policy and binding in {}",
            file.display()
        );
        let mut command = self.cluster.kubectl();
        match is_there {
            true => command.args(["apply", "-f", "-"]),
            false => command.args(["delete", "--ignore-not-found", "-f", "-"]),
        };
        command
            .stdin(process::input(policy.join("\n---\n").as_bytes())?)
            .stdout(Stdio::null());
        let done = process::status(&mut command, Limit::REQUEST)?;
        ensure!(done.success(), "cannot change the admission policy");
        let claims = Api::<ResourceClaim>::namespaced(self.client.clone(), NAMESPACE);
        let probe = objects::claim("probe", &Shape::Shares.request())?;
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let deadline = Instant::now() + READY;
        loop {
            let created = claims.create(&dry_run, &probe).await?;
            if created.finalizers().is_empty() != is_there {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the policy has no effect");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Starts the controller.
    pub(crate) fn start_controller(&self) -> Result<Controller> {
        self.start_program(&self.controller)
    }

    /// Starts a controller, with the catalog of its webhook.
    pub(crate) fn start_program(&self, program: &Path) -> Result<Controller> {
        let log = self.controller_log();
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let address = format!("127.0.0.1:{}", http::free_port()?);
        let webhook = format!("127.0.0.1:{}", http::free_port()?);
        let process = Command::new(program)
            .arg(format!("--listen={address}"))
            .arg(format!("--webhook-listen={webhook}"))
            .arg("--release-unreserved-after=1h")
            .arg(format!("--namespace={NAMESPACE}"))
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output)
            .spawn()
            .with_context(|| format!("run {}", program.display()))?;
        Ok(Controller { process, address })
    }

    fn controller_log(&self) -> PathBuf {
        self.kubeconfig.with_file_name("drava-controller.log")
    }

    /// Waits until a pod is allocated, and bound where kube-scheduler runs: the control plane has seen all slices.
    pub(crate) async fn wait_until_ready(&self, mode: Mode, binds: bool) -> Result<()> {
        let watched = Watched::start(&self.client);
        let probe = "probe".to_owned();
        self.create_claims(vec![objects::claim(&probe, &self.shape.request())?])
            .await?;
        self.create_pods(std::slice::from_ref(&probe), mode == Mode::Managed)
            .await?;
        let reached = watched.until("the first pod is placed", READY, |times| {
            if binds {
                times.bound.contains_key(&probe)
            } else {
                times.allocated.contains_key(&probe)
            }
        });
        reached
            .await
            .with_context(|| format!("see {}", self.controller_log().display()))?;
        self.delete(&[probe]).await
    }

    /// Returns what the components have used so far.
    pub(crate) fn usage(&self) -> Result<BTreeMap<String, Usage>> {
        let mut command = self.node.command("sh")?;
        command
            .args(["-c", "cat /proc/[0-9]*/stat 2>/dev/null; true"])
            .stdin(Stdio::null());
        let output = process::output(&mut command, Limit::REQUEST)?;
        ensure!(output.status.success(), "cannot read the usage of the node");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().filter_map(parse_stat).collect())
    }
}

fn ignore_missing(result: kube::Result<()>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

/// Returns name and usage of a process from a line of `/proc/PID/stat`.
fn parse_stat(line: &str) -> Option<(String, Usage)> {
    let (start, fields) = line.rsplit_once(") ")?;
    let (_, name) = start.split_once(" (")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = u32::try_from(field(14)? + field(15)?).ok()?;
    let usage = Usage {
        cpu_seconds: f64::from(ticks) / f64::from(TICKS_PER_SECOND),
        resident_mib: field(24)? / PAGES_PER_MIB,
    };
    Some((name.to_owned(), usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_usage_of_process_with_spaces_in_its_name() {
        let line = "7 (a (b) c) S 1 1 1 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 9 0 5 1000 2560 18446";
        let (name, usage) = parse_stat(line).unwrap();
        assert_eq!((name.as_str(), usage.resident_mib), ("a (b) c", 10));
        assert!((usage.cpu_seconds - 3.0).abs() < 1e-9);
    }
}
