//! Allocates on request, for a share whose limit changes while the program runs: one line of stdin, one JSON object.

use std::time::Instant;

use anyhow::{Context as _, Result};
use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};

/// Answer to a request.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    total_bytes: usize,
    free_bytes: usize,
    /// Error of the allocation; `None` if there was none.
    error: Option<String>,
    /// Time of the allocation, µs.
    took_us: u128,
}

/// Answers each line of stdin, `0` or the bytes to allocate, until it closes.
pub(crate) fn run() -> Result<()> {
    let _gpu = Gpu::open()?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let bytes: usize = line.trim().parse().with_context(|| line.clone())?;
        let (begun, mut error) = (Instant::now(), None);
        if bytes > 0 {
            let mut pointer = 0;
            // SAFETY: writes one address; the memory is used until the process ends.
            error = error_name(unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) });
        }
        let took_us = begun.elapsed().as_micros();
        let (free_bytes, total_bytes) = result::mem_get_info()?;
        crate::print(&Answer {
            total_bytes,
            free_bytes,
            error,
            took_us,
        })?;
    }
    Ok(())
}
