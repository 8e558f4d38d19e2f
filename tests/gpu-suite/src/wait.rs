//! Launches while a kernel of the same share runs that may wait for them, after the share has spent its credit; and
//! launches after a stop of the process.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Longest duration of the kernel, in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Number of launches behind it; the last one sets the flag
    #[arg(long, default_value_t = 20)]
    launches: u32,
    /// The kernel
    #[arg(long, value_enum, default_value_t = Kernel::AwaitFlag)]
    kernel: Kernel,
    /// Part of this process
    #[arg(long, value_enum, default_value_t = Role::Alone)]
    role: Role,
    /// The flag of the other process, for its launches
    #[arg(long, required_if_eq("role", "launches"))]
    flag: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kernel {
    /// Ends when a later launch has set the flag: needs a real GPU
    AwaitFlag,
    /// Lasts for all its time, so the process does not wait for its end
    Spin,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Launches the kernel, and what the kernel may wait for
    Alone,
    /// Prints its flag; launches the kernel after a line on stdin, and some more
    Waits,
    /// Launches what the kernel of another process may wait for, after a line on stdin
    Launches,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Waited {
    kernel_seconds: u64,
    /// Time of [`SPENT`] before, which takes longer than the kernels themselves once the credit is spent.
    spent_seconds: f64,
    /// Time from the launch of the kernel, or from the line on stdin, to the return of the last launch, and to the end of a
    /// kernel that ends.
    seconds: f64,
}

/// Kernels that spend the credit of a share, and their duration.
const SPENT: (u32, u64) = (20, 5_000_000);

const SHAPE: LaunchConfig = shape(1);

const fn shape(blocks: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let process = Process::new(&gpu, arguments)?;
    let spent_seconds = process.spend(SPENT.0)?;
    let await_line = || std::io::stdin().read_line(&mut String::new());
    let begun = match arguments.role {
        Role::Alone => {
            let begun = Instant::now();
            process.launch_kernel()?;
            process.launch_others()?;
            begun
        }
        Role::Waits => {
            println!("{}", process.export()?);
            await_line()?;
            let begun = Instant::now();
            process.launch_kernel()?;
            println!("launched");
            // Only a process that launches sees how long its kernel runs on, and charges the share for it.
            process.launch_noops()?;
            begun
        }
        Role::Launches => {
            println!("ready");
            await_line()?;
            let begun = Instant::now();
            process.launch_others()?;
            begun
        }
    };
    if arguments.kernel == Kernel::AwaitFlag {
        process.stream.synchronize()?;
    }
    crate::print(&Waited {
        kernel_seconds: arguments.seconds,
        spent_seconds,
        seconds: begun.elapsed().as_secs_f64(),
    })?;
    // Its context competes, and its kernel runs, until the other process has launched.
    if arguments.role == Role::Waits {
        await_line()?;
    }
    Ok(())
}

struct Process<'a> {
    arguments: &'a Arguments,
    stream: std::sync::Arc<CudaStream>,
    other: std::sync::Arc<CudaStream>,
    kernel: CudaFunction,
    spin: CudaFunction,
    noop: CudaFunction,
    set_flag: CudaFunction,
    flag: sys::CUdeviceptr,
}

impl<'a> Process<'a> {
    fn new(gpu: &Gpu, arguments: &'a Arguments) -> Result<Self> {
        let flag = match &arguments.flag {
            Some(flag) => import(flag)?,
            None => allocate()?,
        };
        let process = Self {
            arguments,
            stream: gpu.context.new_stream()?,
            other: gpu.context.new_stream()?,
            kernel: gpu.kernel("await_flag")?,
            spin: gpu.kernel("spin")?,
            noop: gpu.kernel("noop")?,
            set_flag: gpu.kernel("set_flag")?,
            flag,
        };
        // The first launch of a function may wait for all kernels, so each is launched before.
        process.launch_spin(1)?;
        process.launch_noop(1)?;
        process.launch_set_flag()?;
        process.launch_await_flag(1)?;
        process.other.synchronize()?;
        process.stream.synchronize()?;
        if arguments.flag.is_none() {
            clear(flag)?;
        }
        Ok(process)
    }

