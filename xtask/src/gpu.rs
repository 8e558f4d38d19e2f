//! `cargo xtask gpu`: the guarantees of libvgpu, checked on a real GPU.
//!
//! Runs `gpu-suite` with and without libvgpu and compares. Everything runs in separate processes under a share of the first
//! GPU; no setting of the GPU is changed. With `--simulated` the same runs on the simulated GPU, which tests the suite itself.

mod agent;
mod compute;
mod entry_points;
mod events;
mod handles;
mod memory;
mod package;
mod programs;
mod report;
mod setup;
mod tools;
mod torch;
mod verdicts;
mod waits;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use drava_cluster::{Progress, target_dir};

use report::{Report, Row};
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
    #[arg(long, default_value_t = 100_000, value_name = "COUNT")]
    launches: usize,
    /// Seconds for which a process of a share is stopped.
    #[arg(long, default_value_t = 20.0, value_name = "SECONDS")]
    stop_seconds: f64,
    /// Directory of the report: gpu.json, gpu.md, entry-points.json with every address found, and nvml-memory.json and
    /// nvml-utilization.json with what NVML reported.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run only the parts with these names: entry-points, memory, events, compute, agent, programs.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
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

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The address of each entry point, and allocations through each.
    EntryPoints,
    /// Every allocation path up to its limit and against NVML, and handles that recur.
    Memory,
    /// Short kernels by events, against the GPU's clock.
    Events,
    /// Shares of GPU time, launches without credit, and the cost of a launch.
    Compute,
    /// Two tenants with the node agent.
    Agent,
    /// Programs of users: matrix products, PyTorch, static cudart, nvidia-smi, and NVIDIA's tools.
    Programs,
}

impl Part {
    const ALL: [Self; 6] = [
        Self::EntryPoints,
        Self::Memory,
        Self::Events,
        Self::Compute,
        Self::Agent,
        Self::Programs,
    ];

    const fn title(self) -> &'static str {
        match self {
            Self::EntryPoints => "Entry points",
            Self::Memory => "Memory, by allocation path",
            Self::Events => "Short kernels",
            Self::Compute => "GPU time",
            Self::Agent => "Two tenants with the node agent",
            Self::Programs => "Programs",
        }
    }

    fn rows(self, setup: &Setup, args: &Args, progress: &Progress) -> Result<Vec<Row>> {
        match self {
            Self::EntryPoints => entry_points::rows(setup),
            Self::Memory => memory::rows(setup, progress),
            Self::Events => events::rows(setup),
            Self::Compute => compute::rows(setup, args, progress),
            Self::Agent => agent::rows(setup, args.seconds, progress),
            Self::Programs => programs::rows(setup, progress),
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
    let card = match setup.card() {
        Ok(card) => card,
        Err(why) if !args.simulated => {
            println!(
                "no GPU that CUDA can use: {why:#}; nothing was measured.\n\
                 `cargo xtask gpu --simulated` runs the same on the simulated GPU."
            );
            return Ok(());
        }
        Err(why) => return Err(why),
    };
    println!("On {card}");
    let mut report = Report::new(
        card,
        args.simulated,
        package::commit(args.programs.as_deref())?,
    )?;
    let mut durations = Vec::new();
    for part in Part::ALL {
        if !args.only.is_empty() && !args.only.contains(&part) {
            continue;
        }
        let progress = Progress::step(part.title());
        let begun = Instant::now();
        let rows = part.rows(&setup, args, &progress)?;
        progress.done();
        durations.push((part, begun.elapsed()));
        report.add(part.title(), rows);
    }
    report.add("Duration", duration_rows(&durations));
    report.write(&out)?;
    println!("{}\nreport: {}", report.markdown(), out.display());
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
