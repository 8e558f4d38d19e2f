//! Rejected requests: no credentials, options of another cluster, foreign directories.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use drava_cluster::process::{self, Limit};
use drava_cluster::{Kubernetes, Machine, Options, down, target_dir, up};

use crate::trial::{Trial, in_node, is_skipped, kubectl};

#[test]
fn rejects_options_that_differ_from_running_cluster() {
    let Some(trial) = Trial::new("other") else {
        return;
    };
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
        nodes: vec![Machine::default()],
        ..trial.options.clone()
    };
    let message = up(&other).unwrap_err().to_string();
    assert!(
        message.contains("runs with the machines none, not") && message.contains("cluster down"),
        "{message}"
    );
}

#[test]
fn rejects_requests_without_credentials() {
    let Some(trial) = Trial::new("strangers") else {
        return;
    };
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
    stranger.args(["get", "namespaces"]);
    let output = process::output(&mut stranger, Limit::REQUEST).unwrap();
    assert!(
        !output.status.success()
            && String::from_utf8_lossy(&output.stderr).contains("Unauthorized"),
        "{output:?}"
    );

    // Without TLS there is no response at all.
    let mut plain = TcpStream::connect(server.trim_start_matches("https://")).unwrap();
    plain
        .write_all(b"GET /api HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    plain
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("400"), "{answer}");

    // kubelet and etcd reject the requests from inside the node too.
    for (server, refusals) in [
        ("https://127.0.0.1:10250", ["must be logged in"].as_slice()),
        // etcd closes the connection at the handshake. The client may see that before it reads the alert, and before
        // or after its own write. An answer in HTTP differs from all three messages.
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
fn preserves_foreign_directory() {
    if is_skipped() {
        return;
    }
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
