//! Explanations by object and over HTTP, with the caller's permissions.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

const SYSTEM: &str = "drava-system";

fn share(name: &str, memory: &str) -> String {
    pod_with_share(name, "vgpu.drava.dev", &format!("{{memory: {memory}}}"))
}

/// Fills the GPUs, and creates pod `large`, which needs 40 GiB where 20 GiB are free.
fn with_pending_pod(tenant: &Namespace<'_>) -> Result<()> {
    for (name, memory) in [("first", "60Gi"), ("second", "70Gi")] {
        tenant.apply(&share(name, memory))?;
        tenant.running(name)?;
    }
    tenant.apply(&share("large", "40Gi"))?;
    tenant.event("large", "InsufficientMemory")?;
    Ok(())
}

fn request(name: &str, pod: &str, ttl: u32) -> String {
    format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: PlacementExplanation, metadata: {{name: {name}}}, spec: {{podName: {pod}, ttlSeconds: {ttl}}}}}"
    )
}

fn wait_for_state(tenant: &Namespace<'_>, name: &str, state: &str) -> Result<Value> {
    wait(&format!("PlacementExplanation {name} is {state}"), || {
        let found = tenant.find("placementexplanation", name)?;
        let status = found.context("no object")?["status"].clone();
        Ok((status["state"] == state).then_some(status))
    })
}

#[test]
fn explains_pod_on_request_for_its_time() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("explanation")?;
    with_pending_pod(&tenant)?;
    tenant.apply(&request("why", "large", 600))?;
    tenant.apply(&request("absent", "absent", 600))?;
    let status = wait_for_state(&tenant, "why", "Infeasible")?;
    let text = status.to_string();
    ensure!(
        status["reasons"]["InsufficientMemory"] == 1
            && text.contains("request at most")
            && text.contains(&format!("end {}/first", tenant.name())),
        "{text}"
    );
    wait_for_state(&tenant, "absent", "PodMissing")?;
    tenant.example("placement-explanation")?;
    wait_for_state(&tenant, "trainer", "PodMissing")?;
    // It follows the pod.
    tenant.delete_pods(&["first"])?;
    tenant.running("large")?;
    let status = wait_for_state(&tenant, "why", "Placed")?;
    ensure!(status["changes"].is_null(), "{status}");
    tenant.apply(&request("brief", "large", 3))?;
    wait("the explanation is deleted after its time", || {
        let found = tenant.find("placementexplanation", "brief")?;
        Ok(found.is_none().then_some(()))
    })
}

/// A connection to the controller's server, as a user opens it.
struct Forwarding {
    child: Child,
    /// kubectl ends when its output pipe is closed.
    _output: BufReader<ChildStdout>,
    port: String,
    /// File with the authority of the server.
    authority: PathBuf,
    /// Empty kubeconfig: no credential but the token.
    kubeconfig: PathBuf,
}

