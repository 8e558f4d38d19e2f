//! A fabric manager for a test.

use std::path::Path;
use std::process::Child;

use anyhow::Context as _;

use crate::fabric_manager;

/// A running fabric manager. Dropping it kills the process.
#[derive(Debug)]
pub struct FabricManager(Child);

impl FabricManager {
    pub(super) fn start(root: &Path) -> anyhow::Result<Self> {
        let process = fabric_manager::start(root).context("cannot start the fabric manager")?;
        Ok(Self(process))
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
