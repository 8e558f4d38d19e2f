//! The card, the programs, and processes with and without a share of it.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use drava_cluster::{Profile, build_preload, build_programs, build_workspace};
use drava_vgpu_abi::{Cores, DeviceUuid, IdText, Limits, LimitsSpec, encode, paths};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;
use tempfile::TempDir;

/// What `gpu-suite card` says.
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

/// The programs, and the machine if it is simulated.
pub(crate) struct Setup {
    suite: PathBuf,
    viewer: PathBuf,
    preload: PathBuf,
    machine: Option<Machine>,
    /// Where the report goes.
    pub(crate) out: PathBuf,
}

/// One container's share of the first card, as the node driver would lay it out.
pub(crate) struct Share {
    directory: TempDir,
}

impl Setup {
    pub(crate) fn new(simulated: bool, out: &Path) -> Result<Self> {
        // Figures of the simulated card are nobody's; for it all is built as the tests have it.
        let built = if simulated {
            build_workspace(Profile::Dev)?
        } else {
            build_programs(&["gpu-suite", "gpu-view"], Profile::Release)?
        };
        let preload = build_preload()?;
        fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        Ok(Self {
            suite: built.file("gpu-suite")?.to_owned(),
            viewer: built.file("gpu-view")?.to_owned(),
            preload,
            machine: simulated.then(|| Machine::start(H100X2)).transpose()?,
            out: out.to_owned(),
        })
    }

    pub(crate) const fn is_simulated(&self) -> bool {
        self.machine.is_some()
    }

    /// The first card, or why there is none.
    pub(crate) fn card(&self) -> Result<Card> {
        json(self.suite(None, &["card"]))
    }

    /// A share of the first card.
    pub(crate) fn share(&self, limits: &Limits) -> Result<Share> {
        let directory = tempfile::tempdir()?;
        let share = directory.path().join("share");
        for part in [paths::LIMITS_DIR, paths::USAGE_DIR] {
            fs::create_dir_all(share.join(part))?;
        }
        let uuid: DeviceUuid = uuid(&self.card()?.uuid)?
            .parse()
            .map_err(|error| anyhow::anyhow!("read the card's UUID: {error}"))?;
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

    /// `gpu-suite` with these arguments, under a share or on the bare card.
    pub(crate) fn suite(&self, share: Option<&Share>, args: &[&str]) -> Command {
        let mut command = self.program(share, &self.suite);
        command.args(args);
        command
    }

    /// The viewer that stands for `nvidia-smi` on the simulated machine; `nvidia-smi` itself elsewhere.
    pub(crate) fn smi(&self, share: Option<&Share>) -> Command {
        match &self.machine {
            Some(_) => self.program(share, &self.viewer),
            None => self.program(share, Path::new("nvidia-smi")),
        }
    }

    /// Any program under a share or on the bare card.
    pub(crate) fn program(&self, share: Option<&Share>, program: &Path) -> Command {
        let mut command = match &self.machine {
            Some(machine) => machine.command(program),
            None => Command::new(program),
        };
        // Of several cards the first is used, in the order in which NVML counts as well.
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

/// Runs a program and reads the JSON that it prints.
pub(crate) fn json<T: DeserializeOwned>(mut command: Command) -> Result<T> {
    let output = command
        .output()
        .with_context(|| format!("run {}", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read {:?}", String::from_utf8_lossy(&output.stdout)))
}

/// Lets processes that said that they are ready begin together, and reads what each prints in the end.
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
    let mut outputs = Vec::new();
    for child in &mut children {
        let mut lines =
            std::io::BufReader::new(child.stdout.take().context("a program without stdout")?);
        let mut line = String::new();
        std::io::BufRead::read_line(&mut lines, &mut line)?;
        ensure!(
            line.trim() == "ready",
            "instead of being ready it said {line:?}"
        );
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
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "a program ended with {status}");
    }
    results
}

/// A UUID as NVML writes it.
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
