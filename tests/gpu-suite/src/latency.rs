//! Measures the cost of a launch, or of an asynchronous allocation, for the calling thread.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use cudarc::driver::{LaunchConfig, sys};
use serde::Serialize;

use crate::gpu::Gpu;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of measured operations
    #[arg(long, default_value_t = 100_000)]
    launches: usize,
    /// What is measured
    #[arg(long, value_enum, default_value_t = Operation::Launch)]
    operation: Operation,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Operation {
    /// Launch of an empty kernel
    Launch,
    /// `cuMemAllocAsync` of 64 KiB, and `cuMemFreeAsync`
    AllocateAsync,
}

/// Size of an asynchronous allocation.
const ALLOCATION: usize = 64 << 10;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Cost {
    launches: usize,
    mean_ns: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    /// Mean of the first launches after a synchronization.
    first_ns: f64,
    /// Page faults during the launches.
    faults: i64,
}

/// Launches between two synchronizations, so that the queue never fills and blocks.
const BURST: usize = 200;

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.launches > 0, "--launches must be above zero");
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let kernel = gpu.kernel("noop")?;
    let shape = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    let launch = || -> Result<()> {
        // SAFETY: the kernel takes nothing and does nothing.
        unsafe { stream.launch_builder(&kernel).launch(shape) }
            .context("cannot launch the kernel")?;
        Ok(())
    };
    let allocate = || -> Result<()> {
        let mut address = 0;
        let stream = stream.cu_stream();
        // SAFETY: writes one address.
        unsafe { sys::cuMemAllocAsync(&raw mut address, ALLOCATION, stream) }.result()?;
        // SAFETY: memory that is freed once.
        unsafe { sys::cuMemFreeAsync(address, stream) }.result()?;
        Ok(())
    };
    let operate = || match arguments.operation {
        Operation::Launch => launch(),
        Operation::AllocateAsync => allocate(),
    };
    // Warms up code, caches and the driver.
    (0..5 * BURST).try_for_each(|_| operate())?;
    stream.synchronize()?;
    // Written once, so that no launch is followed by the first write to a page of it.
    let mut costs = vec![1_u64; arguments.launches + BURST];
    costs.clear();
    let faults_before = faults()?;
    while costs.len() < arguments.launches {
        for _ in 0..BURST {
            let start = Instant::now();
            operate()?;
            costs.push(u64::try_from(start.elapsed().as_nanos())?);
        }
        stream.synchronize()?;
    }
    let faults = faults()? - faults_before;
    let firsts: Vec<u64> = costs.iter().copied().step_by(BURST).collect();
    costs.sort_unstable();
    let at = |part: f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index below the length"
        )]
        let index = (costs.len() as f64 * part) as usize;
        costs.get(index).copied().unwrap_or_default()
    };
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let mean = |costs: &[u64]| costs.iter().sum::<u64>() as f64 / costs.len() as f64;
    crate::print(&Cost {
        launches: costs.len(),
        mean_ns: mean(&costs),
        p50_ns: at(0.5),
        p99_ns: at(0.99),
        p999_ns: at(0.999),
        first_ns: mean(&firsts),
        faults,
    })
}

/// Page faults of this process.
fn faults() -> Result<i64> {
    // SAFETY: a struct of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes the struct.
    let code = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    ensure!(code == 0, "getrusage failed");
    Ok(usage.ru_minflt + usage.ru_majflt)
}
