//! Prerequisites of `cargo xtask demo` and `cargo xtask test`; `docs/demo.md` has this list as a table.
//!
//! No function installs a system package.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::cargo::target_dir;
use crate::process::{self, Limit};

/// Limit of one check.
const LIMIT: Limit = Limit::total(Duration::from_secs(60));

/// A version such as 1.89.
type Version = (u32, u32);

/// One prerequisite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prerequisite {
    /// Rust with rustfmt and clippy.
    Rust,
    /// A C compiler.
    CCompiler,
    /// A Go toolchain that fetches the toolchain that Kubernetes is built with.
    Go,
    /// Root, for namespaces, mounts and cgroups.
    Root,
    /// `unshare`, `nsenter` and kubelet's `mount`.
    UtilLinux,
    /// Namespaces that root may create.
    Namespaces,
    /// The overlay file system, for containers.
    Overlay,
    /// Python with venv. Without it, the tests with Python clients of NVML and CUDA are skipped.
    Python,
    /// Chromium. Without it, the tests of the console's page are skipped.
    Chromium,
    /// Free disk space for `target` and for the source and build caches of Go.
    DiskSpace,
}

use Prerequisite::{
    CCompiler, Chromium, DiskSpace, Go, Namespaces, Overlay, Python, Root, Rust, UtilLinux,
};

/// Free disk space, in bytes, that a first build needs.
const FIRST_BUILD_BYTES: u64 = 20 << 30;
/// Free disk space, in bytes, that clusters and later builds need.
const LATER_BUILD_BYTES: u64 = 6 << 30;

impl Prerequisite {
    /// All prerequisites, in the order of `docs/demo.md`.
    pub const ALL: [Self; 10] = [
        Rust, CCompiler, Go, Root, UtilLinux, Namespaces, Overlay, DiskSpace, Python, Chromium,
    ];
    /// The prerequisites of a cluster.
    pub const CLUSTER: [Self; 7] = [
        CCompiler, Go, Root, UtilLinux, Namespaces, Overlay, DiskSpace,
    ];

