//! Prints the measured decisions of a bench, one JSON object per line.

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
    for point in scenario::run(args.bench, args.rounds)? {
        println!("{}", serde_json::to_string(&point)?);
    }
    Ok(())
}
