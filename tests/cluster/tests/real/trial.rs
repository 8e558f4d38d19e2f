//! A cluster for one test, and how to ask it.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use drava_cluster::{Cluster, Machine, Options, down, up};

/// A cluster of its own for each test, ended whatever happens.
pub(crate) struct Trial {
    pub(crate) options: Options,
}

impl Trial {
    pub(crate) fn new(name: &str) -> Self {
        let options = Options {
            machine: Machine::None,
            ..Options::named(&format!("test-{name}"))
        };
        down(&options.state).unwrap();
        Self { options }
    }

    pub(crate) fn up(&self) -> Cluster {
        up(&self.options).unwrap()
    }

    pub(crate) fn state(&self) -> &Path {
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
pub(crate) fn in_node(cluster: &Cluster, line: &str) -> String {
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

pub(crate) fn kubectl(cluster: &Cluster, args: &[&str]) -> String {
    cluster.kubectl_output(args.iter().copied()).unwrap()
}

/// Waits until `reached`, which everything here is within seconds.
pub(crate) fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !reached() {
        assert!(Instant::now() < deadline, "waited two minutes until {what}");
        sleep(Duration::from_millis(10));
    }
}
