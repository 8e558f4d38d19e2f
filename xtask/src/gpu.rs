//! `cargo xtask gpu`: the guarantees of libvgpu, checked on a real GPU.
//!
//! Runs `gpu-suite` with and without libvgpu and compares. Everything runs in separate processes under a share of the first
//! GPU; no setting of the GPU is changed. With `--simulated` the same runs on the simulated GPU, which tests the suite itself.

mod agent;
mod captures;
mod compute;
mod elastic;
mod entry_points;
mod events;
mod handles;
mod launches;
mod loads;
mod memory;
mod mix;
mod mps;
mod node;
mod package;
mod programs;
mod report;
mod rows;
mod setup;
mod spatial;
mod suspend;
mod tools;
mod torch;
mod verdicts;
mod waits;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use drava_cluster::{Progress, target_dir};

use report::{Report, Row};
use rows::{Rows, Selection};
use setup::Setup;

/// Command line of `cargo xtask gpu`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Use the simulated GPU instead of a real one.
    #[arg(long)]
    simulated: bool,
    /// Seconds of each measurement of a share of GPU time.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Launches of each measurement of the cost of a launch.
    #[arg(long, default_value_t = 20_000, value_name = "COUNT")]
    launches: usize,
    /// Seconds for which a process of a share is stopped.
    #[arg(long, default_value_t = 20.0, value_name = "SECONDS")]
    stop_seconds: f64,
    /// Directory of the report: gpu.json, gpu.md, entry-points.json with every address found, and nvml-memory.json and
    /// nvml-utilization.json with what NVML reported.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seconds of the mixed load whose account is compared with NVML: 180, or 2 on the simulated GPU.
    #[arg(long, value_name = "SECONDS")]
    mix_seconds: Option<f64>,
    /// Run only the parts with these names (loads, account, launches, entry-points, memory, events, compute, agent,
    /// elastic, spatial, suspend, programs), and rows whose titles begin so.
    #[arg(long, value_delimiter = ',', value_name = "PART|ROW")]
    only: Vec<String>,
    /// Another library to preload, for a column of its own in the rows of memory, shares and launches. It gets the variables
    /// of HAMi-core.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Build the programs and copy them to a directory, for a machine with a GPU and without a Rust toolchain; there, run
    /// `DIR/xtask gpu --programs DIR`.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["programs", "simulated"])]
    package: Option<PathBuf>,
    /// Use the programs of a directory that `--package` wrote, instead of building them.
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    /// Root directory of the NVIDIA driver of the real GPU.
    #[arg(long, value_name = "DIR", default_value = "/")]
    driver_root: PathBuf,
}

/// Parts, in the order in which they run: first what hardware alone decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Loads of modules beside allocations, captures beside other calls, and a library beside a kernel that waits.
    Loads,
    /// The account of a mixed load against NVML.
    Account,
    /// The cost of a launch, and kernels that a program awaits one by one.
    Launches,
    /// The address of each entry point, and allocations through each.
    EntryPoints,
    /// Every allocation path up to its limit and against NVML, and handles that recur.
    Memory,
    /// Short kernels by events, against the GPU's clock.
    Events,
    /// Shares of GPU time, and launches without credit.
    Compute,
    /// Two tenants with the node agent.
    Agent,
    /// Shares that grow, and memory that is lent and taken back.
    Elastic,
    /// Two clients of MPS against two tenants that take turns.
    Spatial,
    /// Trainings that are suspended and resumed.
    Suspend,
    /// Programs of users: matrix products, PyTorch, static cudart, nvidia-smi, and NVIDIA's tools.
    Programs,
}

impl Part {
    const ALL: [Self; 12] = [
        Self::Loads,
        Self::Account,
        Self::Launches,
        Self::EntryPoints,
        Self::Memory,
        Self::Events,
        Self::Compute,
        Self::Agent,
        Self::Elastic,
        Self::Spatial,
        Self::Suspend,
        Self::Programs,
    ];

