//! Private functions of the driver, which profilers get by `cuGetExportTable`. There is one table with
//! one function; real profilers and the CUDA runtime ask for others.

use std::ffi::c_void;

use crate::abi::{In, Out, code, entry_points};
use crate::context::current_handle;
use crate::driver::driver;
use crate::error::{CUresult, CudaError};

const PROFILER: [u8; 16] = *b"simulated export";

#[repr(C)]
struct ExportTable {
    /// Size of the table.
    bytes: usize,
    /// Reserves the memory of a profiler in the current context.
    begin_profiling: extern "C" fn() -> CUresult,
}

static TABLE: ExportTable = ExportTable {
    bytes: size_of::<ExportTable>(),
    begin_profiling,
};

extern "C" fn begin_profiling() -> CUresult {
    code(|| {
        let context = current_handle()?;
        let driver = driver()?;
        driver.state().require_profiler(driver, context)
    })
}

entry_points! {
    "cuGetExportTable" 3000 fn cuGetExportTable(table: Out<*const c_void>, id: In<[u8; 16]>) {
        match id.get()? {
            PROFILER => table.set((&raw const TABLE).cast()),
            _ => Err(CudaError::NotFound),
        }
    }
}
