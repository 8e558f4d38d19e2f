//! `gpu-suite`: what a program under libvgpu gets, measured from inside that program.
//!
//! `cargo xtask gpu` runs it with and without `libvgpu.so` preloaded and compares; each subcommand is one measurement and prints one
//! JSON object. It works on a real card and on the simulated one, and changes no setting of the card.

mod card;
mod entry_points;
mod gemm;
mod latency;
mod memory;
mod work;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures libvgpu's promises from inside a process and prints JSON.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Subcommand)]
enum Measurement {
    /// Which card and driver this is.
    Card,
    /// Where every entry point of the driver API leads, through `dlsym` and `cuGetProcAddress`.
    EntryPoints,
    /// Take memory on one path until it is refused.
    Memory(memory::Arguments),
    /// Keep the card busy and count what was done.
    Work(work::Arguments),
    /// What one launch costs the calling thread.
    Latency(latency::Arguments),
    /// Multiply matrices and compare with the host's result.
    Gemm(gemm::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().measurement {
        Measurement::Card => card::run(),
        Measurement::EntryPoints => entry_points::run(),
        Measurement::Memory(arguments) => memory::run(&arguments),
        Measurement::Work(arguments) => work::run(&arguments),
        Measurement::Latency(arguments) => latency::run(&arguments),
        Measurement::Gemm(arguments) => gemm::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-suite: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a result.
fn print(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}
