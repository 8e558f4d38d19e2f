//! The files of this image that containers use: `libvgpu.so`, which they load, and `drava-cdi-hook`, which the runtime
//! runs for them.
//!
//! They are installed on the node under a path that contains a hash of their content, once and never changed: a
//! library that is overwritten in place breaks the programs that have it mapped. Old ones stay as long as a prepared
//! claim refers to them, so an upgrade of the driver changes nothing for running pods.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::files;

/// An artifact that is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artifact {
    /// The interposer that containers load.
    Library,
    /// The CDI hook that the container runtime runs on the node.
    Hook,
}

impl Artifact {
    /// File name, in the image and on the node.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Library => "libvgpu.so",
            Self::Hook => "drava-cdi-hook",
        }
    }

    /// Directory below the state directory.
    const fn directory(self) -> &'static str {
        match self {
            Self::Library => "lib",
            Self::Hook => "bin",
        }
    }

    /// Path of the version with this hash.
    #[must_use]
    pub fn path(self, state_dir: &Path, hash: &str) -> PathBuf {
        state_dir
            .join(self.directory())
            .join(hash)
            .join(self.file_name())
    }
}

/// Content hashes of the artifacts of this image, which are installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Hash of `libvgpu.so`.
    pub library: String,
    /// Hash of `drava-cdi-hook`.
    pub hook: String,
}

/// An artifact could not be installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The image does not have it.
    #[error("read {}; --artifacts-dir must be a directory with libvgpu.so and drava-cdi-hook", path.display())]
    Read {
        /// The file in the image.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The node does not take it.
    #[error("install {}; --state-dir must be writable and not mounted noexec", path.display())]
    Write {
        /// The file on the node.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Installs the artifacts of `artifacts_dir` below `state_dir`. Costs two reads when they are there already.
///
/// # Errors
/// When one is missing in the image or cannot be written.
pub fn install(artifacts_dir: &Path, state_dir: &Path) -> Result<Installed, InstallError> {
    Ok(Installed {
        library: install_one(Artifact::Library, artifacts_dir, state_dir)?,
        hook: install_one(Artifact::Hook, artifacts_dir, state_dir)?,
    })
}

fn install_one(
    artifact: Artifact,
    artifacts_dir: &Path,
    state_dir: &Path,
) -> Result<String, InstallError> {
    let source = artifacts_dir.join(artifact.file_name());
    let bytes = fs::read(&source).map_err(|error| InstallError::Read {
        path: source,
        source: error,
    })?;
    let hash = hash(&bytes);
    let path = artifact.path(state_dir, &hash);
    if fs::read(&path).is_ok_and(|present| present == bytes) {
        return Ok(hash);
    }
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(state_dir))?;
        files::write_durably(&path, &bytes, 0o755)
    };
    write().map_err(|source| InstallError::Write {
        path: path.clone(),
        source,
    })?;
    Ok(hash)
}

/// First 16 bytes of SHA-256, in hex.
fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Removes installed versions whose hash is not in `in_use`. Returns what it removed.
///
/// # Errors
/// The first directory that could not be read or removed.
pub fn remove_unused(state_dir: &Path, in_use: &BTreeSet<String>) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for artifact in [Artifact::Library, Artifact::Hook] {
        let entries = match fs::read_dir(state_dir.join(artifact.directory())) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            if !entry
                .file_name()
                .to_str()
                .is_some_and(|hash| in_use.contains(hash))
            {
                fs::remove_dir_all(entry.path())?;
                removed.push(entry.path());
            }
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn image(library: &str) -> tempfile::TempDir {
        let image = tempfile::tempdir().unwrap();
        fs::write(image.path().join("libvgpu.so"), library).unwrap();
        fs::write(image.path().join("drava-cdi-hook"), "hook").unwrap();
        image
    }

    #[test]
    fn a_new_version_leaves_the_old_one_until_it_is_unused() {
        let node = tempfile::tempdir().unwrap();
        let old = install(image("old").path(), node.path()).unwrap();
        let new = install(image("new").path(), node.path()).unwrap();
        let path = |installed: &Installed| Artifact::Library.path(node.path(), &installed.library);
        assert_eq!(fs::read(path(&old)).unwrap(), b"old");
        assert_eq!(fs::read(path(&new)).unwrap(), b"new");
        assert_eq!(
            fs::metadata(path(&new)).unwrap().permissions().mode() & 0o777,
            0o755
        );
        assert_eq!(old.hook, new.hook);

        let in_use = BTreeSet::from([new.library.clone(), new.hook.clone()]);
        assert_eq!(
            remove_unused(node.path(), &in_use).unwrap(),
            [path(&old).parent().unwrap()]
        );
        assert!(path(&new).exists());
    }

    #[test]
    fn what_is_installed_is_not_written_again_but_a_damaged_one_is_replaced() {
        let (node, image) = (tempfile::tempdir().unwrap(), image("a"));
        let installed = install(image.path(), node.path()).unwrap();
        let path = Artifact::Library.path(node.path(), &installed.library);
        let inode = fs::metadata(&path).unwrap().ino();
        install(image.path(), node.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);

        fs::write(&path, "damaged").unwrap();
        install(image.path(), node.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"a");
    }

    #[test]
    fn an_image_without_the_library_is_named() {
        let image = tempfile::tempdir().unwrap();
        let error = install(image.path(), image.path()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&*image.path().join("libvgpu.so").to_string_lossy()),
            "{error}"
        );
        assert!(error.to_string().contains("--artifacts-dir"), "{error}");
    }
}
