//! Builds the workspace's programs with cargo and returns their paths.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::oci::libraries;
use crate::process::{self, Limit, Stream};
use crate::progress::Progress;

/// Cargo profile of the product's programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Quick to build.
    #[default]
    Dev,
    /// As released.
    Release,
}

impl Profile {
    /// cargo's name of the profile.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dev => "dev",
            Self::Release => "release",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "dev" => Ok(Self::Dev),
            "release" => Ok(Self::Release),
            other => bail!("unknown profile {other:?}: choose dev or release"),
        }
    }
}

/// Root of the workspace.
#[must_use]
pub fn workspace_root() -> &'static Path {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir)
}

/// Cargo's output directory.
#[must_use]
pub fn target_dir() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace_root().join(dir),
        None => workspace_root().join("target"),
    }
}

/// Files built by cargo.
#[derive(Clone, Debug)]
pub struct Artifacts(Vec<PathBuf>);

impl Artifacts {
    /// Returns the program or library with the file name `name`.
    pub fn file(&self, name: &str) -> Result<&Path> {
        let found = self
            .0
            .iter()
            .find(|file| file.file_name().is_some_and(|file| file == name));
        found
            .map(PathBuf::as_path)
            .with_context(|| format!("cargo built no file {name}"))
    }
}

/// Builds the workspace's programs and libraries in one cargo call: another selection of packages has other features,
/// for which cargo would compile shared dependencies again.
pub fn build_workspace(profile: Profile) -> Result<Artifacts> {
    // The calling program must not be replaced while it runs; the interposer has a profile of its own.
    let args = [
        "--workspace",
        "--exclude=xtask",
        "--exclude=libvgpu",
        "--lib",
        "--bins",
        "--profile",
        profile.name(),
    ];
    let mut command = cargo();
    command.args(args);
    if profile == Profile::Dev {
        // The workspace has no examples. With `--examples` cargo counts the features of dev-dependencies, as it does
        // for tests; without them, cargo would compile tokio and its dependents a second time.
        command.arg("--examples");
    }
    build("Build the workspace", &mut command)
}

/// Builds only the programs of `packages`.
pub fn build_programs(packages: &[&str], profile: Profile) -> Result<Artifacts> {
    let packages: Vec<String> = packages
        .iter()
        .map(|package| format!("--package={package}"))
        .collect();
    build(
        "Build the programs",
        cargo()
            .args(packages)
            .args(["--bins", "--profile", profile.name()]),
    )
}

/// Builds the node's own programs: its init and the simulated GPU machine. The product is not among them, so a cluster
/// starts even where the product does not compile.
pub(crate) fn build_node() -> Result<Artifacts> {
    let packages = [
        "drava-cluster",
        "simulator-machine",
        "simulator-cuda",
        "simulator-nvml",
    ];
    let packages = packages.map(|package| format!("--package={package}"));
    build(
        "Build the node's own programs",
        cargo().args(packages).args(["--lib", "--bins"]),
    )
}

/// Builds the program `package` without shared libraries, so that it runs in any container, and returns its path.
pub fn build_static(package: &str, profile: Profile) -> Result<PathBuf> {
    let mut command = cargo();
    // With `--target`, the flags do not apply to build scripts and macros, which must stay dynamic.
    command.args([
        "--package",
        package,
        "--bins",
        "--profile",
        profile.name(),
        "--target",
        &host_triple()?,
    ]);
    let flags = env::var("RUSTFLAGS").unwrap_or_default();
    command
        .env("RUSTFLAGS", format!("{flags} -Ctarget-feature=+crt-static"))
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    let program = build(&format!("Build {package}"), &mut command)?
        .file(package)?
        .to_owned();
    let libraries = libraries::needed(&program)?;
    if !libraries.is_empty() {
        bail!(
            "{} must be static, but loads {libraries:?}",
            program.display()
        );
    }
    Ok(program)
}

/// Builds the interposer and returns its path.
pub fn build_preload() -> Result<PathBuf> {
    let built = build(
        "Build libvgpu",
        cargo().args(["--package", "libvgpu", "--profile", "preload"]),
    )?;
    Ok(built.file("libvgpu.so")?.to_owned())
}

fn cargo() -> Command {
    let mut command = cargo_command();
    command.args([
        "build",
        "--locked",
        "--quiet",
        "--message-format=json-render-diagnostics",
    ]);
    command
}

/// Returns cargo in the workspace, without the variables that `cargo run` sets for the calling program: build scripts watch
/// them, so all crates that depend on such a script would be compiled twice.
#[must_use]
pub fn cargo_command() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    for (name, _) in env::vars_os() {
        let is_of_package = |name: &str| {
            ["CARGO_PKG_", "CARGO_MANIFEST_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        };
        if name.to_str().is_some_and(is_of_package) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs cargo and returns every file that it built or found fresh.
fn build(title: &str, command: &mut Command) -> Result<Artifacts> {
    let step = Progress::step(title);
    let mut files = vec![];
    command.stdin(Stdio::null());
    let status = process::lines(command, Stream::Stdout, Limit::BUILD, |line| {
        let message: Value = serde_json::from_str(line).context("read a message of cargo")?;
        if let Some(name) = message.pointer("/target/name").and_then(Value::as_str) {
            step.note(format!("compiled {name}"));
        }
        files.extend(produced(&message));
        Ok(())
    })?;
    if !status.success() {
        let args: Vec<_> = command
            .get_args()
            .map(|arg| arg.to_string_lossy())
            .collect();
        bail!("`cargo {}` failed; its messages are above", args.join(" "));
    }
    step.done();
    Ok(Artifacts(files))
}

/// Returns the files of a `compiler-artifact` message.
fn produced(message: &Value) -> Vec<PathBuf> {
    let files = message
        .get("filenames")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    files.filter_map(Value::as_str).map(PathBuf::from).collect()
}

/// Returns rustc's default target.
fn host_triple() -> Result<String> {
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output = process::output(rustc.arg("-vV"), Limit::REQUEST)?;
    let text = String::from_utf8(output.stdout).context("read the output of rustc")?;
    let triple = text.lines().find_map(|line| line.strip_prefix("host: "));
    triple
        .map(str::to_owned)
        .context("`rustc -vV` does not name its host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_artifact_messages_of_cargo() {
        let message = serde_json::json!({"reason": "compiler-artifact", "filenames": ["/t/debug/drava-node"]});
        let built = Artifacts(produced(&message));
        assert_eq!(
            built.file("drava-node").unwrap(),
            Path::new("/t/debug/drava-node")
        );
        assert!(
            built
                .file("drava")
                .unwrap_err()
                .to_string()
                .contains("drava")
        );
        assert!(
            produced(&serde_json::json!({"reason": "build-finished", "success": true})).is_empty()
        );
    }
}
