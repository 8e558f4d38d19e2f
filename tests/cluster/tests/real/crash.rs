//! What was killed is repaired or replaced.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use drava_cluster::{Component, Machine, Options, Phase, attach, down, up};

use crate::traces::{hash_of, traces};
use crate::trial::{Trial, wait_until};

/// Where the child of `a_killed_start_is_repaired_by_the_next` is told what to start.
const CHILD_STATE: &str = "DRAVA_CLUSTER_TEST_STATE";

#[test]
fn a_killed_start_is_repaired_by_the_next() {
    let Some(trial) = Trial::new("killed") else {
        return;
    };
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
        ..Options::named("child")
    })
    .unwrap();
}

#[test]
fn a_crashed_node_is_replaced() {
    let Some(trial) = Trial::new("crash") else {
        return;
    };
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
    let Some(trial) = Trial::new("components") else {
        return;
    };
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
            .stop(Component::Simulator)
            .unwrap_err()
            .to_string()
            .contains("runs no simulator-machine")
    );
}
