//! Wrapper of runc for hosts without libseccomp.
//!
//! containerd adds a seccomp filter to every sandbox if the kernel supports filters; a runc without libseccomp rejects
//! it. The wrapper removes the filter from the bundle's configuration.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{Never, become_program};
use crate::config::TOOLS_DIR;

/// Replaces this process with runc and `args`.
pub(super) fn run(args: &[OsString]) -> Result<Never> {
    if args.iter().any(|arg| arg == "create")
        && let Some(bundle) = args.iter().skip_while(|arg| *arg != "--bundle").nth(1)
    {
        remove_filter(&Path::new(bundle).join("config.json"))?;
    }
    become_program(Command::new(format!("{TOOLS_DIR}/runc/runc")).args(args))
}

fn remove_filter(file: &Path) -> Result<()> {
    let text = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let mut config: Value =
        serde_json::from_slice(&text).with_context(|| format!("read {}", file.display()))?;
    let removed = config
        .get_mut("linux")
        .and_then(Value::as_object_mut)
        .and_then(|linux| linux.remove("seccomp"));
    if removed.is_some() {
        fs::write(file, serde_json::to_vec(&config)?)
            .with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_only_the_filter() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        fs::write(&file, r#"{"ociVersion":"1.2.0","linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO"},"cgroupsPath":"/a"}}"#).unwrap();
        remove_filter(&file).unwrap();
        assert_eq!(
            fs::read_to_string(&file).unwrap(),
            r#"{"linux":{"cgroupsPath":"/a"},"ociVersion":"1.2.0"}"#
        );
    }
}
