//! A cluster of two nodes.

use std::path::Path;

use drava_cluster::{Component, Machine, Node, Phase, down};
use serde_json::{Value, json};

use crate::pod::{apply, load_kubectl};
use crate::traces::traces;
use crate::trial::{Trial, kubectl, wait_until};

const VERSION: &str = "\"gitVersion\": \"v1.37.1\"";

/// A pod on a given node that runs kubectl.
fn pod(name: &str, node: &str, args: &[&str]) -> String {
    let container = json!({
        "name": "kubectl",
        "image": "localhost/kubectl:test",
        "imagePullPolicy": "Never",
        "command": ["/usr/bin/kubectl"],
        "args": args,
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"nodeName": node, "restartPolicy": "Never", "containers": [container]},
    })
    .to_string()
}

fn phase(node: &Node, component: Component) -> Phase {
    let components = node.components().unwrap().into_iter();
    let mut named = components.filter(|status| status.component == component);
    named.next().unwrap().phase
}

#[test]
fn connects_pods_of_two_nodes_and_leaves_no_trace() {
    let Some(mut trial) = Trial::new("nodes") else {
        return;
    };
    trial.options.nodes = vec![Machine::None, Machine::None];
    let cluster = trial.up();
    assert!(cluster.status().unwrap().ready);
    let names: Vec<_> = cluster.nodes().iter().map(Node::name).collect();
    assert_eq!(names, ["node-0", "node-1"]);
    let [control_plane, worker] = <[Node; 2]>::try_from(cluster.nodes()).unwrap();
    assert_ne!(
        control_plane.path(Path::new("/")).unwrap(),
        worker.path(Path::new("/")).unwrap()
    );
    let started: Vec<_> = worker.components().unwrap();
    let started: Vec<_> = started.iter().map(|status| status.component).collect();
    assert_eq!(started, [Component::Containerd, Component::Kubelet]);

    // A server on each node, and a client on the other node.
    let dir = tempfile::tempdir().unwrap();
    load_kubectl(&cluster, dir.path());
    for (server, client) in [("node-0", "node-1"), ("node-1", "node-0")] {
        let (proxy, reader) = (format!("proxy-{server}"), format!("reader-{client}"));
        let serve = ["proxy", "--address=0.0.0.0", "--accept-hosts=.*"];
        apply(&cluster, &pod(&proxy, server, &serve));
        let mut address = String::new();
        wait_until("the server has an address", || {
            // The log is read by way of the node's kubelet.
            let log = cluster.kubectl_output(["logs", &proxy]).unwrap_or_default();
            address = kubectl(
                &cluster,
                &["get", "pod", &proxy, "-o", "jsonpath={.status.podIP}"],
            );
            log.contains("Starting to serve") && !address.is_empty()
        });
        let server = format!("--server=http://{address}:8001");
        let read = [server.as_str(), "get", "--raw=/version"];
        apply(&cluster, &pod(&reader, client, &read));
        let ended = "--for=jsonpath={.status.phase}=Succeeded";
        let reader = format!("pod/{reader}");
        kubectl(&cluster, &["wait", &reader, ended, "--timeout=60s"]);
        assert!(kubectl(&cluster, &["logs", &reader]).contains(VERSION));
        let args = [
            "exec",
            &proxy,
            "--",
            "/usr/bin/kubectl",
            "version",
            "--client",
        ];
        assert!(kubectl(&cluster, &args).contains("v1.37.1"));
    }

    // A crash on one node leaves the other alone.
    let before = phase(&control_plane, Component::Kubelet);
    let crashed = phase(&worker, Component::Kubelet);
    worker.kill(Component::Kubelet).unwrap();
    wait_until("kubelet was restarted", || {
        let now = phase(&worker, Component::Kubelet);
        matches!(now, Phase::Ready { .. }) && now != crashed
    });
    assert_eq!(phase(&control_plane, Component::Kubelet), before);

    assert!(down(trial.state()).unwrap());
    assert_eq!(traces(trial.state()), [""; 0]);
}

#[test]
fn replaces_cluster_with_ended_node() {
    let Some(mut trial) = Trial::new("ended-node") else {
        return;
    };
    trial.options.nodes = vec![Machine::None, Machine::None];
    let cluster = trial.up();
    let error = cluster.node("node-2").unwrap_err().to_string();
    assert!(error.contains("node-0, node-1"), "{error}");
    let worker = cluster.node("node-1").unwrap();
    let root = worker.path(Path::new("/")).unwrap();
    let pid = root.components().nth(2).unwrap().as_os_str();
    let pid = pid.to_str().unwrap().parse().unwrap();
    let init = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(init, rustix::process::Signal::KILL).unwrap();
    wait_until("the node has ended", || {
        drava_cluster::attach(trial.state()).is_err()
    });
    let error = cluster.status().unwrap_err().to_string();
    assert!(error.contains("node-1 has ended"), "{error}");

    let cluster = trial.up();
    let nodes: Value =
        serde_json::from_str(&kubectl(&cluster, &["get", "nodes", "-o", "json"])).unwrap();
    assert_eq!(nodes["items"].as_array().unwrap().len(), 2);
}
