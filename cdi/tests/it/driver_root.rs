//! A fake driver root with the files and contents that discovery reads.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use drava_cdi::{Driver, DriverRoot};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tempfile::TempDir;

/// `e_machine` of this machine.
const HOST: u16 = if cfg!(target_arch = "aarch64") {
    183
} else {
    62
};
/// `e_machine` of another machine.
pub(crate) const OTHER: u16 = if cfg!(target_arch = "aarch64") {
    62
} else {
    183
};

pub(crate) struct FakeRoot {
    dir: TempDir,
}

impl FakeRoot {
    pub(crate) fn empty() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Returns an NVIDIA driver as installed on Debian.
    pub(crate) fn debian() -> Self {
        let root = Self::empty();
        root.driver_libraries("usr/lib/x86_64-linux-gnu", "580.65.06");
        root.device("dev/nvidiactl");
        root.device("dev/nvidia-uvm");
        root.device("dev/nvidia-uvm-tools");
        root.device("dev/nvidia-modeset");
        root.device("dev/nvidia0");
        root.device("dev/nvidia1");
        root.file("usr/bin/nvidia-smi", b"#!");
        root.file("usr/bin/nvidia-cuda-mps-control", b"#!");
        root.file("lib/firmware/nvidia/580.65.06/gsp_ga10x.bin", b"");
        root.socket("run/nvidia-persistenced/socket");
        root
    }

    /// Adds libraries of every part, with the installer's links.
    pub(crate) fn driver_libraries(&self, directory: &str, version: &str) {
        for (stem, number) in [
            ("libcuda", Some("1")),
            ("libcudadebugger", Some("1")),
            ("libnvidia-ptxjitcompiler", Some("1")),
            ("libnvidia-nvvm", Some("4")),
            ("libnvidia-gpucomp", None),
            ("libnvidia-ml", Some("1")),
            ("libnvidia-cfg", Some("1")),
            ("libnvidia-opencl", Some("1")),
            ("libnvidia-encode", Some("1")),
            ("libnvidia-eglcore", None),
            ("libGLX_nvidia", Some("0")),
            ("libnvidia-fbc", Some("1")),
        ] {
            let file = format!("{stem}.so.{version}");
            let soname =
                number.map_or_else(|| file.clone(), |number| format!("{stem}.so.{number}"));
            self.library(&format!("{directory}/{file}"), &soname);
            if soname != file {
                self.link(&format!("{directory}/{soname}"), &file);
            }
        }
        self.link(&format!("{directory}/libcuda.so"), "libcuda.so.1");
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    fn at(&self, path: &str) -> PathBuf {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(crate) fn file(&self, path: &str, contents: &[u8]) {
        fs::write(self.at(path), contents).unwrap();
    }

    /// Adds an executable file.
    pub(crate) fn program(&self, path: &str) {
        self.file(path, b"#!");
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn library(&self, path: &str, soname: &str) {
        self.file(path, &elf_of_host(Some(soname)));
    }

    pub(crate) fn library_of_other_machine(&self, path: &str) {
        self.file(path, &elf(OTHER, Some("libcuda.so.1")));
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        symlink(target, self.at(path)).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        fs::remove_file(self.dir.path().join(path)).unwrap();
    }

    /// Adds a character device; discovery checks only its type.
    pub(crate) fn device(&self, path: &str) {
        self.node(path, FileType::CharacterDevice);
    }

    pub(crate) fn fifo(&self, path: &str) {
        self.node(path, FileType::Fifo);
    }

    fn node(&self, path: &str, kind: FileType) {
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, self.at(path), kind, mode, makedev(1, 3))
            .expect("create a device node, which needs root");
    }

    pub(crate) fn socket(&self, path: &str) {
        // The socket's file outlives the listener.
        drop(UnixListener::bind(self.at(path)).unwrap());
    }

    pub(crate) fn open(&self, node: &str) -> DriverRoot {
        DriverRoot::open(self.path(), node).unwrap()
    }

    pub(crate) fn driver(&self) -> Driver {
        Driver::discover(self.open("/run/nvidia/driver")).unwrap()
    }
}

/// Returns whether the process cannot create device nodes, and then reports the running test as skipped.
pub(crate) fn cannot_create_devices() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("device");
    let kind = FileType::CharacterDevice;
    let mode = Mode::from_raw_mode(0o666);
    if mknodat(CWD, &file, kind, mode, makedev(1, 3)).is_ok() {
        return false;
    }
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    let line = format!("skipped: {test}: device nodes need root\n");
    // `eprintln!` would be hidden for a test that passes.
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    true
}

/// As [`elf`], for this machine.
pub(crate) fn elf_of_host(soname: Option<&str>) -> Vec<u8> {
    elf(HOST, soname)
}

/// Returns a shared library with only the parts that discovery reads: header, segment, dynamic section.
pub(crate) fn elf(machine: u16, soname: Option<&str>) -> Vec<u8> {
    const PROGRAM_HEADERS: u64 = 64;
    const DYNAMIC: u64 = PROGRAM_HEADERS + 2 * 56;
    const STRINGS: u64 = DYNAMIC + 3 * 16;
    /// Address of the mapped file, so that addresses differ from offsets.
    const BASE: u64 = 0x10_0000;
    let strings = format!("\0{}\0", soname.unwrap_or_default());
    let size = STRINGS + strings.len() as u64;

    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1];
    file.resize(16, 0);
    file.extend(3_u16.to_le_bytes());
    file.extend(machine.to_le_bytes());
    file.resize(32, 0);
    file.extend(PROGRAM_HEADERS.to_le_bytes());
    file.resize(54, 0);
    file.extend(56_u16.to_le_bytes());
    file.extend(2_u16.to_le_bytes());
    file.resize(64, 0);
    for (kind, offset, length) in [(1_u32, 0, size), (2, DYNAMIC, STRINGS - DYNAMIC)] {
        file.extend(kind.to_le_bytes());
        file.extend(4_u32.to_le_bytes());
        for word in [offset, BASE + offset, BASE + offset, length, length, 8] {
            file.extend(word.to_le_bytes());
        }
    }
    let name = if soname.is_some() { 14_u64 } else { 0 };
    for word in [5, BASE + STRINGS, name, 1, 0, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(strings.as_bytes());
    file
}
