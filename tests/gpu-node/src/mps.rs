//! The node driver's own daemon of MPS for a GPU, without Kubernetes.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use drava_dra_driver::mps::{Daemons, Roots, process};
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::node::tmpfs::KernelTmpfs;
use serde_json::json;

use crate::Node;

/// First argument of a program that runs a daemon.
const DAEMON: &str = "own-mps";

/// Runs if the arguments of the process say so: `own-mps DIRECTORY DRIVER_ROOT GPU` starts the daemon as the node driver does, prints its
/// directories as JSON, and ends it when stdin closes. The daemon and its commands are processes of this program, too.
#[must_use]
pub fn run(arguments: impl Fn() -> std::env::ArgsOs) -> Option<ExitCode> {
    if let Some(code) = process::run(arguments()) {
        return Some(code);
    }
    let given: Vec<OsString> = arguments().skip(1).collect();
    let [kind, directory, driver_root, gpu] = given.as_slice() else {
        return None;
    };
    if kind != DAEMON {
        return None;
    }
    let served = serve(
        Path::new(directory),
        driver_root.into(),
        &gpu.to_string_lossy(),
    );
    Some(match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    })
}

fn serve(directory: &Path, driver_root: PathBuf, gpu: &str) -> Result<()> {
    let node = Node::create(directory)?;
    let roots = Roots {
        driver: driver_root,
        device: None,
        proc: "/proc".into(),
    };
    let daemons = Daemons::new(
        node.layout().clone(),
        std::env::current_exe()?,
        roots,
        Labels::Off,
        Arc::new(KernelTmpfs::default()),
    );
    let started = daemons.ensure(gpu).context("the daemon");
    let served = started.and_then(|_| {
        let own = node.layout().mps_gpu(gpu);
        println!(
            "{}",
            json!({ "pipe": own.join("pipe"), "shm": own.join("shm") })
        );
        io::copy(&mut io::stdin(), &mut io::sink())?;
        Ok(())
    });
    let stopped = daemons.stop(gpu).context("the end of the daemon");
    served.and(stopped)
}
