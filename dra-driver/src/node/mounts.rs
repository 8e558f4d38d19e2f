//! Mounts of shares, by mount root and device number.
//!
//! A container has a share if the limits directory of the share is mounted in it. A mount point proves nothing: a tenant
//! can mount a volume of its own at the path of another share. The root of a mount within its file system and the device
//! number of that file system cannot be chosen by a tenant, so a mount counts only if both are those of the node's own
//! limits directory (`/proc/<pid>/mountinfo`, proc(5)).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use drava_vgpu_abi::paths;

use crate::node::claim::{ClaimUid, ShareId};

/// Suffix of the root of a mount whose directory was removed.
const REMOVED: &str = "//deleted";

/// A share whose limits directory is mounted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MountedShare {
    /// The claim of the share.
    pub claim: ClaimUid,
    /// ID of the share.
    pub share: ShareId,
}

/// Directory of the claims, as mountinfo names it in any mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimsMount {
    /// `major:minor` of the file system.
    device: String,
    /// Path of the directory within the file system.
    root: PathBuf,
}

impl ClaimsMount {
    /// Locates the directory, which must exist.
    ///
    /// # Errors
    /// When the directory cannot be opened, or `/proc` does not list its mount.
    pub fn locate(claims: &Path) -> io::Result<Self> {
        let dir = File::open(claims)?;
        // The kernel knows the mount of an open directory; a search by path would have to resolve links and hidden mounts.
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", dir.as_raw_fd()))?;
        let path = fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        Self::of_open_directory(&info, &path, &mounts).ok_or_else(|| {
            let path = path.display();
            io::Error::other(format!(
                "/proc/self/mountinfo does not list the mount of {path}"
            ))
        })
    }

    fn of_open_directory(fdinfo: &str, path: &Path, mounts: &str) -> Option<Self> {
        let id = fdinfo
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:"))?;
        let mount = mounts
            .lines()
            .filter_map(Mount::parse)
            .find(|mount| mount.id == id.trim())?;
        let below = path.strip_prefix(unescape(mount.point)).ok()?;
        Some(Self {
            device: mount.device.to_owned(),
            root: Path::new(&unescape(mount.root)).join(below),
        })
    }

    /// Returns the shares that are mounted according to the content of a mountinfo file.
    #[must_use]
    pub fn shares(&self, mountinfo: &str) -> BTreeSet<MountedShare> {
        let mounts = mountinfo.lines().filter_map(Mount::parse);
        mounts.filter_map(|mount| self.share(&mount)).collect()
    }

    /// Locates a directory that may have been removed, by the nearest one above it that exists.
    ///
    /// # Errors
    /// As [`locate`](Self::locate).
    pub fn locate_removed(dir: &Path) -> io::Result<Self> {
        let existing = dir.ancestors().find(|above| above.exists());
        let above = existing.ok_or(io::ErrorKind::NotFound)?;
        let mut mount = Self::locate(above)?;
        mount.root.extend(dir.strip_prefix(above));
        Ok(mount)
    }

    /// Returns whether a mountinfo file has this directory at the mount point, removed or not.
    #[must_use]
    pub fn is_at(&self, mountinfo: &str, point: &str) -> bool {
        let mut mounts = mountinfo.lines().filter_map(Mount::parse);
        mounts.any(|mount| {
            let root = unescape(mount.root);
            let root = root.strip_suffix(REMOVED).unwrap_or(&root);
            mount.device == self.device && mount.point == point && Path::new(root) == self.root
        })
    }

    /// Returns `major:minor` of the file system and the path of the directory within it.
    #[must_use]
    pub fn into_parts(self) -> (String, PathBuf) {
        (self.device, self.root)
    }

    fn share(&self, mount: &Mount<'_>) -> Option<MountedShare> {
        if mount.device != self.device {
            return None;
        }
        let root = unescape(mount.root);
        let root = root.strip_suffix(REMOVED).unwrap_or(&root);
        let mut below = Path::new(root).strip_prefix(&self.root).ok()?.iter();
        let (claim, share, dir) = (below.next()?, below.next()?, below.next()?);
        let is_limits = dir == paths::LIMITS_DIR && below.next().is_none();
        is_limits.then_some(MountedShare {
            claim: ClaimUid::parse(claim.to_str()?).ok()?,
            share: ShareId::parse(share.to_str()?).ok()?,
        })
    }
}

/// The first fields of a line of mountinfo, escaped as there.
struct Mount<'a> {
    id: &'a str,
    device: &'a str,
    root: &'a str,
    point: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(' ');
        let (id, _parent) = (fields.next()?, fields.next()?);
        Some(Self {
            id,
            device: fields.next()?,
            root: fields.next()?,
            point: fields.next()?,
        })
    }
}

