//! `/proc/driver/nvidia/params`, by which NVIDIA's libraries decide whether they create device files.
//!
//! With `ModifyDeviceFiles: 1`, the default of the kernel driver, NVML and `nvidia-smi` of a root container create files of
//! all GPUs of the node and change the modes of present ones. The container gets a read-only copy with 0. The device cgroup
//! denies access to other GPUs with or without the copy.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_remount, move_mount,
    open_tree, unmount,
};

use crate::container::Container;
use crate::root::RootError;

const DIRECTORY: &str = "/proc/driver/nvidia";
const PARAMS: &str = "/proc/driver/nvidia/params";
/// Size limit of the file, which has about 2 KiB.
const MAX_BYTES: u64 = 64 << 10;

/// The parameters cannot be masked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ParamsError {
    #[error(transparent)]
    Root(#[from] RootError),
    #[error("cannot {operation} over {PARAMS}")]
    Mount {
        operation: &'static str,
        source: io::Error,
    },
}

pub(crate) fn apply(container: &Container) -> Result<(), ParamsError> {
    let root = &container.root;
    // Without the kernel driver there is no file.
    let Some(present) = root.read(PARAMS, MAX_BYTES)? else {
        return Ok(());
    };
    let Some(masked) = masked(&present) else {
        return Ok(());
    };
    let (directory, file) = (root.mount_point(DIRECTORY)?, root.mount_point(PARAMS)?);
    let failed = |operation| move |source: io::Error| ParamsError::Mount { operation, source };
    let copy = copy_below(&directory, &masked, &container.mount_label)
        .map_err(failed("prepare a copy"))?;
    attach(&copy, &file).map_err(failed("mount a copy"))
}

/// Returns the content with `ModifyDeviceFiles: 0`; `None` if it does not allow changes.
fn masked(present: &[u8]) -> Option<Vec<u8>> {
    const ALLOWED: &[u8] = b"ModifyDeviceFiles: 1";
    let mut is_allowed = false;
    let lines = present.split(|&byte| byte == b'\n').map(|line| {
        if line == ALLOWED {
            is_allowed = true;
            b"ModifyDeviceFiles: 0"
        } else {
            line
        }
    });
    let masked = lines.collect::<Vec<_>>().join(&b'\n');
    is_allowed.then_some(masked)
}

/// Returns a detached mount of a file with this content.
///
/// The file is on a new tmpfs that is on `directory` for a moment: older kernels copy no mount that is not in the mount
/// namespace. The namespace is the container's, in which no process of the tenant runs yet.
fn copy_below(directory: &OwnedFd, content: &[u8], label: &str) -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (option, value) in options(label) {
        fsconfig_set_string(&context, option, value)?;
    }
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let tmpfs = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(&tmpfs, "params", flags, Mode::from_raw_mode(0o444))?;
    File::from(file).write_all(content)?;
    let is_empty_path =
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tmpfs, "", directory, "", is_empty_path)?;
    let copy = open_tree(
        &tmpfs,
        "params",
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    );
    unmount(path_of(&tmpfs), UnmountFlags::DETACH)?;
    Ok(copy?)
}

/// Returns the options of the tmpfs. Without the label of the container's mounts, SELinux denies the container the file.
fn options(label: &str) -> Vec<(&str, &str)> {
    let mut options = vec![("size", "64k"), ("nr_inodes", "2")];
    if !label.is_empty() {
        options.push(("context", label));
    }
    options
}

/// Attaches the mount of a file to `file`, read-only.
fn attach(copy: &OwnedFd, file: &OwnedFd) -> io::Result<()> {
    let is_empty_path =
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(copy, "", file, "", is_empty_path)?;
    let read_only = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC;
    Ok(mount_remount(path_of(copy), read_only, "")?)
}

/// Returns the path of an open file for calls that take no descriptor.
fn path_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_copy_as_mounts_of_the_container() {
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        assert!(options(label).contains(&("context", label)));
        assert!(options("").iter().all(|(option, _)| *option != "context"));
    }

    #[test]
    fn masks_only_permission_to_create_device_files() {
        let params = b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n";
        let expected = b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileUID: 0\n";
        assert_eq!(masked(params).as_deref(), Some(&expected[..]));
        for unchanged in [
            &b"ModifyDeviceFiles: 0\n"[..],
            b"ModifyDeviceFiles: 11\n",
            b" ModifyDeviceFiles: 1\n",
            b"",
        ] {
            assert_eq!(masked(unchanged), None);
        }
    }
}
