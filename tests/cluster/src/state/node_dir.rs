//! The directory that holds everything of one node; the node sees it as `/cluster`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

use crate::component::Component;

/// Paths in the state directory of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeDir {
    pub(super) path: PathBuf,
}

impl NodeDir {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn control_socket(&self) -> PathBuf {
        self.path.join("control.sock")
    }

    /// Lock held by the node's init.
    pub(crate) fn lock(&self) -> PathBuf {
        self.path.join("node.lock")
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.path.join("pki")
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.path.join("config")
    }

    pub(crate) fn machine(&self) -> PathBuf {
        self.path.join("machine.yaml")
    }

    /// The node's own disk: its `/etc` and `/var`.
    pub(crate) fn disk(&self) -> PathBuf {
        self.path.join("disk")
    }

    /// Mount point of the node's root file system; always empty on the host.
    pub(crate) fn root(&self) -> PathBuf {
        self.path.join("root")
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    pub(crate) fn log(&self, component: Component) -> PathBuf {
        self.logs().join(format!("{component}.log"))
    }

    /// Log of the node's init.
    pub(crate) fn init_log(&self) -> PathBuf {
        self.logs().join("node.log")
    }

    /// Creates the directories.
    pub(crate) fn create(&self) -> Result<()> {
        for dir in [self.logs(), self.config(), self.root(), self.disk()] {
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        Ok(())
    }

    /// Waits until the last process of a killed node, the one that reaps its init, releases its lock; at most
    /// `limit`.
    pub(crate) fn await_lock(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let Ok(file) = File::open(self.lock()) else {
            return;
        };
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
            && Instant::now() < deadline
        {
            sleep(Duration::from_millis(10));
        }
    }
}
