//! The shared libraries that a program of this machine loads at its start.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::process::{self, Limit};

/// Paths of the libraries and the loader that `program` needs; none for a static one.
///
/// The loader itself is asked (by way of ldd(1)), so that its own search rules decide. The programs are our own builds
/// and the host's, never a stranger's.
pub(crate) fn needed(program: &Path) -> Result<Vec<PathBuf>> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program).env("LC_ALL", "C").stdin(Stdio::null());
    let output = process::output(&mut ldd, Limit::REQUEST)
        .context("run ldd, which comes with the C library (`apt install libc-bin`, `dnf install glibc-common`)")?;
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    if stderr.contains("not a dynamic executable") || stdout.contains("statically linked") {
        return Ok(vec![]);
    }
    if !output.status.success() {
        bail!("ldd {} failed: {stderr}", program.display());
    }
    parse(&stdout).with_context(|| format!("find the libraries of {}", program.display()))
}

/// Reads lines such as `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux-x86-64.so.2 (0x7f…)`.
fn parse(output: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = vec![];
    for line in output.lines() {
        let line = line.split(" (0x").next().unwrap_or(line).trim();
        let (name, path) = line.split_once(" => ").unwrap_or((line, line));
        if path == "not found" {
            bail!("{name} is not on this machine");
        }
        // The kernel's own library (linux-vdso.so.1) has no path.
        if path.starts_with('/') {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_libraries_and_loader_and_leaves_out_the_kernels() {
        let output = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n";
        let expected = [
            PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"),
            PathBuf::from("/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(parse(output).unwrap(), expected);
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let message = parse("\tlibnone.so.1 => not found\n")
            .unwrap_err()
            .to_string();
        assert!(message.contains("libnone.so.1"), "{message}");
    }
}
