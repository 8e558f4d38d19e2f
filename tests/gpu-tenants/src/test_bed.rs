//! A machine and its tenants.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use drava_vgpu_abi::{IdText, Limits, LimitsSpec, encode};
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

use crate::share::Share;
use crate::tenant::{Tenant, compile};

/// UUIDs of the machine's GPUs.
const GPUS: [&str; 2] = [
    "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01",
    "GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502",
];

/// The default machine with memory so slow that a fill of 4 KiB takes 10 ms and a copy 20 ms: fills and copies then
/// cost GPU time and almost no host time.
pub fn slow_memory() -> anyhow::Result<String> {
    const USUAL: &str = "bytesPerSecond: 3350000000000";
    const SLOW: &str = "bytesPerSecond: 409600";
    anyhow::ensure!(
        H100X2.contains(USUAL),
        "the machine has unexpected memory bandwidth"
    );
    Ok(H100X2.replace(USUAL, SLOW))
}

/// A machine, and the programs of its tenants.
pub struct TestBed {
    machine: Machine,
    library: PathBuf,
    program: PathBuf,
    directory: tempfile::TempDir,
}

impl TestBed {
    /// Starts the default machine, with `library` as the `libvgpu.so` of its containers.
    pub fn new(library: &Path) -> anyhow::Result<Self> {
        Self::with_machine(library, H100X2)
    }

    /// As [`Self::new`], with the GPUs of [`slow_memory`].
    pub fn with_slow_memory(library: &Path) -> anyhow::Result<Self> {
        Self::with_machine(library, &slow_memory()?)
    }

    /// As [`Self::new`], with a machine described in YAML.
    pub fn with_machine(library: &Path, machine: &str) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path())?;
        Ok(Self {
            machine: Machine::start(machine)?,
            library: library.to_owned(),
            program,
            directory,
        })
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Creates a share of the first GPU, as the node driver does, in a new container.
    pub fn share(&self, name: &str, limits: &Limits) -> anyhow::Result<Share> {
        self.make(
            Share::in_container(self.directory.path().join(name)),
            name,
            0,
            limits,
        )
    }

    /// Creates a share of each GPU, all in one container.
    pub fn share_of_each_gpu(&self, name: &str, limits: &Limits) -> anyhow::Result<[Share; 2]> {
        let make = |gpu: usize| {
            let share = format!("gpu-{gpu}");
            let container = self.directory.path().join(name);
            self.make(Share::named(container, &share), &share, gpu, limits)
        };
        Ok([make(0)?, make(1)?])
    }

    fn make(&self, share: Share, id: &str, gpu: usize, limits: &Limits) -> anyhow::Result<Share> {
        let gpu = GPUS.get(gpu).context("the machine has two GPUs")?;
        let spec = LimitsSpec {
            claim_uid: IdText::new("claim").context("claim UID")?,
            share_id: IdText::new(id).context("share ID")?,
            device_uuid: gpu.parse().context("device UUID")?,
            limits: *limits,
        };
        for file in [share.page(), share.region()] {
            fs::create_dir_all(file.parent().context("no parent directory")?)?;
        }
        fs::write(share.page(), encode(&spec))?;
        Ok(share)
    }

    /// Starts a process of a share, or without any share, with a context on the first GPU.
    pub fn tenant(&self, share: Option<&Share>, route: &str) -> anyhow::Result<Tenant> {
        self.tenant_with(share, route, |_| {})
    }

    /// As [`Self::tenant`], with changes to its command.
    pub fn tenant_with(
        &self,
        share: Option<&Share>,
        route: &str,
        change: impl FnOnce(&mut Command),
    ) -> anyhow::Result<Tenant> {
        let mut command = self.machine.command(&self.program);
        command.arg(route);
        // A container sees only the GPUs of its shares.
        command.env("CUDA_VISIBLE_DEVICES", "0");
        if let Some(share) = share {
            command
                .env("LD_PRELOAD", &self.library)
                .env("DRAVA_RUN_DIR", share.container());
        }
        change(&mut command);
        let mut tenant = Tenant::spawn(command)?;
        tenant.ok("init 0")?;
        Ok(tenant)
    }

    /// GPU time of each process on the first GPU, by PID, and the time of the reading.
    pub fn used(&self, pids: &[u32]) -> anyhow::Result<(Vec<Duration>, Instant)> {
        let gpu = self.machine.gpu(0)?;
        let at = Instant::now();
        let of = |pid: &u32| {
            let process = gpu.processes.iter().find(|process| process.pid == *pid);
            Duration::from_nanos(process.map_or(0, |process| process.busy_nanos))
        };
        Ok((pids.iter().map(of).collect(), at))
    }

    /// Busy time of the first GPU.
    pub fn busy(&self) -> anyhow::Result<Duration> {
        Ok(Duration::from_nanos(self.machine.gpu(0)?.busy_nanos))
    }

    /// Percent of the GPU that each process gets during `measure`, after waiting for `settle`.
    pub fn percents(
        &self,
        tenants: &[&Tenant],
        settle: Duration,
        measure: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let pids: Vec<u32> = tenants.iter().map(|tenant| tenant.pid()).collect();
        std::thread::sleep(settle);
        let (before, begun) = self.used(&pids)?;
        std::thread::sleep(measure);
        let (after, ended) = self.used(&pids)?;
        let length = (ended - begun).as_secs_f64();
        let percent = |(after, before): (Duration, Duration)| {
            100.0 * after.saturating_sub(before).as_secs_f64() / length
        };
        Ok(after.into_iter().zip(before).map(percent).collect())
    }
}
