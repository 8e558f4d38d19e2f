//! The GPU, the programs, and processes with and without a share.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::process::{self, Limit, Watchdog};
use drava_nvml::{GpuUuid, Library};
use drava_vgpu_abi::snapshot::Snapshot;
use drava_vgpu_abi::{Cores, DeviceUuid, IdText, Limits, LimitsSpec, encode, paths};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;
use tempfile::TempDir;

use super::Args;
use super::package::Programs;

/// Longest run of a program.
const LONGEST: Duration = Duration::from_secs(30 * 60);
const LIMIT: Limit = Limit::total(LONGEST);

/// Output of `gpu-suite gpu`.
#[derive(Debug, Clone, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// 32 hexadecimal digits.
    pub(crate) uuid: String,
    pub(crate) driver_version: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
}

impl Gpu {
    /// Its UUID as NVML writes it.
    pub(crate) fn gpu(&self) -> Result<String> {
        uuid(&self.uuid)
    }
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} MiB ({} free), {} multiprocessors, CUDA {}.{}",
            self.name,
            self.total_bytes >> 20,
            self.free_bytes >> 20,
            self.multiprocessors,
            self.driver_version / 1000,
            self.driver_version % 1000 / 10,
        )
    }
}

/// The built programs, and the simulated machine, if any.
pub(crate) struct Setup {
    suite: PathBuf,
    viewer: PathBuf,
    /// Runs the node agent.
    pub(crate) node: PathBuf,
    preload: PathBuf,
    /// Another library that limits processes.
    peer: Option<PathBuf>,
    machine: Option<Machine>,
    /// Root directory of the NVIDIA driver of a real GPU.
    driver_root: PathBuf,
    /// Directory of the report.
    pub(crate) out: PathBuf,
}

/// The library that limits the processes of a share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preload {
    /// libvgpu.
    Own,
    /// The one of `--peer`.
    Peer,
}

/// One container's share of the first GPU.
pub(crate) struct Share {
    limited_by: LimitedBy,
    /// Holds the files; `None` if another holds them.
    _directory: Option<TempDir>,
}

