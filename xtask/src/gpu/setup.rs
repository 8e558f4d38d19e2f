//! The GPU, the programs, and processes with and without a share.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::process::{self, Limit, Watchdog};
use drava_cluster::{Artifacts, Profile, build_preload, build_programs, build_workspace};
use drava_vgpu_abi::{Cores, DeviceUuid, IdText, Limits, LimitsSpec, encode, paths};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use simulator_machine::description::H100X2;
use simulator_machine::testing::{BUILT_VARIABLE, Machine};
use tempfile::TempDir;

/// Limit of one run of a program.
const LIMIT: Limit = Limit::total(Duration::from_secs(30 * 60));

/// Output of `gpu-suite card`.
#[derive(Debug, Clone, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Card {
    pub(crate) name: String,
    /// 32 hexadecimal digits.
    pub(crate) uuid: String,
    pub(crate) driver_version: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
}

impl std::fmt::Display for Card {
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
    preload: PathBuf,
    machine: Option<Machine>,
    /// Directory of the report.
    pub(crate) out: PathBuf,
}

/// One container's share of the first GPU, with the files that the node driver writes.
pub(crate) struct Share {
    directory: TempDir,
}

impl Setup {
    pub(crate) fn new(simulated: bool, out: &Path) -> Result<Self> {
        const PROGRAMS: [&str; 2] = ["gpu-suite", "gpu-view"];
        let find = |built: Artifacts| -> Result<[PathBuf; 2]> {
            let [suite, viewer] = PROGRAMS.map(|name| built.file(name).map(Path::to_owned));
            Ok([suite?, viewer?])
        };
        // Times of the simulated GPU mean nothing, so the programs of the tests do.
        let [suite, viewer] = match std::env::var_os(BUILT_VARIABLE) {
            Some(directory) if simulated => PROGRAMS.map(|name| Path::new(&directory).join(name)),
            _ if simulated => find(build_workspace(Profile::Dev)?)?,
            _ => find(build_programs(&PROGRAMS, Profile::Release)?)?,
        };
        let preload = build_preload()?;
        fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        Ok(Self {
            suite,
            viewer,
            preload,
            machine: simulated.then(|| Machine::start(H100X2)).transpose()?,
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
    pub(crate) fn card(&self) -> Result<Card> {
        json(self.suite(None, &["card"]))
    }

    /// Creates a share of the first GPU.
    pub(crate) fn share(&self, limits: &Limits) -> Result<Share> {
        let directory = tempfile::tempdir()?;
        let share = directory.path().join("share");
        for part in [paths::LIMITS_DIR, paths::USAGE_DIR] {
            fs::create_dir_all(share.join(part))?;
        }
        let uuid: DeviceUuid = uuid(&self.card()?.uuid)?
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
        Ok(Share { directory })
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
        if let Some(share) = share {
            command
                .env("LD_PRELOAD", &self.preload)
                .env("DRAVA_RUN_DIR", share.directory.path());
        }
        command
    }
}

/// Limits of a share with memory and a guarantee of GPU time.
pub(crate) fn limits(memory_bytes: u64, cores: u32) -> Result<Limits> {
    Ok(Limits {
        cores: Cores::new(cores).context("cores above 100")?,
        compute_policy: drava_vgpu_abi::ComputePolicy::Fixed,
        ..Limits::memory(memory_bytes)
    })
}

/// Runs a program and reads its JSON output.
pub(crate) fn json<T: DeserializeOwned>(mut command: Command) -> Result<T> {
    let output = process::output(&mut command, LIMIT)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read {:?}", String::from_utf8_lossy(&output.stdout)))
}

/// Starts programs, lets them begin together once each is ready, and reads the JSON output of each.
pub(crate) fn together<T: DeserializeOwned>(commands: Vec<Command>) -> Result<Vec<T>> {
    let mut children: Vec<Child> = commands
        .into_iter()
        .map(|mut command| {
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| format!("run {}", command.get_program().display()))
        })
        .collect::<Result<_>>()?;
    let watchdogs = children
        .iter()
        .map(|child| Watchdog::start(child, Duration::from_secs(30 * 60)))
        .collect::<Result<Vec<_>>>()?;
    let mut outputs = Vec::new();
    for child in &mut children {
        let mut lines =
            std::io::BufReader::new(child.stdout.take().context("a program without stdout")?);
        let mut line = String::new();
        std::io::BufRead::read_line(&mut lines, &mut line)?;
        ensure!(line.trim() == "ready", "expected \"ready\", read {line:?}");
        outputs.push(lines);
    }
    for child in &mut children {
        child
            .stdin
            .take()
            .context("a program without stdin")?
            .write_all(b"go\n")?;
    }
    let results = outputs
        .into_iter()
        .map(|mut lines| {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut lines, &mut line)?;
            serde_json::from_str(&line).with_context(|| format!("read {line:?}"))
        })
        .collect();
    drop(watchdogs);
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "a program failed: {status}");
    }
    results
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
