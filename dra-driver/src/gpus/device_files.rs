//! Device files of NVIDIA's kernel driver that the node lacks.
//!
//! - The container runtime fills the `/dev` of the node driver's pod once. Files that appear later, because a module was
//!   loaded late or a GPU was added, are created there from those of the node: NVML opens them there.
//! - With systemd's cgroup driver, systemd looks up the devices of containers in `/dev/char` at each reload. udev creates
//!   no link there for NVIDIA's devices, so running containers would lose their GPUs. The links are created.
//! - The kernel driver creates no file for the capabilities of a MIG instance. Runtimes create files in containers from
//!   numbers, but for a container with its own user namespace they mount the node's file. The files of an instance are
//!   created on the node, with their links.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use drava_cdi::DeviceNode;
use rustix::fs::{CWD, FileType, Mode, major, makedev, minor, mknodat};

/// Mode of the files in this container.
const OWN_MODE: u32 = 0o600;
/// Mode of the files of MIG instances on the node, as that of the kernel driver: the device cgroup decides who opens them.
const CAPABILITY_MODE: u32 = 0o444;

/// Files of NVIDIA's kernel modules whose names do not start with `nvidia`.
const OTHER_NAMES: [&str; 1] = ["gdrdrv"];

/// Directories below `/dev` with further files of the kernel driver.
const SUBDIRECTORIES: [&str; 2] = ["nvidia-caps", "nvidia-caps-imex-channels"];

/// Where device files are and where they are needed.
#[derive(Debug, Clone)]
pub struct DeviceFiles {
    /// The node's `/dev` in this container.
    pub dev: PathBuf,
    /// Path of `dev` on the node.
    pub dev_on_node: PathBuf,
    /// `/dev` of this container.
    pub own_dev: PathBuf,
    /// The node's `/dev/char` in this container; `None` to create no links.
    pub char_dir: Option<PathBuf>,
}

/// A device file of the node.
#[derive(Debug, PartialEq, Eq)]
struct DeviceFile {
    /// Path below `/dev`.
    name: String,
    rdev: u64,
}

impl DeviceFiles {
    /// Creates the missing files and links; logs what cannot be created.
    pub fn refresh(&self) {
        let files = match find(&self.dev) {
            Ok(files) => files,
            Err(error) => {
                tracing::warn!(dir = %self.dev.display(), %error, "cannot list the device files of the node");
                return;
            }
        };
        for file in &files {
            if let Err(error) = copy(file, &self.own_dev, OWN_MODE) {
                tracing::warn!(file = file.name, %error, "cannot create the device file for NVML");
            }
            self.link(file);
        }
    }

    /// Creates the files of MIG capabilities on the node, and their links; logs what cannot be created. Only containers with
    /// their own user namespace need the files.
    pub fn create(&self, nodes: &[DeviceNode]) {
        for node in nodes {
            let (Some(number), Some(name)) = (node.number, node.path.strip_prefix("/dev/")) else {
                continue;
            };
            let file = DeviceFile {
                name: name.to_owned(),
                rdev: makedev(number.major, number.minor),
            };
            if let Err(error) = copy(&file, &self.dev, CAPABILITY_MODE) {
                tracing::warn!(
                    file = file.name, %error,
                    "cannot create the device file on the node; pods with hostUsers: false cannot use the MIG instance"
                );
            }
            self.link(&file);
        }
    }

    fn link(&self, file: &DeviceFile) {
        let linked = match &self.char_dir {
            Some(dir) => link(file, dir, &self.dev_on_node),
            None => Ok(()),
        };
        if let Err(error) = linked {
            tracing::warn!(file = file.name, %error, "cannot create the link in /dev/char");
        }
    }
}

