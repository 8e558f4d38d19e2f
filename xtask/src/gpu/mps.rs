//! A daemon of MPS for the first GPU, with the options of the node driver. It changes nothing of the GPU and ends with its value.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use serde::Deserialize;
use tempfile::TempDir;

use super::setup::{Running, Setup, is_installed};

const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Longest start of the daemon.
const START: Duration = Duration::from_secs(10);

/// Longest end of the daemon.
const STOP: Duration = Duration::from_secs(5);

const POLL: Duration = Duration::from_millis(20);

/// A running control daemon, with directories of its own. Programs find it by their environment only.
pub(super) struct Daemon<'a> {
    setup: &'a Setup,
    program: PathBuf,
    process: Child,
    directory: TempDir,
}

impl<'a> Daemon<'a> {
    /// # Errors
    /// Why MPS cannot be used here.
    pub(super) fn start(setup: &'a Setup) -> Result<Self> {
        let program = setup.mps_control();
        ensure!(
            is_installed(&program),
            "{} is not installed",
            program.display()
        );
        ensure!(is_root()?, "a daemon of MPS for all users needs root");
        let directory = tempfile::tempdir()?;
        for part in ["pipe", "log"] {
            fs::create_dir(directory.path().join(part))?;
        }
        let mut command = setup.program(None, &program);
        command
            .args(["-f", "-multiuser-server"])
            .env("CUDA_VISIBLE_DEVICES", setup.gpu()?.gpu()?)
            .env(PIPE_DIRECTORY, directory.path().join("pipe"))
            .env("CUDA_MPS_LOG_DIRECTORY", directory.path().join("log"))
            .env_remove(PERCENTAGE)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = command.spawn();
        let process = process.with_context(|| format!("cannot run {}", program.display()))?;
        let mut daemon = Self {
            setup,
            program,
            process,
            directory,
        };
        daemon.await_start()?;
        Ok(daemon)
    }

    fn await_start(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let percentage = self.command("get_default_active_thread_percentage");
            if percentage.is_ok_and(|answer| answer.trim().parse::<f64>().is_ok()) {
                return Ok(());
            }
            let ended = self.process.try_wait()?;
            if ended.is_some() || start.elapsed() >= START {
                let log = self.directory.path().join("log/control.log");
                let log = fs::read_to_string(log).unwrap_or_default();
                let last = log.trim().lines().next_back().unwrap_or("its log is empty");
                bail!("the MPS daemon does not start: {last}");
            }
            sleep(POLL);
        }
    }

    /// Makes a program a client of the daemon.
    pub(super) fn client(&self, mut command: Command) -> Command {
        // The daemon has one GPU, which is the first of its clients.
        command
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env(PIPE_DIRECTORY, self.directory.path().join("pipe"));
        command
    }

    /// Makes a program a client with a part of the multiprocessors.
    pub(super) fn limited(&self, command: Command, percent: u32) -> Command {
        let mut command = self.client(command);
        command.env(PERCENTAGE, percent.to_string());
        command
    }

    /// Gives the daemon a command, and returns its answer.
    fn command(&self, text: &str) -> Result<String> {
        let mut command = self.client(self.setup.program(None, &self.program));
        command.stdin(process::input(format!("{text}\n").as_bytes())?);
        let output = process::output(&mut command, Limit::total(STOP))?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // A daemon that does not answer is killed.
        let _ = self.command("quit -t 1");
        let start = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && start.elapsed() < STOP {
            sleep(POLL);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A daemon that the node driver's code starts: in a root and with shared memory of its own.
pub(super) struct OwnDaemon<'a> {
    setup: &'a Setup,
    program: Running,
    directories: Directories,
    _directory: TempDir,
}

/// First line of `gpu-node own-mps`.
#[derive(Debug, Deserialize)]
struct Directories {
    pipe: PathBuf,
    shm: PathBuf,
}

impl<'a> OwnDaemon<'a> {
    /// # Errors
    /// When the daemon does not start; the reason is on standard error.
    pub(super) fn start(setup: &'a Setup) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let mut command = Command::new(&setup.node);
        command
            .arg("own-mps")
            .arg(directory.path())
            .arg(setup.driver_root())
            .arg(setup.gpu()?.gpu()?);
        let mut program = Running::start(command)?;
        Ok(Self {
            setup,
            directories: program.json()?,
            program,
            _directory: directory,
        })
    }

    /// A client as in a container: with the shared memory of the daemon, and a part of the multiprocessors.
    pub(super) fn limited(&self, client: &Command, percent: u32) -> Command {
        const SHOW: &str = "mount --bind \"$0\" /dev/shm && exec \"$@\"";
        let mut command = self.setup.program(None, Path::new("unshare"));
        command
            .args(["--mount", "sh", "-c", SHOW])
            .arg(&self.directories.shm)
            .arg(client.get_program())
            .args(client.get_args())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env(PIPE_DIRECTORY, &self.directories.pipe)
            .env(PERCENTAGE, percent.to_string());
        command
    }

    /// Ends the daemon.
    ///
    /// # Errors
    /// When something of it is left.
    pub(super) fn end(self) -> Result<()> {
        self.program.end().map(drop)
    }
}

/// Whether this process has the rights of root.
fn is_root() -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mut users = status.lines().filter_map(|line| line.strip_prefix("Uid:"));
    let effective = users.next().and_then(|ids| ids.split_whitespace().nth(1));
    Ok(effective == Some("0"))
}
