//! An installation from a private registry, on a node without a way out. Runs after the removal of drava, and leaves drava from
//! the registry: kubelet asks for the secret of a pulled image again, also where the image has another name.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::{Kubernetes, target_dir, workspace_root};
use drava_e2e::{TestCluster, wait};

const ADDRESS: &str = "127.0.0.1:5000";
const USER: &str = "drava";
const PASSWORD: &str = "not-a-secret";
const SYSTEM: &str = "drava-system";
/// Images of the registry with their archives. The demo is the image of `helm test`.
const IMAGES: [(&str, &str); 3] = [
    ("drava-dra-driver:dev", "drava-dra-driver"),
    ("drava-controller:dev", "drava-controller"),
    ("library/debian:13-slim", "drava-demo"),
];
/// Removes all images of the node but that of pod sandboxes; containerd also has a reference by digest to each.
const REMOVE_IMAGES: &str = "c='ctr --namespace=k8s.io images'; \
    $c ls | awk 'NR>1 {d[$1]=$3} END {for (r in d) if (d[r] != d[\"localhost/pause:dev\"]) print r}' | xargs $c rm --sync";
/// Directory of the registry on the node.
const DIRECTORY: &str = "/var/lib/registry-test";

/// A registry on the first node with the images of this build. Ends with the value.
struct Registry {
    process: Child,
}

impl Registry {
    fn start(cluster: &TestCluster) -> Result<Self> {
        let node = cluster.kubernetes().control_plane();
        let directory = node.path(Path::new(DIRECTORY))?;
        std::fs::create_dir_all(&directory)?;
        let source = workspace_root().join("tests/e2e/registry");
        let program = drava_cluster::build_program(&source, "registry", Kubernetes::default())?;
        let copied = std::fs::copy(&program, directory.join("registry"));
        copied.with_context(|| format!("copy {}", program.display()))?;
        let images = target_dir().join("images");
        for (_, archive) in IMAGES {
            let archive = format!("{archive}.tar");
            let copied = std::fs::copy(images.join(&archive), directory.join(&archive));
            copied.with_context(|| format!("copy {archive}"))?;
        }
        let mut command = node.command(&format!("{DIRECTORY}/registry"))?;
        command.args(["-listen", ADDRESS, "-user", USER, "-password", PASSWORD]);
        for (reference, archive) in IMAGES {
            command.arg(format!("{reference}={DIRECTORY}/{archive}.tar"));
        }
        // The registry ends with its standard input.
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the registry")?;
        let output = process.stdout.take().context("no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "the registry says {line:?}");
        Ok(Self { process })
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if let Err(error) = self.process.wait() {
            eprintln!("cannot await the end of the registry: {error}");
        }
    }
}

/// Returns the images of the pods of drava.
fn images_of_drava(cluster: &TestCluster) -> Result<Vec<String>> {
    let pods = cluster.get(&["pods", "-n", SYSTEM])?;
    let pods = pods["items"].as_array().context("pods")?;
    let present = pods
        .iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(present
        .filter_map(|pod| pod["spec"]["containers"][0]["image"].as_str())
        .map(str::to_owned)
        .collect())
}

#[test]
fn installs_from_private_registry_without_egress() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("airgap")?;
    // No default route: nothing but the node answers.
    let routes = cluster.on_node("cat", &["/proc/net/route"])?;
    let has_default = routes
        .lines()
        .skip(1)
        .any(|route| route.split_whitespace().nth(1) == Some("00000000"));
    ensure!(!has_default, "the node has a default route: {routes}");
    let _registry = Registry::start(&cluster)?;

    // The registry rejects requests without the credentials of the secret.
    tenant.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: anonymous}}, spec: {{containers: [{{name: app, \
         image: '{ADDRESS}/drava-controller:dev', imagePullPolicy: Always}}]}}}}"
    ))?;
    wait("kubelet is refused by the registry", || {
        let events = tenant.events("anonymous")?;
        let mut failures = events.iter().filter(|event| event.starts_with("Failed: "));
        let is_refused = |event: &String| event.contains("401") || event.contains("auth");
        Ok(failures.any(is_refused).then_some(()))
    })?;

    // Alone, the test finds the drava of the other tests.
    cluster.helm([
        "uninstall",
        "drava",
        "-n",
        SYSTEM,
        "--wait",
        "--ignore-not-found",
    ])?;
    cluster.kubectl([
        "delete",
        "namespace",
        SYSTEM,
        "--ignore-not-found",
        "--timeout=90s",
    ])?;
    cluster.on_node("sh", &["-ec", REMOVE_IMAGES])?;
    cluster.kubectl(["create", "namespace", SYSTEM])?;
    let secret = [
        "create",
        "secret",
        "docker-registry",
        "registry",
        "-n",
        SYSTEM,
    ];
    let server = format!("--docker-server={ADDRESS}");
    let user = format!("--docker-username={USER}");
    let password = format!("--docker-password={PASSWORD}");
    cluster.kubectl(secret.iter().copied().chain([&*server, &user, &password]))?;
    let images = target_dir().join("images");
    let values = images.join("values.yaml").display().to_string();
    let chart = workspace_root()
        .join("deploy/helm/drava")
        .display()
        .to_string();
    let registry = format!("global.imageRegistry={ADDRESS}");
    let install = [
        "install", "drava", &chart, "-n", SYSTEM, "-f", &values, "--set", &registry,
    ];
    let secret = ["--set", "imagePullSecrets[0].name=registry"];
    let of_cluster = ["--set", "image.tag=dev,driver.driverRoot=/opt/drava-sim"];
    cluster.helm(install.iter().chain(&secret).chain(&of_cluster))?;
    cluster.drava_ready()?;

    // Exactly the images of the printed list.
    let list = std::fs::read_to_string(images.join("images.txt"))?;
    let expected: Vec<String> = list
        .lines()
        .filter_map(|line| line.split_once('@'))
        .map(|(name, digest)| format!("{ADDRESS}/{name}:dev@{digest}"))
        .collect();
    ensure!(expected.len() == 2, "{list}");
    let present = images_of_drava(&cluster)?;
    ensure!(
        !present.is_empty() && present.iter().all(|image| expected.contains(image)),
        "{present:?}, expected {expected:?}"
    );
    wait("kubelet pulled the images from the registry", || {
        let events = cluster.get(&["events", "-n", SYSTEM])?;
        let events = events["items"].as_array().into_iter().flatten();
        let messages: Vec<&str> = events
            .filter_map(|event| event["message"].as_str())
            .filter(|message| message.contains("Successfully pulled image"))
            .collect();
        let is_pulled = |image: &String| {
            let mut messages = messages.iter();
            messages.any(|message| message.contains(image.as_str()))
        };
        Ok(expected.iter().all(is_pulled).then_some(()))
    })?;
    // The image of the test comes from the registry, too.
    cluster.helm(["test", "drava", "--namespace", SYSTEM])?;
    Ok(())
}
