//! Keeps the GPU busy for a while with kernels of one or several durations, and adds up those that complete.

use std::io::Read as _;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaEvent, CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use serde::Serialize;

use crate::gpu::Gpu;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration of one kernel on an idle GPU, in microseconds; several durations alternate at random
    #[arg(long, value_delimiter = ',', required = true)]
    kernel_us: Vec<u64>,
    /// Time before the count, in seconds
    #[arg(long, default_value_t = 0.0)]
    settle: f64,
    /// Duration of the count, in seconds
    #[arg(long)]
    seconds: f64,
    /// How kernels are submitted
    #[arg(long, value_enum, default_value_t = Way::Queue)]
    way: Way,
    /// The kernel: `work` takes GPU time and needs a real GPU, `spin` takes wall-clock time
    #[arg(long, value_enum, default_value_t = Kernel::Work)]
    kernel: Kernel,
    /// Blocks of 256 threads in each kernel; one for each multiprocessor if absent
    #[arg(long)]
    blocks: Option<u32>,
    /// Kernels before each wait with `--way sync`, as those of a token
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_BATCH))]
    awaited: u64,
    /// Rounds of `work` per microsecond, as measured by a run on an idle GPU; measured if absent
    #[arg(long)]
    rounds_per_us: Option<f64>,
    /// Time that any kernel takes beyond its duration, in microseconds, as measured by a run on an idle GPU
    #[arg(long, default_value_t = 0.0)]
    overhead_us: f64,
    /// Wait for a line on stdin before the run, and go on until stdin closes, so that several processes are counted at the
    /// same time
    #[arg(long)]
    wait: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    /// Many in advance, as training does: the GPU always has work
    Queue,
    /// Synchronize after each, as a loop that reads its loss does
    Sync,
    /// A graph of 20 kernels, as decoding does
    Graph,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kernel {
    Work,
    Spin,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Completed {
    seconds: f64,
    /// GPU time of the kernels by their duration on an idle GPU, divided by elapsed time.
    share: f64,
    rounds_per_us: f64,
    overhead_us: f64,
    /// Median time of a batch with its wait, µs: of a token, if the program awaits each batch.
    batch_p50_us: f64,
}

/// Kernels in a graph.
const GRAPH_KERNELS: u64 = 20;

/// Kernels that are launched together at most.
const MAX_BATCH: u64 = 1000;

/// Durations of kernels, µs, in an order that is random but the same in each run.
struct Lengths<'a> {
    all: &'a [u64],
    state: u64,
}

impl<'a> Lengths<'a> {
    fn new(all: &'a [u64]) -> Result<Self> {
        ensure!(!all.contains(&0), "a kernel lasts at least 1 µs");
        Ok(Self { all, state: 1 })
    }

    /// Returns the duration of the next kernel.
    fn next(&mut self) -> u64 {
        // Knuth's linear congruential generator; its high bits are the random ones.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let count = self.all.len().max(1);
        let index = usize::try_from(self.state >> 33).unwrap_or(0) % count;
        self.all.get(index).copied().unwrap_or(1)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let (kernel, rounds_per_us, overhead_us) = match (arguments.kernel, arguments.rounds_per_us) {
        (Kernel::Spin, _) => (gpu.kernel("spin")?, 1000.0, 0.0),
        (Kernel::Work, Some(known)) => (gpu.kernel("work")?, known, arguments.overhead_us),
        (Kernel::Work, None) => {
            let kernel = gpu.kernel("work")?;
            let (rounds_per_us, overhead_us) = calibrate(&gpu, &stream, &kernel)?;
            (kernel, rounds_per_us, overhead_us)
        }
    };
    let blocks = arguments.blocks.map_or_else(|| gpu.multiprocessors(), Ok)?;
    let work = Work {
        stream: &stream,
        kernel: &kernel,
        shape: LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        },
        rounds_per_us,
    };
    let mut lengths = Lengths::new(&arguments.kernel_us)?;
    // Loads the module before the measurement.
    work.launch(lengths.next())?;
    stream.synchronize()?;
    let graph = match arguments.way {
        Way::Graph => Some(Graph::capture(&work, &mut lengths)?),
        Way::Queue | Way::Sync => None,
    };
    if arguments.wait {
        println!("ready");
        std::io::stdin().read_line(&mut String::new())?;
    }

