//! `cargo xtask`: the tasks of the project. Each task is a module; this file reads the command line.

mod bench;
mod cluster;
mod codegen;
mod demo;
mod deploy;
mod figures;
mod gpu;
mod image;
mod release;
mod screenshots;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Tasks of drava", long_about = None)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Show two pods that share one simulated GPU on a real Kubernetes.
    Demo(demo::Args),
    /// Run everything that can be proved without a GPU.
    Test(test::Args),
    /// Start, stop and inspect the Kubernetes of the tests.
    Cluster(cluster::Args),
    /// Check the guarantees of libvgpu on a real GPU, if there is one.
    Gpu(gpu::Args),
    /// Measure on the simulated GPU.
    Bench(bench::Args),
    /// Write the images of drava as OCI archives.
    Image(image::Args),
    /// Write the files of a release: images, plugin, charts, checksums, provenance.
    Release(release::Args),
    /// Generate the checked-in sources, or check that they are fresh.
    Codegen(codegen::Args),
    /// Print how large the crates are.
    Figures(figures::Args),
    /// Write the images of the console in the documents, with headless Chromium.
    Screenshots(screenshots::Args),
}

fn main() -> ExitCode {
    let outcome = end_programs_on_interrupt().and_then(|()| match Cli::parse().task {
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => test::run(&args),
        Task::Cluster(args) => cluster::run(args),
        Task::Gpu(args) => gpu::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::Image(args) => image::run(args),
        Task::Release(args) => release::run(&args),
        Task::Codegen(args) => codegen::run(&args),
        Task::Figures(args) => figures::run(&args),
        Task::Screenshots(args) => screenshots::run(&args),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            error
                .chain()
                .skip(1)
                .for_each(|cause| eprintln!("  because: {cause}"));
            ExitCode::FAILURE
        }
    }
}

/// Programs run in process groups of their own, which a terminal's Ctrl-C does not reach.
fn end_programs_on_interrupt() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            drava_cluster::process::kill_all();
            #[expect(clippy::exit, reason = "the user interrupts the task")]
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn accepts_command_line_of_every_task() {
        Cli::command().debug_assert();
    }
}
