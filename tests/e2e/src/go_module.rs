//! Sources of Go modules, such as the custom resource definitions of other projects.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::Value;

/// Returns the directory of a module in this version (`path@version`), which is downloaded if the module cache lacks it.
/// `sum` pins its content.
///
/// # Errors
/// When the module cannot be downloaded, or has another content.
pub fn go_module(module: &str, sum: &str) -> Result<PathBuf> {
    let mut go = Command::new("go");
    go.args(["mod", "download", "-json", module])
        .current_dir(std::env::temp_dir())
        // The sum is compared here.
        .env("GONOSUMDB", "*")
        .env("GOFLAGS", "")
        .stdin(Stdio::null());
    let output = process::output(&mut go, Limit::BUILD)?;
    let answer: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("download {module}: {output:?}"))?;
    ensure!(
        answer["Sum"] == sum,
        "{module} has another content: {answer}"
    );
    let directory = answer["Dir"].as_str().context("no directory")?;
    Ok(directory.into())
}
