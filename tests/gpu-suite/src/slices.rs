//! Time slices of the GPU: how long this context runs, and how long others run between.
//!
//! Short kernels with an event between each two of them. An interval much longer than the others contains a slice of another
//! context.

use std::io::Read as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaEvent, CudaStream, LaunchConfig, PushKernelArg, sys};
use serde::Serialize;

use crate::gpu::Gpu;
use crate::work::Kernel;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration of the measurement, in seconds
    #[arg(long)]
    seconds: f64,
    /// The kernel: `work` takes GPU time and needs a real GPU, `spin` takes wall-clock time
    #[arg(long, value_enum, default_value_t = Kernel::Work)]
    kernel: Kernel,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Slices {
    /// Median interval of one kernel, µs.
    kernel_us: f64,
    /// Slices of others.
    count: usize,
    own_us: Quantiles,
    others_us: Quantiles,
    /// Part of the time in which this context ran.
    own_part: f64,
}

/// Of lengths, µs; 0 without any.
#[derive(Serialize)]
struct Quantiles {
    p10: f64,
    p50: f64,
    p90: f64,
}

/// Kernels that are launched together. Two batches are in the queue.
const BATCH: usize = 200;

/// Amount of work of a kernel: about 100 µs on current GPUs.
const ROUNDS: u64 = 10_000;
const SPIN_NS: u64 = 100_000;

/// Runs once `stdin` has a line.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let (kernel, amount) = match arguments.kernel {
        Kernel::Work => (gpu.kernel("work")?, ROUNDS),
        Kernel::Spin => (gpu.kernel("spin")?, SPIN_NS),
    };
    let shape = LaunchConfig {
        grid_dim: (gpu.multiprocessors()?, 1, 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    let launch = || -> Result<()> {
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&amount);
        // SAFETY: the kernel takes one 64-bit number and touches no memory.
        unsafe { launch.launch(shape) }.context("cannot launch the kernel")?;
        Ok(())
    };
    launch()?;
    stream.synchronize()?;
    let mut batches = [Batch::new(&gpu)?, Batch::new(&gpu)?];
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;

    let mut intervals = Vec::new();
    let (start, length) = (Instant::now(), Duration::from_secs_f64(arguments.seconds));
    let [first, second] = &mut batches;
    first.launch(&stream, launch)?;
    while start.elapsed() < length {
        second.launch(&stream, launch)?;
        first.read(&mut intervals)?;
        first.launch(&stream, launch)?;
        second.read(&mut intervals)?;
    }
    crate::print(&slices(&intervals)?)?;
    // Its context competes until the other measurements have ended.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Events before, between and after the kernels of a batch.
struct Batch(Vec<CudaEvent>);

impl Batch {
    fn new(gpu: &Gpu) -> Result<Self> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let events = (0..=BATCH).map(|_| gpu.context.new_event(flags));
        Ok(Self(events.collect::<Result<_, _>>()?))
    }

    fn launch(&self, stream: &CudaStream, launch: impl Fn() -> Result<()>) -> Result<()> {
        for (number, event) in self.0.iter().enumerate() {
            if number > 0 {
                launch()?;
            }
            event.record(stream)?;
        }
        Ok(())
    }

    /// Waits for the end, and adds the intervals between the events, µs.
    fn read(&self, intervals: &mut Vec<f64>) -> Result<()> {
        let last = self.0.last().context("a batch without events")?;
        last.synchronize()?;
        for pair in self.0.windows(2) {
            if let [from, to] = pair {
                intervals.push(f64::from(from.elapsed_ms(to)?) * 1000.0);
            }
        }
        Ok(())
    }
}

/// Divides intervals into the context's own time and slices of others.
fn slices(intervals: &[f64]) -> Result<Slices> {
    let kernel_us = Quantiles::of(intervals.to_vec()).p50;
    ensure!(kernel_us > 0.0, "no kernel was measured");
    let (mut own, mut others, mut running) = (Vec::new(), Vec::new(), 0.0);
    for interval in intervals {
        running += interval.min(kernel_us);
        if *interval > 2.0 * kernel_us {
            others.push(interval - kernel_us);
            own.push(std::mem::take(&mut running));
        }
    }
    let total: f64 = intervals.iter().sum();
    let away: f64 = others.iter().sum();
    Ok(Slices {
        kernel_us,
        count: others.len(),
        own_us: Quantiles::of(own),
        others_us: Quantiles::of(others),
        own_part: 1.0 - away / total,
    })
}

impl Quantiles {
    fn of(mut lengths: Vec<f64>) -> Self {
        lengths.sort_unstable_by(f64::total_cmp);
        let at = |tenths: usize| {
            let index = lengths.len() * tenths / 10;
            lengths.get(index).copied().unwrap_or_default()
        };
        Self {
            p10: at(1),
            p50: at(5),
            p90: at(9),
        }
    }
}
