//! What belongs to which part of the driver. This list decides what a tenant can reach.
//!
//! Sources: the driver's README, chapter "Installed Components", and `nvc_info.c` of libnvidia-container.

/// A part of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// CUDA.
    Compute,
    /// Management: NVML, `nvidia-smi`.
    Utility,
    /// OpenCL: allocates device memory without the CUDA driver API.
    OpenCl,
    /// Encoding and decoding video, optical flow.
    Video,
    /// OpenGL, Vulkan, ray tracing.
    Graphics,
    /// Screens.
    Display,
    /// The server that lets processes share one context: memory it holds is no single tenant's.
    Mps,
}

/// What a device gets whose memory and time are metered: nothing that allocates outside the CUDA driver API.
pub const METERED: &[Part] = &[Part::Compute, Part::Utility];

/// What a device gets that is a tenant's alone.
pub const UNMETERED: &[Part] = &[
    Part::Compute,
    Part::Utility,
    Part::OpenCl,
    Part::Video,
    Part::Graphics,
    Part::Display,
    Part::Mps,
];

/// Libraries by the name before `.so`.
const LIBRARIES: [(Part, &[&str]); 6] = [
    (
        Part::Compute,
        &[
            "libcuda",
            "libcudadebugger",
            "libnvidia-fatbinaryloader",
            "libnvidia-gpucomp",
            "libnvidia-nvvm",
            "libnvidia-nvvm70",
            "libnvidia-pkcs11",
            "libnvidia-pkcs11-openssl3",
            "libnvidia-ptxjitcompiler",
            "libnvidia-tileiras",
        ],
    ),
    (
        Part::Utility,
        &[
            "libnvidia-cfg",
            "libnvidia-ml",
            "libnvidia-nscq",
            "libnvidia-sandboxutils",
        ],
    ),
    (Part::OpenCl, &["libnvidia-compiler", "libnvidia-opencl"]),
    (
        Part::Video,
        &[
            "libnvcuvid",
            "libnvidia-encode",
            "libnvidia-opticalflow",
            "libvdpau_nvidia",
        ],
    ),
    (
        Part::Graphics,
        &[
            "libEGL_nvidia",
            "libGLESv1_CM_nvidia",
            "libGLESv2_nvidia",
            "libGLX_nvidia",
            "libnvidia-allocator",
            "libnvidia-api",
            "libnvidia-cbl",
            "libnvidia-egl-gbm",
            "libnvidia-egl-wayland",
            "libnvidia-egl-wayland2",
            "libnvidia-egl-xcb",
            "libnvidia-egl-xlib",
            "libnvidia-eglcore",
            "libnvidia-glcore",
            "libnvidia-glsi",
            "libnvidia-glvkspirv",
            "libnvidia-ngx",
            "libnvidia-rtcore",
            "libnvidia-tls",
            "libnvidia-vksc-core",
            "libnvoptix",
        ],
    ),
    (
        Part::Display,
        &[
            "libnvidia-fbc",
            "libnvidia-ifr",
            "libnvidia-present",
            "libnvidia-wayland-client",
        ],
    ),
];

/// Programs by name.
const BINARIES: [(Part, &[&str]); 2] = [
    (Part::Utility, &["nvidia-debugdump", "nvidia-smi"]),
    (
        Part::Mps,
        &["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"],
    ),
];

/// The part of a library with this file name; `None` for one that is mounted into no container.
pub(super) fn of_library(file_name: &str) -> Option<Part> {
    let (stem, _) = file_name.split_once(".so")?;
    LIBRARIES
        .iter()
        .find(|(_, stems)| stems.contains(&stem))
        .map(|(part, _)| *part)
}

/// The programs that are mounted into containers.
pub(super) fn binaries() -> impl Iterator<Item = (Part, &'static str)> {
    BINARIES
        .iter()
        .flat_map(|(part, names)| names.iter().map(move |name| (*part, *name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metered_devices_get_nothing_that_allocates_outside_cuda() {
        for file in [
            "libnvidia-opencl.so.1",
            "libnvidia-encode.so.1",
            "libnvcuvid.so.580.65.06",
            "libGLX_nvidia.so.0",
            "libEGL_nvidia.so.0",
            "libnvoptix.so.1",
            "libnvidia-allocator.so.1",
        ] {
            let part = of_library(file).unwrap();
            assert!(!METERED.contains(&part), "{file} is {part:?}");
            assert!(UNMETERED.contains(&part), "{file} is {part:?}");
        }
        for file in [
            "libcuda.so.1",
            "libcuda.so.580.65.06",
            "libnvidia-ml.so.1",
            "libnvidia-ptxjitcompiler.so.1",
        ] {
            assert!(METERED.contains(&of_library(file).unwrap()), "{file}");
        }
    }

    #[test]
    fn only_listed_names_count() {
        for file in [
            "libcudart.so.12",
            "libnvidia-container.so.1",
            "libcuda-evil.so.1",
            "libcuda",
            "libc.so.6",
            "",
        ] {
            assert_eq!(of_library(file), None, "{file}");
        }
    }
}
