//! File names inside a container. The CDI specification mounts the files, `libvgpu.so` opens them.
//!
//! ```text
//! /run/drava/<share>/limits/page      read-only directory mount, written by the node driver
//! /run/drava/<share>/usage/region     writable directory mount, shared by all containers of the share
//! /usr/local/lib/drava/libvgpu.so     the interposer
//! /usr/local/lib/drava/driver/        NVIDIA libraries that are replaced by a stub ([`Stub`])
//! ```
//!
//! `<share>` is the allocation result's share ID (a lowercase UUID). Directories are mounted instead of files, so
//! that running containers see a replaced page.

use core::ffi::CStr;

/// The interposer inside the container, the same path for every claim.
pub const LIBRARY: &str = "/usr/local/lib/drava/libvgpu.so";

/// An NVIDIA library that a stub may replace in containers (delivery mode `shim`). The stub needs [`LIBRARY`]
/// first, then the original library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stub {
    /// Name that programs load.
    pub soname: &'static CStr,
    /// Path of the original library behind the stub, whatever its version.
    pub original_path: &'static CStr,
    /// One function per line, for `ld`: programs may be linked with the stub. Comments begin with `#`, a tab ends
    /// the name.
    link_names: &'static str,
}

impl Stub {
    /// Returns the functions of the library's public header, without the variants that end in `_ptsz` or `_ptds`.
    pub fn link_names(&self) -> impl Iterator<Item = &'static str> {
        self.link_names
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split('\t').next())
    }
}

/// libcuda.
pub const CUDA_STUB: Stub = Stub {
    soname: c"libcuda.so.1",
    original_path: c"/usr/local/lib/drava/driver/libcuda.so.1",
    link_names: include_str!("../../entry-points.tsv"),
};

/// NVML.
pub const NVML_STUB: Stub = Stub {
    soname: c"libnvidia-ml.so.1",
    original_path: c"/usr/local/lib/drava/driver/libnvidia-ml.so.1",
    link_names: "",
};

/// Directory that holds one directory per share.
pub const RUN_DIR: &str = "/run/drava";

/// Directory of a share that holds [`PAGE_FILE`].
pub const LIMITS_DIR: &str = "limits";

/// File name of the limits page.
pub const PAGE_FILE: &str = "page";

/// Directory of a share that holds [`REGION_FILE`].
pub const USAGE_DIR: &str = "usage";

/// File name of the usage region.
pub const REGION_FILE: &str = "region";

/// Mode of the region file: processes of a share may have different users.
pub const REGION_FILE_MODE: u32 = 0o666;
