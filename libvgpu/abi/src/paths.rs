//! Names of the files that a container sees. The CDI specification mounts them, `libvgpu.so` opens them.
//!
//! ```text
//! /run/drava/<share>/limits/page      read-only directory mount, written by the node driver
//! /run/drava/<share>/usage/region     writable directory mount, shared by all containers of the share
//! ```
//!
//! `<share>` is the allocation result's share ID (a lowercase UUID). Directories are mounted rather than
//! files, so that a page that is replaced is seen by containers that already run.

/// The interposer inside the container, the same path for every claim.
pub const LIBRARY: &str = "/usr/local/lib/drava/libvgpu.so";

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
