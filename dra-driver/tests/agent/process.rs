//! Identity of processes that the agent kills.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use drava_dra_driver::node::process::Processes;

/// A child that reads until its standard input is closed.
struct Reader(Child);

impl Reader {
    fn start() -> Self {
        let mut command = Command::new("cat");
        Self(command.stdin(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

fn processes() -> Processes {
    Processes::new(PathBuf::from("/proc"), std::env::temp_dir())
}

#[test]
fn kills_process_that_is_described_as_before() {
    let mut child = Reader::start();
    let mut processes = processes();
    let owner = processes.describe(child.0.id()).unwrap().owner;
    assert!(processes.kill(child.0.id(), |now| now.owner == owner));
    assert!(!child.0.wait().unwrap().success());
}

#[test]
fn spares_process_that_reuses_pid() {
    let mut child = Reader::start();
    let mut processes = processes();
    let mut earlier = processes.describe(child.0.id()).unwrap().owner;
    earlier.start_time -= 1;
    assert!(!processes.kill(child.0.id(), |now| now.owner == earlier));
    drop(child.0.stdin.take());
    assert!(child.0.wait().unwrap().success(), "the child was killed");
}
