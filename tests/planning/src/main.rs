//! Prints the measured decisions of a bench, one JSON object per line.

use std::time::Instant;

use clap::Parser;
use drava_planning::scenario::{self, Bench};

/// Measures decisions of the planner.
#[derive(Parser)]
struct Args {
    /// Which bench.
    #[arg(value_enum)]
    bench: Bench,
    /// Number of decisions of the scenarios that are repeated.
    #[arg(long, default_value_t = 100)]
    rounds: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let start = Instant::now();
    scenario::run(args.bench, args.rounds, |point| {
        println!("{}", serde_json::to_string(point)?);
        let mean = point.ms.iter().sum::<f64>() / point.ms.len().max(1) as f64;
        let passed = start.elapsed().as_secs();
        eprintln!("{passed} s: {}: {mean:.1} ms on average", point.decision);
        Ok(())
    })
}
