//! The first GPU, and the suite's kernels on it.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, result, sys};
use cudarc::nvrtc::Ptx;
use serde::Serialize;

/// The first GPU with the suite's kernels loaded.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    module: Arc<CudaModule>,
}

impl Gpu {
    /// Loads the driver, makes the primary context of device 0 current and loads the kernels.
    pub(crate) fn open() -> Result<Self> {
        let context = CudaContext::new(0).context("cannot create a context on device 0")?;
        let module = context
            .load_module(Ptx::from_src(include_str!("kernels.ptx")))
            .context("cannot load the suite's kernels")?;
        Ok(Self { context, module })
    }

    /// Returns a kernel.
    pub(crate) fn kernel(&self, name: &str) -> Result<CudaFunction> {
        self.module
            .load_function(name)
            .with_context(|| format!("cannot find kernel {name}"))
    }

    /// Number of multiprocessors.
    pub(crate) fn multiprocessors(&self) -> Result<u32> {
        let count = self
            .context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count.unsigned_abs())
    }
}

/// Returns the name of the error of a driver call that failed.
pub(crate) fn error_name(code: sys::CUresult) -> Option<String> {
    match code.result() {
        Ok(()) => None,
        Err(error) => Some(error.error_name().map_or_else(
            |_| format!("{:?}", error.0),
            |name| name.to_string_lossy().into_owned(),
        )),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuInfo {
    name: String,
    uuid: String,
    driver_version: i32,
    compute_capability: (i32, i32),
    multiprocessors: i32,
    total_bytes: usize,
    free_bytes: usize,
}

pub(crate) fn run() -> Result<()> {
    // cudarc panics without the library.
    // SAFETY: a terminated string; loading runs the library's initializers, as in any program.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    ensure!(!library.is_null(), "cannot load libcuda.so.1");
    let context = CudaContext::new(0).context("cannot create a context on device 0")?;
    let (free_bytes, total_bytes) = result::mem_get_info()?;
    let mut driver_version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_version) }.result()?;
    let uuid: String = context
        .uuid()?
        .bytes
        .iter()
        .map(|byte| format!("{:02x}", byte.cast_unsigned()))
        .collect();
    crate::print(&GpuInfo {
        name: context.name()?,
        uuid,
        driver_version,
        compute_capability: context.compute_capability()?,
        multiprocessors: context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        total_bytes,
        free_bytes,
    })
}
