//! The state directory of a cluster.

mod node_dir;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

use crate::plan::Plan;
pub(crate) use node_dir::NodeDir;

/// Marker file of a state directory: without it, no file is removed.
const MARKER: &str = "drava-cluster";
/// File that a command locks while it changes the cluster.
const LOCK: &str = "lock";
/// Directory with the state directories of the nodes.
const NODES: &str = "nodes";

/// Paths in the state directory of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The state directory at `path`, which need not exist.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path)
            .with_context(|| format!("make {} absolute", path.display()))?;
        Ok(Self { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.path.join("kubeconfig")
    }

    /// State directory of the node `name`.
    pub(crate) fn node(&self, name: &str) -> NodeDir {
        NodeDir {
            path: self.path.join(NODES).join(name),
        }
    }

    /// State directories of all nodes, including those of an interrupted start.
    pub(crate) fn nodes(&self) -> Vec<NodeDir> {
        let entries = fs::read_dir(self.path.join(NODES)).into_iter().flatten();
        entries
            .flatten()
            .map(|entry| NodeDir { path: entry.path() })
            .collect()
    }

    fn plan_file(&self) -> PathBuf {
        self.path.join("plan.json")
    }

    /// Name of the cluster's cgroup, unique per directory.
    pub(crate) fn cgroup(&self) -> String {
        format!(
            "drava-{}",
            short_hash(self.path.as_os_str().as_encoded_bytes())
        )
    }

    pub(crate) fn read_plan(&self) -> Result<Option<Plan>> {
        let file = self.plan_file();
        match fs::read(&file) {
            Ok(bytes) => Ok(Some(
                serde_json::from_slice(&bytes)
                    .with_context(|| format!("read {}", file.display()))?,
            )),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
        }
    }

    pub(crate) fn write_plan(&self, plan: &Plan) -> Result<()> {
        let file = self.plan_file();
        fs::write(&file, serde_json::to_vec_pretty(plan)?)
            .with_context(|| format!("write {}", file.display()))
    }

    /// Creates the state directory and the marker. The lock must be held.
    pub(crate) fn mark(&self) -> Result<()> {
        let text = "State of a drava test cluster. `cargo xtask cluster down` removes it.\n";
        fs::create_dir_all(&self.path)
            .and_then(|()| fs::write(self.path.join(MARKER), text))
            .with_context(|| format!("write to {}", self.path.display()))
    }

    fn is_ours(&self) -> bool {
        self.path.join(MARKER).exists()
    }

    /// Returns whether the directory has contents but no marker.
    fn is_foreign(&self) -> bool {
        let mut entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        !self.is_ours() && entries.any(|entry| entry.file_name() != LOCK)
    }

    /// Removes the files of an earlier start.
    pub(crate) fn clear(&self) -> Result<()> {
        if !self.is_ours() {
            return Ok(());
        }
        for entry in
            fs::read_dir(&self.path).with_context(|| format!("list {}", self.path.display()))?
        {
            let entry = entry?;
            if [MARKER, LOCK].iter().any(|kept| entry.file_name() == *kept) {
                continue;
            }
            let path = entry.path();
            let removed = if entry.file_type()?.is_dir() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.with_context(|| format!("remove {}", path.display()))?;
        }
        Ok(())
    }

    /// Removes the directory itself. The lock must be held.
    pub(crate) fn remove(&self) -> Result<()> {
        self.clear()?;
        // The marker is removed last: the next removal continues an interrupted one.
        for name in [LOCK, MARKER] {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("remove {name} from {}", self.path.display()));
                }
                _ => {}
            }
        }
        match fs::remove_dir(&self.path) {
            // Another command has started the next cluster, or the directory is gone; neither is an error.
            Err(error)
                if !matches!(
                    error.kind(),
                    ErrorKind::DirectoryNotEmpty | ErrorKind::NotFound
                ) =>
            {
                Err(error).with_context(|| format!("remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Waits until no other command changes this cluster, and excludes other commands until dropped. Rejects a
    /// directory with other contents.
    pub(crate) fn lock(&self) -> Result<File> {
        if self.is_foreign() {
            bail!(
                "{} is not empty and not a cluster's state directory; choose another --name",
                self.path.display()
            );
        }
        loop {
            let path = self.path.join(LOCK);
            fs::create_dir_all(&self.path)
                .with_context(|| format!("create {}", self.path.display()))?;
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .with_context(|| format!("open {}", path.display()))?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                eprintln!(
                    "waiting for another command that uses {}",
                    self.path.display()
                );
                flock(&file, FlockOperation::LockExclusive)
                    .with_context(|| format!("lock {}", path.display()))?;
            }
            // The holder may have been a `down` that removed the file.
            if fs::metadata(&path)
                .is_ok_and(|now| file.metadata().is_ok_and(|ours| now.ino() == ours.ino()))
            {
                return Ok(file);
            }
        }
    }
}

/// Returns the first 12 hexadecimal digits of a SHA-256.
pub(crate) fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_and_preserves_foreign_directory() {
        let dir = tempfile::tempdir().unwrap();
        let precious = dir.path().join("thesis.tex");
        fs::write(&precious, "x").unwrap();
        let state = StateDir::new(dir.path()).unwrap();
        assert!(
            state
                .lock()
                .unwrap_err()
                .to_string()
                .contains("not a cluster's state directory")
        );
        state.clear().unwrap();
        assert!(precious.exists());
    }

    #[test]
    fn clear_keeps_marker_and_remove_deletes_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("default");
        let state = StateDir::new(&path).unwrap();
        let lock = state.lock().unwrap();
        state.mark().unwrap();
        let node = state.node("node-0");
        node.create().unwrap();
        assert_eq!(state.nodes(), [node]);
        fs::write(state.kubeconfig(), "{}").unwrap();
        state.clear().unwrap();
        assert!(state.is_ours() && !state.kubeconfig().exists() && state.nodes().is_empty());
        state.remove().unwrap();
        assert!(!path.exists());
        drop(lock);
    }

    #[test]
    fn cgroup_name_is_unique_per_directory() {
        let one = StateDir::new(Path::new("/a/default")).unwrap().cgroup();
        let two = StateDir::new(Path::new("/b/default")).unwrap().cgroup();
        assert_ne!(one, two);
        assert!(
            one.starts_with("drava-") && one.len() == "drava-".len() + 12,
            "{one}"
        );
    }
}
