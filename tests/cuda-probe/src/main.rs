//! `cuda-probe`: allocates, launches and reports through the CUDA driver API.
//!
//! Pods and tests use it to observe what a program sees. Exit status: 0 on success, 2 for an error of CUDA (its name is
//! printed), 1 for any other error.
//!
//! It works on the simulated machine and on a real GPU: its kernel is PTX.

use std::ffi::{CString, c_int};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use serde::Serialize;

mod churn;
mod cuda;
mod launch;
mod train;

use cuda::{Cuda, CudaError, MemoryInfo};

const MIB: usize = 1 << 20;

/// Allocates, launches and reports through the CUDA driver API.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
    /// Format of the output.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// Ordinal of the device.
    #[arg(long, global = true, default_value_t = 0)]
    device: c_int,
}

#[derive(Clone, Copy, ValueEnum)]
enum Output {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Action {
    /// Print the visible devices.
    Info,
    /// Allocate memory and print free and total memory before and after.
    Alloc {
        /// Amount in MiB.
        #[arg(long)]
        mib: usize,
        /// Time to hold the memory, in seconds.
        #[arg(long, default_value_t = 0)]
        hold: u64,
    },
    /// Allocate all free memory in pieces down to 1 MiB and print the amount.
    Fill {
        /// Time to hold the memory, in seconds.
        #[arg(long, default_value_t = 0)]
        hold: u64,
    },
    /// Launch a kernel that accesses an illegal address.
    Fault {
        /// Time to live after the error, in seconds.
        #[arg(long, default_value_t = 0)]
        hold: u64,
    },
    /// Launch a kernel repeatedly and print the number of launches.
    Launch(launch::Arguments),
    /// Hold memory with known bytes, launch a kernel again and again, and print what changes, one JSON object per line.
    Train(train::Arguments),
    /// Allocate and free memory at random until killed, and print the counts, one JSON object per line.
    Churn(churn::Arguments),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceInfo {
    ordinal: c_int,
    name: String,
    total_bytes: usize,
    multiprocessors: c_int,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    driver_version: c_int,
    devices: Vec<DeviceInfo>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Allocated {
    requested_bytes: usize,
    before: MemoryInfo,
    after: MemoryInfo,
    /// Name of CUDA's error; `None` on success.
    error: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Filled {
    before: MemoryInfo,
    allocated_bytes: usize,
    /// Name of the error of the last allocation.
    error: String,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cuda-probe: {error:#}");
            match error.downcast_ref() {
                Some(CudaError::Rejected { .. }) => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let cuda = Cuda::load()?;
    match &arguments.action {
        Action::Info => info(&cuda, arguments.output),
        Action::Alloc { mib, hold } => {
            cuda.use_device(arguments.device)?;
            return alloc(&cuda, arguments.output, *mib, Duration::from_secs(*hold));
        }
        Action::Fill { hold } => {
            cuda.use_device(arguments.device)?;
            fill(&cuda, arguments.output, Duration::from_secs(*hold))
        }
        Action::Fault { hold } => {
            cuda.use_device(arguments.device)?;
            fault(&cuda, Duration::from_secs(*hold))
        }
        Action::Launch(launches) => {
            cuda.use_device(arguments.device)?;
            launch::run(&cuda, arguments.output, arguments.device, launches)
        }
        Action::Train(training) => {
            cuda.use_device(arguments.device)?;
            train::run(&cuda, training)
        }
        Action::Churn(churning) => {
            cuda.use_device(arguments.device)?;
            churn::run(&cuda, churning)
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

fn info(cuda: &Cuda, output: Output) -> anyhow::Result<()> {
    let devices = (0..cuda.device_count()?)
        .map(|ordinal| {
            Ok(DeviceInfo {
                ordinal,
                name: cuda.device_name(ordinal)?,
                total_bytes: cuda.device_total(ordinal)?,
                multiprocessors: cuda.multiprocessors(ordinal)?,
            })
        })
        .collect::<Result<Vec<_>, CudaError>>()?;
    let driver_version = cuda.driver_version()?;
    let info = Info {
        driver_version,
        devices,
    };
    print(output, &info, |info| {
        let version = info.driver_version;
        let mut text = format!("CUDA {}.{}\n", version / 1000, version % 1000 / 10);
        for device in &info.devices {
            let DeviceInfo {
                ordinal,
                name,
                total_bytes,
                multiprocessors,
            } = device;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{ordinal}: {name}, {} MiB, {multiprocessors} multiprocessors",
                total_bytes / MIB
            );
        }
        text
    })
}

fn alloc(cuda: &Cuda, output: Output, mib: usize, hold: Duration) -> anyhow::Result<ExitCode> {
    let requested_bytes = mib
        .checked_mul(MIB)
        .context("--mib is larger than any address space")?;
    let before = cuda.memory_info()?;
    let error = match cuda.allocate(requested_bytes) {
        Ok(_) => None,
        Err(CudaError::Rejected { name, .. }) => Some(name),
        Err(error) => return Err(error.into()),
    };
    let after = cuda.memory_info()?;
    let allocated = Allocated {
        requested_bytes,
        before,
        after,
        error,
    };
    print(output, &allocated, |allocated| {
        let free = |info: MemoryInfo| {
            format!(
                "{} MiB free of {} MiB",
                info.free_bytes / MIB,
                info.total_bytes / MIB
            )
        };
        let outcome = match &allocated.error {
            None => format!("allocated {mib} MiB"),
            Some(name) => format!("denied {mib} MiB: {name}"),
        };
        format!(
            "before: {}\n{outcome}\nafter: {}\n",
            free(allocated.before),
            free(allocated.after)
        )
    })?;
    if allocated.error.is_some() {
        return Ok(ExitCode::from(2));
    }
    std::thread::sleep(hold);
    Ok(ExitCode::SUCCESS)
}

fn fill(cuda: &Cuda, output: Output, hold: Duration) -> anyhow::Result<()> {
    let before = cuda.memory_info()?;
    let mut allocated_bytes = 0;
    let mut piece_bytes = 1024 * MIB;
    let error = loop {
        match cuda.allocate(piece_bytes) {
            Ok(_) => allocated_bytes += piece_bytes,
            Err(CudaError::Rejected { .. }) if piece_bytes > MIB => piece_bytes /= 2,
            Err(CudaError::Rejected { name, .. }) => break name,
            Err(error) => return Err(error.into()),
        }
    };
    print(
        output,
        &Filled {
            before,
            allocated_bytes,
            error,
        },
        |filled| {
            format!(
                "allocated {} MiB of {} MiB free, then {}\n",
                filled.allocated_bytes / MIB,
                filled.before.free_bytes / MIB,
                filled.error
            )
        },
    )?;
    std::thread::sleep(hold);
    Ok(())
}

/// Returns the error of the kernel.
fn fault(cuda: &Cuda, hold: Duration) -> anyhow::Result<()> {
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`
    const ILLEGAL_ADDRESS: u64 = 700;
    let image = CString::new(include_str!("fault.ptx"))?;
    let kernel = cuda.kernel(&image, c"fault")?;
    cuda.launch(kernel, 1, ILLEGAL_ADDRESS)?;
    let outcome = cuda.synchronize();
    std::thread::sleep(hold);
    Ok(outcome?)
}

/// Writes the value as a line of JSON at once. A closed pipe is an error.
fn print_line(value: &impl Serialize) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    serde_json::to_writer(&mut output, value)?;
    writeln!(output)?;
    output.flush().context("cannot write to standard output")
}

/// Writes the value to standard output. A closed pipe (`| head -1`) is not an error.
fn print<T: Serialize>(
    output: Output,
    value: &T,
    text: impl Fn(&T) -> String,
) -> anyhow::Result<()> {
    let text = match output {
        Output::Text => text(value),
        Output::Json => format!("{}\n", serde_json::to_string(value)?),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}
