//! Starts a machine for a test.
//!
//! Tests of the real libraries need the daemon, both cdylibs and their client programs, which cargo
//! does not build for a test (artifact dependencies are unstable). [`Machine::start`] runs `cargo
//! build` for these packages once per test process; with fresh builds this takes a fraction of a
//! second. `DRAVA_SIMULATOR_BUILT=DIR` names a directory with all of them, for tests without cargo.

use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use crate::control::{self, Answer};
use crate::kernel::{GpuStatus, MachineStatus};
use crate::root::DriverRoot;

mod mps;
pub mod python;

pub use mps::MpsDaemon;

/// Directory with `simulator-machine`, `libsimulator_cuda.so`, `libsimulator_nvml.so`, `cuda-probe`
/// and `gpu-view`.
pub const BUILT_VARIABLE: &str = "DRAVA_SIMULATOR_BUILT";

/// Time after which [`poll`] gives up. It only ends a test that hangs: a busy host takes long.
const HUNG_AFTER: Duration = Duration::from_secs(120);

/// Interval of [`poll`].
const POLL: Duration = Duration::from_millis(2);

/// Calls `condition` until it returns a value, for two minutes.
///
/// # Errors
/// That of `condition`, or if it returns no value in that time.
pub fn poll<T>(mut condition: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    let deadline = Instant::now() + HUNG_AFTER;
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        ensure!(Instant::now() < deadline, "not within {HUNG_AFTER:?}");
        std::thread::sleep(POLL);
    }
}

/// A running machine in a temporary directory. Dropping it kills the daemon.
#[derive(Debug)]
pub struct Machine {
    root: DriverRoot,
    daemon: Child,
    machine_file: PathBuf,
    _directory: TempDir,
}

impl Machine {
    /// Starts the machine of a YAML text, such as [`crate::description::H100X2`].
    ///
    /// # Errors
    /// If the daemon or the libraries cannot be built or started.
    pub fn start(yaml: &str) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir().context("cannot create a directory for the machine")?;
        let machine_file = directory.path().join("machine.yaml");
        std::fs::write(&machine_file, yaml)?;
        let root = DriverRoot::new(directory.path().join("root"));
        let daemon = serve(&machine_file, root.path())?;
        Ok(Self {
            root,
            daemon,
            machine_file,
            _directory: directory,
        })
    }

    /// The driver root.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Directory of `libcuda.so.1` and `libnvidia-ml.so.1`, for `LD_LIBRARY_PATH`.
    #[must_use]
    pub fn lib_dir(&self) -> PathBuf {
        self.root.library_dir()
    }

    /// Returns a command whose process finds the machine's libraries by name.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.lib_dir());
        command
    }

    /// Like [`Self::command`], for `cuda-probe` or `gpu-view`.
    ///
    /// # Errors
    /// If the program cannot be built.
    pub fn program(&self, name: &str) -> anyhow::Result<Command> {
        Ok(self.command(built()?.join(name)))
    }

    /// Returns the oracle's view of the machine.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn status(&self) -> anyhow::Result<MachineStatus> {
        match self.control(&control::Command::Status)? {
            Answer::Status(status) => Ok(status),
            answer => bail!("unexpected answer {answer:?}"),
        }
    }

    /// Sends a control command.
    ///
    /// # Errors
    /// If the daemon does not answer or rejects.
    pub fn control(&self, command: &control::Command) -> anyhow::Result<Answer> {
        Ok(control::send(&self.root, command)?)
    }

    /// Returns the oracle's view of one GPU.
    ///
    /// # Errors
    /// If the daemon does not answer or the GPU does not exist.
    pub fn gpu(&self, index: usize) -> anyhow::Result<GpuStatus> {
        let status = self.status()?;
        let gpu = status.gpus.into_iter().nth(index);
        gpu.with_context(|| format!("the machine has no GPU {index}"))
    }

    /// Waits until a GPU satisfies a condition, and returns it.
    ///
    /// # Errors
    /// As [`poll`]; the message shows the GPU.
    pub fn wait_for_gpu(
        &self,
        index: usize,
        expected: impl Fn(&GpuStatus) -> bool,
    ) -> anyhow::Result<GpuStatus> {
        let mut last = None;
        let as_expected = poll(|| {
            let gpu = last.insert(self.gpu(index)?);
            Ok(expected(gpu).then(|| gpu.clone()))
        });
        as_expected.with_context(|| format!("the GPU is {last:?}"))
    }

    /// Starts an MPS control daemon with options such as `-multiuser-server`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_mps(&self, options: &[&str]) -> anyhow::Result<MpsDaemon> {
        MpsDaemon::start(self.root(), options)
    }

    /// Starts the fabric manager, without which CUDA fails on machines with NVSwitches before Hopper.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_fabric_manager(&self) -> anyhow::Result<FabricManager> {
        FabricManager::start(self.root())
    }

    /// PID of the daemon.
    #[must_use]
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.id()
    }

    /// Kills the daemon and starts another one on the same root. As after a driver reload, no
    /// memory is held.
    ///
    /// # Errors
    /// If the new daemon cannot be started.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.daemon.kill()?;
        self.daemon.wait()?;
        self.daemon = serve(&self.machine_file, self.root.path())?;
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The test may have killed it.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn serve(machine_file: &Path, root: &Path) -> anyhow::Result<Child> {
    let built = built()?;
    let messages = machine_file.with_file_name("simulator-machine.log");
    let mut daemon = Command::new(built.join("simulator-machine"))
        .arg("serve")
        .args([Path::new("--machine"), machine_file])
        .args([Path::new("--root"), root])
        .args([Path::new("--libs"), built])
        .arg("--until-stdin-closes")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::from(File::create(&messages)?))
        .spawn()
        .context("cannot start simulator-machine")?;
    let stdout = daemon
        .stdout
        .take()
        .context("simulator-machine has no stdout")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line.trim() != "ready" {
        let status = daemon.wait()?;
        let messages = std::fs::read_to_string(messages)?;
        bail!("simulator-machine exited before it was ready ({status}): {messages}");
    }
    Ok(daemon)
}

