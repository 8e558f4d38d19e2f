//! Random allocations and frees, as many as memory allows.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cuda::{Cuda, CudaError};
use crate::{MIB, print_line};

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Largest allocation, in MiB.
    #[arg(long, default_value_t = 64)]
    largest_mib: usize,
    /// Allocations that are held at most.
    #[arg(long, default_value_t = 256)]
    held: usize,
    /// Time between two calls, in microseconds.
    #[arg(long, default_value_t = 2000)]
    pause_us: u64,
    /// Seed of the sizes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What is printed.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    /// Of this process.
    pid: u32,
    allocated: u64,
    denied: u64,
    freed: u64,
    held_bytes: usize,
}

/// A generator of Marsaglia (xorshift), good enough for sizes.
struct Random(u64);

impl Random {
    /// Returns a number below `end`, which is not 0.
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or(0) % end.max(1)
    }
}

/// Runs until it is killed.
pub(crate) fn run(cuda: &Cuda, arguments: &Arguments) -> anyhow::Result<()> {
    let mut random = Random(arguments.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut held: Vec<(u64, usize)> = Vec::new();
    let mut counts = Counts {
        pid: std::process::id(),
        ..Counts::default()
    };
    let mut reported = Instant::now();
    loop {
        let is_full = held.len() >= arguments.held;
        if held.is_empty() || (!is_full && random.below(5) > 1) {
            let bytes = (1 + random.below(arguments.largest_mib)) * MIB;
            match cuda.allocate(bytes) {
                Ok(address) => {
                    counts.allocated += 1;
                    counts.held_bytes += bytes;
                    held.push((address, bytes));
                }
                Err(CudaError::Rejected { name, .. }) if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
                    counts.denied += 1;
                    // Other processes of the share get what it frees.
                    free_some(cuda, &mut held, &mut counts, &mut random)?;
                }
                Err(error) => return Err(error.into()),
            }
        } else {
            free_some(cuda, &mut held, &mut counts, &mut random)?;
        }
        if reported.elapsed() > REPORT_INTERVAL {
            reported = Instant::now();
            print_line(&counts)?;
        }
        std::thread::sleep(Duration::from_micros(arguments.pause_us));
    }
}

/// Frees one allocation, or in one of twenty cases all.
fn free_some(
    cuda: &Cuda,
    held: &mut Vec<(u64, usize)>,
    counts: &mut Counts,
    random: &mut Random,
) -> Result<(), CudaError> {
    let frees = match random.below(20) {
        0 => held.len(),
        _ => 1.min(held.len()),
    };
    for _ in 0..frees {
        let (address, bytes) = held.swap_remove(random.below(held.len()));
        cuda.free(address)?;
        counts.freed += 1;
        counts.held_bytes -= bytes;
    }
    Ok(())
}