impl Forwarding {
    fn start(cluster: &TestCluster) -> Result<Self> {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let secret = cluster.kubectl([
            "-n",
            SYSTEM,
            "get",
            "secret",
            "drava-webhook",
            "-o",
            "go-template={{index .data \"ca.crt\" | base64decode}}",
        ])?;
        let authority = directory.join("drava-webhook.crt");
        std::fs::write(&authority, secret)?;
        let kubeconfig = directory.join("empty.kubeconfig");
        std::fs::write(&kubeconfig, "")?;
        let mut command = cluster.kubernetes().kubectl();
        command.args([
            "-n",
            SYSTEM,
            "port-forward",
            "service/drava-webhook",
            ":443",
        ]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("start kubectl port-forward")?;
        let stdout = child.stdout.take().context("a pipe")?;
        let mut output = BufReader::new(stdout);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let port = line
            .split_once("127.0.0.1:")
            .and_then(|(_, rest)| rest.split_once(' '))
            .map(|(port, _)| port.to_owned());
        Ok(Self {
            port: port.with_context(|| format!("no port in {line:?}"))?,
            child,
            _output: output,
            authority,
            kubeconfig,
        })
    }

    /// Runs `kubectl get --raw PATH`, or `kubectl create --raw PATH` with a body.
    fn call(
        &self,
        cluster: &TestCluster,
        token: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<std::process::Output> {
        let mut command: Command = cluster.kubernetes().kubectl();
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg(format!("--server=https://127.0.0.1:{}", self.port))
            .arg("--certificate-authority")
            .arg(&self.authority)
            .arg(format!("--tls-server-name=drava-webhook.{SYSTEM}.svc"))
            .arg(format!("--token={token}"));
        match body {
            None => {
                command.args(["get", "--raw", path]).stdin(Stdio::null());
            }
            Some(body) => {
                command.args(["create", "--raw", path, "-f", "-"]);
                command.stdin(process::input(body.to_string().as_bytes())?);
            }
        }
        process::output(&mut command, Limit::REQUEST)
    }

    fn answer(
        &self,
        cluster: &TestCluster,
        token: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value> {
        let output = self.call(cluster, token, path, body)?;
        ensure!(output.status.success(), "{output:?}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn refusal(
        &self,
        cluster: &TestCluster,
        token: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<String> {
        let output = self.call(cluster, token, path, body)?;
        ensure!(!output.status.success(), "{output:?}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Creates a service account with the role in the namespace, and returns a token of it.
fn token(tenant: &Namespace<'_>, account: &str, role: &str) -> Result<String> {
    tenant.kubectl(&["create", "serviceaccount", account])?;
    let subject = format!("--serviceaccount={}:{account}", tenant.name());
    let role = format!("--clusterrole={role}");
    tenant.kubectl(&["create", "rolebinding", account, &role, &subject])?;
    Ok(tenant
        .kubectl(&["create", "token", account])?
        .trim()
        .to_owned())
}

#[test]
fn explains_and_simulates_over_http_as_permitted() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("http")?;
    let other = cluster.namespace("http-other")?;
    with_pending_pod(&tenant)?;
    let (editor, viewer) = (
        token(&tenant, "editor", "edit")?,
        token(&tenant, "viewer", "view")?,
    );
    let stranger = token(&other, "stranger", "edit")?;
    let server = Forwarding::start(&cluster)?;
    let explain = format!("/explain/namespaces/{}/pods/large", tenant.name());
    for caller in [&editor, &viewer] {
        let report = server.answer(&cluster, caller, &explain, None)?;
        ensure!(report["state"] == "Infeasible", "{report}");
    }
    let refusal = server.refusal(&cluster, &stranger, &explain, None)?;
    ensure!(
        refusal.contains("stranger may not get pods in namespace"),
        "{refusal}"
    );
    server.refusal(&cluster, "forged", &explain, None)?;

    let objects = |namespace: &str, memory: &str| {
        json!({"kind": "List", "items": [
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
                "metadata": {"name": "simulated", "namespace": namespace},
                "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
                    "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory}},
                }}]}}},
            },
            {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": namespace},
                "spec": {
                    "containers": [{"name": "c", "image": "x"}],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "simulated"}],
                },
            },
        ]})
    };
    let placed = objects(tenant.name(), "10Gi");
    let report = server.answer(&cluster, &editor, "/simulate", Some(&placed))?;
    ensure!(report["pods"][0]["state"] == "placed", "{report}");
    // A viewer may not create pods.
    server.refusal(&cluster, &viewer, "/simulate", Some(&placed))?;
    // A caller learns what would have to end, but no name of another tenant's pod.
    let pending = objects(other.name(), "40Gi");
    let report = server.answer(&cluster, &stranger, "/simulate", Some(&pending))?;
    let text = report.to_string();
    ensure!(
        report["pods"][0]["state"] == "pending"
            && text.contains("a pod of another namespace")
            && !text.contains("/first")
            && !text.contains("/second"),
        "{text}"
    );
    Ok(())
}
