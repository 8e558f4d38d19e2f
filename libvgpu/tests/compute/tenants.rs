//! Tenants of one simulated card, each in a container with a share of its own, and what the card says they got.
//!
//! Also the ground that `cargo xtask bench` stands on, so nothing here is about tests.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use drava_mock_machine::description::H100X2;
use drava_mock_machine::testing::Machine;
use drava_vgpu_abi::contention;
use drava_vgpu_abi::snapshot::{ProcessUsage, ShareUsage, Snapshot};
use drava_vgpu_abi::{
    ComputePolicy, Cores, IdText, Limits, LimitsSpec, PageWrite, encode, own_time, paths, token,
    update,
};

/// UUID of the first card of the machine.
const CARD: &str = "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01";

/// A machine, and what tenants are made of.
pub struct Ground {
    machine: Machine,
    library: PathBuf,
    program: PathBuf,
    directory: tempfile::TempDir,
}

/// The limits of a share of that many percent.
pub fn share(policy: ComputePolicy, percent: u32) -> anyhow::Result<Limits> {
    Ok(Limits {
        memory_limit_bytes: None,
        cores: Cores::new(percent).context("a share has at most 100 percent")?,
        compute_policy: policy,
        ..Limits::memory(0)
    })
}

impl Ground {
    /// A machine with `library`, which is `libvgpu.so`, for its containers.
    pub fn new(library: &Path) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path())?;
        Ok(Self {
            machine: Machine::start(H100X2)?,
            library: library.to_owned(),
            program,
            directory,
        })
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Makes a share, as the driver does.
    pub fn share(&self, name: &str, limits: &Limits) -> anyhow::Result<Share> {
        let share = Share {
            container: self.directory.path().join(name),
        };
        let spec = LimitsSpec {
            claim_uid: IdText::new("claim").context("claim UID")?,
            share_id: IdText::new(name).context("share ID")?,
            device_uuid: CARD.parse().context("device UUID")?,
            limits: *limits,
        };
        for file in [share.page(), share.region()] {
            fs::create_dir_all(file.parent().context("a file lies in a directory")?)?;
        }
        fs::write(share.page(), encode(&spec))?;
        Ok(share)
    }

    /// A process of a share, or of nobody's, with a context on the first card.
    pub fn tenant(&self, share: Option<&Share>, route: &str) -> anyhow::Result<Tenant> {
        self.tenant_with(share, route, |_| {})
    }

    /// As [`Self::tenant`], with something about its process changed.
    pub fn tenant_with(
        &self,
        share: Option<&Share>,
        route: &str,
        change: impl FnOnce(&mut Command),
    ) -> anyhow::Result<Tenant> {
        let mut command = self.machine.command(&self.program);
        command.arg(route);
        // A container sees the cards that it has shares of.
        command.env("CUDA_VISIBLE_DEVICES", "0");
        if let Some(share) = share {
            command
                .env("LD_PRELOAD", &self.library)
                .env("DRAVA_RUN_DIR", &share.container);
        }
        change(&mut command);
        let mut tenant = Tenant::spawn(command)?;
        tenant.ok("init 0")?;
        Ok(tenant)
    }

    /// What each process has had of the first card so far, by PID, and when that was.
    pub fn used(&self, pids: &[u32]) -> anyhow::Result<(Vec<Duration>, Instant)> {
        let card = self.machine.card(0)?;
        let at = Instant::now();
        let of = |pid: &u32| {
            let process = card.processes.iter().find(|process| process.pid == *pid);
            Duration::from_nanos(process.map_or(0, |process| process.busy_nanos))
        };
        Ok((pids.iter().map(of).collect(), at))
    }

    /// For how long the first card ran anything so far.
    pub fn busy(&self) -> anyhow::Result<Duration> {
        Ok(Duration::from_nanos(self.machine.card(0)?.busy_nanos))
    }

    /// As [`Self::percents`], while neighbours' turns are taken out of what each share counts, by what the card says of
    /// each process: what the node agent does every 100 ms.
    pub fn percents_corrected(
        &self,
        tenants: &[&Tenant],
        shares: &[&Share],
        settle: Duration,
        measure: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let pids: Vec<u32> = tenants.iter().map(|tenant| tenant.pid()).collect();
        let mut correction = Correction::new(self, &pids, shares)?;
        let mut run = |length: Duration| -> anyhow::Result<()> {
            let end = Instant::now() + length;
            while Instant::now() < end {
                std::thread::sleep(Duration::from_millis(100));
                correction.step(self, &pids, shares)?;
            }
            Ok(())
        };
        run(settle)?;
        let (before, begun) = self.used(&pids)?;
        run(measure)?;
        let (after, ended) = self.used(&pids)?;
        let length = (ended - begun).as_secs_f64();
        let percent = |(after, before): (Duration, Duration)| {
            100.0 * after.saturating_sub(before).as_secs_f64() / length
        };
        Ok(after.into_iter().zip(before).map(percent).collect())
    }

    /// Percent of the card that each process gets for a while, after another while.
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

/// How much of what shares count is their own, kept up to date.
struct Correction {
    counted: Vec<Duration>,
    used: Vec<Duration>,
    /// Of each share: its part, and moving sums of what it counted and used, seconds.
    shares: Vec<(u32, f64, f64)>,
}

