//! Programs of a driver root: those of the multi-process service, and the fabric manager.
//!
//! They run after a `chroot` to the root, as a root of a host has a C library: the root gets the libraries that this process has
//! loaded, and the dynamic loader. They are not in the directory of the driver's libraries, which containers get.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::DriverRoot;

/// Name of the control daemon of the multi-process service.
pub const MPS_CONTROL: &str = "nvidia-cuda-mps-control";
/// Name of the server of the multi-process service.
pub const MPS_SERVER: &str = "nvidia-cuda-mps-server";
/// Name of the fabric manager.
pub const FABRIC_MANAGER: &str = "nv-fabricmanager";

/// The dynamic loader that the programs name.
const LOADER: &str = if cfg!(target_arch = "aarch64") {
    "lib/ld-linux-aarch64.so.1"
} else {
    "lib64/ld-linux-x86-64.so.2"
};

impl DriverRoot {
    /// Installs this program under the names of the service, with what it needs to run.
    pub(super) fn install_mps(&self) -> Result<(), (PathBuf, io::Error)> {
        self.install_programs(&[MPS_CONTROL, MPS_SERVER])?;
        // Clients share memory with the servers there; a driver root has it as a mount point.
        let shared = self.path().join("dev/shm");
        fs::create_dir_all(&shared).map_err(|error| (shared, error))
    }

    /// Installs this program under the name of the fabric manager, with what it needs to run.
    pub(super) fn install_fabric_manager(&self) -> Result<(), (PathBuf, io::Error)> {
        self.install_programs(&[FABRIC_MANAGER])
    }

    /// Installs this program under each name, with what it needs to run.
    fn install_programs(&self, names: &[&str]) -> Result<(), (PathBuf, io::Error)> {
        let own = Path::new("/proc/self/exe");
        let own = fs::read_link(own).map_err(|error| (own.to_owned(), error))?;
        for name in names {
            place(&own, &self.path().join("usr/bin").join(name))?;
        }
        let maps = Path::new("/proc/self/maps");
        let maps = fs::read_to_string(maps).map_err(|error| (maps.to_owned(), error))?;
        for library in libraries(&maps) {
            let library = Path::new(library);
            let is_loader = library.file_name() == Path::new(LOADER).file_name();
            let target = match is_loader {
                true => PathBuf::from(LOADER),
                false => below_root(library),
            };
            place(library, &self.path().join(target))?;
        }
        Ok(())
    }
}

/// Shared libraries in the text of `/proc/self/maps`.
fn libraries(maps: &str) -> BTreeSet<&str> {
    let paths = maps.lines().filter_map(|line| line.get(line.find('/')?..));
    paths
        .filter(|path| path.contains(".so") && path.contains("/lib"))
        .collect()
}

/// Returns the path of a library below the root: outside of `usr`, in a directory that the loader also searches.
fn below_root(library: &Path) -> PathBuf {
    let path = library.strip_prefix("/usr").unwrap_or(library);
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

/// Links or copies a file, under a temporary name first: a process may run it.
fn place(source: &Path, target: &Path) -> Result<(), (PathBuf, io::Error)> {
    let failed = |error| (target.to_owned(), error);
    if let Some(directory) = target.parent() {
        fs::create_dir_all(directory).map_err(failed)?;
    }
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let temporary = target.with_file_name(format!(".{name}.new"));
    // A leftover of a daemon that was killed.
    let _ = fs::remove_file(&temporary);
    if fs::hard_link(source, &temporary).is_err() {
        fs::copy(source, &temporary).map_err(|error| (source.to_owned(), error))?;
    }
    fs::rename(&temporary, target).map_err(failed)?;
    // `rename` does nothing if both names are of one file.
    let _ = fs::remove_file(&temporary);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_libraries_of_a_process() {
        let maps = "\
            55d0-55d1 r-xp 00000000 fe:00 12 /opt/lib/simulator-machine\n\
            7f00-7f01 r--p 00000000 fe:00 13 /usr/lib/x86_64-linux-gnu/libc.so.6\n\
            7f01-7f02 r-xp 00001000 fe:00 13 /usr/lib/x86_64-linux-gnu/libc.so.6\n\
            7f02-7f03 rw-p 00000000 00:00 0 \n\
            7f03-7f04 r-xp 00000000 fe:00 14 /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n\
            7ffd-7ffe rw-p 00000000 00:00 0 [stack]\n";
        let directory = "/usr/lib/x86_64-linux-gnu";
        let expected =
            ["ld-linux-x86-64.so.2", "libc.so.6"].map(|name| format!("{directory}/{name}"));
        let found: Vec<&str> = libraries(maps).into_iter().collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn keeps_libraries_out_of_the_directory_of_the_driver() {
        let of = |path: &str| below_root(Path::new(path));
        assert_eq!(of("/usr/lib/x/libc.so.6"), Path::new("lib/x/libc.so.6"));
        assert_eq!(of("/lib64/libc.so.6"), Path::new("lib64/libc.so.6"));
    }
}
