//! Programs of MPS in the driver root. Some packages of the NVIDIA driver leave them out.

use std::path::Path;

use drava_api::obstacle::SpatialObstacle;
use drava_cdi::DriverRoot;
use drava_cdi::elf;
use drava_cdi::ldcache::DEFAULT_DIRECTORIES;

/// The control daemon.
pub const CONTROL: &str = "nvidia-cuda-mps-control";

/// The server, which the daemon starts.
const SERVER: &str = "nvidia-cuda-mps-server";

const LIBC: &str = "libc.so.6";

/// Where the driver root may have them, as a variable `PATH`.
pub const PATH: &str = "/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/bin:/usr/local/nvidia/bin";

/// Checks that a driver root has both programs, and what they need to run: the daemon has the driver root as its root, and a driver root
/// that is only a directory of the driver has no system.
///
/// # Errors
/// The obstacle.
pub fn check(driver_root: &Path) -> Result<(), SpatialObstacle> {
    if ![CONTROL, SERVER]
        .iter()
        .all(|program| is_installed(driver_root, program))
    {
        return Err(SpatialObstacle::NoMps);
    }
    let Ok(root) = DriverRoot::open(driver_root, "/") else {
        return Ok(());
    };
    match [CONTROL, SERVER]
        .iter()
        .any(|program| lacks_loader(&root, program))
    {
        true => Err(SpatialObstacle::NoLoader),
        false => Ok(()),
    }
}

/// Links are not followed: they lead to files of the root.
fn is_installed(driver_root: &Path, program: &str) -> bool {
    let mut directories = PATH.split(':').map(|path| path.trim_start_matches('/'));
    directories.any(|path| {
        let file = driver_root.join(path).join(program);
        file.symlink_metadata().is_ok_and(|found| !found.is_dir())
    })
}

/// Of a program that this process cannot read, nothing is known.
fn lacks_loader(root: &DriverRoot, program: &str) -> bool {
    let mut directories = PATH.split(':');
    let file = directories.find_map(|path| root.read(&format!("{path}/{program}")).ok());
    let Some(loader) = file.and_then(|file| elf::interpreter(&file).ok().flatten()) else {
        return false;
    };
    let Some(found) = root.file(&loader) else {
        return true;
    };
    // Other loaders are the C library themselves.
    let is_glibc = Path::new(&loader)
        .file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-linux"));
    let beside = [&loader, &found].map(|path| Path::new(path).parent().unwrap_or(Path::new("/")));
    let mut libraries = beside.into_iter().chain(DEFAULT_DIRECTORIES.map(Path::new));
    is_glibc
        && !libraries.any(|directory| {
            let library = directory.join(LIBC);
            library
                .to_str()
                .is_some_and(|path| root.file(path).is_some())
        })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn needs_both_programs_in_a_directory_of_the_path() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("opt/bin");
        fs::create_dir_all(&bin).unwrap();
        let lacks = Err(SpatialObstacle::NoMps);
        assert_eq!(check(root.path()), lacks);
        // A link of the driver root, whose target this process does not have.
        std::os::unix::fs::symlink("/opt/nvidia/control", bin.join(CONTROL)).unwrap();
        assert_eq!(check(root.path()), lacks);
        fs::create_dir(bin.join(SERVER)).unwrap();
        assert_eq!(check(root.path()), lacks);
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        fs::write(root.path().join("usr/bin").join(SERVER), "").unwrap();
        assert_eq!(check(root.path()), Ok(()));
    }

    /// A program that names this loader.
    fn program(loader: &str) -> Vec<u8> {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        // Program headers: offset, size and number.
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        // PT_INTERP: offset and size.
        file[64] = 3;
        file[72] = 120;
        file[96] = u8::try_from(loader.len() + 1).unwrap();
        file.extend(loader.as_bytes());
        file.push(0);
        file
    }

    #[test]
    fn needs_loader_and_libc_of_the_programs_below_the_root() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let put = |path: &str, content: &[u8]| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        // As GKE has it: a directory of the driver.
        put(
            &format!("bin/{CONTROL}"),
            &program("/lib64/ld-linux-x86-64.so.2"),
        );
        put(&format!("bin/{SERVER}"), b"#!/bin/sh");
        let lacks = Err(SpatialObstacle::NoLoader);
        assert_eq!(check(root), lacks);
        // A link of the system is one of the root.
        put("usr/lib/glibc/ld-linux-x86-64.so.2", b"");
        std::os::unix::fs::symlink("/usr/lib/glibc", root.join("lib64")).unwrap();
        assert_eq!(check(root), lacks, "without libc");
        put("usr/lib/glibc/libc.so.6", b"");
        assert_eq!(check(root), Ok(()));
        // The other program is checked, too.
        put(
            &format!("bin/{SERVER}"),
            &program("/lib/ld-musl-x86_64.so.1"),
        );
        assert_eq!(check(root), lacks);
        put("lib/ld-musl-x86_64.so.1", b"");
        assert_eq!(check(root), Ok(()));
        // The system of a node has what its own programs need.
        let own = Path::new("/proc/self/exe").canonicalize().unwrap();
        let own = fs::File::open(own).unwrap();
        let loader = elf::interpreter(&own).unwrap().unwrap();
        let system = DriverRoot::open("/", "/").unwrap();
        assert!(system.file(&loader).is_some(), "{loader}");
        let mut directories = DEFAULT_DIRECTORIES.iter();
        assert!(directories.any(|path| system.file(&format!("{path}/{LIBC}")).is_some()));
    }
}
