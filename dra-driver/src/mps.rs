//! Daemons of MPS (CUDA Multi-Process Service) for shares with `computePolicy: spatial`.
//!
//! Each GPU with such shares has one control daemon of the NVIDIA driver, whose programs come from the driver root. It runs outside
//! the pod of the node driver, so that it survives an upgrade of drava, and in a mount namespace of its own, see [`process`].
//!
//! | Directory of the GPU | Content |
//! |---|---|
//! | `pipe` | sockets of the daemon; read-only in the containers |
//! | `shm` | memory that daemon and containers share, a tmpfs; `/dev/shm` of the containers |
//! | `log` | log of the daemon |
//! | `daemon.json` | its process, written before the daemon starts |
//!
//! All of it ends with the last spatial share of the GPU, or with a reboot.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::gpus::mps_directories::{self, UnsafeDirectory};
use crate::node::layout::Layout;
use crate::node::process::runs;
use crate::node::selinux::{LabelError, Labels};
use crate::node::tmpfs::Tmpfs;

mod log;
mod members;
pub mod process;

use log::ControlLog;

/// Pipe directory of the clients in containers, and of the daemon in its root: NVIDIA's default.
pub const PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";

/// Size of the memory that the programs of a GPU share.
const SHM_BYTES: u64 = 1 << 30;

/// Size from which on a log is emptied.
const LOG_BYTES: u64 = 8 << 20;

/// Log of the daemon's commands.
const CONTROL_LOG: &str = "control.log";

/// Files in that memory.
const SHM_INODES: u64 = 1 << 16;

/// Longest start of a daemon.
const START: Duration = Duration::from_secs(10);

/// Longest answer to a command.
const ANSWER: Duration = Duration::from_secs(3);

/// Longest end of a daemon whose programs are gone.
const STOP: Duration = Duration::from_secs(3);

/// Time between two looks at a process.
const POLL: Duration = Duration::from_millis(10);

/// End of the daemon's log in an error, bytes.
const LOG_TAIL: usize = 512;

/// MPS cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpsError {
    /// The daemon ended, or gave no answer, when it was started.
    #[error(
        "the MPS control daemon of GPU {gpu} does not start from the driver root ({reason}); computePolicy: spatial needs \
         nvidia-cuda-mps-control and nvidia-cuda-mps-server there"
    )]
    Start {
        /// UUID of the GPU.
        gpu: String,
        /// End of its log, or that it gives no answer.
        reason: String,
    },
    /// The daemon did not answer a command in time.
    #[error("the MPS control daemon of GPU {gpu} does not answer {command:?} in time")]
    NoAnswer {
        /// UUID of the GPU.
        gpu: String,
        /// The command.
        command: String,
    },
    /// A command failed, or could not be given.
    #[error("cannot give the MPS control daemon of GPU {gpu} the command {command:?}: {reason}")]
    Command {
        /// UUID of the GPU.
        gpu: String,
        /// The command.
        command: String,
        /// What happened.
        reason: String,
    },
    /// Another user could replace what programs of claims trust.
    #[error(transparent)]
    Unsafe(#[from] UnsafeDirectory),
    /// A file operation failed.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Operation.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A directory for containers did not get its label.
    #[error(transparent)]
    Label(#[from] LabelError),
}

/// Process of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Daemon {
    /// PID on the node.
    pid: u32,
    /// Start time, clock ticks since boot.
    start_time: u64,
}

/// State of the MPS server of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Server {
    /// The daemon has ended.
    NoDaemon,
    /// No program has used the GPU yet, or the server takes programs.
    Serving,
    /// A program had a fatal fault: all programs of the GPU get errors, and no new one is taken until all have ended.
    Fault,
    /// The daemon was told to quit: it takes no new program, and ends when all present ones have ended.
    Quitting,
}

/// The daemons of a node.
pub struct Daemons {
    layout: Layout,
    /// The node driver, which starts them; see [`process`].
    program: PathBuf,
    /// Driver root in this container.
    driver_root: PathBuf,
    /// Device root in this container, where the driver root has no device files.
    device_root: Option<PathBuf>,
    proc_root: PathBuf,
    labels: Labels,
    tmpfs: Arc<dyn Tmpfs>,
    /// What was read of the logs, by GPU.
    logs: Mutex<BTreeMap<String, ControlLog>>,
}

/// Where the daemons find the NVIDIA driver and the node.
#[derive(Debug, Clone)]
pub struct Roots {
    /// Driver root in this container.
    pub driver: PathBuf,
    /// Device root in this container, where the driver root has no device files.
    pub device: Option<PathBuf>,
    /// `/proc` of the node.
    pub proc: PathBuf,
}

