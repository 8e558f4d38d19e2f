//! `gpu-suite` measures the limits of libvgpu from inside a limited process.
//!
//! `cargo xtask gpu` runs it with and without `libvgpu.so` and compares the results. Each subcommand is one measurement
//! and prints one JSON object. It runs on a real or simulated GPU and changes no GPU setting.

mod captures;
mod elastic;
mod entry_points;
mod events;
mod exports;
mod fault;
mod gemm;
mod gpu;
mod handles;
mod latency;
mod library;
mod loads;
mod lookup;
mod memory;
mod mix;
mod pointers;
mod slices;
mod train;
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
    Gpu,
    /// Resolve every known or exported function of the driver and of NVML
    EntryPoints,
    /// Allocate through every pointer to an allocating function
    Pointers,
    /// Allocate memory by one function until denied
    Memory(memory::Arguments),
    /// Load modules while another thread allocates
    Loads(loads::Arguments),
    /// Capture while something else is called
    Captures(captures::Arguments),
    /// Use a library while a kernel of another context waits
    Library(library::Arguments),
    /// Allocate and free by several functions at random
    Mix(mix::Arguments),
    /// Create and release objects of each kind repeatedly
    Handles(handles::Arguments),
    /// Launch while a kernel runs that may wait for it
    Wait(wait::Arguments),
    /// Launch after a stop of the process
    Stopped,
    /// Allocate on request while the limit changes
    Elastic,
    /// Keep the GPU busy and count the completed kernels
    Work(work::Arguments),
    /// Cause a fatal fault of a kernel, or launch until one stops this process
    Fault(fault::Arguments),
    /// Measure the time slices of this context and of others
    Slices(slices::Arguments),
    /// Measure short kernels by events
    Events(events::Arguments),
    /// Measure the cost of a launch for the calling thread
    Latency(latency::Arguments),
    /// Train step by step, in memory with known bytes
    Train(train::Arguments),
    /// Multiply matrices and compare with the host's result
    Gemm(gemm::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().measurement {
        Measurement::Gpu => gpu::run(),
        Measurement::EntryPoints => entry_points::run(),
        Measurement::Pointers => pointers::run(),
        Measurement::Memory(arguments) => memory::run(&arguments),
        Measurement::Loads(arguments) => loads::run(&arguments),
        Measurement::Captures(arguments) => captures::run(&arguments),
        Measurement::Library(arguments) => library::run(&arguments),
        Measurement::Mix(arguments) => mix::run(&arguments),
        Measurement::Handles(arguments) => handles::run(&arguments),
        Measurement::Wait(arguments) => wait::run(&arguments),
        Measurement::Stopped => wait::run_stopped(),
        Measurement::Elastic => elastic::run(),
        Measurement::Work(arguments) => work::run(&arguments),
        Measurement::Fault(arguments) => fault::run(&arguments),
        Measurement::Slices(arguments) => slices::run(&arguments),
        Measurement::Events(arguments) => events::run(&arguments),
        Measurement::Latency(arguments) => latency::run(&arguments),
        Measurement::Train(arguments) => train::run(&arguments),
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
