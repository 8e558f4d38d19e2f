//! A program that would notice if its GPU memory changed, stood still or had another limit.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde::Serialize;

use crate::cuda::{Cuda, CudaError, Kernel};
use crate::{MIB, print_line};

/// Time between two reports that the bytes are the same.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Length of a kernel, nanoseconds.
const KERNEL_NANOS: u64 = 1_000_000;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Memory with known bytes, in MiB.
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// Further memory that is allocated and not written, in MiB.
    #[arg(long, default_value_t = 0)]
    unwritten_mib: usize,
    /// Time between two steps, in milliseconds.
    #[arg(long, default_value_t = 10)]
    step_ms: u64,
    /// Take a step for each byte that is appended to this file, as a notebook does for its cells.
    #[arg(long)]
    cells: Option<PathBuf>,
    /// A step that takes longer is reported as a pause, in milliseconds.
    #[arg(long, default_value_t = 300)]
    pause_ms: u64,
}

/// What is printed, with the time since the epoch.
#[derive(Serialize)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    tag = "event"
)]
enum Event {
    /// The memory is allocated and the first kernel has ended.
    Started { at_us: u128 },
    /// The memory of the device is another.
    Total { at_us: u128, bytes: usize },
    /// A step took long; it began at `from_us`.
    Pause { from_us: u128, at_us: u128 },
    /// All known bytes were compared, after the launch of this many kernels.
    Checked {
        at_us: u128,
        kernels: u64,
        bytes: usize,
        wrong_blocks: usize,
    },
}

fn now_us() -> anyhow::Result<u128> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(now.context("the clock is before 1970")?.as_micros())
}

/// The known bytes: blocks of 1 MiB that differ by their number.
struct Known {
    address: u64,
    blocks: usize,
}

impl Known {
    fn block(index: usize) -> Vec<u8> {
        let mut block: Vec<u8> = (0..MIB).map(|at| (at % 251).to_le_bytes()[0]).collect();
        for (to, from) in block.iter_mut().zip(index.to_le_bytes()) {
            *to = from;
        }
        block
    }

    fn address_of(&self, index: usize) -> u64 {
        self.address + (index * MIB) as u64
    }

    /// Allocates and writes the bytes.
    fn write(cuda: &Cuda, blocks: usize) -> Result<Self, CudaError> {
        let known = Self {
            address: cuda.allocate(blocks.max(1) * MIB)?,
            blocks,
        };
        for index in 0..blocks {
            cuda.write(known.address_of(index), &Self::block(index))?;
        }
        Ok(known)
    }

    /// Returns how many blocks have other bytes.
    fn wrong_blocks(&self, cuda: &Cuda) -> Result<usize, CudaError> {
        let (mut wrong, mut found) = (0, vec![0; MIB]);
        let mut expected = Self::block(0);
        for index in 0..self.blocks {
            for (to, from) in expected.iter_mut().zip(index.to_le_bytes()) {
                *to = from;
            }
            found.fill(0);
            cuda.read(self.address_of(index), &mut found)?;
            wrong += usize::from(found != expected);
        }
        Ok(wrong)
    }
}

/// Returns the memory of the device after a kernel.
fn step(cuda: &Cuda, kernel: Kernel) -> Result<usize, CudaError> {
    cuda.launch(kernel, 1, KERNEL_NANOS)?;
    cuda.synchronize()?;
    Ok(cuda.memory_info()?.total_bytes)
}

/// Runs until it is killed.
pub(crate) fn run(cuda: &Cuda, arguments: &Arguments) -> anyhow::Result<()> {
    let image = CString::new(include_str!("spin.ptx"))?;
    let kernel = cuda.kernel(&image, c"spin")?;
    let known = Known::write(cuda, arguments.mib)?;
    if arguments.unwritten_mib > 0 {
        let bytes = arguments.unwritten_mib.checked_mul(MIB);
        cuda.allocate(bytes.context("--unwritten-mib is too large")?)?;
    }
    let mut total = step(cuda, kernel)?;
    print_line(&Event::Started { at_us: now_us()? })?;
    print_line(&Event::Total {
        at_us: now_us()?,
        bytes: total,
    })?;
    let mut kernels = 1;
    let mut reported = Instant::now();
    let mut taken = 0;
    loop {
        if let Some(cells) = &arguments.cells {
            taken += 1;
            while std::fs::metadata(cells).map_or(0, |file| file.len()) < taken {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let (from_us, begun) = (now_us()?, Instant::now());
        let bytes = step(cuda, kernel)?;
        kernels += 1;
        let is_pause = begun.elapsed() > Duration::from_millis(arguments.pause_ms);
        if bytes != total {
            total = bytes;
            let at_us = now_us()?;
            print_line(&Event::Total { at_us, bytes })?;
        }
        if is_pause {
            let at_us = now_us()?;
            print_line(&Event::Pause { from_us, at_us })?;
        }
        if is_pause || arguments.cells.is_some() || reported.elapsed() > REPORT_INTERVAL {
            reported = Instant::now();
            let wrong_blocks = known.wrong_blocks(cuda)?;
            print_line(&Event::Checked {
                at_us: now_us()?,
                kernels,
                bytes: known.blocks * MIB,
                wrong_blocks,
            })?;
        }
        if arguments.cells.is_none() {
            std::thread::sleep(Duration::from_millis(arguments.step_ms));
        }
    }
}