impl Daemons {
    /// Returns the daemons of a node. `program` is the node driver.
    #[must_use]
    pub fn new(
        layout: Layout,
        program: PathBuf,
        roots: Roots,
        labels: Labels,
        tmpfs: Arc<dyn Tmpfs>,
    ) -> Self {
        Self {
            layout,
            program,
            driver_root: roots.driver,
            device_root: roots.device,
            proc_root: roots.proc,
            labels,
            tmpfs,
            logs: Mutex::default(),
        }
    }

    /// Ensures that the daemon of a GPU runs. Returns whether it was started. The caller holds the lock of the GPU.
    ///
    /// # Errors
    /// When it does not run; nothing of the first one stays then.
    pub fn ensure(&self, gpu: &str) -> Result<bool, MpsError> {
        self.check_owner(gpu)?;
        if self.running(gpu).is_some() {
            return Ok(false);
        }
        // Containers have the directories of a daemon that has ended, and its shared memory: both stay for the next one.
        let is_first = !self.layout.mps_gpu(gpu).exists();
        self.kill_members(gpu);
        self.tidy(gpu)?;
        self.start(gpu).inspect_err(|_| {
            if is_first {
                // On an error the next start, stop or look at the GPU clears the rest.
                let _ = self.stop(gpu);
            }
        })?;
        Ok(true)
    }

    /// Kills the daemon of a GPU and its servers, so that [`ensure`](Self::ensure) starts another one. The caller holds the lock of the
    /// GPU.
    pub fn kill(&self, gpu: &str) {
        if let Some(daemon) = self.running(gpu) {
            kill_if(daemon.pid, || self.is_running(daemon));
            self.await_end(daemon);
        }
        self.kill_members(gpu);
    }

