//! Prints the measured decisions of a bench, one JSON object per line.

use std::time::Instant;

use clap::{Parser, Subcommand};
use drava_planning::scale::{self, Point};
use drava_planning::scenario::{self, Bench};

/// Measures decisions of the planner.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Decisions about preemption, gangs or quotas.
    Decisions {
        /// Which bench.
        #[arg(value_enum)]
        bench: Bench,
        /// Number of decisions of the scenarios that are repeated.
        #[arg(long, default_value_t = 100)]
        rounds: usize,
    },
    /// The planner in a large cluster.
    Scale {
        /// What is measured.
        #[arg(value_enum)]
        point: Point,
        /// Number of nodes, with eight GPUs each.
        nodes: usize,
    },
}

fn main() -> anyhow::Result<()> {
    let (bench, rounds) = match Args::parse().what {
        What::Decisions { bench, rounds } => (bench, rounds),
        What::Scale { point, nodes } => {
            println!("{}", serde_json::to_string(&scale::run(point, nodes)?)?);
            return Ok(());
        }
    };
    let start = Instant::now();
    scenario::run(bench, rounds, |point| {
        println!("{}", serde_json::to_string(point)?);
        let mean = point.ms.iter().sum::<f64>() / point.ms.len().max(1) as f64;
        let passed = start.elapsed().as_secs();
        eprintln!("{passed} s: {}: {mean:.1} ms on average", point.decision);
        Ok(())
    })
}
