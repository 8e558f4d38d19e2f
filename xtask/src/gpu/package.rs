//! The programs of the suite: built here, or packaged for a machine with a GPU and without a Rust toolchain.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Artifacts, Profile, build_preload, build_programs, build_workspace};
use simulator_machine::testing::BUILT_VARIABLE;

/// File with the commit of packaged programs.
const COMMIT: &str = "commit";

const NAMES: [&str; 3] = ["gpu-suite", "gpu-view", "gpu-node"];

const PRELOAD: &str = "libvgpu.so";

/// Programs of the suite.
pub(crate) struct Programs {
    pub(crate) suite: PathBuf,
    pub(crate) viewer: PathBuf,
    /// Runs the node agent.
    pub(crate) node: PathBuf,
    pub(crate) preload: PathBuf,
}

impl Programs {
    /// Returns the programs that [`write()`] packaged.
    ///
    /// # Errors
    /// When one of them is missing; names it.
    pub(crate) fn packaged(directory: &Path) -> Result<Self> {
        let programs = Self::in_directory(directory);
        let Self {
            suite,
            viewer,
            node,
            preload,
        } = &programs;
        for file in [suite, viewer, node, preload] {
            ensure!(
                file.is_file(),
                "{} is missing; `cargo xtask gpu --package {}` writes it",
                file.display(),
                directory.display()
            );
        }
        Ok(programs)
    }

    fn in_directory(directory: &Path) -> Self {
        let [suite, viewer, node] = NAMES.map(|name| directory.join(name));
        Self {
            suite,
            viewer,
            node,
            preload: directory.join(PRELOAD),
        }
    }

    /// Builds the programs. Times of the simulated GPU mean nothing, so the programs of the tests do for it.
    pub(crate) fn build(simulated: bool) -> Result<Self> {
        let find = |built: Artifacts| -> Result<[PathBuf; 3]> {
            let [suite, viewer, node] = NAMES.map(|name| built.file(name).map(Path::to_owned));
            Ok([suite?, viewer?, node?])
        };
        let [suite, viewer, node] = match std::env::var_os(BUILT_VARIABLE) {
            Some(directory) if simulated => NAMES.map(|name| Path::new(&directory).join(name)),
            _ if simulated => find(build_workspace(Profile::Dev)?)?,
            _ => find(build_programs(&NAMES, Profile::Release)?)?,
        };
        Ok(Self {
            suite,
            viewer,
            node,
            preload: build_preload()?,
        })
    }
}

/// Builds the programs and copies them with this program to `directory`.
pub(crate) fn write(directory: &Path) -> Result<()> {
    let programs = Programs::build(false)?;
    let packaged = Programs::in_directory(directory);
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let own = std::env::current_exe()?;
    for (from, to) in [
        (&own, &directory.join("xtask")),
        (&programs.suite, &packaged.suite),
        (&programs.viewer, &packaged.viewer),
        (&programs.node, &packaged.node),
        (&programs.preload, &packaged.preload),
    ] {
        fs::copy(from, to)
            .with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    }
    let commit = directory.join(COMMIT);
    fs::write(&commit, workspace_commit()? + "\n")
        .with_context(|| format!("write {}", commit.display()))
}

/// Returns the commit of packaged programs, or of the workspace.
pub(crate) fn commit(directory: Option<&Path>) -> Result<String> {
    let Some(directory) = directory else {
        return workspace_commit();
    };
    let path = directory.join(COMMIT);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Returns the commit of the workspace.
fn workspace_commit() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty"]);
    output_of(git.current_dir(drava_cluster::workspace_root()))
}

/// Returns the output of a program, without the end of its last line.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let output = process::output(command.stdin(Stdio::null()), Limit::REQUEST)?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