    /// Kills what runs in the root of the daemon: its servers outlive it, with their contexts and their programs.
    fn kill_members(&self, gpu: &str) {
        let log = self.layout.mps_gpu(gpu).join("log");
        match members::kill(&self.proc_root, &log, STOP) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                gpu.uuid = gpu,
                "processes of the MPS daemon of a GPU do not end; the next daemon takes turns with them"
            ),
            Err(error) => tracing::warn!(
                gpu.uuid = gpu,
                %error,
                "cannot find the processes of the MPS daemon of a GPU; the next daemon may take turns with them"
            ),
        }
    }

    fn await_end(&self, daemon: Daemon) {
        let end = Instant::now() + STOP;
        while self.is_running(daemon) && Instant::now() < end {
            std::thread::sleep(POLL);
        }
    }

    /// Whether the daemon was told to quit, which root in a container can do. No command of MPS tells that a daemon
    /// takes no programs; its log does.
    fn was_told_to_quit(&self, gpu: &str) -> Result<bool, MpsError> {
        let path = self.control_log(gpu);
        let found = self.with_log(gpu, |log| log.was_told_to_quit(&path));
        found.map_err(|source| file("read", &path, source))
    }

    fn control_log(&self, gpu: &str) -> PathBuf {
        self.layout.mps_gpu(gpu).join("log").join(CONTROL_LOG)
    }

    fn with_log<T>(&self, gpu: &str, work: impl FnOnce(&mut ControlLog) -> T) -> T {
        // What was read of a log is valid after a panic.
        let logs = self.logs.lock();
        let mut logs = logs.unwrap_or_else(PoisonError::into_inner);
        work(logs.entry(gpu.to_owned()).or_default())
    }

    /// Ends the daemon of a GPU and removes its files. Succeeds without a daemon. The caller holds the lock of the GPU.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn stop(&self, gpu: &str) -> Result<(), MpsError> {
        if let Some(daemon) = self.running(gpu) {
            // A daemon that does not answer is killed.
            let _ = self.command(gpu, daemon, "quit -t 1");
            self.await_end(daemon);
        }
        self.kill(gpu);
        self.clear(gpu)
    }

    /// Returns the GPUs that have a daemon, or had one that was not stopped.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn gpus(&self) -> Result<Vec<String>, MpsError> {
        let dir = self.layout.mps();
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(file("list the MPS daemons in", &dir, source)),
        };
        let name = |entry: io::Result<fs::DirEntry>| {
            let entry = entry.map_err(|source| file("list the MPS daemons in", &dir, source))?;
            Ok(entry.file_name().to_string_lossy().into_owned())
        };
        entries.map(name).collect()
    }

    /// Returns the state of the server of a GPU.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn server(&self, gpu: &str) -> Result<Server, MpsError> {
        self.check_owner(gpu)?;
        let Some(daemon) = self.running(gpu) else {
            return Ok(Server::NoDaemon);
        };
        if self.was_told_to_quit(gpu)? {
            return Ok(Server::Quitting);
        }
        for server in self.servers(gpu, daemon)? {
            let status = self.command(gpu, daemon, &format!("get_server_status {server}"))?;
            if status.contains("FAULT") {
                return Ok(Server::Fault);
            }
        }
        Ok(Server::Serving)
    }

    /// Empties the logs of a GPU that have become large. The daemon writes several lines for each command and each client, into
    /// memory of the node.
    ///
    /// # Errors
    /// When a log cannot be emptied.
    pub fn trim_logs(&self, gpu: &str) -> Result<(), MpsError> {
        let logs = self.layout.mps_gpu(gpu).join("log");
        for entry in fs::read_dir(&logs).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_large = entry
                .metadata()
                .is_ok_and(|found| found.is_file() && found.len() > LOG_BYTES);
            if !is_large {
                continue;
            }
            let emptied = match path.ends_with(CONTROL_LOG) {
                true => self.with_log(gpu, |log| log.empty(&path, LOG_BYTES)),
                false => {
                    let log = File::options().write(true).open(&path);
                    log.and_then(|log| log.set_len(0))
                }
            };
            emptied.map_err(|source| file("empty", &path, source))?;
        }
        Ok(())
    }

    /// Ends the servers of a GPU although they have programs, so that new programs are taken again.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn end_servers(&self, gpu: &str) -> Result<(), MpsError> {
        let Some(daemon) = self.running(gpu) else {
            return Ok(());
        };
        for server in self.servers(gpu, daemon)? {
            self.command(gpu, daemon, &format!("shutdown_server {server} -f"))?;
        }
        Ok(())
    }

    /// Ends the work of a program of a GPU on its server, so that its end disturbs no other program. Returns within some `time`, also when
    /// the daemon does not answer, and does nothing for a program that is no client of MPS.
    ///
    /// # Errors
    /// When the daemon does not answer in time.
    pub fn terminate_client(&self, gpu: &str, pid: u32, time: Duration) -> Result<(), MpsError> {
        let Some(daemon) = self.running(gpu) else {
            return Ok(());
        };
        let end = Instant::now() + time;
        let ask = |command: &str| self.command_until(gpu, daemon, command, end);
        for server in pids(&ask("get_server_list")?) {
            let clients = ask(&format!("get_client_list {server}"))?;
            if pids(&clients).any(|client| client == pid) {
                ask(&format!("terminate_client {server} {pid}"))?;
            }
        }
        Ok(())
    }

    fn servers(&self, gpu: &str, daemon: Daemon) -> Result<Vec<u32>, MpsError> {
        let listed = self.command(gpu, daemon, "get_server_list")?;
        Ok(pids(&listed).collect())
    }

    fn start(&self, gpu: &str) -> Result<(), MpsError> {
        let dir = self.layout.mps_gpu(gpu);
        let (pipe, shm, log) = (dir.join("pipe"), dir.join("shm"), dir.join("log"));
        for created in [&pipe, &shm, &log] {
            let made = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(created);
            made.map_err(|source| file("create", created, source))?;
        }
        self.labels.ensure(&pipe)?;
        let mounted = self
            .tmpfs
            .is_mounted(&shm)
            .and_then(|is_mounted| match is_mounted {
                true => Ok(()),
                false => self.tmpfs.mount(&shm, SHM_BYTES, SHM_INODES),
            });
        mounted.map_err(|source| file("mount a tmpfs on", &shm, source))?;
        let output = log.join("daemon.log");
        // Appended, so that it begins anew after it was emptied.
        let open = || {
            let file = File::options().create(true).append(true).open(&output)?;
            Ok((file.try_clone()?, file))
        };
        let (stdout, stderr) =
            open().map_err(|source: io::Error| file("create", &output, source))?;
        let mut child = Command::new(&self.program)
            .arg(process::DAEMON)
            .args([&dir, &self.driver_root])
            .arg(self.device_root.as_deref().unwrap_or(Path::new("")))
            .arg(gpu)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .map_err(|source| file("start", &self.program, source))?;
        let failed = |reason: String| MpsError::Start {
            gpu: gpu.to_owned(),
            reason,
        };
        let end = Instant::now() + START;
        let started = loop {
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => {
                    break Err(failed(format!("{}: {status}", tail(&output))));
                }
                Err(error) => break Err(failed(error.to_string())),
            }
            let answer = self.running(gpu).map(|daemon| {
                // It answers without a server once it serves.
                self.command(gpu, daemon, "get_default_active_thread_percentage")
            });
            match answer {
                Some(Ok(_)) => break Ok(()),
                Some(Err(error)) if Instant::now() >= end => {
                    break Err(failed(error.to_string()));
                }
                None if Instant::now() >= end => break Err(failed("no process".to_owned())),
                Some(Err(_)) | None => std::thread::sleep(POLL),
            }
        };
        if started.is_err() {
            // Fails only for a process that has ended.
            let _ = child.kill();
        }
        // Its exit status is read by the driver that started it, as long as this driver lives.
        std::thread::spawn(move || child.wait());
        started
    }

    /// Checks that no other user can replace the sockets of a GPU, as far as its directories exist.
    fn check_owner(&self, gpu: &str) -> Result<(), MpsError> {
        mps_directories::check(&self.layout.mps())?;
        Ok(mps_directories::check_gpu(&self.layout.mps_gpu(gpu))?)
    }

    /// Removes what a daemon that has ended left in its directories, apart from the shared memory, which programs use too.
    fn tidy(&self, gpu: &str) -> Result<(), MpsError> {
        let dir = self.layout.mps_gpu(gpu);
        let removed = |path: &Path, removed: io::Result<()>| match removed {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(file("remove", path, source))
            }
            _ => Ok(()),
        };
        // The inode of a log that is removed can become that of the next one.
        self.with_log(gpu, |log| *log = ControlLog::default());
        let record = dir.join(process::RECORD);
        removed(&record, fs::remove_file(&record))?;
        for left in ["pipe", "log"].map(|name| dir.join(name)) {
            for entry in fs::read_dir(&left).into_iter().flatten().flatten() {
                let path = entry.path();
                let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
                removed(
                    &path,
                    match is_directory {
                        true => fs::remove_dir_all(&path),
                        false => fs::remove_file(&path),
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Removes the files of a GPU without a daemon.
    fn clear(&self, gpu: &str) -> Result<(), MpsError> {
        let dir = self.layout.mps_gpu(gpu);
        if !dir.exists() {
            return Ok(());
        }
        let shm = dir.join("shm");
        let unmount = || {
            // After a crash a mount can lie on another mount.
            while shm.exists() && self.tmpfs.is_mounted(&shm)? {
                self.tmpfs.unmount(&shm)?;
            }
            fs::remove_dir_all(&dir)
        };
        unmount().map_err(|source| file("remove", &dir, source))
    }

    /// Returns the daemon of a GPU, if it runs.
    pub fn running(&self, gpu: &str) -> Option<Daemon> {
        let path = self.layout.mps_gpu(gpu).join(process::RECORD);
        let daemon = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        self.is_running(daemon).then_some(daemon)
    }

    fn is_running(&self, daemon: Daemon) -> bool {
        runs(&self.proc_root, daemon.pid, daemon.start_time)
    }

    /// Returns the answer of the daemon to a command.
    fn command(&self, gpu: &str, daemon: Daemon, command: &str) -> Result<String, MpsError> {
        self.command_until(gpu, daemon, command, Instant::now() + ANSWER)
    }

    fn command_until(
        &self,
        gpu: &str,
        daemon: Daemon,
        command: &str,
        end: Instant,
    ) -> Result<String, MpsError> {
        let failed = |reason: String| MpsError::Command {
            gpu: gpu.to_owned(),
            command: command.to_owned(),
            reason,
        };
        let root = self.proc_root.join(daemon.pid.to_string()).join("root");
        let asked = || {
            let mut child = Command::new(&self.program)
                .arg(process::COMMAND)
                .arg(&root)
                .env_clear()
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()?;
            if let Some(mut stdin) = child.stdin.take() {
                // A program that does not read has ended, which its status says.
                let _ = writeln!(stdin, "{command}");
            }
            let status = loop {
                match child.try_wait()? {
                    Some(status) => break status,
                    None if Instant::now() >= end => {
                        let _ = child.kill();
                        let _ = child.wait();
                        return Err(io::Error::from(io::ErrorKind::TimedOut));
                    }
                    None => std::thread::sleep(POLL),
                }
            };
            let mut answer = String::new();
            if let Some(mut stdout) = child.stdout.take() {
                stdout.read_to_string(&mut answer)?;
            }
            Ok((status, answer))
        };
        match asked() {
            Ok((status, answer)) if status.success() => Ok(answer),
            Ok((status, answer)) => Err(failed(format!("{status}: {}", answer.trim()))),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(MpsError::NoAnswer {
                gpu: gpu.to_owned(),
                command: command.to_owned(),
            }),
            Err(error) => Err(failed(error.to_string())),
        }
    }
}

/// Returns the processes that a daemon lists.
fn pids(listed: &str) -> impl Iterator<Item = u32> {
    let words = listed.split_ascii_whitespace();
    words.filter_map(|pid| pid.parse().ok())
}

fn file(operation: &'static str, path: &Path, source: io::Error) -> MpsError {
    MpsError::File {
        operation,
        path: path.to_owned(),
        source,
    }
}

/// Kills a process if it is the one that is meant: another may have its PID by now. Nothing happens to one that has ended.
fn kill_if(pid: u32, is_meant: impl FnOnce() -> bool) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(Ok(process)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()))
        && is_meant()
    {
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

/// Returns the end of a log as one line.
fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let from = text.len().saturating_sub(LOG_TAIL);
    let text = String::from_utf8_lossy(text.get(from..).unwrap_or_default());
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ")
}