enum LimitedBy {
    /// The files that the node driver writes.
    Own {
        /// The directory that the container sees as `/run/drava`.
        container: PathBuf,
        region: PathBuf,
    },
    /// What an environment says: another library with its limits, or libvgpu without limits.
    Environment(Vec<(&'static str, OsString)>),
}

/// Where HAMi-core locks, which nothing creates outside of its images.
const PEER_LOCKS: &str = "/tmp/vgpulock";

impl Share {
    /// Returns a share that the node of an agent has prepared.
    pub(crate) const fn of_node(container: PathBuf, region: PathBuf) -> Self {
        Self {
            limited_by: LimitedBy::Own { container, region },
            _directory: None,
        }
    }

    /// Returns the memory, bytes, and the GPU time, µs, in the accounts of its processes.
    pub(crate) fn account(&self) -> Result<(u64, u64)> {
        let LimitedBy::Own { region: path, .. } = &self.limited_by else {
            bail!("no account of another library");
        };
        let region = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let snapshot = Snapshot::decode(&region)?;
        let gpu_time_us = snapshot.processes().map(|process| process.gpu_time_us);
        Ok((snapshot.share().total_bytes, gpu_time_us.sum()))
    }
}

impl Setup {
    pub(crate) fn new(args: &Args, out: &Path) -> Result<Self> {
        let Programs {
            suite,
            viewer,
            node,
            preload,
        } = match &args.programs {
            Some(directory) => Programs::packaged(directory)?,
            None => Programs::build(args.simulated)?,
        };
        fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        let peer = args.peer.as_deref().map(|peer| {
            fs::create_dir_all(PEER_LOCKS)
                .and_then(|()| fs::canonicalize(peer))
                .with_context(|| format!("--peer {}", peer.display()))
        });
        let peer = peer.transpose()?;
        Ok(Self {
            suite,
            viewer,
            node,
            preload,
            peer,
            machine: args.simulated.then(|| Machine::start(H100X2)).transpose()?,
            driver_root: args.driver_root.clone(),
            out: out.to_owned(),
        })
    }

    pub(crate) const fn is_simulated(&self) -> bool {
        self.machine.is_some()
    }

    /// Returns the first GPU.
    ///
    /// # Errors
    /// When there is no GPU that CUDA can use.
    pub(crate) fn gpu(&self) -> Result<Gpu> {
        json(self.suite(None, &["gpu"]))
    }

    /// Creates a share of the first GPU.
    pub(crate) fn share(&self, limits: &Limits) -> Result<Share> {
        let directory = tempfile::tempdir()?;
        let share = directory.path().join("share");
        for part in [paths::LIMITS_DIR, paths::USAGE_DIR] {
            fs::create_dir_all(share.join(part))?;
        }
        let uuid: DeviceUuid = self
            .gpu()?
            .gpu()?
            .parse()
            .map_err(|error| anyhow::anyhow!("cannot read the UUID of the GPU: {error}"))?;
        let spec = LimitsSpec {
            claim_uid: IdText::new("gpu-suite").context("a claim UID")?,
            share_id: IdText::new("share").context("a share ID")?,
            device_uuid: uuid,
            limits: *limits,
        };
        let page = share.join(paths::LIMITS_DIR).join(paths::PAGE_FILE);
        fs::write(&page, encode(&spec)).with_context(|| format!("write {}", page.display()))?;
        Ok(Share {
            limited_by: LimitedBy::Own {
                container: directory.path().to_owned(),
                region: share.join(paths::USAGE_DIR).join(paths::REGION_FILE),
            },
            _directory: Some(directory),
        })
    }

    /// No limits, with libvgpu.
    pub(crate) fn unlimited(&self) -> Share {
        let preload = ("LD_PRELOAD", self.preload.clone().into());
        Share {
            limited_by: LimitedBy::Environment(vec![preload]),
            _directory: None,
        }
    }

    pub(crate) const fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Creates a share of the first GPU that one of the libraries limits.
    pub(crate) fn preloaded(&self, preload: Preload, limits: &Limits) -> Result<Share> {
        match preload {
            Preload::Own => self.share(limits),
            Preload::Peer => self.peer_share(limits),
        }
    }

    /// Creates a share in the environment that HAMi-core's manual names.
    fn peer_share(&self, limits: &Limits) -> Result<Share> {
        let peer = self.peer.as_ref().context("no --peer")?;
        let directory = tempfile::tempdir()?;
        let bytes = limits.memory_limit_bytes.context("no limit of memory")?;
        let mut environment = vec![
            ("LD_PRELOAD", peer.into()),
            // Where it finds its own functions.
            ("CUDA_REDIRECT", peer.into()),
            ("CUDA_DEVICE_MEMORY_LIMIT", bytes.to_string().into()),
            (
                "CUDA_DEVICE_MEMORY_SHARED_CACHE",
                directory.path().join("cache").into(),
            ),
            ("LIBCUDA_LOG_LEVEL", "0".into()),
        ];
        let cores = limits.cores.percent();
        if cores > 0 {
            environment.push(("CUDA_DEVICE_SM_LIMIT", cores.to_string().into()));
        }
        Ok(Share {
            limited_by: LimitedBy::Environment(environment),
            _directory: Some(directory),
        })
    }

    /// Root directory of the NVIDIA driver.
    pub(crate) fn driver_root(&self) -> &Path {
        self.machine
            .as_ref()
            .map_or(&self.driver_root, |machine| machine.root())
    }

    /// The control program of MPS in the driver root; where that is `/`, the one that a shell would find.
    pub(crate) fn mps_control(&self) -> PathBuf {
        const PROGRAM: &str = "nvidia-cuda-mps-control";
        match self.driver_root() {
            root if root == Path::new("/") => PROGRAM.into(),
            root => root.join("usr/bin").join(PROGRAM),
        }
    }

    /// Loads NVML, and returns it with the first GPU.
    pub(crate) fn nvml(&self) -> Result<(Library, GpuUuid)> {
        let library = Library::open(&drava_nvml::find(self.driver_root())?)?;
        Ok((library, GpuUuid::new(self.gpu()?.gpu()?)))
    }

    /// Writes raw data beside the report.
    pub(crate) fn save(&self, name: &str, data: &serde_json::Value) -> Result<()> {
        let path = self.out.join(name);
        let text = serde_json::to_string_pretty(data)? + "\n";
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    /// `gpu-suite` with these arguments, with or without a share.
    pub(crate) fn suite(&self, share: Option<&Share>, args: &[&str]) -> Command {
        let mut command = self.program(share, &self.suite);
        command.args(args);
        command
    }

    /// `nvidia-smi`; on the simulated machine the project's viewer.
    pub(crate) fn smi(&self, share: Option<&Share>) -> Command {
        match &self.machine {
            Some(_) => self.program(share, &self.viewer),
            None => self.program(share, Path::new("nvidia-smi")),
        }
    }

    /// A program, with or without a share.
    pub(crate) fn program(&self, share: Option<&Share>, program: &Path) -> Command {
        let mut command = match &self.machine {
            Some(machine) => machine.command(program),
            None => Command::new(program),
        };
        // The first GPU of CUDA is then the first of NVML.
        command
            .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            .stdin(Stdio::null());
        match share.map(|share| &share.limited_by) {
            None => {}
            Some(LimitedBy::Own { container, .. }) => {
                command
                    .env("LD_PRELOAD", &self.preload)
                    .env("DRAVA_RUN_DIR", container);
            }
            Some(LimitedBy::Environment(environment)) => {
                command.envs(environment.iter().map(|(name, value)| (name, value)));
            }
        }
        command
    }
}

/// Limits of a share with memory and a guarantee of GPU time; of memory only without one, as the node driver writes them:
/// launches of other shares are metered.
pub(crate) fn limits(memory_bytes: u64, cores: u32) -> Result<Limits> {
    let memory = Limits::memory(memory_bytes);
    if cores == 0 {
        return Ok(memory);
    }
    Ok(Limits {
        cores: Cores::new(cores).context("cores above 100")?,
        compute_policy: drava_vgpu_abi::ComputePolicy::Fixed,
        ..memory
    })
}

/// Runs a program and reads its JSON output.
pub(crate) fn json<T: DeserializeOwned>(command: Command) -> Result<T> {
    json_within(command, LIMIT)
}

/// The same with a limit of its own.
pub(crate) fn json_within<T: DeserializeOwned>(mut command: Command, limit: Limit) -> Result<T> {
    let output = process::output(&mut command, limit)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read {:?}", String::from_utf8_lossy(&output.stdout)))
}

/// A program that exchanges lines with its caller. It ends when its stdin closes.
pub(crate) struct Running {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    watchdog: Watchdog,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {}", command.get_program().display()))?;
        let watchdog = Watchdog::start(&child, LONGEST)?;
        Ok(Self {
            stdin: child.stdin.take().context("a program without stdin")?,
            stdout: BufReader::new(child.stdout.take().context("a program without stdout")?),
            child,
            watchdog,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    pub(crate) fn send(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.stdin, "{line}")?)
    }

    /// Reads a line.
    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Reads a line of JSON.
    pub(crate) fn json<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.line()?;
        if line.is_empty() {
            bail!("a program ended: {}", self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| format!("read {line:?}"))
    }

    /// Kills the program.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Closes stdin, and returns the last line.
    pub(crate) fn end(mut self) -> Result<String> {
        drop(self.stdin);
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        drop(self.watchdog);
        let status = self.child.wait()?;
        ensure!(status.success(), "a program failed: {status}");
        Ok(line.trim().to_owned())
    }
}

/// Starts programs, each of which is then ready to begin.
pub(crate) fn start_all(commands: Vec<Command>) -> Result<Vec<Running>> {
    let started: Result<Vec<Running>> = commands.into_iter().map(Running::start).collect();
    let mut started = started?;
    for program in &mut started {
        let line = program.line()?;
        ensure!(line == "ready", "expected \"ready\", read {line:?}");
    }
    Ok(started)
}

/// Lets programs begin together.
pub(crate) fn go(programs: &mut [Running]) -> Result<()> {
    programs
        .iter_mut()
        .try_for_each(|program| program.send("go"))
}

/// Runs programs together, and reads the JSON output of each.
pub(crate) fn together<T: DeserializeOwned>(commands: Vec<Command>) -> Result<Vec<T>> {
    let mut programs = start_all(commands)?;
    go(&mut programs)?;
    let results = programs.iter_mut().map(Running::json).collect();
    programs
        .into_iter()
        .try_for_each(|program| program.end().map(drop))?;
    results
}

/// Whether a program is installed.
pub(crate) fn is_installed(program: &Path) -> bool {
    let mut which = Command::new("which");
    which.arg(program).stdin(Stdio::null());
    process::output(&mut which, Limit::REQUEST).is_ok_and(|output| output.status.success())
}

/// A UUID in the form of NVML.
fn uuid(digits: &str) -> Result<String> {
    let part = |from: usize, to: usize| {
        digits
            .get(from..to)
            .with_context(|| format!("{digits:?} is not a UUID"))
    };
    Ok(format!(
        "GPU-{}-{}-{}-{}-{}",
        part(0, 8)?,
        part(8, 12)?,
        part(12, 16)?,
        part(16, 20)?,
        part(20, 32)?
    ))
}
