//! What a machine needs to run the cluster, and what to do where it is missing.

use std::fmt;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// The first Go that switches to the toolchain which a go.mod asks for.
const OLDEST_GO_MINOR: u32 = 21;

/// Something that the cluster needs of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prerequisite {
    /// Root, for namespaces, mounts and cgroups.
    Root,
    /// A Go toolchain that fetches the one that Kubernetes needs.
    Go,
    /// A C compiler, for the part of runc that is written in C.
    CCompiler,
    /// `unshare`, `nsenter` and kubelet's `mount`.
    UtilLinux,
    /// Namespaces that root may make.
    Namespaces,
    /// The overlay file system, for containers.
    Overlay,
}

impl Prerequisite {
    /// Everything that is needed, in the order in which it is tested.
    pub const ALL: [Self; 6] = [
        Self::Root,
        Self::Go,
        Self::CCompiler,
        Self::UtilLinux,
        Self::Namespaces,
        Self::Overlay,
    ];

    fn is_met(self) -> bool {
        match self {
            Self::Root => rustix::process::geteuid().is_root(),
            Self::Go => {
                output_of("go", &["version"]).as_deref().and_then(go_minor) >= Some(OLDEST_GO_MINOR)
            }
            Self::CCompiler => runs("cc", &["--version"]),
            Self::UtilLinux => ["unshare", "nsenter", "mount"]
                .iter()
                .all(|program| runs(program, &["--version"])),
            Self::Namespaces => runs(
                "unshare",
                &[
                    "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--fork", "true",
                ],
            ),
            Self::Overlay => {
                let known = || {
                    fs::read_to_string("/proc/filesystems")
                        .is_ok_and(|text| text.contains("\toverlay"))
                };
                known() || (runs("modprobe", &["overlay"]) && known())
            }
        }
    }
}

impl fmt::Display for Prerequisite {
    /// What is missing and how to get it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Root => "root: the cluster makes namespaces, mounts and cgroups; run the command as root (`sudo -E env PATH=\"$PATH\" …`)",
            Self::Go => "Go 1.21 or newer, which fetches the toolchain that Kubernetes is built with: https://go.dev/doc/install (the packages of Debian 13, Ubuntu 24.04 and Fedora do: `apt install golang-go` or `dnf install golang`)",
            Self::CCompiler => "a C compiler called `cc`, which runc needs: `apt install gcc libc6-dev` or `dnf install gcc`",
            Self::UtilLinux => "`unshare`, `nsenter` and `mount`: `apt install util-linux mount` or `dnf install util-linux`",
            Self::Namespaces => "namespaces: `unshare --mount --pid --net --uts --ipc --cgroup --fork true` fails here, as in a container that is not privileged; use a machine, a virtual machine or a privileged container",
            Self::Overlay => "the overlay file system, on which containers run: `modprobe overlay` (a kernel with CONFIG_OVERLAY_FS)",
        })
    }
}

/// Fails with everything that is missing.
pub fn check() -> Result<()> {
    report(Prerequisite::is_met)
}

fn report(is_met: impl Fn(Prerequisite) -> bool) -> Result<()> {
    let mut missing = vec![];
    for prerequisite in Prerequisite::ALL {
        // Without root and unshare there is no telling whether namespaces work.
        let cause_known = prerequisite == Prerequisite::Namespaces && !missing.is_empty();
        if !cause_known && !is_met(prerequisite) {
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
    bail!(
        "this machine lacks what a Kubernetes cluster needs:\n{}",
        lines.join("\n")
    )
}

/// Minor version in the output of `go version`: 26 of `go version go1.26.3 linux/amd64`.
fn go_minor(output: &str) -> Option<u32> {
    let version = output.split(' ').nth(2)?.strip_prefix("go1.")?;
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

fn output_of(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    String::from_utf8(output.stdout).ok()
}

fn runs(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_all_that_is_missing_at_once_and_how_to_get_it() {
        let message = report(|prerequisite| prerequisite == Prerequisite::Overlay)
            .unwrap_err()
            .to_string();
        for part in [
            "root",
            "https://go.dev/doc/install",
            "apt install gcc",
            "dnf install gcc",
            "apt install util-linux",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }

    #[test]
    fn a_missing_namespace_is_named_only_when_nothing_else_explains_it() {
        let unprivileged = report(|prerequisite| {
            !matches!(prerequisite, Prerequisite::Root | Prerequisite::Namespaces)
        });
        assert!(
            !unprivileged
                .unwrap_err()
                .to_string()
                .contains("privileged container")
        );
        let contained = report(|prerequisite| prerequisite != Prerequisite::Namespaces);
        assert!(
            contained
                .unwrap_err()
                .to_string()
                .contains("privileged container")
        );
    }

    #[test]
    fn reads_the_version_of_go() {
        assert_eq!(go_minor("go version go1.26.3 linux/amd64\n"), Some(26));
        assert_eq!(go_minor("go version go1.27rc1 linux/amd64\n"), Some(27));
        assert_eq!(go_minor("go: not found"), None);
    }

    #[test]
    fn a_complete_machine_passes() {
        report(|_| true).unwrap();
    }
}
