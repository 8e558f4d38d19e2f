//! `cargo xtask`: the one entry point for the project's chores.
//!
//! Each chore lives in the module that carries its name; this file only reads the command line.

mod bench;
mod cluster;
mod codegen;
mod demo;
mod deploy;
mod gpu;
mod image;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "drava's chores", long_about = None)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Show two pods sharing one simulated GPU on a real Kubernetes.
    Demo(demo::Args),
    /// Run everything that can be proved without a GPU.
    Test(test::Args),
    /// Start, stop and look into the real Kubernetes that the tests use.
    Cluster(cluster::Args),
    /// Measure what libvgpu keeps of its promises on a real GPU, where there is one.
    Gpu(gpu::Args),
    /// Measure, on the simulated card.
    Bench(bench::Args),
    /// Write drava's images as OCI archives.
    Image(image::Args),
    /// Generate the checked-in sources, or check that they are fresh.
    Codegen(codegen::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().chore {
        Chore::Demo(args) => demo::run(&args),
        Chore::Test(args) => test::run(&args),
        Chore::Cluster(args) => cluster::run(args),
        Chore::Gpu(args) => gpu::run(&args),
        Chore::Bench(args) => bench::run(&args),
        Chore::Image(args) => image::run(args),
        Chore::Codegen(args) => codegen::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The whole chain, without a backtrace: the reader is a user of the chore, not its author.
            eprintln!("error: {error}");
            error
                .chain()
                .skip(1)
                .for_each(|cause| eprintln!("  because: {cause}"));
            ExitCode::FAILURE
        }
    }
}
