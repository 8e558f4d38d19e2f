//! `kubectl drava console` on the cluster: its model follows pods, within the permissions of its user.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::http;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// A running console.
struct Console {
    child: Child,
    /// Host and port.
    host: String,
    /// Secret of the address.
    token: String,
}

impl Console {
    fn start(cluster: &TestCluster, kubeconfig: &Path, namespace: &str) -> Result<Self> {
        let mut child = Command::new(cluster.plugin()?)
            .env("KUBECONFIG", kubeconfig)
            .args(["console", "-n", namespace])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("a pipe")?;
        let address = BufReader::new(stdout).lines().next();
        let mut console = Self {
            child,
            host: String::new(),
            token: String::new(),
        };
        let address = address.context("the console has ended")??;
        let mut parts = address.split('/').skip(2);
        console.host = parts.next().context("no host")?.to_owned();
        console.token = parts.next().context("no token")?.to_owned();
        wait("the first lists of the console", || {
            Ok((console.view()?["isComplete"] == true).then_some(()))
        })?;
        Ok(console)
    }

    /// Returns the model of the page.
    fn view(&self) -> Result<Value> {
        let text = http::get(&self.host, &format!("/{}/view.json", self.token))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Waits until the model meets a condition, and returns it.
    fn wait_for(&self, what: &str, is_met: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut last = Value::Null;
        wait(&format!("the console shows {what}"), || {
            last = self.view()?;
            Ok(is_met(&last).then(|| last.clone()))
        })
        .with_context(|| self.view().unwrap_or_default().to_string())
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the pods with GPUs in a namespace.
fn pods_with_gpus(view: &Value, namespace: &str) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let gpus = list(&view["nodes"])
        .into_iter()
        .flat_map(|node| list(&node["gpus"]));
    let claims = gpus.flat_map(|gpu| list(&gpu["claims"]));
    let claims = claims.filter(|claim| claim["namespace"] == namespace);
    let pods = claims.flat_map(|claim| list(&claim["pods"]));
    pods.filter_map(|pod| pod.as_str().map(str::to_owned))
        .collect()
}

/// Returns the entry of a pod in the queue.
fn queued<'a>(view: &'a Value, namespace: &str, pod: &str) -> Option<&'a Value> {
    let mut queue = view["queue"].as_array()?.iter();
    queue.find(|queued| queued["namespace"] == namespace && queued["pod"] == pod)
}

/// Creates a pod that runs and one that no GPU can serve.
fn with_pods(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&pod_with_share("small", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.apply(&pod_with_share("large", "vgpu.drava.dev", "{memory: 1Ti}"))?;
    tenant.running("small")
}

#[test]
fn console_follows_pods_of_the_cluster() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("console")?;
    let name = tenant.name();
    let kubeconfig = cluster.kubernetes().kubeconfig();
    let console = Console::start(&cluster, &kubeconfig, name)?;
    let empty = console.view()?;
    ensure!(pods_with_gpus(&empty, name).is_empty(), "{empty}");

    with_pods(&tenant)?;
    console.wait_for("the running pod at its GPU", |view| {
        pods_with_gpus(view, name)
            .iter()
            .any(|pod| pod.contains("small"))
    })?;
    let view = console.wait_for("the pending pod with a reason", |view| {
        let queued = queued(view, name, "large");
        queued.is_some_and(|queued| queued["reason"].is_string())
    })?;
    let reason = queued(&view, name, "large").context("queued")?["reason"].clone();
    tenant.event("large", reason.as_str().unwrap_or_default())?;
    let tenants = view["tenants"].as_array().context("tenants")?;
    let mut tenants = tenants.iter();
    let own = tenants.find(|tenant| tenant["namespace"] == name);
    let own = own.with_context(|| view.to_string())?;
    ensure!(own["shares"] == 1 && own["pending"] == 1, "{own}");

    tenant.delete_pods(&["small", "large"])?;
    console.wait_for("neither of the deleted pods", |view| {
        pods_with_gpus(view, name).is_empty() && queued(view, name, "large").is_none()
    })?;
    Ok(())
}

/// Returns what the console or `top` says that the pod's claim uses.
fn measured(gpus: &[Value], pod: &str) -> Option<Value> {
    let claims = gpus.iter().filter_map(|gpu| gpu["claims"].as_array());
    let mut claims = claims.flatten();
    let claim = claims.find(|claim| claim["pods"][0] == pod)?;
    claim.get("measured").cloned()
}

#[test]
fn usage_of_running_program_is_shown() -> Result<()> {
    const MIB: u64 = 300;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("usage")?;
    let name = tenant.name();
    let pod = format!("user-{name}");
    tenant.apply(&pod_with_share(&pod, "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running(&pod)?;
    let console = Console::start(&cluster, &cluster.kubernetes().kubeconfig(), name)?;
    // As a page does: what claims use is measured while one is open.
    let mut page = TcpStream::connect(&console.host)?;
    let path = format!("/{}/events", console.token);
    write!(
        page,
        "GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n",
        console.host
    )?;
    std::thread::scope(|scope| {
        let program = scope.spawn(|| {
            let mib = MIB.to_string();
            let probe = [
                "cuda-probe",
                "alloc",
                "--mib",
                &mib,
                "--hold",
                "60",
                "-o",
                "json",
            ];
            tenant.exec(&pod, "app", &probe)
        });
        let is_used = |measured: &Value| {
            measured["memory"].as_u64() >= Some(MIB << 20) && measured["cores"] == 0
        };
        let shown = wait("top shows the memory of the program", || {
            let top = cluster.drava(&["top", "--usage", "-n", name, "-o", "json"])?;
            let top = top.json()?;
            let gpus = top["gpus"].as_array().context("GPUs")?;
            Ok(measured(gpus, &pod).filter(is_used))
        })?;
        console.wait_for("the memory of the program", |view| {
            let nodes = view["nodes"].as_array().into_iter().flatten();
            let gpus = nodes.filter_map(|node| node["gpus"].as_array()).flatten();
            let gpus: Vec<Value> = gpus.cloned().collect();
            measured(&gpus, &pod).as_ref() == Some(&shown)
        })?;
        let ended = program.join();
        let ended = ended.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(ended.code == 0, "{ended:?}");
        Ok(())
    })
}

#[test]
fn console_shows_only_own_namespace_of_tenant() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let (own, other) = (
        cluster.namespace("console-own")?,
        cluster.namespace("console-other")?,
    );
    for tenant in [&own, &other] {
        with_pods(tenant)?;
    }
    let administrator = Console::start(&cluster, &cluster.kubernetes().kubeconfig(), own.name())?;
    administrator.wait_for("both namespaces", |view| {
        [&own, &other]
            .iter()
            .all(|tenant| queued(view, tenant.name(), "large").is_some())
    })?;

    let kubeconfig = cluster.kubeconfig_of_tenant(&own)?;
    let console = Console::start(&cluster, &kubeconfig, own.name())?;
    let view = console.wait_for("the pending pod", |view| {
        queued(view, own.name(), "large").is_some()
    })?;
    let text = view.to_string();
    ensure!(!text.contains(other.name()), "another namespace in {text}");
    let notice = format!("only pods of namespace {} are shown", own.name());
    ensure!(text.contains(&notice), "no {notice:?} in {text}");
    ensure!(
        text.contains("you may not list resourceslices"),
        "GPUs of all tenants in {text}"
    );
    own.delete_pods(&["large"])?;
    console.wait_for("that the pod was deleted", |view| {
        queued(view, own.name(), "large").is_none()
    })?;
    Ok(())
}
