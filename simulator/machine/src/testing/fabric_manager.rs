//! A fabric manager for a test.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::root::FABRIC_MANAGER;

/// A running fabric manager. Dropping it kills the process.
#[derive(Debug)]
pub struct FabricManager(Child);

impl FabricManager {
    pub(super) fn start(root: &Path) -> anyhow::Result<Self> {
        let mut process = Command::new(root.join("usr/bin").join(FABRIC_MANAGER))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the fabric manager")?;
        let output = process.stdout.take().context("no standard output")?;
        let manager = Self(process);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "the fabric manager has ended");
        Ok(manager)
    }

    /// PID of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for FabricManager {
    fn drop(&mut self) {
        // It may have ended with the machine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
