//! Installation of the files that containers use: `libvgpu.so` and `drava-cdi-hook` of this image, and generated stubs of
//! NVIDIA's libraries for the delivery `shim`.
//!
//! The path of an installed file contains a hash of its content, and the file never changes: overwriting a library in
//! place breaks the processes that map it. Old versions stay while a prepared claim refers to them, so an upgrade of the
//! driver does not affect running pods.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drava_cdi::elf::{self, Machine};
use drava_vgpu_abi::paths;
use rustix::fs::{StatVfsMountFlags, statvfs};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::node::files;

/// Kind of an installed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artifact {
    /// The interposer that containers load.
    Library,
    /// The CDI hook that the container runtime runs on the node.
    Hook,
    /// Stub that replaces libcuda in containers.
    CudaStub,
    /// Stub that replaces libnvidia-ml in containers.
    NvmlStub,
}

impl Artifact {
    /// Returns the file name, which is the same in the image and on the node.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Library => "libvgpu.so",
            Self::Hook => "drava-cdi-hook",
            Self::CudaStub => "libcuda.so.1",
            Self::NvmlStub => "libnvidia-ml.so.1",
        }
    }

    /// Returns the name of the subdirectory of the state directory.
    const fn directory(self) -> &'static str {
        match self {
            Self::Library | Self::CudaStub | Self::NvmlStub => "lib",
            Self::Hook => "bin",
        }
    }

    /// Returns the directory of all versions.
    #[must_use]
    pub fn all(self, state_dir: &Path) -> PathBuf {
        state_dir.join(self.directory())
    }

    /// Returns the path of the version with this hash.
    #[must_use]
    pub fn path(self, state_dir: &Path, hash: &str) -> PathBuf {
        self.all(state_dir).join(hash).join(self.file_name())
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

/// Content hashes of the installed artifacts of this version.
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
    /// The file of the image cannot be read.
    #[error("cannot read {}; --artifacts-dir must contain libvgpu.so and drava-cdi-hook", path.display())]
    Read {
        /// The file in the image.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written to the node.
    #[error("cannot install {}; --state-dir must be writable", path.display())]
    Write {
        /// The file on the node.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// The node does not run programs from the state directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} is mounted noexec on the node: the container runtime cannot run the CDI hook and containers cannot load libvgpu.so; \
     set driver.stateDir of the drava chart to a directory whose file system allows programs, such as \
     /home/kubernetes/bin/drava on GKE, or remount the file system with exec",
    state_dir.display()
)]
pub struct NotExecutable {
    state_dir: PathBuf,
}

/// Checks that the node runs programs from `state_dir`, where the container runtime finds the CDI hook. `host_root` is the root
/// of the node: the flags of a mount in the container of the driver can be others. Without access to it, the flags in the
/// container count.
///
/// # Errors
/// When the file system of the directory is mounted `noexec`.
pub fn check_executable(state_dir: &Path, host_root: &Path) -> Result<(), NotExecutable> {
    let on_host = host_root.join(state_dir.strip_prefix("/").unwrap_or(state_dir));
    let mount = statvfs(&on_host).or_else(|_| statvfs(state_dir));
    match mount {
        Ok(mount) if mount.f_flag.contains(StatVfsMountFlags::NOEXEC) => Err(NotExecutable {
            state_dir: state_dir.to_owned(),
        }),
        // Without an answer the directory is unusable anyway, which the installation reports.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Installs the files of `artifacts_dir` and the stubs below `state_dir`. Installed files are only read and compared.
///
/// # Errors
/// When a file of the image cannot be read or a file cannot be written.
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

/// Returns the stub of a library. The stub needs `libvgpu.so` first and the original library second, so symbols of
/// `libvgpu.so` take precedence.
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

/// Returns the first 16 bytes of SHA-256 in hex.
fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Removes installed versions whose hash is not in `in_use`. Returns the removed directories.
///
/// # Errors
/// When a directory cannot be read or removed.
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
    fn keeps_old_version_until_unused() {
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
    fn stub_needs_libvgpu_before_the_original_library() {
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
            let original = format!("/usr/local/lib/drava/driver/{}", artifact.file_name());
            assert_eq!(stub.needed, [paths::LIBRARY, &original]);
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        }
    }

    #[test]
    fn rewrites_only_damaged_files() {
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
    fn reports_missing_library_of_image() {
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
