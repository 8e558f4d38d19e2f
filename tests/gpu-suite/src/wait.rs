//! Launches while a long kernel runs: the kernel could wait for them, so they must not wait for its end.

use std::time::Instant;

use anyhow::Result;
use cudarc::driver::{LaunchConfig, PushKernelArg};
use serde::Serialize;

use crate::card::Card;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration of the kernel, in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Number of launches behind it
    #[arg(long, default_value_t = 20)]
    launches: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Waited {
    kernel_seconds: u64,
    /// Time from the launch of the kernel to the return of the last launch.
    seconds: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let card = Card::open()?;
    let (stream, other) = (card.context.new_stream()?, card.context.new_stream()?);
    let (spin, noop) = (card.kernel("spin")?, card.kernel("noop")?);
    let shape = |blocks| LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the kernel takes nothing and does nothing. Its launch loads the module.
    unsafe { other.launch_builder(&noop).launch(shape(1)) }?;
    other.synchronize()?;
    let nanoseconds = arguments.seconds * 1_000_000_000;
    let begun = Instant::now();
    let mut launch = stream.launch_builder(&spin);
    launch.arg(&nanoseconds);
    // SAFETY: the kernel takes one 64-bit number and touches no memory.
    unsafe { launch.launch(shape(1)) }?;
    for launch in 1..=arguments.launches {
        // Each of another shape, so that its cost is not known.
        // SAFETY: the kernel takes nothing and does nothing.
        unsafe { other.launch_builder(&noop).launch(shape(launch * 64)) }?;
    }
    crate::print(&Waited {
        kernel_seconds: arguments.seconds,
        seconds: begun.elapsed().as_secs_f64(),
    })
}
