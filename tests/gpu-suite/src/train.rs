//! A training: each step changes weights by a kernel and prints their loss, and memory with known bytes is compared.

use std::io::BufRead as _;
use std::time::Instant;

use anyhow::{Context as _, Result};
use cudarc::driver::{LaunchConfig, PushKernelArg, result, sys};
use serde::Serialize;

use crate::gpu::Gpu;

const MIB: usize = 1 << 20;

/// Size of a piece of memory with known bytes; one block of each is compared with each step.
const PIECE: usize = 256 * MIB;
const BLOCK: usize = MIB;

/// Bytes that one operation writes: the simulated machine keeps no more of it.
const FILL: usize = 64 * MIB;

/// Rows and columns of the weights.
const SIDE: u16 = 256;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Memory with known bytes, in MiB
    #[arg(long)]
    mib: usize,
}

/// A step that has ended.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Step {
    /// The bits of the loss.
    loss: String,
    /// Blocks with other bytes.
    wrong: usize,
    /// Time of the step, µs.
    us: u128,
}

/// Memory with known bytes.
struct Piece {
    address: sys::CUdeviceptr,
    byte: u8,
    bytes: usize,
}

/// Takes a step for each line of stdin, after one that prints its result, too. Ends with stdin.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let kernel = gpu.kernel("gemm")?;
    let side = usize::from(SIDE);
    let mut left = arguments
        .mib
        .checked_mul(MIB)
        .context("--mib is too large")?;
    let mut pieces = Vec::new();
    for byte in (1..=250_u8).cycle() {
        let bytes = left.min(PIECE);
        if bytes < BLOCK {
            break;
        }
        left -= bytes;
        // SAFETY: not used after the end of the process.
        let address = unsafe { result::malloc_sync(bytes) }?;
        for start in (0..bytes).step_by(FILL) {
            let filled = FILL.min(bytes - start);
            // SAFETY: within the piece, which was just allocated.
            unsafe { result::memset_d8_sync(address + start as u64, byte, filled) }?;
        }
        pieces.push(Piece {
            address,
            byte,
            bytes,
        });
    }
    let fixed: Vec<f32> = (0..side * side)
        .map(|index| number(index * 3 + 1))
        .collect();
    let fixed = stream.clone_htod(&fixed)?;
    let mut weights: Vec<f32> = (0..side * side).map(|index| number(index * 7)).collect();
    let blocks = u32::from(SIDE).div_ceil(16);
    let shape = LaunchConfig {
        grid_dim: (blocks, blocks, 1),
        block_dim: (16, 16, 1),
        shared_mem_bytes: 0,
    };
    let rows = u32::from(SIDE);
    let mut on_gpu = stream.clone_htod(&weights)?;
    let mut product = stream.alloc_zeros::<f32>(side * side)?;
    let mut found = vec![0_u8; BLOCK];
    let mut lines = std::io::stdin().lock().lines();
    loop {
        let begun = Instant::now();
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&on_gpu).arg(&fixed).arg(&mut product).arg(&rows);
        // SAFETY: three matrices of `rows` × `rows` floats and their side, as the kernel expects.
        unsafe { launch.launch(shape) }?;
        let gradient = stream.clone_dtoh(&product)?;
        // What the GPU has, not what the host remembers.
        weights = stream.clone_dtoh(&on_gpu)?;
        for (weight, gradient) in weights.iter_mut().zip(&gradient) {
            *weight = *weight * 0.999 - gradient * 1e-6;
        }
        on_gpu = stream.clone_htod(&weights)?;
        let loss: f64 = weights
            .iter()
            .map(|weight| f64::from(*weight).powi(2))
            .sum();
        let mut wrong = 0;
        for piece in &pieces {
            let last = piece.address + (piece.bytes - BLOCK) as u64;
            result_of(&mut found, last)?;
            wrong += usize::from(found.iter().any(|byte| *byte != piece.byte));
        }
        crate::print(&Step {
            loss: format!("{:016x}", loss.to_bits()),
            wrong,
            us: begun.elapsed().as_micros(),
        })?;
        if lines.next().transpose()?.is_none() {
            return Ok(());
        }
    }
}

/// Reads a block.
fn result_of(found: &mut [u8], address: sys::CUdeviceptr) -> Result<()> {
    found.fill(0);
    // SAFETY: the caller passes the address of a block.
    Ok(unsafe { result::memcpy_dtoh_sync(found, address) }?)
}

fn number(index: usize) -> f32 {
    u8::try_from(index % 13).map_or(0.0, f32::from) / 13.0
}
