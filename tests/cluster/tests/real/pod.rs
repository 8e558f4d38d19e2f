//! A pod runs to completion, and `down` removes every trace of the cluster.

use std::fs;
use std::path::Path;

use drava_cluster::oci::{Image, Layer};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Cluster, Kubernetes, down};

use crate::traces::{devices, namespaces, now_ticks, start_ticks, traces};
use crate::trial::{Trial, in_node, kubectl};

/// A pod that requests the API server's version with its service account.
const POD: &str = r#"{
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"},
    "spec": {"restartPolicy": "Never", "containers": [{"name": "asks", "image": "localhost/kubectl:test", "imagePullPolicy": "Never"}]}
}"#;

/// Loads an image with this cluster's kubectl.
pub(crate) fn load_kubectl(cluster: &Cluster, dir: &Path) {
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
        labels: std::collections::BTreeMap::new(),
        layer,
    };
    let archive = dir.join("kubectl.tar");
    image.write(&archive).unwrap();
    cluster.load_image(&archive).unwrap();
}

pub(crate) fn apply(cluster: &Cluster, manifest: &str) {
    let mut apply = cluster.kubectl();
    apply
        .args(["apply", "-f", "-"])
        .stdin(process::input(manifest.as_bytes()).unwrap());
    let output = process::output(&mut apply, Limit::REQUEST).unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Waits until [`POD`] has succeeded.
fn await_success(cluster: &Cluster) {
    let ended = "--for=jsonpath={.status.phase}=Succeeded";
    kubectl(cluster, &["wait", "pod/asks", ended, "--timeout=60s"]);
}

#[test]
fn runs_pod_and_leaves_no_trace() {
    let Some(trial) = Trial::new("pod") else {
        return;
    };
    let (devices_before, settings_before) = (
        devices(),
        fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap(),
    );
    let cluster = trial.up();
    assert!(cluster.status().unwrap().ready);
    assert!(kubectl(&cluster, &["version"]).contains("Server Version: v1.37.1"));

    // A second start reuses the running cluster.
    let init = cluster.control_plane().path(Path::new("/")).unwrap();
    assert_eq!(
        trial.up().control_plane().path(Path::new("/")).unwrap(),
        init
    );

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

    // The host sees no trace while the cluster runs either.
    assert_eq!(devices(), devices_before);
    assert_eq!(
        fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap(),
        settings_before
    );
    assert_eq!(in_node(&cluster, "hostname").trim(), "node-0");
    assert!(!in_node(&cluster, "cat /proc/mounts").contains("/root/home-of-the-host"));

    let theirs = namespaces(init.parent().unwrap());
    assert_eq!(theirs.len(), 6);
    let ended = now_ticks();
    assert!(down(trial.state()).unwrap());
    assert_eq!(traces(trial.state()), [""; 0]);
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let process = process.path();
        // Later namespaces of others, such as those of another cluster, get the numbers that are free now.
        if start_ticks(&process).is_none_or(|start| start > ended) {
            continue;
        }
        assert!(
            namespaces(&process).is_disjoint(&theirs),
            "{} is in a namespace of the node",
            process.display()
        );
    }
    assert_eq!(devices(), devices_before);
    assert!(
        !down(trial.state()).unwrap(),
        "a second down finds no cluster"
    );
}

#[test]
#[ignore = "builds a second Kubernetes first, which takes minutes; stage oldest of cargo xtask test proves it"]
fn runs_pod_on_oldest_supported_release() {
    let Some(mut trial) = Trial::new("oldest") else {
        return;
    };
    trial.options.kubernetes = Kubernetes::V1_36;
    let cluster = trial.up();
    let dir = tempfile::tempdir().unwrap();
    load_kubectl(&cluster, dir.path());
    apply(&cluster, POD);
    await_success(&cluster);
    assert!(kubectl(&cluster, &["logs", "asks"]).contains("\"gitVersion\": \"v1.36.3\""));
}