    /// Name in `docs/demo.md`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Rust => "Rust with rustfmt and clippy",
            CCompiler => "C compiler `cc`",
            Go => "Go",
            Root => "root",
            UtilLinux => "`unshare`, `nsenter`, `mount` (util-linux)",
            Namespaces => "namespaces",
            Overlay => "overlay file system",
            Python => "Python with venv (optional)",
            Chromium => "Chromium (optional)",
            DiskSpace => "20 GiB of free disk space",
        }
    }

    /// Oldest version that works, where versions differ.
    #[must_use]
    pub const fn minimum(self) -> Option<Version> {
        match self {
            Rust => Some((1, 89)),
            Go => Some((1, 21)),
            Python => Some((3, 10)),
            CCompiler | Root | UtilLinux | Namespaces | Overlay | Chromium | DiskSpace => None,
        }
    }

    /// Purpose of the prerequisite.
    #[must_use]
    pub const fn purpose(self) -> &'static str {
        match self {
            Rust => "drava and its tests",
            CCompiler => "linking Rust programs; runc",
            Go => {
                "Kubernetes, etcd, containerd and Helm; the compiler switches to the version that each of them requires"
            }
            Root => "namespaces, mounts and cgroups of the cluster",
            UtilLinux => "the node's namespaces; volumes of the kubelet",
            Namespaces => "the node; a container must be privileged",
            Overlay => "root file systems of containers",
            Python => "tests with Python clients of NVML and CUDA, which are skipped without it",
            Chromium => "tests of the console's page, which are skipped without it",
            DiskSpace => "compiled tests, Kubernetes and images; 6 GiB after the first build",
        }
    }

    /// How to install or enable the prerequisite.
    const fn remedy(self) -> &'static str {
        match self {
            Rust => "https://rustup.rs, then `rustup component add rustfmt clippy`",
            CCompiler => "`apt install gcc libc6-dev` or `dnf install gcc`",
            Go => {
                "https://go.dev/doc/install, or `apt install golang-go` (Debian 13, Ubuntu 24.04) or `dnf install golang`"
            }
            Root => "run the command as root (`sudo -E env PATH=\"$PATH\" cargo xtask …`)",
            UtilLinux => "`apt install util-linux mount` or `dnf install util-linux`",
            Namespaces => {
                "`unshare --mount --pid --net --uts --ipc --cgroup --fork true` fails; use a machine, a virtual machine or a privileged container"
            }
            Overlay => "`modprobe overlay` (a kernel with CONFIG_OVERLAY_FS)",
            Python => "`apt install python3-venv` or `dnf install python3`",
            Chromium => "`apt install chromium` or `dnf install chromium`",
            DiskSpace => {
                "`cargo clean` in other checkouts, `go clean -cache`, or CARGO_TARGET_DIR on a larger disk"
            }
        }
    }

    /// Returns whether the tests pass without the prerequisite.
    #[must_use]
    pub const fn is_optional(self) -> bool {
        matches!(self, Python | Chromium)
    }

    /// Returns whether this machine has the prerequisite.
    #[must_use]
    pub fn is_met(self) -> bool {
        match self {
            Rust => {
                self.is_recent_enough(&output_of("rustc", &["--version"]))
                    && runs("cargo", &["fmt", "--version"])
                    && runs("cargo", &["clippy", "--version"])
            }
            CCompiler => runs("cc", &["--version"]),
            Go => self.is_recent_enough(&output_of("go", &["version"])),
            Root => rustix::process::geteuid().is_root(),
            UtilLinux => ["unshare", "nsenter", "mount"]
                .iter()
                .all(|program| runs(program, &["--version"])),
            Namespaces => runs(
                "unshare",
                &[
                    "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--fork", "true",
                ],
            ),
            Overlay => {
                let is_known = || {
                    fs::read_to_string("/proc/filesystems")
                        .is_ok_and(|text| text.contains("\toverlay"))
                };
                is_known() || (runs("modprobe", &["overlay"]) && is_known())
            }
            // On Debian, the module venv exists without ensurepip.
            Python => {
                self.is_recent_enough(&output_of("python3", &["--version"]))
                    && runs("python3", &["-c", "import venv, ensurepip"])
            }
            Chromium => ["chromium", "chromium-browser", "google-chrome"]
                .iter()
                .any(|program| runs(program, &["--version"])),
            DiskSpace => free_bytes(&target_dir())
                .is_none_or(|free| free >= needed_bytes(target_dir().join("images").exists())),
        }
    }

    fn is_recent_enough(self, output: &str) -> bool {
        version(output) >= self.minimum()
    }
}

impl fmt::Display for Prerequisite {
    /// Name, version and how to get it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Some((major, minor)) = self.minimum() {
            write!(f, " {major}.{minor} or later")?;
        }
        write!(f, ": for {}; {}", self.purpose(), self.remedy())
    }
}

/// Returns the table of `docs/demo.md`.
#[must_use]
pub fn table() -> String {
    let mut text = "| Prerequisite | Version | For |\n|---|---|---|\n".to_owned();
    for prerequisite in Prerequisite::ALL {
        let version = prerequisite
            .minimum()
            .map_or_else(String::new, |(major, minor)| {
                format!("{major}.{minor} or later")
            });
        text.push_str(&format!(
            "| {} | {version} | {} |\n",
            prerequisite.name(),
            prerequisite.purpose()
        ));
    }
    text
}

/// Checks the prerequisites `needed`.
///
/// # Errors
/// Names every missing prerequisite that is not optional, and how to install it.
pub fn check(needed: &[Prerequisite]) -> Result<()> {
    report(needed, Prerequisite::is_met)
}

fn report(needed: &[Prerequisite], is_met: impl Fn(Prerequisite) -> bool) -> Result<()> {
    let mut missing = vec![];
    for prerequisite in needed.iter().copied().filter(|one| !one.is_optional()) {
        // Without root or unshare the check of namespaces proves nothing.
        let is_explained =
            prerequisite == Namespaces && (missing.contains(&Root) || missing.contains(&UtilLinux));
        if !is_explained && !is_met(prerequisite) {
            missing.push(prerequisite);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = missing
        .iter()
        .map(|prerequisite| format!("  - {prerequisite}"))
        .collect();
    bail!("missing prerequisites:\n{}", lines.join("\n"))
}

/// Returns the free bytes that a build needs, the first one or a later one.
const fn needed_bytes(is_built: bool) -> u64 {
    if is_built {
        LATER_BUILD_BYTES
    } else {
        FIRST_BUILD_BYTES
    }
}

/// Returns the bytes that an unprivileged process may still write on the file system of `path` or of the nearest folder
/// above it that exists.
fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|folder| folder.exists())?;
    let status = rustix::fs::statvfs(existing).ok()?;
    Some(status.f_bavail.saturating_mul(status.f_frsize))
}

