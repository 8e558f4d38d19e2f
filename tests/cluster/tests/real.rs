//! The cluster against itself: it starts, runs a pod, survives what it should, and leaves nothing behind.
//!
//! Needs root and Go. Run one after another (`cargo test -p drava-cluster --test real -- --test-threads=1`): each test has
//! a cluster of its own, and a machine that runs three at once is slow.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use drava_cluster::oci::{Image, Layer};
use drava_cluster::{
    Cluster, Component, Kubernetes, Machine, Options, Phase, attach, down, target_dir, up,
};

/// A pod that asks the API server for its version with nothing but what every pod is given.
const POD: &str = r#"{
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"},
    "spec": {"restartPolicy": "Never", "containers": [{"name": "asks", "image": "localhost/kubectl:test", "imagePullPolicy": "Never"}]}
}"#;

/// Where the child of `a_killed_start_is_repaired_by_the_next` is told what to start.
const CHILD_STATE: &str = "DRAVA_CLUSTER_TEST_STATE";

/// A cluster of its own for each test, ended whatever happens.
struct Trial {
    options: Options,
}

impl Trial {
    fn new(name: &str) -> Self {
        let options = Options {
            machine: Machine::None,
            ..Options::named(&format!("test-{name}"))
        };
        down(&options.state).unwrap();
        Self { options }
    }

    fn up(&self) -> Cluster {
        up(&self.options).unwrap()
    }