impl Correction {
    fn new(ground: &Ground, pids: &[u32], shares: &[&Share]) -> anyhow::Result<Self> {
        let counted = shares.iter().map(|share| share.counted());
        Ok(Self {
            counted: counted.collect::<anyhow::Result<_>>()?,
            used: ground.used(pids)?.0,
            shares: vec![(contention::ALL, 0.0, 0.0); shares.len()],
        })
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "microseconds of a few seconds"
    )]
    fn step(&mut self, ground: &Ground, pids: &[u32], shares: &[&Share]) -> anyhow::Result<()> {
        const MEMORY: f64 = 0.8;
        const GAIN: f64 = 0.3;
        let now_used = ground.used(pids)?.0;
        let states = self.shares.iter_mut().zip(&mut self.counted);
        let figures = self.used.iter_mut().zip(now_used);
        for ((((own, counted_sum, used_sum), counted), (used, now_used)), share) in
            states.zip(figures).zip(shares)
        {
            let now_counted = share.counted()?;
            let more_counted = now_counted.saturating_sub(*counted).as_secs_f64();
            *counted_sum = MEMORY * *counted_sum + more_counted;
            *used_sum = MEMORY * *used_sum + now_used.saturating_sub(*used).as_secs_f64();
            *counted = now_counted;
            *used = now_used;
            if *counted_sum > 0.0 {
                let all = f64::from(contention::ALL);
                let own_part = f64::from(*own) * (*used_sum / *counted_sum).powf(GAIN);
                *own = own_part.clamp(1.0, all) as u32;
            }
            share.set_own_time(*own)?;
        }
        Ok(())
    }
}

/// A share of the first card.
pub struct Share {
    container: PathBuf,
}

impl Share {
    /// Its limits page.
    pub fn page(&self) -> PathBuf {
        let limits = self.container.join("share").join(paths::LIMITS_DIR);
        limits.join(paths::PAGE_FILE)
    }

    /// Its usage region.
    pub fn region(&self) -> PathBuf {
        let usage = self.container.join("share").join(paths::USAGE_DIR);
        usage.join(paths::REGION_FILE)
    }

    /// Changes its limits in place, as the agent does.
    pub fn change(&self, limits: &Limits) -> anyhow::Result<()> {
        self.write(&update(&fs::read(self.page())?, limits)?)
    }

    /// Gives it the token until then, microseconds of `CLOCK_MONOTONIC`.
    pub fn give_token(&self, until_us: u64) -> anyhow::Result<()> {
        self.write(&[token(until_us)])
    }

    /// Tells it how much of what it measures is its own.
    pub fn set_own_time(&self, parts_per_million: u32) -> anyhow::Result<()> {
        self.write(&[own_time(parts_per_million)])
    }

    fn write(&self, writes: &[PageWrite]) -> anyhow::Result<()> {
        let page = fs::OpenOptions::new().write(true).open(self.page())?;
        for write in writes {
            page.write_all_at(write.bytes(), write.offset())?;
        }
        Ok(())
    }

    /// What its region says of it and of its processes.
    pub fn usage(&self) -> anyhow::Result<(ShareUsage, Vec<ProcessUsage>)> {
        let region = fs::read(self.region())?;
        let snapshot = Snapshot::decode(&region)?;
        Ok((snapshot.share(), snapshot.processes().collect()))
    }

    /// GPU time that its processes counted so far.
    pub fn counted(&self) -> anyhow::Result<Duration> {
        let (_, processes) = self.usage()?;
        let us = processes.iter().map(|process| process.gpu_time_us);
        Ok(Duration::from_micros(us.sum()))
    }
}

/// A process that does what it is told.
pub struct Tenant {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Tenant {
    fn spawn(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self {
            child,
            input,
            output,
        })
    }

    /// Its PID, by which the card knows it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command without waiting.
    pub fn send(&mut self, command: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        Ok(writeln!(input, "{command}")?)
    }

    /// The next answer.
    pub fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(
            !line.is_empty(),
            "the tenant ended: {:?}",
            self.child.try_wait()
        );
        Ok(line.trim().to_owned())
    }

    /// Sends a command that must succeed and returns the words behind the driver's result.
    pub fn say(&mut self, command: &str) -> anyhow::Result<Vec<String>> {
        self.send(command)?;
        let line = self.hear()?;
        let mut words = line.split_ascii_whitespace().map(String::from);
        if words.next().as_deref() != Some("0") {
            bail!("{command}: {line}");
        }
        Ok(words.collect())
    }

    /// As [`Self::say`], with numbers for an answer.
    pub fn ok(&mut self, command: &str) -> anyhow::Result<Vec<u64>> {
        let words = self.say(command)?;
        let numbers = words.iter().map(|word| word.parse());
        numbers
            .collect::<Result<_, _>>()
            .with_context(|| format!("{command}: {words:?}"))
    }

    /// How many launches it has made.
    pub fn launched(&mut self) -> anyhow::Result<u64> {
        let answer = self.ok("count")?;
        answer.first().copied().context("no count")
    }

    /// `kill -9`.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

fn compile(directory: &Path) -> anyhow::Result<PathBuf> {
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../libvgpu/tests/compute/tenant.c"
    );
    let program = directory.join("tenant");
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&program, Path::new(source)])
        .args(["-ldl", "-lpthread"])
        .status()
        .context("cannot run cc")?;
    ensure!(status.success(), "cc could not compile {source}");
    Ok(program)
}
