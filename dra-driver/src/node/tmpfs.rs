//! The tmpfs of a share's usage region.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags};

use crate::node::selinux::Labels;

/// Mount operations. Tests replace them, because they need CAP_SYS_ADMIN.
pub trait Tmpfs: Send + Sync + 'static {
    /// Mounts a tmpfs of at most `size_bytes` and `inodes` on `dir`.
    ///
    /// # Errors
    /// Error of the system call.
    fn mount(&self, dir: &Path, size_bytes: u64, inodes: u64) -> io::Result<()>;

    /// Unmounts the file system on `dir`, even while containers use it.
    ///
    /// # Errors
    /// Error of the system call.
    fn unmount(&self, dir: &Path) -> io::Result<()>;

    /// Returns whether `dir`, which must exist, is a mount point.
    ///
    /// # Errors
    /// When the directory cannot be read.
    fn is_mounted(&self, dir: &Path) -> io::Result<bool>;
}

/// Mount operations of the kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct KernelTmpfs {
    /// Label of the mounted files.
    pub labels: Labels,
}

impl Tmpfs for KernelTmpfs {
    fn mount(&self, dir: &Path, size_bytes: u64, inodes: u64) -> io::Result<()> {
        // Writable for all, like /tmp: in a pod with a user namespace the CDI hook opens its file as an ordinary
        // user. Size and inodes are limited, so a tenant can fill only its own share.
        let label = self.labels.mount_option();
        let options = format!("size={size_bytes},nr_inodes={inodes},mode=1777{label}");
        let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("tmpfs", dir, "tmpfs", flags, Some(options.as_c_str()))
            .map_err(Into::into)
    }

    fn unmount(&self, dir: &Path) -> io::Result<()> {
        rustix::mount::unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(Into::into)
    }

    fn is_mounted(&self, dir: &Path) -> io::Result<bool> {
        let parent = dir.parent().unwrap_or(dir);
        Ok(fs::symlink_metadata(dir)?.dev() != fs::symlink_metadata(parent)?.dev())
    }
}
