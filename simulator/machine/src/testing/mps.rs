//! An MPS control daemon for a test.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use crate::mps::{LOG_VARIABLE, PIPE_VARIABLE};
use crate::root::MPS_CONTROL;

use super::poll;

/// A running MPS control daemon with a pipe directory of its own. Dropping it kills the daemon; its servers end with the machine.
#[derive(Debug)]
pub struct MpsDaemon {
    program: PathBuf,
    process: Child,
    directory: TempDir,
}

impl MpsDaemon {
    pub(super) fn start(root: &Path, options: &[&str]) -> anyhow::Result<Self> {
        use std::os::unix::fs::PermissionsExt;

        let program = root.join("usr/bin").join(MPS_CONTROL);
        let directory = tempfile::tempdir().context("cannot create the pipe directory")?;
        // Clients of other users connect too.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        let mut command = Command::new(&program);
        command.env_remove("CUDA_VISIBLE_DEVICES");
        command.env(LOG_VARIABLE, directory.path().join("log"));
        command.arg("-f");
        for option in options {
            match option.split_once('=') {
                Some((variable, value)) => command.env(variable, value),
                None => command.arg(option),
            };
        }
        let process = command
            .env(PIPE_VARIABLE, directory.path().join("pipe"))
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start the MPS control daemon")?;
        let mut daemon = Self {
            program,
            process,
            directory,
        };
        poll(|| {
            ensure!(daemon.process.try_wait()?.is_none(), "the daemon has ended");
            Ok(daemon
                .shell("get_default_active_thread_percentage")?
                .status
                .success()
                .then_some(()))
        })?;
        Ok(daemon)
    }

    /// Directory of its socket.
    #[must_use]
    pub fn pipe_directory(&self) -> PathBuf {
        self.directory.path().join("pipe")
    }

    /// Text of a log file: `control.log` or `server.log`.
    ///
    /// # Errors
    /// If there is none.
    pub fn log(&self, name: &str) -> anyhow::Result<String> {
        Ok(std::fs::read_to_string(
            self.directory.path().join("log").join(name),
        )?)
    }

    /// Lets the process of a command find the daemon.
    pub fn serve<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env(PIPE_VARIABLE, self.pipe_directory())
    }

    /// Process of the daemon.
    pub fn process(&mut self) -> &mut Child {
        &mut self.process
    }

    /// Returns the answer of the daemon to a command of its shell.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn command(&self, command: &str) -> anyhow::Result<String> {
        let output = self.shell(command)?;
        ensure!(output.status.success(), "{command}: {output:?}");
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    /// Returns the result of the daemon's shell for a command.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn shell(&self, command: &str) -> anyhow::Result<Output> {
        let mut shell = Command::new(&self.program);
        self.serve(&mut shell);
        let mut shell = shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = shell.stdin.take().context("no standard input")?;
        // Without a daemon the shell ends at once.
        let _ = writeln!(input, "{command}");
        drop(input);
        Ok(shell.wait_with_output()?)
    }

    /// Returns the PID of the only server.
    ///
    /// # Errors
    /// If there is none, or several.
    pub fn server(&self) -> anyhow::Result<u32> {
        let listed = self.command("get_server_list")?;
        listed
            .parse()
            .with_context(|| format!("servers: {listed:?}"))
    }

    /// Returns the state of the only server.
    ///
    /// # Errors
    /// If there is none, or several.
    pub fn status(&self) -> anyhow::Result<String> {
        self.command(&format!("get_server_status {}", self.server()?))
    }
}

impl Drop for MpsDaemon {
    fn drop(&mut self) {
        // The test may have ended it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
