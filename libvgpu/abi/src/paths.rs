//! Names of the files that a container sees. The CDI specification mounts them, `libvgpu.so` opens them.
//!
//! ```text
//! /run/drava/<share>/limits/page      read-only directory mount, written by the node driver
//! /run/drava/<share>/usage/region     writable directory mount, shared by all containers of the share
//! /usr/local/lib/drava/libvgpu.so     the interposer
//! /usr/local/lib/drava/driver/        the driver's own libraries that have a stub in their place ([`Stub`])
//! ```
//!
//! `<share>` is the allocation result's share ID (a lowercase UUID). Directories are mounted rather than
//! files, so that a page that is replaced is seen by containers that already run.

use core::ffi::CStr;

/// The interposer inside the container, the same path for every claim.
pub const LIBRARY: &str = "/usr/local/lib/drava/libvgpu.so";

/// A library of the driver in whose place containers may have a stub (delivery mode `shim`). The stub needs
/// [`LIBRARY`] first, then the driver's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stub {
    /// Name by which programs ask for it.
    pub soname: &'static CStr,
    /// Where the driver's own library is then, whatever its version.
    pub original_path: &'static CStr,
    /// A function a line, for `ld`: programs may be linked with the stub. Comments begin with `#`, tabs end names.
    link_names: &'static str,
}

impl Stub {
    /// Functions of the library's public header, without the variants that end in `_ptsz` or `_ptds`.
    pub fn link_names(&self) -> impl Iterator<Item = &'static str> {
        self.link_names
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split('\t').next())
    }
}

/// The CUDA driver.
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

/// The limits page.
pub const PAGE_FILE: &str = "page";

/// Directory of a share that holds [`REGION_FILE`].
pub const USAGE_DIR: &str = "usage";

/// The usage region.
pub const REGION_FILE: &str = "region";

/// Mode of the region file: each process of a share, whatever its user, counts in it.
pub const REGION_FILE_MODE: u32 = 0o666;