    let mut previous: Option<CudaEvent> = None;
    // Returns the duration and the number of its kernels, µs.
    let mut run_batch = || -> Result<(u64, u64)> {
        let (mut length_us, mut kernels) = (0, 0);
        match &graph {
            Some(graph) => {
                graph.executable.launch(&stream)?;
                length_us += graph.length_us;
                kernels += GRAPH_KERNELS;
            }
            None => {
                // Batches of about 20 ms drain quickly.
                for _ in 0..MAX_BATCH {
                    let kernel_us = lengths.next();
                    work.launch(kernel_us)?;
                    length_us += kernel_us;
                    kernels += 1;
                    let is_complete = match arguments.way {
                        Way::Sync => kernels == arguments.awaited,
                        Way::Queue | Way::Graph => length_us >= 20_000,
                    };
                    if is_complete {
                        break;
                    }
                }
            }
        }
        match arguments.way {
            Way::Queue => {
                let end = stream.record_event(None)?;
                previous
                    .replace(end)
                    .map_or(Ok(()), |end| end.synchronize())?;
            }
            Way::Sync | Way::Graph => stream.synchronize()?,
        }
        Ok((length_us, kernels))
    };
    // From now on each call ends with one batch.
    run_batch()?;
    let mut run = |seconds: f64| -> Result<(f64, f64, f64)> {
        let (start, length) = (Instant::now(), Duration::from_secs_f64(seconds));
        let (mut length_us, mut kernels) = (0, 0);
        let mut batches = Vec::new();
        let mut begun = Duration::ZERO;
        while begun < length {
            let batch = run_batch()?;
            let ended = start.elapsed();
            batches.push(ended - begun);
            begun = ended;
            length_us += batch.0;
            kernels += batch.1;
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let busy_us = (kernels as f64).mul_add(overhead_us, length_us as f64);
        Ok((busy_us, begun.as_secs_f64(), median_us(batches)))
    };
    run(arguments.settle)?;
    let (busy_us, seconds, batch_p50_us) = run(arguments.seconds)?;
    crate::print(&Completed {
        seconds,
        share: busy_us / 1e6 / seconds,
        rounds_per_us,
        overhead_us,
        batch_p50_us,
    })?;
    if arguments.wait {
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&is_closed);
        std::thread::spawn(move || {
            // An error ends the run, too.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            closed.store(true, Ordering::Relaxed);
        });
        while !is_closed.load(Ordering::Relaxed) {
            run_batch()?;
        }
    }
    Ok(())
}

/// Returns the median, µs; 0 without any.
fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let middle = times.get(times.len() / 2).copied().unwrap_or_default();
    middle.as_secs_f64() * 1e6
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "positive and far below 2^52"
)]
fn amount(kernel_us: u64, per_us: f64) -> u64 {
    (kernel_us as f64 * per_us).max(1.0) as u64
}

struct Work<'a> {
    stream: &'a CudaStream,
    kernel: &'a CudaFunction,
    shape: LaunchConfig,
    rounds_per_us: f64,
}

impl Work<'_> {
    fn launch(&self, kernel_us: u64) -> Result<()> {
        let amount = amount(kernel_us, self.rounds_per_us);
        let mut launch = self.stream.launch_builder(self.kernel);
        launch.arg(&amount);
        // SAFETY: the kernel takes one 64-bit number and touches no memory.
        unsafe { launch.launch(self.shape) }.context("cannot launch the kernel")?;
        Ok(())
    }
}

/// Returns the rounds of `work` per microsecond on an otherwise idle GPU, and the time of a kernel beyond its rounds, µs.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn calibrate(gpu: &Gpu, stream: &CudaStream, kernel: &CudaFunction) -> Result<(f64, f64)> {
    const ROUNDS: u64 = 2_000_000;
    const SHORT_US: u64 = 20;
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let shape = LaunchConfig {
        grid_dim: (gpu.multiprocessors()?, 1, 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    // Returns the shortest time of a number of kernels in a row, µs.
    let measure = |rounds: u64, kernels: usize| -> Result<f64> {
        let mut best = f64::MAX;
        for _ in 0..5 {
            let (from, to) = (gpu.context.new_event(flags)?, gpu.context.new_event(flags)?);
            from.record(stream)?;
            for _ in 0..kernels {
                let mut launch = stream.launch_builder(kernel);
                launch.arg(&rounds);
                // SAFETY: the kernel takes one 64-bit number and touches no memory.
                unsafe { launch.launch(shape) }?;
            }
            to.record(stream)?;
            stream.synchronize()?;
            best = best.min(f64::from(from.elapsed_ms(&to)?) * 1000.0);
        }
        Ok(best)
    };
    let rounds_per_us = ROUNDS as f64 / measure(ROUNDS, 1)?;
    // Many in a row: launches take less time than the kernels.
    let many = 200;
    let short_us = measure(amount(SHORT_US, rounds_per_us), many)? / many as f64;
    Ok((rounds_per_us, (short_us - SHORT_US as f64).max(0.0)))
}

struct Graph {
    executable: Executable,
    length_us: u64,
}

/// A graph that is never destroyed.
struct Executable(sys::CUgraphExec);

impl Graph {
    fn capture(work: &Work<'_>, lengths: &mut Lengths<'_>) -> Result<Self> {
        let stream = work.stream.cu_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream that lives as long as `work`.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result()?;
        let mut length_us = 0;
        for _ in 0..GRAPH_KERNELS {
            let kernel_us = lengths.next();
            work.launch(kernel_us)?;
            length_us += kernel_us;
        }
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is capturing; writes one handle.
        unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }.result()?;
        let mut executable = ptr::null_mut();
        // SAFETY: a captured graph; writes one handle.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.result()?;
        Ok(Self {
            executable: Executable(executable),
            length_us,
        })
    }
}

impl Executable {
    fn launch(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: an executable graph, and a stream of its context.
        unsafe { sys::cuGraphLaunch(self.0, stream.cu_stream()) }.result()?;
        Ok(())
    }
}
