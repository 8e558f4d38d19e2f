//! Measurements of the node agent with `libvgpu.so` on a simulated machine: its cost, and GPU time and latency of shares.
//!
//! `cargo bench -p drava-dra-driver --bench agent -- MEASUREMENT…` prints each measured row as a JSON object. `cargo xtask
//! bench agent` and `cargo xtask bench share-agent` write the rows to pages.

mod cost;
mod latency;
mod node;
mod reclaim;
mod two_shares;

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use drava_vgpu_abi::ComputePolicy;
use serde_json::Value;

/// Measure the node agent on a simulated machine
#[derive(Parser)]
struct Arguments {
    /// What is measured, in this order
    #[arg(value_enum, required = true)]
    measurements: Vec<Measurement>,
    /// Seconds of each long measurement
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Measure the algorithm of HAMi-core, too
    #[arg(long)]
    baseline: bool,
    /// Set by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Measurement {
    /// CPU time and reads of the agent, for idle and for busy claims
    Cost,
    /// Two saturating shares with kernels
    Two,
    /// A saturating share and one with fills or copies
    Copies,
    /// A saturating share and one with bursts
    Bursts,
    /// Reclaim of lent time
    Reclaim,
    /// Requests of higher priority
    Latency,
}

fn main() -> Result<()> {
    if gpu_node::run_agent()? {
        return Ok(());
    }
    let arguments = Arguments::parse();
    let length = Duration::from_secs_f64(arguments.seconds);
    for measurement in arguments.measurements {
        match measurement {
            Measurement::Cost => cost::measure(length)?,
            Measurement::Two => two_shares::measure_kernels(length, arguments.baseline)?,
            Measurement::Copies => two_shares::measure_copies(length)?,
            Measurement::Bursts => two_shares::measure_bursts(length)?,
            Measurement::Reclaim => reclaim::measure()?,
            Measurement::Latency => latency::measure(length)?,
        }
    }
    Ok(())
}

/// Prints a measured row.
fn report(row: &Value) {
    println!("{row}");
}

const fn name(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::None => "none",
        ComputePolicy::Balance => "balance",
        ComputePolicy::Fixed => "fixed",
    }
}
