//! `gpu-suite` measures the limits of libvgpu from inside a limited process.
//!
//! `cargo xtask gpu` runs it with and without `libvgpu.so` and compares the results. Each subcommand is one measurement
//! and prints one JSON object. It runs on a real or simulated GPU and changes no GPU setting.

mod card;
mod entry_points;
mod events;
mod gemm;
mod handles;
mod latency;
mod memory;
mod slices;
mod wait;
mod work;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure the limits of libvgpu from inside a process and print JSON
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Subcommand)]
enum Measurement {
    /// Show the GPU and its driver
    Card,
    /// Resolve every entry point of the driver API with `dlsym` and `cuGetProcAddress`
    EntryPoints,
    /// Allocate memory by one function until denied
    Memory(memory::Arguments),
    /// Create, export and release physical memory repeatedly
    Handles(handles::Arguments),
    /// Launch while a long kernel runs
    Wait(wait::Arguments),
    /// Keep the GPU busy and count the completed kernels
    Work(work::Arguments),
    /// Measure the time slices of this context and of others
    Slices(slices::Arguments),
    /// Measure short kernels by events
    Events(events::Arguments),
    /// Measure the cost of a launch for the calling thread
    Latency(latency::Arguments),
    /// Multiply matrices and compare with the host's result
    Gemm(gemm::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().measurement {
        Measurement::Card => card::run(),
        Measurement::EntryPoints => entry_points::run(),
        Measurement::Memory(arguments) => memory::run(&arguments),
        Measurement::Handles(arguments) => handles::run(&arguments),
        Measurement::Wait(arguments) => wait::run(&arguments),
        Measurement::Work(arguments) => work::run(&arguments),
        Measurement::Slices(arguments) => slices::run(&arguments),
        Measurement::Events(arguments) => events::run(&arguments),
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