/// Decodes `\040` and the like: the kernel escapes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut parts = field.split('\\');
    text.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (code, part.get(3..)) {
            (Some(code), Some(rest)) => {
                text.push(char::from(code));
                text.push_str(rest);
            }
            (_, _) => {
                text.push('\\');
                text.push_str(part);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: &str = "00000000-0000-4000-8000-000000000001";

    fn node() -> ClaimsMount {
        let mounts = "30 1 8:1 / / rw - ext4 /dev/sda rw\n\
            31 30 8:2 /volumes/a\\040b /var/lib/drava rw - xfs /dev/sdb rw\n";
        let path = Path::new("/var/lib/drava/claims");
        ClaimsMount::of_open_directory("pos:\t0\nmnt_id:\t31\n", path, mounts).unwrap()
    }

    #[test]
    fn locates_claims_within_their_file_system() {
        let expected = ClaimsMount {
            device: "8:2".to_owned(),
            root: PathBuf::from("/volumes/a b/claims"),
        };
        assert_eq!(node(), expected);
    }

    #[test]
    fn finds_share_at_any_mount_point() {
        let root = format!("/volumes/a\\040b/claims/u1/{SHARE}/limits");
        for (root, point) in [
            (root.clone(), format!("/run/drava/{SHARE}/limits")),
            (root.clone(), "/elsewhere".to_owned()),
            (format!("{root}//deleted"), "/run/x".to_owned()),
        ] {
            let line = format!("9 8 8:2 {root} {point} ro - xfs /dev/sdb rw\n");
            let found = node().shares(&line);
            let found: Vec<_> = found.iter().map(|mounted| mounted.share.as_str()).collect();
            assert_eq!(found, [SHARE], "{line}");
        }
    }

    #[test]
    fn rejects_forged_mounts() {
        let claims = "/volumes/a\\040b/claims";
        let point = format!("/run/drava/{SHARE}/limits");
        for (device, root) in [
            // An emptyDir, on disk and in memory.
            (
                "8:2",
                "/kubelet/pods/p/volumes/kubernetes.io~empty-dir/e".to_owned(),
            ),
            ("0:77", "/".to_owned()),
            // The same path in another file system.
            ("0:77", format!("{claims}/u1/{SHARE}/limits")),
            // Parts of the directory tree.
            ("8:2", format!("{claims}/u1/{SHARE}")),
            ("8:2", format!("{claims}/u1/{SHARE}/limits/page")),
            ("8:2", format!("/x{claims}/u1/{SHARE}/limits")),
            ("8:2", format!("{claims}/u1/../limits")),
        ] {
            let line = format!("9 8 {device} {root} {point} ro - xfs /dev/sdb rw\n");
            assert!(node().shares(&line).is_empty(), "{line}");
        }
    }

    #[test]
    fn finds_directory_at_its_mount_point_only() {
        let log = ClaimsMount {
            device: "0:25".to_owned(),
            root: PathBuf::from("/drava/mps/GPU 1/log"),
        };
        let is_at = |line: &str| log.is_at(&format!("1 0 8:1 / / rw\n{line}\n"), "/tmp/nvidia-log");
        assert!(is_at(
            "30 1 0:25 /drava/mps/GPU\\0401/log /tmp/nvidia-log rw - tmpfs run rw"
        ));
        assert!(is_at(
            "30 1 0:25 /drava/mps/GPU\\0401/log//deleted /tmp/nvidia-log rw - tmpfs run rw"
        ));
        // Directories of a container at the same place, and the directory at another one.
        for other in [
            "30 1 8:1 /drava/mps/GPU\\0401/log /tmp/nvidia-log rw - ext4 disk rw",
            "30 1 0:25 /volumes/log /tmp/nvidia-log rw - tmpfs run rw",
            "30 1 0:25 /drava/mps/GPU\\0401/log /logs rw - tmpfs run rw",
        ] {
            assert!(!is_at(other), "{other}");
        }
    }

    #[test]
    fn locates_directory_of_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        let mount = ClaimsMount::locate(dir.path()).unwrap();
        assert!(
            mount.root.ends_with(dir.path().file_name().unwrap()),
            "{mount:?}"
        );
        let missing = dir.path().join("missing/log");
        ClaimsMount::locate(&missing).unwrap_err();
        let expected = ClaimsMount {
            root: mount.root.join("missing/log"),
            ..mount
        };
        assert_eq!(ClaimsMount::locate_removed(&missing).unwrap(), expected);
    }
}
