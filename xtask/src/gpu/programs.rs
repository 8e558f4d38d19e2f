//! Programs of users, under a share.

use anyhow::Result;
use drava_cluster::process::{self, Limit};
use serde::Deserialize;

use super::report::Row;
use super::rows::Rows;
use super::setup::{Setup, Share, json, limits};
use super::verdicts::allocator;
use super::{tools, torch};

/// Output of `gpu-suite gemm`.
#[derive(Debug, Deserialize)]
struct Compared {
    wrong: usize,
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let limit = setup.gpu()?.free_bytes.min(16 << 30) / 4;
    let share = setup.share(&limits(limit, 50)?)?;
    rows.run("matrix products", || Ok(vec![gemm(setup, &share)]))?;
    rows.run("nvidia-smi", || Ok(vec![smi(setup, &share, limit)]))?;
    rows.run("a program with static cudart", || {
        Ok(vec![static_cudart(setup, &share, limit)])
    })?;
    rows.run("PyTorch", || Ok(torch::rows(setup, &share, limit)))?;
    rows.run("a limited program", || Ok(tools::rows(setup, &share)))
}

fn gemm(setup: &Setup, share: &Share) -> Row {
    let title = "matrix products under a limit are correct";
    if setup.is_simulated() {
        return Row::not_run(title, "the simulated GPU computes nothing");
    }
    match json::<Compared>(setup.suite(Some(share), &["gemm"])) {
        Ok(compared) => Row::checked(
            title,
            compared.wrong == 0,
            format!("{} wrong elements", compared.wrong),
        ),
        Err(error) => Row::checked(title, false, format!("{error:#}")),
    }
}

fn smi(setup: &Setup, share: &Share, limit: u64) -> Row {
    let title = "nvidia-smi shows the share";
    let mut command = setup.smi(Some(share));
    command.args([
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
        "--id=0",
    ]);
    match process::output(&mut command, Limit::REQUEST) {
        Err(error) => Row::not_run(title, format!("cannot run nvidia-smi: {error:#}")),
        Ok(output) => {
            let shown = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let is_share = shown == (limit >> 20).to_string();
            Row::checked(title, is_share, format!("{shown} MiB in total"))
        }
    }
}

/// A program with a static CUDA runtime allocates up to the limit and no further.
fn static_cudart(setup: &Setup, share: &Share, limit: u64) -> Row {
    const SOURCE: &str = r#"
#include <cuda_runtime.h>
#include <stdio.h>
int main(void) {
    size_t free_bytes = 0, total_bytes = 0, taken = 0, piece = 512u << 20;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) return 3;
    while (piece >= 2u << 20) {
        void *pointer;
        cudaError_t error = cudaMalloc(&pointer, piece);
        if (error == cudaSuccess) { taken += piece; continue; }
        if (error != cudaErrorMemoryAllocation) return 4;
        cudaGetLastError();
        piece /= 2;
    }
    printf("{\"total\": %zu, \"free\": %zu, \"taken\": %zu}\n", total_bytes, free_bytes, taken);
    return 0;
}
"#;
    let title = "a program with static cudart is limited";
    let source = setup.out.join("cudart.cu");
    let program = setup.out.join("cudart");
    if let Err(error) = tools::nvcc(&source, SOURCE, &["--cudart", "static"], &program) {
        return Row::not_run(title, format!("{error:#}"));
    }
    allocator(title, setup.program(Some(share), &program), limit)
}