/// Returns the device files of NVIDIA's kernel driver below `dev`.
fn find(dev: &Path) -> io::Result<Vec<DeviceFile>> {
    let mut files = Vec::new();
    for directory in std::iter::once("").chain(SUBDIRECTORIES) {
        let entries = match fs::read_dir(dev.join(directory)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !directory.is_empty() => {
                continue;
            }
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let is_of_driver = |name: &&str| !directory.is_empty() || is_of_nvidia(name);
            let Some(name) = name.to_str().filter(is_of_driver) else {
                continue;
            };
            // A file can disappear at any time.
            let Ok(found) = entry.metadata() else {
                continue;
            };
            if found.file_type().is_char_device() {
                let name = match directory {
                    "" => name.to_owned(),
                    directory => format!("{directory}/{name}"),
                };
                files.push(DeviceFile {
                    name,
                    rdev: found.rdev(),
                });
            }
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Ensures that `dev` has the file. A module can get another major number when it is loaded again.
fn copy(file: &DeviceFile, dev: &Path, mode: u32) -> io::Result<()> {
    let path = dev.join(&file.name);
    match fs::symlink_metadata(&path) {
        Ok(present) if present.file_type().is_char_device() && present.rdev() == file.rdev => {
            return Ok(());
        }
        Ok(_) => fs::remove_file(&path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let kind = FileType::CharacterDevice;
    mknodat(CWD, &path, kind, Mode::from_raw_mode(mode), file.rdev)?;
    // Without the umask.
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Ensures that `char_dir` has a link to the file. Links to files of other drivers stay.
fn link(file: &DeviceFile, char_dir: &Path, dev_on_node: &Path) -> io::Result<()> {
    let path = char_dir.join(format!("{}:{}", major(file.rdev), minor(file.rdev)));
    let target = match dev_on_node == Path::new("/dev") {
        true => Path::new("..").join(&file.name),
        false => dev_on_node.join(&file.name),
    };
    match fs::read_link(&path) {
        Ok(present) if present == target || !leads_to_nvidia(&present) => return Ok(()),
        Ok(_) => fs::remove_file(&path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    symlink(target, path)
}

fn leads_to_nvidia(target: &Path) -> bool {
    let mut names = target.iter().filter_map(|name| name.to_str());
    names.any(is_of_nvidia)
}

fn is_of_nvidia(name: &str) -> bool {
    name.starts_with("nvidia") || OTHER_NAMES.contains(&name)
}

#[cfg(test)]
mod tests {
    use drava_cdi::DeviceNumber;

    use super::*;

    /// A node's `/dev` and `/dev/char`, and the `/dev` of the pod; `None` where device files need root.
    fn node() -> Option<(tempfile::TempDir, DeviceFiles)> {
        let dir = tempfile::tempdir().unwrap();
        let files = DeviceFiles {
            dev: dir.path().join("dev"),
            dev_on_node: PathBuf::from("/dev"),
            own_dev: dir.path().join("own"),
            char_dir: Some(dir.path().join("dev/char")),
        };
        fs::create_dir_all(dir.path().join("dev/char")).unwrap();
        fs::create_dir(&files.own_dev).unwrap();
        fs::write(files.dev.join("nvidia-file"), "no device").unwrap();
        let created = create(&files, "nvidiactl", 195, 255);
        if let Err(error) = created {
            let line = format!("skipped: device_files: device files need root: {error}\n");
            // `eprintln!` would be hidden for a test that passes.
            io::Write::write_all(&mut io::stderr(), line.as_bytes()).unwrap();
            return None;
        }
        Some((dir, files))
    }

    fn create(files: &DeviceFiles, name: &str, major: u32, minor: u32) -> io::Result<()> {
        copy(
            &DeviceFile {
                name: name.to_owned(),
                rdev: makedev(major, minor),
            },
            &files.dev,
            OWN_MODE,
        )
    }

    fn numbers(path: &Path) -> (u32, u32) {
        let rdev = fs::symlink_metadata(path).unwrap().rdev();
        (major(rdev), minor(rdev))
    }

    #[test]
    fn creates_files_that_appear_later() {
        let Some((_dir, files)) = node() else { return };
        files.refresh();
        create(&files, "nvidia-uvm", 510, 0).unwrap();
        create(&files, "nvidia-caps/nvidia-cap1", 237, 1).unwrap();
        create(&files, "null", 1, 3).unwrap();
        create(&files, "gdrdrv", 236, 0).unwrap();
        create(&files, "nvidia-caps-imex-channels/channel0", 235, 0).unwrap();
        files.refresh();
        let own = |name: &str| numbers(&files.own_dev.join(name));
        assert_eq!(own("nvidiactl"), (195, 255));
        assert_eq!(own("nvidia-uvm"), (510, 0));
        assert_eq!(own("nvidia-caps/nvidia-cap1"), (237, 1));
        assert_eq!(own("gdrdrv"), (236, 0));
        assert_eq!(own("nvidia-caps-imex-channels/channel0"), (235, 0));
        assert!(
            !files.own_dev.join("null").exists() && !files.own_dev.join("nvidia-file").exists()
        );

        // The module was loaded again with another number.
        fs::remove_file(files.dev.join("nvidia-uvm")).unwrap();
        create(&files, "nvidia-uvm", 511, 0).unwrap();
        files.refresh();
        assert_eq!(own("nvidia-uvm"), (511, 0));
    }

    #[test]
    fn creates_files_of_mig_instances_on_the_node() {
        let Some((_dir, files)) = node() else { return };
        let node = |minor| {
            let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
            DeviceNode::numbered(path, DeviceNumber { major: 237, minor })
        };
        let gpu = DeviceNode::read_write("/dev/nvidia0", "/dev/nvidia0");
        for _repeated in 0..2 {
            files.create(&[gpu.clone(), node(48), node(49)]);
        }
        let on_node = |name: &str| files.dev.join(name);
        assert_eq!(numbers(&on_node("nvidia-caps/nvidia-cap49")), (237, 49));
        let found = fs::metadata(on_node("nvidia-caps/nvidia-cap48")).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o444);
        assert!(
            !on_node("nvidia0").exists(),
            "only the kernel driver's users create it"
        );
        let link = fs::read_link(files.char_dir.unwrap().join("237:48")).unwrap();
        assert_eq!(link, Path::new("../nvidia-caps/nvidia-cap48"));
    }

    #[test]
    fn links_device_numbers_for_systemd() {
        let Some((_dir, files)) = node() else { return };
        create(&files, "nvidia-caps/nvidia-cap1", 237, 1).unwrap();
        create(&files, "nvidia0", 195, 0).unwrap();
        let dir = files.char_dir.clone().unwrap();
        symlink("../nvidia7", dir.join("195:0")).unwrap();
        symlink("../other", dir.join("195:255")).unwrap();
        files.refresh();
        let target = |name: &str| fs::read_link(dir.join(name)).unwrap();
        assert_eq!(target("195:0"), Path::new("../nvidia0"));
        assert_eq!(target("237:1"), Path::new("../nvidia-caps/nvidia-cap1"));
        assert_eq!(
            target("195:255"),
            Path::new("../other"),
            "a link of another driver"
        );

        let apart = DeviceFiles {
            dev_on_node: PathBuf::from("/run/nvidia/driver/dev"),
            ..files
        };
        apart.refresh();
        assert_eq!(target("195:0"), Path::new("/run/nvidia/driver/dev/nvidia0"));
    }
}
