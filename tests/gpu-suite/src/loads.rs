//! Loads modules while another thread allocates and frees memory: how many loads succeed, and what they take.

use std::ffi::CString;
use std::fs;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};
use crate::memory::array_image;

const MIB: usize = 1 << 20;
/// Pause between two allocations of the other thread.
const PAUSE: Duration = Duration::from_micros(200);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of modules
    #[arg(long, default_value_t = 300)]
    modules: usize,
    /// Size of the array in each module, MiB
    #[arg(long, default_value_t = 0)]
    array_mib: usize,
    /// File with the image of each module, instead of one with that array
    #[arg(long)]
    image: Option<PathBuf>,
    /// Size of what another thread allocates and frees at least once beside each load, MiB; no other thread if 0
    #[arg(long, default_value_t = 0)]
    churn_mib: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Loaded {
    modules: usize,
    loaded: usize,
    /// Name of the error of the first load that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    /// Allocations of the other thread.
    churned: usize,
    churn_refused: usize,
    free_bytes_before: usize,
    /// After the loads, when the other thread holds nothing.
    free_bytes_after: usize,
    seconds: f64,
}

/// What the other thread did.
#[derive(Default)]
struct Churn {
    tried: AtomicUsize,
    refused: AtomicUsize,
    is_over: AtomicBool,
}

impl Churn {
    /// Allocates and frees until the loads are over.
    fn run(&self, bytes: usize) {
        while !self.is_over.load(Ordering::Acquire) {
            let mut pointer = 0;
            // SAFETY: writes one pointer.
            let code = unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) };
            if error_name(code).is_none() {
                // SAFETY: memory that is freed once.
                unsafe { sys::cuMemFree_v2(pointer) };
            } else {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
            self.tried.fetch_add(1, Ordering::Release);
            // The driver's lock is not fair: without a pause the loads may wait for seconds.
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until the other thread has allocated once more.
    fn await_next(&self) {
        let before = self.tried.load(Ordering::Acquire);
        while self.tried.load(Ordering::Acquire) == before {
            std::thread::yield_now();
        }
    }
}

/// Prints `ready`; after a line on stdin reads what is free and prints `measured`; after another one loads, and prints
/// `loaded`; after a third one prints the result. So several processes load at the same time, and what is free is read
/// while none does.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let image = match &arguments.image {
        Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
        None => image(arguments.array_mib)?,
    };
    let bytes = arguments.churn_mib * MIB;
    let next = || std::io::stdin().read_line(&mut String::new());
    println!("ready");
    next()?;
    let (free_bytes_before, _) = result::mem_get_info()?;
    println!("measured");
    next()?;
    let (churn, begun) = (Churn::default(), Instant::now());
    let (mut loaded, mut refusal) = (0, None);
    std::thread::scope(|scope| {
        if bytes > 0 {
            let (context, churn) = (&gpu.context, &churn);
            scope.spawn(move || match context.bind_to_thread() {
                Ok(()) => churn.run(bytes),
                // Nothing is churned then, and the result says so.
                Err(_) => churn.is_over.store(true, Ordering::Release),
            });
        }
        for _ in 0..arguments.modules {
            let mut module = ptr::null_mut();
            // SAFETY: writes one handle; a terminated image, or one with its size in its header, that lives through the
            // call.
            let code = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
            match error_name(code) {
                None => loaded += 1,
                Some(name) => {
                    refusal.get_or_insert(name);
                }
            }
            if bytes > 0 && !churn.is_over.load(Ordering::Acquire) {
                churn.await_next();
            }
        }
        churn.is_over.store(true, Ordering::Release);
    });
    let seconds = begun.elapsed().as_secs_f64();
    println!("loaded");
    next()?;
    let (free_bytes_after, _) = result::mem_get_info()?;
    crate::print(&Loaded {
        modules: arguments.modules,
        loaded,
        refusal,
        churned: churn.tried.into_inner(),
        churn_refused: churn.refused.into_inner(),
        free_bytes_before,
        free_bytes_after,
        seconds,
    })
}

/// A module with an array, or the suite's kernels, which have none.
fn image(array_mib: usize) -> Result<Vec<u8>> {
    let text = match array_mib {
        0 => CString::new(include_str!("kernels.ptx"))?,
        mib => CString::new(array_image(mib * MIB))?,
    };
    Ok(text.into_bytes_with_nul())
}