/// Returns the first version in a text: 1.26 in `go version go1.26.3 linux/amd64`.
fn version(text: &str) -> Option<Version> {
    let number = |text: &str| -> Option<u32> {
        let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    };
    text.split_ascii_whitespace().find_map(|word| {
        let word = word.trim_start_matches(|c: char| !c.is_ascii_digit());
        let (major, rest) = word.split_once('.')?;
        Some((number(major)?, number(rest)?))
    })
}

fn output_of(program: &str, args: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    let output = process::output(&mut command, LIMIT).map(|output| output.stdout);
    String::from_utf8(output.unwrap_or_default()).unwrap_or_default()
}

fn runs(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    process::output(&mut command, LIMIT).is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(is_met: impl Fn(Prerequisite) -> bool) -> String {
        report(&Prerequisite::ALL, is_met).unwrap_err().to_string()
    }

    #[test]
    fn names_every_missing_prerequisite_and_its_remedy() {
        let message = message(|prerequisite| prerequisite == Overlay);
        for part in [
            "Rust with rustfmt and clippy 1.89 or later",
            "https://rustup.rs",
            "Go 1.21 or later",
            "https://go.dev/doc/install",
            "run the command as root",
            "apt install gcc",
            "dnf install gcc",
            "apt install util-linux",
        ] {
            assert!(message.contains(part), "{part:?} is missing in {message}");
        }
        assert!(!message.contains("overlay"), "{message}");
    }

    #[test]
    fn names_namespaces_only_without_other_cause() {
        let unprivileged = message(|one| !matches!(one, Root | Namespaces));
        assert!(!unprivileged.contains("privileged container"));
        let in_container = message(|one| !matches!(one, Namespaces | Go));
        assert!(in_container.contains("privileged container"));
    }

    #[test]
    fn passes_without_optional_prerequisites() {
        report(&Prerequisite::ALL, |one| !one.is_optional()).unwrap();
    }

    #[test]
    fn reads_versions() {
        for (text, expected) in [
            ("go version go1.26.3 linux/amd64\n", Some((1, 26))),
            ("go version go1.27rc1 linux/amd64\n", Some((1, 27))),
            ("rustc 1.95.0 (59807616e 2026-04-14)\n", Some((1, 95))),
            ("Python 3.11.2\n", Some((3, 11))),
            ("go: not found", None),
        ] {
            assert_eq!(version(text), expected, "{text}");
        }
    }

    #[test]
    fn reads_free_disk_space_of_folder_that_is_not_created_yet() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing/folder");
        assert!(free_bytes(&missing).unwrap() > 0);
        // The simulated file system of processes has no space.
        assert_eq!(free_bytes(Path::new("/proc/missing")), Some(0));
    }

    #[test]
    fn names_disk_space_in_readme_as_checked() {
        assert!(
            DiskSpace
                .name()
                .contains(&format!("{} GiB", needed_bytes(false) >> 30))
        );
        assert!(
            DiskSpace
                .purpose()
                .contains(&format!("{} GiB", needed_bytes(true) >> 30))
        );
    }

    #[test]
    fn compares_versions_by_number() {
        assert!(Go.is_recent_enough("go version go1.100 linux/amd64"));
        assert!(!Go.is_recent_enough("go version go1.9.7 linux/amd64"));
        assert!(!Go.is_recent_enough(""));
    }

    #[test]
    fn rust_version_is_that_of_the_workspace() {
        let (major, minor) = Rust.minimum().unwrap();
        assert_eq!(env!("CARGO_PKG_RUST_VERSION"), format!("{major}.{minor}"));
    }
}
