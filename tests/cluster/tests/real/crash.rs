//! Recovery from killed commands, nodes and components.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use drava_cluster::{Component, Machine, Options, Phase, attach, down, up};

use crate::traces::{hash_of, traces};
use crate::trial::{Trial, wait_until};

/// Environment variable with the state directory for the child of `repairs_killed_start`.
const CHILD_STATE: &str = "DRAVA_CLUSTER_TEST_STATE";

#[test]
fn repairs_killed_start() {
    let Some(trial) = Trial::new("killed") else {
        return;
    };
    let moments = [
        ("the plan is written", "plan.json"),
        ("the node's lock is taken", "nodes/node-0/node.lock"),
        ("the node's init listens", "nodes/node-0/control.sock"),
        (
            "the API server starts",
            "nodes/node-0/logs/kube-apiserver.log",
        ),
    ];
    for (moment, file) in moments {
        // State of an earlier round would be mistaken for this round's.
        let file = trial.state().join(file);
        let _ = fs::remove_file(&file);
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "crash::start_in_a_child",
                "--nocapture",
            ])
            .env(CHILD_STATE, trial.state())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // A node of an earlier round may be complete enough to be reused.
        let mut ended = None;
        wait_until(moment, || {
            ended = child.try_wait().unwrap();
            ended.is_some() || file.exists()
        });
        assert!(ended.is_none_or(|status| status.success()), "{moment}");
        // The child may have ended already.
        let _ = child.kill();
        child.wait().unwrap();
    }
    let cluster = trial.up();
    assert!(cluster.status().unwrap().ready);
    // One node in all, not one per attempt.
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
#[ignore = "child process of repairs_killed_start, which kills it"]
fn start_in_a_child() {
    let state = PathBuf::from(env::var_os(CHILD_STATE).expect("started by another test"));
    up(&Options {
        state,
        nodes: vec![Machine::None],
        ..Options::named("child")
    })
    .unwrap();
}

#[test]
fn replaces_crashed_node() {
    let Some(trial) = Trial::new("crash") else {
        return;
    };
    let cluster = trial.up();
    let init = cluster.control_plane().path(Path::new("/")).unwrap();
    let pid = init.components().nth(2).unwrap().as_os_str().to_owned();
    assert!(
        Command::new("kill")
            .arg("-KILL")
            .arg(pid)
            .status()
            .unwrap()
            .success()
    );
    wait_until("the node has ended", || attach(trial.state()).is_err());
    assert!(
        cluster
            .status()
            .unwrap_err()
            .to_string()
            .contains("has ended")
    );
    assert!(trial.up().status().unwrap().ready);

    // As `cargo clean` does, which can fail on a file that the node has just created.
    let _ = fs::remove_dir_all(trial.state());
    assert!(down(trial.state()).unwrap());
    assert_eq!(traces(trial.state()), [""; 0]);
}

#[test]
fn stops_starts_and_restarts_components() {
    let Some(trial) = Trial::new("components") else {
        return;
    };
    let cluster = trial.up();
    let node = cluster.control_plane();
    let status = |component: Component| {
        let all = node.components().unwrap();
        all.into_iter()
            .find(|status| status.component == component)
            .unwrap()
    };

    // The node's init restarts a crashed component.
    let Phase::Ready { pid: before } = status(Component::Kubelet).phase else {
        panic!("kubelet is not ready")
    };
    node.kill(Component::Kubelet).unwrap();
    wait_until(
        "kubelet was restarted",
        || matches!(status(Component::Kubelet), s if s.restarts == 1 && matches!(s.phase, Phase::Ready { pid } if pid != before)),
    );

    // A stopped component stays stopped until the next start.
    node.stop(Component::KubeScheduler).unwrap();
    assert_eq!(status(Component::KubeScheduler).phase, Phase::Stopped);
    assert!(!cluster.status().unwrap().ready);
    let again = trial.up();
    assert!(
        again.status().unwrap().ready,
        "a second start starts the stopped component"
    );

    // Clients retry while the API server restarts.
    node.restart(Component::KubeApiserver).unwrap();
    wait_until("the API server answers", || {
        cluster.kubectl_output(["get", "nodes"]).is_ok()
    });

    assert!(
        node.stop(Component::Simulator)
            .unwrap_err()
            .to_string()
            .contains("has no component simulator-machine")
    );
}
