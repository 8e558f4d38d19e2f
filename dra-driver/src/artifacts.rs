//! The files that containers use: `libvgpu.so`, which they load, and `drava-cdi-hook`, which the runtime runs for them,
//! both of this image; and stubs in the place of the driver's libraries (delivery mode `shim`), which are written here.
//!
//! They are installed on the node under a path that contains a hash of their content, once and never changed: a
//! library that is overwritten in place breaks the programs that have it mapped. Old ones stay as long as a prepared
//! claim refers to them, so an upgrade of the driver changes nothing for running pods.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drava_cdi::elf::{self, Machine};
use drava_vgpu_abi::paths;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::files;

/// An artifact that is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artifact {
    /// The interposer that containers load.
    Library,
    /// The CDI hook that the container runtime runs on the node.
    Hook,
    /// What containers have in the place of libcuda.
    CudaStub,
    /// What containers have in the place of libnvidia-ml.
    NvmlStub,
}

impl Artifact {
    /// File name, in the image and on the node.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Library => "libvgpu.so",
            Self::Hook => "drava-cdi-hook",
            Self::CudaStub => "libcuda.so.1",
            Self::NvmlStub => "libnvidia-ml.so.1",
        }
    }

    /// Directory below the state directory.
    const fn directory(self) -> &'static str {
        match self {
            Self::Library | Self::CudaStub | Self::NvmlStub => "lib",
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

/// Content hashes of the stubs of one version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stubs {
    /// Hash of the stub of libcuda.
    pub cuda: String,
    /// Hash of the stub of libnvidia-ml.
    pub nvml: String,
}

/// Content hashes of the artifacts of this version, which are installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Hash of `libvgpu.so`.
    pub library: String,
    /// Hash of `drava-cdi-hook`.
    pub hook: String,
    /// Hashes of the stubs.
    pub stubs: Stubs,
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

/// Installs the artifacts, those of the image from `artifacts_dir`, below `state_dir`. Costs some reads when they are
/// there already.
///
/// # Errors
/// When one is missing in the image or cannot be written.
pub fn install(artifacts_dir: &Path, state_dir: &Path) -> Result<Installed, InstallError> {
    let of_image = |artifact: Artifact| {
        let path = artifacts_dir.join(artifact.file_name());
        match fs::read(&path) {
            Ok(bytes) => install_one(artifact, &bytes, state_dir),
            Err(source) => Err(InstallError::Read { path, source }),
        }
    };
    let of_stub = |artifact, of| install_one(artifact, &stub(of), state_dir);
    Ok(Installed {
        library: of_image(Artifact::Library)?,
        hook: of_image(Artifact::Hook)?,
        stubs: Stubs {
            cuda: of_stub(Artifact::CudaStub, paths::CUDA_STUB)?,
            nvml: of_stub(Artifact::NvmlStub, paths::NVML_STUB)?,
        },
    })
}

/// The file in the place of a library of the driver's: programs find what `libvgpu.so` has there, and the rest in the
/// driver's own.
fn stub(of: paths::Stub) -> Vec<u8> {
    let link_names: Vec<&str> = of.link_names().collect();
    let (soname, behind) = (
        of.soname.to_string_lossy(),
        of.original_path.to_string_lossy(),
    );
    let stub = elf::Stub {
        machine: Machine::HOST,
        soname: &soname,
        needed: &[paths::LIBRARY, &behind],
        link_names: &link_names,
    };
    stub.to_bytes()
}

fn install_one(artifact: Artifact, bytes: &[u8], state_dir: &Path) -> Result<String, InstallError> {
    let hash = hash(bytes);
    let path = artifact.path(state_dir, &hash);
    if fs::read(&path).is_ok_and(|present| present == bytes) {
        return Ok(hash);
    }
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(state_dir))?;
        files::write_durably(&path, bytes, 0o755)
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

        let stubs = [new.stubs.cuda.clone(), new.stubs.nvml.clone()];
        let mut in_use = BTreeSet::from([new.library.clone(), new.hook.clone()]);
        in_use.extend(stubs);
        assert_eq!(
            remove_unused(node.path(), &in_use).unwrap(),
            [path(&old).parent().unwrap()]
        );
        assert!(path(&new).exists());
        for (artifact, hash) in [
            (Artifact::CudaStub, &new.stubs.cuda),
            (Artifact::NvmlStub, &new.stubs.nvml),
        ] {
            assert!(artifact.path(node.path(), hash).exists());
        }
    }

    #[test]
    fn stubs_are_libraries_that_lead_to_libvgpu_and_then_to_the_drivers_own() {
        let node = tempfile::tempdir().unwrap();
        let installed = install(image("a").path(), node.path()).unwrap();
        for (artifact, hash) in [
            (Artifact::CudaStub, installed.stubs.cuda),
            (Artifact::NvmlStub, installed.stubs.nvml),
        ] {
            let file = fs::File::open(artifact.path(node.path(), &hash)).unwrap();
            let stub = elf::inspect(&file).unwrap().unwrap();
            assert_eq!(stub.machine, Machine::HOST);
            assert_eq!(stub.soname.as_deref(), Some(artifact.file_name()));
            let behind = format!("/usr/local/lib/drava/driver/{}", artifact.file_name());
            assert_eq!(stub.needed, [paths::LIBRARY, &behind]);
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        }
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
