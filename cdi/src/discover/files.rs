//! Finds the NVIDIA driver's programs, firmware, sockets, and the files by which loaders of graphics and OpenCL find it.

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

/// Directories with configuration; the root itself is that of GKE's driver directory.
const CONFIG_DIRECTORIES: [&str; 4] = ["/etc", "/usr/local/share", "/usr/share", ""];

/// Files of the loaders of EGL, Vulkan and OpenCL, by the directory that the loaders read in containers.
const CONFIGS: [(Part, &str, &[&str]); 3] = [
    (
        Part::Graphics,
        "/usr/share",
        &[
            "glvnd/egl_vendor.d/10_nvidia.json",
            "egl/egl_external_platform.d/09_nvidia_wayland2.json",
            "egl/egl_external_platform.d/10_nvidia_wayland.json",
            "egl/egl_external_platform.d/15_nvidia_gbm.json",
            "egl/egl_external_platform.d/20_nvidia_xcb.json",
            "egl/egl_external_platform.d/20_nvidia_xlib.json",
            "nvidia/nvoptix.bin",
        ],
    ),
    (
        Part::Graphics,
        "/etc",
        &[
            "vulkan/icd.d/nvidia_icd.json",
            "vulkan/icd.d/nvidia_icd.x86_64.json",
            "vulkan/icd.d/nvidia_icd.aarch64.json",
            "vulkan/icd.d/nvidia_layers.json",
            "vulkan/implicit_layer.d/nvidia_layers.json",
        ],
    ),
    (Part::OpenCl, "/etc", &["OpenCL/vendors/nvidia.icd"]),
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

/// A data file of the NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Part of the driver.
    pub part: Part,
    /// Path in the driver root.
    pub path: String,
    /// Path in containers.
    pub container_path: String,
}

/// Returns the files by which loaders find the driver, at the paths where the loaders of containers look.
pub(super) fn configs(root: &DriverRoot) -> Vec<DataFile> {
    let find = |part: Part, inside: &str, name: &str| {
        let path = CONFIG_DIRECTORIES
            .iter()
            .find_map(|directory| root.file(&format!("{directory}/{name}")))?;
        Some(DataFile {
            part,
            path,
            container_path: format!("{inside}/{name}"),
        })
    };
    CONFIGS
        .iter()
        .flat_map(|(part, inside, names)| {
            names
                .iter()
                .filter_map(move |name| find(*part, inside, name))
        })
        .collect()
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

/// Returns the firmware of the GPU system processor, which NVIDIA's tools look up by version. In containers it has the
/// path of the tools, which may be a link in the driver root.
pub(super) fn firmware(root: &DriverRoot, version: Option<&str>) -> Vec<DataFile> {
    let Some(version) = version else {
        return Vec::new();
    };
    let [first, ..] = FIRMWARE_DIRECTORIES;
    let mut files: Vec<DataFile> = FIRMWARE_DIRECTORIES
        .iter()
        .flat_map(|directory| {
            let names = root.names(&format!("{directory}/{version}")).into_iter();
            names
                .filter(|name| name.starts_with("gsp") && name.ends_with(".bin"))
                .map(move |name| (format!("{directory}/{version}/{name}"), name))
        })
        .filter_map(|(path, name)| {
            Some(DataFile {
                part: Part::Utility,
                path: root.file(&path)?,
                container_path: format!("{first}/{version}/{name}"),
            })
        })
        .collect();
    files.sort_by(|a, b| a.container_path.cmp(&b.container_path));
    files.dedup_by(|a, b| a.container_path == b.container_path);
    files
}

/// Returns the existing sockets. NVIDIA's libraries have the paths built in, so containers use the same paths.
pub(super) fn sockets(root: &DriverRoot) -> Vec<String> {
    SOCKETS
        .iter()
        .filter(|path| is_socket(root, path))
        .map(|path| (*path).to_owned())
        .collect()
}

pub(super) fn is_socket(root: &DriverRoot, path: &str) -> bool {
    root.resolve(path).is_some_and(|(_, kind)| kind.is_socket())
}
