//! Programs of MPS in the driver root. Some packages of the NVIDIA driver leave them out.

use std::path::Path;

/// The control daemon.
pub const CONTROL: &str = "nvidia-cuda-mps-control";

/// The server, which the daemon starts.
const SERVER: &str = "nvidia-cuda-mps-server";

/// Where the driver root may have them, as a variable `PATH`.
pub const PATH: &str = "/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/bin:/usr/local/nvidia/bin";

/// Returns whether a driver root has both programs. Links are not followed: they lead to files of the root.
#[must_use]
pub fn are_installed(driver_root: &Path) -> bool {
    let has = |program: &str| {
        let mut directories = PATH.split(':').map(|path| path.trim_start_matches('/'));
        directories.any(|path| {
            let file = driver_root.join(path).join(program);
            file.symlink_metadata().is_ok_and(|found| !found.is_dir())
        })
    };
    has(CONTROL) && has(SERVER)
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
        assert!(!are_installed(root.path()));
        // A link of the driver root, whose target this process does not have.
        std::os::unix::fs::symlink("/opt/nvidia/control", bin.join(CONTROL)).unwrap();
        assert!(!are_installed(root.path()));
        fs::create_dir(bin.join(SERVER)).unwrap();
        assert!(!are_installed(root.path()));
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        fs::write(root.path().join("usr/bin").join(SERVER), "").unwrap();
        assert!(are_installed(root.path()));
    }
}