    fn state(&self) -> &Path {
        &self.options.state
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let ended = down(&self.options.state);
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

/// Runs a shell command line in the node.
fn in_node(cluster: &Cluster, line: &str) -> String {
    let output = cluster
        .command("sh")
        .unwrap()
        .args(["-c", line])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{line}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn kubectl(cluster: &Cluster, args: &[&str]) -> String {
    cluster.kubectl_output(args.iter().copied()).unwrap()
}

/// An image with this cluster's kubectl in it.
fn load_kubectl(cluster: &Cluster, dir: &Path) {
    let mut layer = Layer::with_merged_usr();
    layer
        .copy(
            "/usr/bin/kubectl",
            Path::new(cluster.kubectl().get_program()),
            0o755,
        )
        .unwrap();
    let image = Image {
        name: "localhost/kubectl:test".into(),
        entrypoint: vec![
            "/usr/bin/kubectl".into(),
            "get".into(),
            "--raw=/version".into(),
        ],
        command: vec![],
        user: "65532:65532".into(),
        layer,
    };
    let archive = dir.join("kubectl.tar");
    image.write(&archive).unwrap();
    cluster.load_image(&archive).unwrap();
}

fn apply(cluster: &Cluster, manifest: &str) {
    let mut child = cluster
        .kubectl()
        .args(["apply", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), manifest.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

/// Waits until [`POD`] has ended well.
fn await_success(cluster: &Cluster) {
    let ended = "--for=jsonpath={.status.phase}=Succeeded";
    kubectl(cluster, &["wait", "pod/asks", ended, "--timeout=60s"]);
}

/// Traces of the cluster in `state` on this machine: processes, mounts, cgroups, files.
fn traces(state: &Path) -> Vec<String> {
    let mut found = vec![];
    let text = state.display().to_string();
    let name = format!("drava-{}", hash_of(state));
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(process.path().join(file)).unwrap_or_default())
                .into_owned()
        };
        if process
            .file_name()
            .to_string_lossy()
            .chars()
            .all(|digit| digit.is_ascii_digit())
            && process.file_name().to_string_lossy() != std::process::id().to_string()
            && (read("cmdline").contains(&text) || read("cgroup").contains(&name))
        {
            found.push(format!(
                "process {} {}",
                process.path().display(),
                read("cmdline").replace('\0', " ")
            ));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    found.extend(
        mounts
            .lines()
            .filter(|line| line.contains(&text))
            .map(|line| format!("mount {line}")),
    );
    let hierarchies = fs::read_dir("/sys/fs/cgroup")
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let cgroups = hierarchies
        .chain([PathBuf::from("/sys/fs/cgroup")])
        .map(|dir| dir.join(&name));
    found.extend(
        cgroups
            .filter(|dir| dir.exists())
            .map(|dir| format!("cgroup {}", dir.display())),
    );
    if state.exists() {
        found.push(format!("directory {text}"));
    }
    found
}

fn hash_of(state: &Path) -> String {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(state.as_os_str().as_encoded_bytes());
    digest
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Identities of the namespaces that a process is in.
fn namespaces(process: &Path) -> BTreeSet<PathBuf> {
    let links = ["mnt", "pid", "net", "uts", "ipc", "cgroup"]
        .map(|name| fs::read_link(process.join("ns").join(name)));
    links.into_iter().flatten().collect()
}

/// Names of the machine's network devices.
fn devices() -> BTreeSet<String> {
    fs::read_dir("/sys/class/net")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Waits until `reached`, which everything here is within seconds.
fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !reached() {
        assert!(Instant::now() < deadline, "waited two minutes until {what}");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_pod_runs_to_completion_and_nothing_is_left() {
    let trial = Trial::new("pod");
    let (devices_before, settings_before) = (
        devices(),
        fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap(),
    );
    let cluster = trial.up();
    assert!(cluster.status().unwrap().ready);
    assert!(kubectl(&cluster, &["version"]).contains("Server Version: v1.37.1"));

    // A second start finds the first.
    let init = cluster.node_path(Path::new("/")).unwrap();
    assert_eq!(trial.up().node_path(Path::new("/")).unwrap(), init);

    let dir = tempfile::tempdir().unwrap();
    load_kubectl(&cluster, dir.path());
    apply(&cluster, POD);
    await_success(&cluster);
    assert!(kubectl(&cluster, &["logs", "asks"]).contains("\"gitVersion\": \"v1.37.1\""));
    let label = kubectl(
        &cluster,
        &[
            "get",
            "node",
            "node-0",
            "-o",
            r"jsonpath={.metadata.labels.gpu\.drava\.dev/enabled}",
        ],
    );
    assert_eq!(label, "true");

    // The host sees nothing of it while it runs, either.
    assert_eq!(devices(), devices_before);
    assert_eq!(
        fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap(),
        settings_before
    );
    assert_eq!(in_node(&cluster, "hostname").trim(), "node-0");
    assert!(!in_node(&cluster, "cat /proc/mounts").contains("/root/home-of-the-host"));

    let theirs = namespaces(init.parent().unwrap());
    assert_eq!(theirs.len(), 6);
    assert!(down(trial.state()).unwrap());
    assert_eq!(traces(trial.state()), [""; 0]);
    for process in fs::read_dir("/proc").unwrap().flatten() {
        assert!(
            namespaces(&process.path()).is_disjoint(&theirs),
            "{} is in a namespace of the node",
            process.path().display()
        );
    }
    assert_eq!(devices(), devices_before);
    assert!(
        !down(trial.state()).unwrap(),
        "there is nothing left to end"
    );
}

#[test]
fn a_killed_start_is_repaired_by_the_next() {
    let trial = Trial::new("killed");
    let moments = [
        ("the plan is written", "plan.json"),
        ("the node's lock is taken", "node.lock"),
        ("the node's init listens", "control.sock"),
        ("the API server starts", "logs/kube-apiserver.log"),
    ];
    for (moment, file) in moments {
        // What an earlier round left would be taken for this round's.
        let file = trial.state().join(file);
        let _ = fs::remove_file(&file);
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "start_in_a_child", "--nocapture"])
            .env(CHILD_STATE, trial.state())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // A node that an earlier round left may be far enough to be used as it is.
        let mut ended = None;
        wait_until(moment, || {
            ended = child.try_wait().unwrap();
            ended.is_some() || file.exists()
        });
        assert!(ended.is_none_or(|status| status.success()), "{moment}");
        // It may have ended by now.
        let _ = child.kill();
        child.wait().unwrap();
    }
    let cluster = trial.up();
    assert!(cluster.status().unwrap().ready);
    // One node, not one for each attempt.
    let name = format!("drava-{}", hash_of(trial.state()));
    let inits = fs::read_dir("/proc").unwrap().flatten().filter(|process| {
        let read = |file: &str| fs::read_to_string(process.path().join(file)).unwrap_or_default();
        read("cgroup").contains(&name) && read("cmdline").contains("drava-node\0init\0")
    });
    assert_eq!(inits.count(), 1);
    down(trial.state()).unwrap();
    assert_eq!(traces(trial.state()), [""; 0]);
}

#[test]
#[ignore = "the child process of a_killed_start_is_repaired_by_the_next, which kills it"]
fn start_in_a_child() {
    let state = PathBuf::from(env::var_os(CHILD_STATE).expect("started by another test"));
    up(&Options {
        state,
        machine: Machine::None,
        kubernetes: Kubernetes::default(),
    })
    .unwrap();
}

#[test]
fn a_crashed_node_is_replaced() {
    let trial = Trial::new("crash");
    let cluster = trial.up();
    let init = cluster.node_path(Path::new("/")).unwrap();
    let pid = init.components().nth(2).unwrap().as_os_str().to_owned();
    assert!(
        Command::new("kill")
            .arg("-KILL")
            .arg(pid)
            .status()
            .unwrap()
            .success()
    );
    wait_until("the node is gone", || attach(trial.state()).is_err());
    assert!(
        cluster
            .status()
            .unwrap_err()
            .to_string()
            .contains("no longer runs")
    );
    assert!(trial.up().status().unwrap().ready);

    // As `cargo clean` does, which may stumble over a file that the node has just made.
    let _ = fs::remove_dir_all(trial.state());
    assert!(down(trial.state()).unwrap());
    assert_eq!(traces(trial.state()), [""; 0]);
}

#[test]
fn components_crash_stop_and_start() {
    let trial = Trial::new("components");
    let cluster = trial.up();
    let status = |component: Component| {
        let all = cluster.components().unwrap();
        all.into_iter()
            .find(|status| status.component == component)
            .unwrap()
    };

    // A crash is mended by the node's init.
    let Phase::Ready { pid: before } = status(Component::Kubelet).phase else {
        panic!("kubelet is ready")
    };
    cluster.kill(Component::Kubelet).unwrap();
    wait_until(
        "kubelet has been started again",
        || matches!(status(Component::Kubelet), s if s.restarts == 1 && matches!(s.phase, Phase::Ready { pid } if pid != before)),
    );

    // What was stopped stays stopped, and a start brings it back.
    cluster.stop(Component::KubeScheduler).unwrap();
    assert_eq!(status(Component::KubeScheduler).phase, Phase::Stopped);
    assert!(!cluster.status().unwrap().ready);
    let again = trial.up();
    assert!(
        again.status().unwrap().ready,
        "a second start brings up what is missing"
    );

    // The API server goes and comes while its clients wait.
    cluster.restart(Component::KubeApiserver).unwrap();
    wait_until("the API server answers", || {
        cluster.kubectl_output(["get", "nodes"]).is_ok()
    });

    assert!(
        cluster
            .stop(Component::MockMachine)
            .unwrap_err()
            .to_string()
            .contains("runs no mock-machine")
    );
}

#[test]
fn another_release_or_machine_needs_another_cluster() {
    let trial = Trial::new("other");
    trial.up();
    let other = Options {
        kubernetes: Kubernetes::V1_36,
        ..trial.options.clone()
    };
    let message = up(&other).unwrap_err().to_string();
    assert!(
        message.contains("runs Kubernetes v1.37.1, not v1.36.3")
            && message.contains("cluster down"),
        "{message}"
    );
    let other = Options {
        machine: Machine::default(),
        ..trial.options.clone()
    };
    let message = up(&other).unwrap_err().to_string();
    assert!(
        message.contains("runs with the machine none, not") && message.contains("cluster down"),
        "{message}"
    );
}

#[test]
fn nobody_reads_the_cluster_without_credentials() {
    let trial = Trial::new("strangers");
    let cluster = trial.up();
    let server = kubectl(
        &cluster,
        &[
            "config",
            "view",
            "-o",
            "jsonpath={.clusters[0].cluster.server}",
        ],
    );
    let mut stranger = cluster.kubectl();
    stranger.env("KUBECONFIG", "/dev/null").args([
        "--server",
        &server,
        "--insecure-skip-tls-verify",
        "--token=guessed",
    ]);
    let output = stranger.args(["get", "namespaces"]).output().unwrap();
    assert!(
        !output.status.success()
            && String::from_utf8_lossy(&output.stderr).contains("Unauthorized"),
        "{output:?}"
    );

    // Without TLS there is not even an answer to misread.
    let mut plain = TcpStream::connect(server.trim_start_matches("https://")).unwrap();
    std::io::Write::write_all(&mut plain, b"GET /api HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("400"), "{answer}");

    // Nor does kubelet or etcd, from inside the node.
    for (server, refusals) in [
        ("https://127.0.0.1:10250", ["must be logged in"].as_slice()),
        // etcd closes the connection at the handshake; the client may see that before it reads the alert, and on
        // either side of its own write. An answer in HTTP would read differently from all three.
        (
            "https://127.0.0.1:2379",
            &[
                "certificate required",
                "could not be established",
                "Unable to connect to the server",
            ],
        ),
    ] {
        let asked = in_node(
            &cluster,
            &format!(
                "kubectl --server {server} --insecure-skip-tls-verify --token=guessed get --raw /pods 2>&1 || true"
            ),
        );
        assert!(
            refusals.iter().any(|refusal| asked.contains(refusal))
                && !asked.contains("connection refused"),
            "{server}: {asked}"
        );
    }
}

#[test]
#[ignore = "builds a second Kubernetes first, which takes minutes"]
fn the_oldest_supported_release_runs_a_pod() {
    let mut trial = Trial::new("oldest");
    trial.options.kubernetes = Kubernetes::V1_36;
    let cluster = trial.up();
    let dir = tempfile::tempdir().unwrap();
    load_kubectl(&cluster, dir.path());
    apply(&cluster, POD);
    await_success(&cluster);
    assert!(kubectl(&cluster, &["logs", "asks"]).contains("\"gitVersion\": \"v1.36.3\""));
}

#[test]
fn a_foreign_directory_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.tex"), "x").unwrap();
    let options = Options {
        state: dir.path().to_owned(),
        ..Options::named("unused")
    };
    assert!(
        up(&options)
            .unwrap_err()
            .to_string()
            .contains("not a cluster's state directory")
    );
    assert!(
        down(dir.path())
            .unwrap_err()
            .to_string()
            .contains("not a cluster's state directory")
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(target_dir().is_absolute());
}