    const fn title(self) -> &'static str {
        match self {
            Self::Loads => "Loads and captures",
            Self::Account => "Account",
            Self::Launches => "Launches",
            Self::EntryPoints => "Entry points",
            Self::Memory => "Memory, by allocation path",
            Self::Events => "Short kernels",
            Self::Compute => "GPU time",
            Self::Agent => "Two tenants with the node agent",
            Self::Elastic => "Memory that changes while programs run",
            Self::Spatial => "Spatial shares",
            Self::Suspend => "Suspended shares",
            Self::Programs => "Programs",
        }
    }

    fn run(self, setup: &Setup, args: &Args, rows: &mut Rows<'_>) -> Result<()> {
        match self {
            Self::Loads => {
                loads::rows(setup, rows)?;
                captures::rows(setup, rows)
            }
            Self::Account => {
                let seconds = if args.simulated { 2.0 } else { 180.0 };
                mix::rows(setup, args.mix_seconds.unwrap_or(seconds), rows)
            }
            Self::Launches => launches::rows(setup, args, rows),
            Self::EntryPoints => entry_points::rows(setup, rows),
            Self::Memory => memory::rows(setup, rows),
            Self::Events => events::rows(setup, rows),
            Self::Compute => compute::rows(setup, args, rows),
            Self::Agent => agent::rows(setup, args.seconds, rows),
            Self::Elastic => elastic::rows(setup, rows),
            Self::Spatial => spatial::rows(setup, args.seconds, rows),
            Self::Suspend => suspend::rows(setup, rows),
            Self::Programs => programs::rows(setup, rows),
        }
    }
}

const NO_DRIVER: &str =
    "no GPU that CUDA can use: no NVIDIA driver is loaded; nothing was measured.
`cargo xtask gpu --simulated` runs the same on the simulated GPU.";

/// Whether this machine has an NVIDIA driver. Without one, the release build of the suite is not worth its minutes.
fn has_driver() -> bool {
    ["/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg"]
        .iter()
        .any(|path| std::path::Path::new(path).exists())
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(directory) = &args.package {
        package::write(directory)?;
        let directory = directory.display();
        println!(
            "packaged; on the machine with the GPU: {directory}/xtask gpu --programs {directory}"
        );
        return Ok(());
    }
    let out = args.out.clone().unwrap_or_else(|| target_dir().join("gpu"));
    if !args.simulated && !has_driver() {
        println!("{NO_DRIVER}");
        return Ok(());
    }
    let setup = Setup::new(args, &out)?;
    let gpu = match setup.gpu() {
        Ok(gpu) => gpu,
        Err(why) if !args.simulated => {
            println!(
                "no GPU that CUDA can use: {why:#}; nothing was measured.\n\
                 `cargo xtask gpu --simulated` runs the same on the simulated GPU."
            );
            return Ok(());
        }
        Err(why) => return Err(why),
    };
    println!("On {gpu}");
    let commit = package::commit(args.programs.as_deref())?;
    let mut report = Report::new(gpu, args, commit)?;
    let selection = Selection::new(&args.only);
    let mut durations = Vec::new();
    for part in Part::ALL {
        if !selection.may_have(part) {
            continue;
        }
        let progress = Progress::step(part.title());
        let begun = Instant::now();
        let mut rows = Rows {
            part,
            selection: &selection,
            report: &mut report,
            progress: &progress,
            out: &out,
            has_peer: setup.has_peer(),
        };
        part.run(&setup, args, &mut rows)?;
        progress.done();
        if report.has(part.title()) {
            durations.push((part, begun.elapsed()));
        }
    }
    report.add("Duration", duration_rows(&durations));
    report.write(&out)?;
    println!("{}\nreport: {}", report.markdown(), out.display());
    selection.demand(&report)?;
    report.verdict()
}

/// Longest time of all parts.
const LONGEST: Duration = Duration::from_secs(30 * 60);

/// The time of each part. Only a run of all parts has a goal.
fn duration_rows(durations: &[(Part, Duration)]) -> Vec<Row> {
    let parts = durations.iter();
    let mut rows: Vec<Row> = parts
        .map(|(part, time)| Row::measured(part.title(), format!("{:.0} s", time.as_secs_f64())))
        .collect();
    let total: Duration = durations.iter().map(|(_, time)| time).sum();
    let detail = format!("{:.0} s", total.as_secs_f64());
    rows.push(if durations.len() == Part::ALL.len() {
        Row::checked("all parts, under 30 minutes", total < LONGEST, detail)
    } else {
        Row::measured("these parts", detail)
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::report::Outcome;
    use super::{LONGEST, Part, duration_rows};

    #[test]
    fn limits_duration_of_all_parts() {
        let each = LONGEST / u32::try_from(Part::ALL.len()).unwrap_or(1);
        let held = |parts: &[Part], each| {
            let durations: Vec<_> = parts.iter().map(|part| (*part, each)).collect();
            let rows = duration_rows(&durations);
            assert_eq!(rows.len(), parts.len() + 1);
            match rows.last().map(|row| &row.outcome) {
                Some(Outcome::Checked { held, .. }) => Some(*held),
                _ => None,
            }
        };
        assert_eq!(held(&Part::ALL, each / 2), Some(true));
        assert_eq!(held(&Part::ALL, each * 2), Some(false));
        assert_eq!(held(&[Part::Memory], LONGEST * 2), None);
    }
}
