//! Multiplies matrices on the GPU and on the host.

use anyhow::Result;
use cudarc::driver::{LaunchConfig, PushKernelArg};
use serde::Serialize;

use crate::gpu::Gpu;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Rows and columns
    #[arg(long, default_value_t = 256)]
    side: u16,
    /// Number of multiplications
    #[arg(long, default_value_t = 20)]
    times: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Compared {
    side: u16,
    times: u32,
    /// Elements that differ from the host's result. The numbers are small integers, so the result is exact.
    wrong: usize,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let stream = gpu.context.new_stream()?;
    let kernel = gpu.kernel("gemm")?;
    let side = usize::from(arguments.side);
    let a: Vec<f32> = (0..side * side).map(|index| small(index * 7)).collect();
    let b: Vec<f32> = (0..side * side).map(|index| small(index * 3 + 1)).collect();
    let expected = multiply(&a, &b, side);
    let (on_gpu_a, on_gpu_b) = (stream.clone_htod(&a)?, stream.clone_htod(&b)?);
    let blocks = u32::from(arguments.side).div_ceil(16);
    let shape = LaunchConfig {
        grid_dim: (blocks, blocks, 1),
        block_dim: (16, 16, 1),
        shared_mem_bytes: 0,
    };
    let rows = u32::from(arguments.side);
    let mut wrong = 0;
    for _ in 0..arguments.times {
        let mut product = stream.alloc_zeros::<f32>(side * side)?;
        let mut launch = stream.launch_builder(&kernel);
        launch
            .arg(&on_gpu_a)
            .arg(&on_gpu_b)
            .arg(&mut product)
            .arg(&rows);
        // SAFETY: three matrices of `rows` × `rows` floats and their side, as the kernel expects.
        unsafe { launch.launch(shape) }?;
        let product = stream.clone_dtoh(&product)?;
        wrong += product
            .iter()
            .zip(&expected)
            .filter(|(got, want)| got != want)
            .count();
    }
    crate::print(&Compared {
        side: arguments.side,
        times: arguments.times,
        wrong,
    })
}

/// Small enough that sums of products are exact in 24 bits.
fn small(index: usize) -> f32 {
    u8::try_from(index % 13).map_or(0.0, f32::from)
}

fn multiply(a: &[f32], b: &[f32], side: usize) -> Vec<f32> {
    let mut product = vec![0.0; side * side];
    for (row, target) in a.chunks(side).zip(product.chunks_mut(side)) {
        for (x, line) in row.iter().zip(b.chunks(side)) {
            for (y, sum) in line.iter().zip(target.iter_mut()) {
                *sum += x * y;
            }
        }
    }
    product
}