/// Returns whether this process lacks root, which device files and MIG instances require, and then reports the present test
/// as skipped.
#[must_use]
pub fn skips_without_root() -> bool {
    let lacks_root = !rustix::process::geteuid().is_root();
    if lacks_root {
        skip("needs root");
    }
    lacks_root
}

/// Reports the present test as skipped.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // `eprintln!` would be hidden for a test that passes. No test fails because standard error is closed.
    let line = format!("skipped: {test}: {reason}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns the directory with daemon and libraries, built on the first call.
///
/// # Errors
/// If the build fails.
pub fn built() -> anyhow::Result<&'static Path> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn build() -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os(BUILT_VARIABLE) {
        return Ok(directory.into());
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workspace)
        .args(["build", "--quiet", "--message-format=json"])
        .args([
            "-p",
            "simulator-machine",
            "-p",
            "simulator-cuda",
            "-p",
            "simulator-nvml",
            "-p",
            "cuda-probe",
            "-p",
            "gpu-view",
        ])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo to build the simulated machine")?;
    ensure!(
        output.status.success(),
        "cargo could not build the simulated machine ({}); its message is above",
        output.status
    );
    let messages = String::from_utf8(output.stdout)?;
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| {
            let path = message.get("executable")?.as_str()?;
            path.ends_with("/simulator-machine")
                .then(|| PathBuf::from(path))
        })
        .context("cargo reported no path of simulator-machine")?;
    let directory = executable
        .parent()
        .context("the path of simulator-machine has no parent directory")?;
    Ok(directory.to_owned())
}

/// A running fabric manager. Dropping it kills the process.
#[derive(Debug)]
pub struct FabricManager(Child);

impl FabricManager {
    fn start(root: &Path) -> anyhow::Result<Self> {
        let process =
            crate::fabric_manager::start(root).context("cannot start the fabric manager")?;
        Ok(Self(process))
    }

    /// PID of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for FabricManager {
    fn drop(&mut self) {
        // It may have ended with the machine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
