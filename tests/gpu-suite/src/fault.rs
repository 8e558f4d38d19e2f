//! A fatal fault of a kernel, and a process that launches kernels while another one has such a fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;
use serde::Serialize;

use crate::gpu::{Gpu, error_name};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Part of this process
    #[arg(long, value_enum)]
    role: Role,
    /// Longest time in which `launches` waits for an error, in seconds
    #[arg(long, default_value_t = 30.0)]
    seconds: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Launches a kernel with a fault after a line on stdin
    Causes,
    /// After a line on stdin, launches kernels until one fails, or until another line, or its end; prints `running` after
    /// the first kernel
    Launches,
}

/// What happened.
#[derive(Serialize)]
struct Outcome {
    /// Kernels that have completed.
    kernels: u64,
    /// Name of the error that ended the launches.
    error: Option<String>,
}

/// Duration of the kernels, and their parameter.
const KERNEL_NS: u64 = 1_000_000;

/// The error of an access to address 0, of which the simulated machine needs the number.
const ILLEGAL_ADDRESS: u64 = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u64;

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let spin = gpu.kernel("spin")?;
    let faults = gpu
        .context
        .load_module(Ptx::from_src(include_str!("fault.ptx")))?;
    let fault = faults.load_function("fault")?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    let outcome = match arguments.role {
        Role::Causes => Outcome {
            kernels: 0,
            error: launch(&stream, &fault, ILLEGAL_ADDRESS),
        },
        Role::Launches => {
            let longest = Duration::from_secs_f64(arguments.seconds);
            launch_until_error(|| launch(&stream, &spin, KERNEL_NS), longest)
        }
    };
    crate::print(&outcome)
}

/// Launches until an error, a line on stdin or its end. The last kernel begins after that line.
fn launch_until_error(launch: impl Fn() -> Option<String>, longest: Duration) -> Outcome {
    let start = Instant::now();
    let is_told = Arc::new(AtomicBool::new(false));
    let mut kernels = 0;
    loop {
        let is_last = is_told.load(Ordering::Acquire) || start.elapsed() >= longest;
        let error = launch();
        if error.is_some() {
            return Outcome { kernels, error };
        }
        kernels += 1;
        if is_last {
            return Outcome { kernels, error };
        }
        if kernels == 1 {
            println!("running");
            let told = Arc::clone(&is_told);
            std::thread::spawn(move || {
                // An error ends the launches, too.
                let _ = std::io::stdin().read_line(&mut String::new());
                told.store(true, Ordering::Release);
            });
        }
    }
}

/// Runs a kernel of one thread to its end, and returns the name of its error.
fn launch(stream: &Arc<CudaStream>, kernel: &CudaFunction, parameter: u64) -> Option<String> {
    let shape = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&parameter);
    // SAFETY: the kernel takes one 64-bit number; `fault` touches no memory that exists.
    let launched = unsafe { launch.launch(shape) };
    let ended = launched.and_then(|_| stream.synchronize());
    ended.err().and_then(|error| error_name(error.0))
}