    /// Spends the credit of the share; returns the time in seconds.
    fn spend(&self, kernels: u32) -> Result<f64> {
        let begun = Instant::now();
        for _ in 0..kernels {
            self.launch_spin(SPENT.1)?;
            self.stream.synchronize()?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    fn launch_kernel(&self) -> Result<()> {
        let nanoseconds = self.arguments.seconds * 1_000_000_000;
        match self.arguments.kernel {
            Kernel::AwaitFlag => self.launch_await_flag(nanoseconds),
            Kernel::Spin => self.launch_spin(nanoseconds),
        }
    }

    /// Launches kernels, each of another shape, so that its cost is not known.
    fn launch_noops(&self) -> Result<()> {
        (1..self.arguments.launches).try_for_each(|number| self.launch_noop(number * 64))
    }

    /// Launches what the kernel may wait for.
    fn launch_others(&self) -> Result<()> {
        self.launch_noops()?;
        self.launch_set_flag()
    }

    fn launch_spin(&self, nanoseconds: u64) -> Result<()> {
        let mut launch = self.stream.launch_builder(&self.spin);
        launch.arg(&nanoseconds);
        // SAFETY: the kernel takes one 64-bit number and touches no memory.
        unsafe { launch.launch(SHAPE) }?;
        Ok(())
    }

    fn launch_await_flag(&self, nanoseconds: u64) -> Result<()> {
        let mut launch = self.stream.launch_builder(&self.kernel);
        launch.arg(&self.flag).arg(&nanoseconds);
        // SAFETY: the kernel takes an address, which it reads and which stays valid, and a number.
        unsafe { launch.launch(SHAPE) }?;
        Ok(())
    }

    fn launch_noop(&self, blocks: u32) -> Result<()> {
        // SAFETY: the kernel takes nothing and does nothing.
        unsafe { self.other.launch_builder(&self.noop).launch(shape(blocks)) }?;
        Ok(())
    }

    fn launch_set_flag(&self) -> Result<()> {
        let mut launch = self.other.launch_builder(&self.set_flag);
        launch.arg(&self.flag);
        // SAFETY: the kernel takes an address, which it writes and which stays valid.
        unsafe { launch.launch(SHAPE) }?;
        Ok(())
    }

    /// Returns the flag for another process.
    fn export(&self) -> Result<String> {
        let mut exported = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes one handle; the flag is the start of an allocation.
        let code = unsafe { sys::cuIpcGetMemHandle(&raw mut exported, self.flag) };
        check("cuIpcGetMemHandle", code)?;
        let bytes = exported.reserved.iter();
        Ok(bytes
            .map(|byte| format!("{:02x}", byte.cast_unsigned()))
            .collect())
    }
}

fn check(call: &str, code: sys::CUresult) -> Result<()> {
    let error = error_name(code);
    ensure!(error.is_none(), "{call}: {error:?}");
    Ok(())
}

/// Bytes of the allocation with the flag.
const FLAG_BYTES: usize = 2 << 20;

fn allocate() -> Result<sys::CUdeviceptr> {
    let mut flag = 0;
    // SAFETY: writes one pointer.
    let code = unsafe { sys::cuMemAlloc_v2(&raw mut flag, FLAG_BYTES) };
    check("cuMemAlloc", code)?;
    Ok(flag)
}

fn clear(flag: sys::CUdeviceptr) -> Result<()> {
    // SAFETY: memory of at least one word.
    check("cuMemsetD32", unsafe { sys::cuMemsetD32_v2(flag, 0, 1) })
}

fn import(flag: &str) -> Result<sys::CUdeviceptr> {
    let mut exported = sys::CUipcMemHandle { reserved: [0; 64] };
    for (index, byte) in exported.reserved.iter_mut().enumerate() {
        let digits = flag.get(index * 2..index * 2 + 2);
        let digits = digits.context("a flag has 128 hexadecimal digits")?;
        *byte = u8::from_str_radix(digits, 16)?.cast_signed();
    }
    let mut flag = 0;
    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    // SAFETY: writes one pointer.
    let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut flag, exported, 1) };
    check("cuIpcOpenMemHandle", code)?;
    Ok(flag)
}

/// A process that is stopped while a kernel runs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Continued {
    kernels: u32,
    /// Time of these kernels after the stop, one by one.
    seconds: f64,
}

/// Kernels after a stop.
const AFTER_STOP: u32 = 3;

/// Launches a kernel and reports that it is ready to be stopped; after a line on stdin, times kernels.
pub(crate) fn run_stopped() -> Result<()> {
    let gpu = Gpu::open()?;
    let arguments = Arguments {
        seconds: 0,
        launches: 0,
        kernel: Kernel::Spin,
        role: Role::Alone,
        flag: None,
    };
    let process = Process::new(&gpu, &arguments)?;
    process.spend(SPENT.0)?;
    process.launch_spin(SPENT.1)?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    let seconds = process.spend(AFTER_STOP)?;
    crate::print(&Continued {
        kernels: AFTER_STOP,
        seconds,
    })
}
