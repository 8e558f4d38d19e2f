//! Trainings that are suspended and resumed: the same loss, the speed of both directions, the first kernel of another program, and
//! no leak over many cycles.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use drava_nvml::GpuLibrary as _;
use drava_nvml::Memory;
use serde::Deserialize;

use super::node::{Moved, Node};
use super::report::Row;
use super::rows::Rows;
use super::setup::{Running, Setup};
use super::torch::has_torch;

/// Memory of the trainings, GiB.
const SIZES_GIB: [u64; 3] = [5, 20, 60];

/// The same on the simulated GPU, which keeps it in memory of the host, MiB.
const SIMULATED_MIB: [u64; 3] = [64, 128, 256];

/// Memory of a program beside its known bytes, MiB.
const EXTRA_MIB: u64 = 1536;

/// Steps before a suspension, and after it.
const STEPS: usize = 3;

const GOAL_GB_PER_S: f64 = 4.0;
const GOAL_FIRST_KERNEL: Duration = Duration::from_secs(10);

/// Cycles, and the part by which the host memory of the program may grow after the first of them, percent.
const CYCLES: usize = 20;
const LEAK_PERCENT: u64 = 5;

/// A step that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Step {
    loss: String,
    wrong: usize,
}

/// Steps of PyTorch, with the protocol of `gpu-suite train`.
const TORCH: &str = r#"
import json, struct, sys, torch
torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
mib = int(sys.argv[1])
ballast = [torch.full((64 << 20,), float(i % 250), device="cuda") for i in range(mib // 256)]
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    x = torch.randn(256, 512, device="cuda")
    loss = (model(x) - x.roll(1, 1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    wrong = sum(bool((t[-1024:] != float(i % 250)).any()) for i, t in enumerate(ballast))
    print(json.dumps({"loss": struct.pack(">f", loss.item()).hex(), "wrong": wrong}), flush=True)
    if not sys.stdin.readline():
        break
"#;

/// A program that trains.
#[derive(Clone, Copy)]
enum Trainer {
    Cuda,
    Torch,
}

impl Trainer {
    const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA",
            Self::Torch => "PyTorch",
        }
    }

    fn command(self, setup: &Setup, node: &Node, share: usize, mib: u64) -> Result<Command> {
        let share = node.shares.get(share).context("a share")?;
        let mib = mib.to_string();
        Ok(match self {
            Self::Cuda => setup.suite(Some(share), &["train", "--mib", &mib]),
            Self::Torch => {
                let mut command = setup.program(Some(share), Path::new("python3"));
                command.args(["-c", TORCH, &mib]);
                command.env("CUBLAS_WORKSPACE_CONFIG", ":4096:8");
                command
            }
        })
    }
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let total_mib = setup.gpu()?.total_bytes >> 20;
    let sizes = match setup.is_simulated() {
        true => SIMULATED_MIB,
        false => SIZES_GIB.map(|gib| gib << 10),
    };
    for trainer in [Trainer::Cuda, Trainer::Torch] {
        for mib in sizes {
            let title = format!("{} with {mib} MiB, suspended and resumed", trainer.name());
            rows.run(&title, || {
                if mib + 2 * EXTRA_MIB > total_mib {
                    return Ok(vec![Row::not_run(
                        title.as_str(),
                        "the GPU has less memory",
                    )]);
                }
                if matches!(trainer, Trainer::Torch) && !has_torch(setup) {
                    let why = "python3 has no torch that can use the GPU";
                    return Ok(vec![Row::not_run(title.as_str(), why)]);
                }
                once(setup, trainer, mib, &title)
            })?;
        }
    }
    let largest = sizes
        .into_iter()
        .filter(|mib| 2 * mib + 4 * EXTRA_MIB > total_mib);
    let largest = largest.filter(|mib| mib + 2 * EXTRA_MIB <= total_mib).max();
    let large = largest.or(sizes.first().copied()).context("no size")?;
    rows.run("first kernel of another program", || {
        Ok(vec![first_kernel(setup, large)?])
    })?;
    let small = sizes.first().copied().context("no size")?;
    rows.run("20 cycles", || cycles(setup, small))?;
    rows.run("delivery shim", || {
        let why = "the stubs need the root file system of a container; `preload` is used above";
        Ok(vec![Row::not_run("delivery shim", why)])
    })
}

fn node(setup: &Setup, mib: u64) -> Result<Node> {
    Node::start(setup, [50; 2], (mib + EXTRA_MIB) << 20)
}

fn start(
    setup: &Setup,
    node: &mut Node,
    share: usize,
    trainer: Trainer,
    mib: u64,
) -> Result<(Running, Step)> {
    let mut program = Running::start(trainer.command(setup, node, share, mib)?)?;
    let number = u32::try_from(share)? + 1;
    node.add_tenant(number, program.pid())?;
    let first = program.json()?;
    Ok((program, first))
}

fn steps(program: &mut Running, count: usize, taken: &mut Vec<Step>) -> Result<()> {
    for _ in 0..count {
        program.send("step")?;
        taken.push(program.json()?);
    }
    Ok(())
}

fn used_bytes(setup: &Setup) -> Result<u64> {
    let (library, gpu) = setup.nvml()?;
    match library.memory(&gpu)? {
        Memory::Dedicated { used_bytes, .. } => Ok(used_bytes),
        Memory::NotSupported => anyhow::bail!("NVML shows no memory of the GPU"),
    }
}

/// One training that is suspended after some steps, against one that is not.
fn once(setup: &Setup, trainer: Trainer, mib: u64, title: &str) -> Result<Vec<Row>> {
    let mut node = node(setup, mib)?;
    let (mut program, first) = start(setup, &mut node, 0, trainer, mib)?;
    let mut expected = vec![first];
    steps(&mut program, 2 * STEPS, &mut expected)?;
    program.end()?;
    let before = used_bytes(setup)?;
    let (mut program, first) = start(setup, &mut node, 0, trainer, mib)?;
    let mut taken = vec![first];
    steps(&mut program, STEPS, &mut taken)?;
    let saved = node.suspend(1)?;
    let freed = used_bytes(setup)?;
    let restored = node.resume(1)?;
    steps(&mut program, STEPS, &mut taken)?;
    program.end()?;
    node.end()?;
    let wrong: usize = taken.iter().map(|step| step.wrong).sum();
    let losses = format!(
        "{} of {} losses equal, {wrong} wrong blocks",
        taken
            .iter()
            .zip(&expected)
            .filter(|(one, other)| one == other)
            .count(),
        expected.len()
    );
    let speed = |moved: &Moved| {
        let bytes =
            f64::from(u32::try_from(saved.bytes >> 20).unwrap_or(u32::MAX)) * f64::from(1 << 20);
        bytes / 1e9 / moved.copying_seconds.max(1e-9)
    };
    let speeds = [speed(&saved), speed(&restored)];
    let detail = format!(
        "{:.1} GB/s to host memory within {:.2} s, {:.1} GB/s back within {:.2} s",
        speeds[0], saved.seconds, speeds[1], restored.seconds
    );
    let speed_title = format!("{title}, speed");
    Ok(vec![
        Row::checked(
            format!("{title}, loss to the last digit"),
            taken == expected && wrong == 0,
            losses,
        ),
        Row::checked(
            format!("{title}, memory by NVML"),
            freed <= before,
            format!(
                "{} MiB used while suspended, {} MiB before",
                freed >> 20,
                before >> 20
            ),
        ),
        // The simulated machine copies nothing.
        match setup.is_simulated() {
            true => Row::measured(speed_title, detail),
            false => Row::checked(
                speed_title,
                speeds.iter().all(|speed| *speed >= GOAL_GB_PER_S),
                detail,
            ),
        },
    ])
}

/// From the order to suspend a share to the first kernel of another program in its memory. A pod adds its own start.
fn first_kernel(setup: &Setup, mib: u64) -> Result<Row> {
    let mut node = node(setup, mib)?;
    let (mut low, _) = start(setup, &mut node, 0, Trainer::Cuda, mib)?;
    let begun = Instant::now();
    node.suspend(1)?;
    let (high, step) = start(setup, &mut node, 1, Trainer::Cuda, mib)?;
    let elapsed = begun.elapsed();
    ensure!(
        step.wrong == 0,
        "other bytes in the memory of the new program"
    );
    high.end()?;
    node.resume(1)?;
    let mut taken = Vec::new();
    steps(&mut low, 1, &mut taken)?;
    low.end()?;
    node.end()?;
    let is_same = taken.iter().all(|step| step.wrong == 0);
    Ok(Row::checked(
        "first kernel of another program",
        elapsed <= GOAL_FIRST_KERNEL && is_same,
        format!("{:.2} s with {mib} MiB each", elapsed.as_secs_f64()),
    ))
}

/// Host memory of a process, KiB.
fn resident_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no VmRSS")?.parse()?)
}

fn cycles(setup: &Setup, mib: u64) -> Result<Vec<Row>> {
    let mut node = node(setup, mib)?;
    let (mut program, _) = start(setup, &mut node, 0, Trainer::Cuda, mib)?;
    let mut taken = Vec::new();
    let (mut resident, mut used) = (Vec::new(), Vec::new());
    for _ in 0..CYCLES {
        node.suspend(1)?;
        node.resume(1)?;
        steps(&mut program, 1, &mut taken)?;
        resident.push(resident_kib(program.pid())?);
        used.push(used_bytes(setup)?);
    }
    program.end()?;
    node.end()?;
    let ends = |values: &[u64]| Some((*values.first()?, *values.last()?));
    let (first, last) = ends(&resident).context("no cycle")?;
    let (gpu_first, gpu_last) = ends(&used).context("no cycle")?;
    let wrong: usize = taken.iter().map(|step| step.wrong).sum();
    Ok(vec![
        Row::checked(
            "20 cycles, bytes",
            wrong == 0,
            format!("{wrong} wrong blocks"),
        ),
        Row::checked(
            "20 cycles, memory of the GPU",
            gpu_last <= gpu_first,
            format!(
                "{} MiB after the first, {} MiB after the last",
                gpu_first >> 20,
                gpu_last >> 20
            ),
        ),
        Row::checked(
            "20 cycles, memory of the host",
            last <= first + first * LEAK_PERCENT / 100,
            format!(
                "{} MiB after the first, {} MiB after the last",
                first >> 10,
                last >> 10
            ),
        ),
    ])
}
