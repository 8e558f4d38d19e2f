//! A cluster for one test, and requests to it.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use drava_cluster::prerequisite::{self, Prerequisite};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Cluster, HostLock, Machine, Options, down, lock_host, up};

/// The cluster of one test; removed when dropped.
pub(crate) struct Trial {
    pub(crate) options: Options,
    _lock: HostLock,
}

impl Trial {
    /// Waits for the clusters of other tests. Returns `None` for a test that [`is_skipped`].
    pub(crate) fn new(name: &str) -> Option<Self> {
        if is_skipped() {
            return None;
        }
        let lock = lock_host().unwrap();
        let options = Options {
            nodes: vec![Machine::None],
            ..Options::named(&format!("test-{name}"))
        };
        down(&options.state).unwrap();
        Some(Self {
            options,
            _lock: lock,
        })
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

/// Returns whether the machine lacks a prerequisite of a cluster, and then reports the running test as skipped.
pub(crate) fn is_skipped() -> bool {
    let Err(error) = prerequisite::check(&Prerequisite::CLUSTER) else {
        return false;
    };
    let test = std::thread::current();
    let reason = format!("{error:#}").replace('\n', " ");
    let line = format!("skipped: {}: {reason}\n", test.name().unwrap_or("a test"));
    // `eprintln!` would be hidden for a test that passes.
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    true
}

/// Runs a shell command line in the first node.
pub(crate) fn in_node(cluster: &Cluster, line: &str) -> String {
    let mut shell = cluster.control_plane().command("sh").unwrap();
    shell.args(["-c", line]).stdin(Stdio::null());
    let output = process::output(&mut shell, Limit::REQUEST).unwrap();
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

/// Waits until `reached` returns true, at most 120 s.
pub(crate) fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !reached() {
        assert!(Instant::now() < deadline, "not within 120 s: {what}");
        sleep(Duration::from_millis(10));
    }
}
