//! Shared libraries that a program of this machine loads at start.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::process::{self, Limit};

/// Returns the paths of the libraries and the loader of `program`; none for a static program.
///
/// Runs the loader itself through ldd(1), so that its own search rules decide. The programs are drava's builds and the
/// host's, so running them is safe.
pub(crate) fn needed(program: &Path) -> Result<Vec<PathBuf>> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program).env("LC_ALL", "C").stdin(Stdio::null());
    let output = process::output(&mut ldd, Limit::REQUEST)
        .context("cannot run ldd, which is part of the C library's package (`apt install libc-bin`, `dnf install glibc-common`)")?;
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

/// Parses lines such as `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux-x86-64.so.2 (0x7f…)`.
fn parse(output: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = vec![];
    for line in output.lines() {
        let line = line.split(" (0x").next().unwrap_or(line).trim();
        let (name, path) = line.split_once(" => ").unwrap_or((line, line));
        if path == "not found" {
            bail!("library {name} is missing on this machine");
        }
        // The kernel's library (linux-vdso.so.1) has no path.
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
    fn reads_libraries_and_loader_without_vdso() {
        let output = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n";
        let expected = [
            PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"),
            PathBuf::from("/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(parse(output).unwrap(), expected);
    }

    #[test]
    fn names_missing_library() {
        let message = parse("\tlibnone.so.1 => not found\n")
            .unwrap_err()
            .to_string();
        assert!(message.contains("libnone.so.1"), "{message}");
    }
}
