//! Times of short kernels by events, and the time of a pair of events without a kernel.

use anyhow::Result;
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use serde::Serialize;

use crate::gpu::Gpu;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Durations of the kernels by the GPU's clock, in microseconds
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2, 5, 10, 20])]
    kernel_us: Vec<u64>,
    /// Number of samples of each
    #[arg(long, default_value_t = 100)]
    samples: usize,
}

/// Medians, nanoseconds.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Times {
    pair_ns: u64,
    kernels: Vec<Kernel>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Kernel {
    kernel_us: u64,
    by_events_ns: u64,
}

/// Keeps the stream busy while the rest is queued, so that events do not measure the host.
const QUEUED_NS: u64 = 500_000;

const SHAPE: LaunchConfig = LaunchConfig {
    grid_dim: (1, 1, 1),
    block_dim: (1, 1, 1),
    shared_mem_bytes: 0,
};

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let spin = gpu.kernel("spin")?;
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let (from, to) = (gpu.context.new_event(flags)?, gpu.context.new_event(flags)?);
    let median_ns = |kernel_us: Option<u64>| -> Result<u64> {
        let mut all = Vec::with_capacity(arguments.samples);
        for _ in 0..arguments.samples {
            launch(&stream, &spin, QUEUED_NS)?;
            from.record(&stream)?;
            if let Some(us) = kernel_us {
                launch(&stream, &spin, us * 1000)?;
            }
            to.record(&stream)?;
            stream.synchronize()?;
            all.push(from.elapsed_ms(&to)?);
        }
        all.sort_unstable_by(f32::total_cmp);
        let ms = all.get(all.len() / 2).copied().unwrap_or_default();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at least zero, and milliseconds"
        )]
        let ns = (f64::from(ms.max(0.0)) * 1e6) as u64;
        Ok(ns)
    };
    // Loads the module before the measurement.
    launch(&stream, &spin, 1)?;
    stream.synchronize()?;
    let pair_ns = median_ns(None)?;
    let kernels = arguments.kernel_us.iter().map(|us| {
        Ok(Kernel {
            kernel_us: *us,
            by_events_ns: median_ns(Some(*us))?,
        })
    });
    crate::print(&Times {
        pair_ns,
        kernels: kernels.collect::<Result<_>>()?,
    })
}

fn launch(stream: &CudaStream, kernel: &CudaFunction, nanoseconds: u64) -> Result<()> {
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&nanoseconds);
    // SAFETY: the kernel takes one 64-bit number and touches no memory.
    unsafe { launch.launch(SHAPE) }?;
    Ok(())
}
