//! Finds the NVIDIA driver's programs, firmware and sockets.

use super::{DriverRoot, Part, parts};

const PROGRAM_DIRECTORIES: [&str; 6] = [
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/opt/bin",
];
const FIRMWARE_DIRECTORIES: [&str; 2] = ["/lib/firmware/nvidia", "/usr/lib/firmware/nvidia"];

/// Sockets of NVIDIA's daemons that its libraries connect to.
const SOCKETS: [&str; 2] = [
    "/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
];

/// A program of the NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Part of the driver.
    pub part: Part,
    /// Path in the driver root.
    pub path: String,
    /// Path in containers, in a directory of the usual `PATH`.
    pub container_path: String,
}

pub(super) fn binaries(root: &DriverRoot) -> Vec<Binary> {
    let find = |(part, name): (Part, &str)| {
        let path = PROGRAM_DIRECTORIES
            .iter()
            .find_map(|directory| root.file(&format!("{directory}/{name}")))?;
        Some(Binary {
            part,
            path,
            container_path: format!("/usr/bin/{name}"),
        })
    };
    parts::binaries().filter_map(find).collect()
}

/// Returns the firmware of the GPU system processor, which NVIDIA's tools look up by version.
pub(super) fn firmware(root: &DriverRoot, version: Option<&str>) -> Vec<String> {
    let Some(version) = version else {
        return Vec::new();
    };
    let mut files: Vec<String> = FIRMWARE_DIRECTORIES
        .iter()
        .flat_map(|directory| {
            let directory = format!("{directory}/{version}");
            let names = root.names(&directory).into_iter();
            names
                .filter(|name| name.starts_with("gsp") && name.ends_with(".bin"))
                .map(move |name| format!("{directory}/{name}"))
        })
        .filter_map(|path| root.file(&path))
        .collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// Returns the existing sockets. NVIDIA's libraries have the paths built in, so containers use the same paths.
pub(super) fn sockets(root: &DriverRoot) -> Vec<String> {
    let is_socket = |path: &&&str| root.resolve(path).is_some_and(|(_, kind)| kind.is_socket());
    SOCKETS
        .iter()
        .filter(is_socket)
        .map(|path| (*path).to_owned())
        .collect()
}
