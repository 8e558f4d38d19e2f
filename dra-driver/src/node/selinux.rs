//! SELinux labels of the files that the containers of tenants use.
//!
//! With SELinux, a container reads and executes only files of a few types. The loader ignores a preloaded library that it
//! cannot read, so a share whose files have another label would run without limits: a claim is prepared only when its files
//! have the label.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};
use rustix::io::Errno;

/// Label of files that every container may use.
const LABEL: &str = "system_u:object_r:container_file_t:s0";

const ATTRIBUTE: &str = "security.selinux";

/// Labels of the node; none without SELinux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Labels {
    /// The kernel does not use SELinux.
    #[default]
    Off,
    /// Files get the label of containers.
    Containers,
}

/// A file did not get its label.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot set the SELinux label {LABEL} of {}, without which containers cannot read it; run the node driver with a type \
     that may, such as spc_t",
    path.display()
)]
pub struct LabelError {
    /// The file or directory.
    pub path: PathBuf,
    /// Error of the operating system.
    #[source]
    pub source: io::Error,
}

impl Labels {
    /// Returns the labels of a kernel. `attributes` is `/proc/self/attr/current`, which has a context of SELinux
    /// (`user:role:type:level`) if the kernel uses SELinux, and a profile or nothing otherwise.
    #[must_use]
    pub fn of_kernel(attributes: &Path) -> Self {
        let context = fs::read_to_string(attributes).unwrap_or_default();
        match context.trim_end_matches(['\0', '\n']).split(':').count() {
            4.. => Self::Containers,
            _ => Self::Off,
        }
    }

    /// Ensures the label of a file or directory.
    ///
    /// # Errors
    /// When it has another label after the change.
    pub fn ensure(self, path: &Path) -> Result<(), LabelError> {
        match self {
            Self::Off => Ok(()),
            Self::Containers => ensure(path).map_err(|source| LabelError {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// As [`ensure`](Self::ensure), for a directory and everything below.
    ///
    /// # Errors
    /// When a file has another label after the change.
    pub fn ensure_all(self, directory: &Path) -> Result<(), LabelError> {
        if self == Self::Off {
            return Ok(());
        }
        self.ensure(directory)?;
        let failed = |source| LabelError {
            path: directory.to_owned(),
            source,
        };
        for entry in fs::read_dir(directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_type().map_err(failed)?.is_dir() {
                self.ensure_all(&entry.path())?;
            } else {
                self.ensure(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Returns the option of a file system that is mounted for containers.
    #[must_use]
    pub fn mount_option(self) -> String {
        match self {
            Self::Off => String::new(),
            Self::Containers => format!(",context=\"{LABEL}\""),
        }
    }
}

fn ensure(path: &Path) -> io::Result<()> {
    if has_label(path)? {
        return Ok(());
    }
    // SELinux stores the label with its terminating zero.
    let label = format!("{LABEL}\0");
    lsetxattr(path, ATTRIBUTE, label.as_bytes(), XattrFlags::empty())?;
    match has_label(path)? {
        true => Ok(()),
        false => Err(io::Error::other("the file system does not keep the label")),
    }
}

fn has_label(path: &Path) -> io::Result<bool> {
    let mut buffer = [0; 256];
    match lgetxattr(path, ATTRIBUTE, &mut buffer) {
        Ok(length) => {
            let label = buffer.get(..length).unwrap_or_default();
            Ok(label.strip_suffix(b"\0").unwrap_or(label) == LABEL.as_bytes())
        }
        // A longer label is another label.
        Err(Errno::NODATA | Errno::RANGE) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_selinux_by_the_context_of_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let current = dir.path().join("current");
        for (content, labels) in [
            ("system_u:system_r:spc_t:s0\0", Labels::Containers),
            (
                "system_u:system_r:spc_t:s0-s0:c0.c1023\n",
                Labels::Containers,
            ),
            ("cri-containerd.apparmor.d (enforce)\n", Labels::Off),
            ("unconfined\n", Labels::Off),
            ("", Labels::Off),
        ] {
            fs::write(&current, content).unwrap();
            assert_eq!(Labels::of_kernel(&current), labels, "{content:?}");
        }
        assert_eq!(Labels::of_kernel(&dir.path().join("missing")), Labels::Off);
    }

    #[test]
    fn labels_every_file_and_reports_those_without() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        let file = dir.path().join("a/libvgpu.so");
        fs::write(&file, "").unwrap();
        Labels::Off.ensure_all(dir.path()).unwrap();
        assert!(!has_label(&file).unwrap());
        if let Err(error) = Labels::Containers.ensure_all(dir.path()) {
            // Only root may change attributes of security.
            assert!(error.to_string().contains("container_file_t"), "{error}");
            assert!(error.to_string().contains("spc_t"), "{error}");
            return;
        }
        assert!(has_label(&file).unwrap() && has_label(dir.path()).unwrap());
        let missing = Labels::Containers.ensure(&dir.path().join("missing"));
        let error = missing.unwrap_err().to_string();
        assert!(
            error.contains("/missing") && error.contains("container_file_t"),
            "{error}"
        );
    }
}
