//! Assigns the NVIDIA driver's files to parts. The closed list decides which driver functions a tenant can use.
//!
//! Sources: the NVIDIA driver's README, chapter "Installed Components", and `nvc_info.c` of libnvidia-container.

/// A part of the NVIDIA driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// CUDA.
    Compute,
    /// Management: NVML, `nvidia-smi`.
    Utility,
    /// OpenCL: allocates device memory without the CUDA driver API.
    OpenCl,
    /// Video encoding and decoding, optical flow.
    Video,
    /// OpenGL, Vulkan, ray tracing.
    Graphics,
    /// Display output.
    Display,
    /// Transfers between GPU memory and other devices or nodes: GDRCopy, GPUDirect Storage, IMEX. They map device memory
    /// without the CUDA driver API.
    Transfer,
    /// MPS, whose server shares one context between processes: its memory belongs to no single tenant.
    Mps,
}

/// Parts for devices with memory and time limits: none allocates device memory outside the CUDA driver API.
pub const METERED: &[Part] = &[Part::Compute, Part::Utility];

/// Parts for devices that are allocated exclusively.
pub const UNMETERED: &[Part] = &[
    Part::Compute,
    Part::Utility,
    Part::OpenCl,
    Part::Video,
    Part::Graphics,
    Part::Display,
    Part::Transfer,
    Part::Mps,
];

/// Libraries by the file name before `.so`.
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

/// Returns the part of the library `file_name`; `None` for a library that no container gets.
pub(super) fn of_library(file_name: &str) -> Option<Part> {
    let (stem, _) = file_name.split_once(".so")?;
    LIBRARIES
        .iter()
        .find(|(_, stems)| stems.contains(&stem))
        .map(|(part, _)| *part)
}

/// Returns the programs that containers get.
pub(super) fn binaries() -> impl Iterator<Item = (Part, &'static str)> {
    BINARIES
        .iter()
        .flat_map(|(part, names)| names.iter().map(move |name| (*part, *name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes_allocators_outside_cuda_from_metered_devices() {
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
    fn returns_no_part_for_unlisted_names() {
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
