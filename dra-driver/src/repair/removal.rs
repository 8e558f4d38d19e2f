//! Removal of the driver's files from a node, after `helm uninstall`.
//!
//! The hook of the chart runs it in a pod that mounts the directories of the node; see `drava-dra-driver remove-files`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drava_api::names;

use crate::node::layout::{BASE_PREFIX, Layout, SPEC_PREFIX};
use crate::node::options::Paths;
use crate::prepare::record::RecordStore;

/// Why the files cannot be removed.
#[derive(Debug, thiserror::Error)]
pub enum RemovalError {
    /// Claims have records on the node.
    #[error(
        "{0} claims have state on the node; delete their pods while the node driver runs, then remove drava again"
    )]
    InUse(usize),
    /// A directory cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A file cannot be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// The file or directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Removes CDI specs, sockets, state and run directory. Returns what was removed.
///
/// # Errors
/// When a claim has a record, or a file cannot be removed. What was removed before stays removed.
pub fn remove(paths: &Paths) -> Result<Vec<PathBuf>, RemovalError> {
    let layout = Layout::new(paths);
    if layout.claims().exists() {
        let listed = RecordStore::new(layout.claims()).list();
        let recorded = listed.map_or(0, |listing| listing.recorded.len());
        if recorded > 0 {
            return Err(RemovalError::InUse(recorded));
        }
    }
    let mut removed = Vec::new();
    let plugins = paths.kubelet_dir.join("plugins").join(names::DRIVER);
    let registry = paths.kubelet_dir.join("plugins_registry");
    let of_directory = [
        (paths.cdi_dir.as_path(), SPEC_PREFIX),
        (paths.cdi_dir.as_path(), BASE_PREFIX),
        (registry.as_path(), names::DRIVER),
    ];
    for (directory, prefix) in of_directory {
        for path in entries(directory, prefix)? {
            remove_path(&path, &mut removed)?;
        }
    }
    for directory in [&plugins, &paths.state_dir, &paths.run_dir] {
        remove_path(directory, &mut removed)?;
    }
    Ok(removed)
}

/// Returns the entries of a directory whose names begin with `prefix`. A missing directory has none.
fn entries(directory: &Path, prefix: &str) -> Result<Vec<PathBuf>, RemovalError> {
    let error = |source| RemovalError::Read {
        path: directory.to_owned(),
        source,
    };
    let read = match fs::read_dir(directory) {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(error)?,
    };
    let mut found = Vec::new();
    for entry in read {
        let entry = entry.map_err(error)?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Removes a file, or a directory with its content, if it exists. Links are not followed.
fn remove_path(path: &Path, removed: &mut Vec<PathBuf>) -> Result<(), RemovalError> {
    let outcome = match fs::symlink_metadata(path) {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    outcome.map_err(|source| RemovalError::Remove {
        path: path.to_owned(),
        source,
    })?;
    removed.push(path.to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> (tempfile::TempDir, Paths) {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in [
            "kubelet/plugins/gpu.drava.dev",
            "kubelet/plugins/other.example.com",
            "kubelet/plugins_registry",
            "cdi",
            "state/claims",
            "run/usage",
        ] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        for file in [
            "kubelet/plugins/gpu.drava.dev/dra.sock",
            "kubelet/plugins_registry/gpu.drava.dev-reg.sock@localhost",
            "kubelet/plugins_registry/other.example.com-reg.sock",
            "cdi/gpu.drava.dev-claim-1.json",
            "cdi/gpu.drava.dev-base-share.json",
            "cdi/nvidia.yaml",
            "state/libvgpu.so",
        ] {
            fs::write(at(file), "").unwrap();
        }
        let paths = Paths {
            kubelet_dir: at("kubelet"),
            cdi_dir: at("cdi"),
            state_dir: at("state"),
            run_dir: at("run"),
            driver_root: at("root"),
            driver_root_mount: at("root"),
            dev_root: None,
            dev_root_mount: at("root"),
            dev_char_dir: None,
            artifacts_dir: at("artifacts"),
        };
        (root, paths)
    }

    #[test]
    fn removes_own_files_and_no_others() {
        let (root, paths) = node();
        assert_eq!(remove(&paths).unwrap().len(), 6);
        let left = |path: &str| {
            let mut names: Vec<String> = fs::read_dir(root.path().join(path))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort_unstable();
            names
        };
        assert_eq!(left("."), ["cdi", "kubelet"]);
        assert_eq!(left("cdi"), ["nvidia.yaml"]);
        assert_eq!(left("kubelet/plugins"), ["other.example.com"]);
        assert_eq!(
            left("kubelet/plugins_registry"),
            ["other.example.com-reg.sock"]
        );
        assert_eq!(remove(&paths).unwrap(), Vec::<PathBuf>::new(), "again");
    }

    #[test]
    fn keeps_files_while_claims_have_records() {
        let (_root, paths) = node();
        let record = paths
            .state_dir
            .join("claims/11111111-1111-4111-8111-111111111111.json");
        fs::write(&record, "").unwrap();
        assert!(matches!(remove(&paths), Err(RemovalError::InUse(1))));
        assert!(record.exists());
    }
}
