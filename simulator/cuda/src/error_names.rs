//! `cuGetErrorName` and `cuGetErrorString`.

use std::ffi::{CStr, c_char};

use crate::abi::{CudaResult, Out, entry_points};
use crate::error::{CUresult, CudaError, name};

entry_points! {
    "cuGetErrorString" 6000 fn cuGetErrorString(code: CUresult, text: Out<*const c_char>) {
        describe(code, text, |(_, text)| text)
    }
    "cuGetErrorName" 6000 fn cuGetErrorName(code: CUresult, text: Out<*const c_char>) {
        describe(code, text, |(name, _)| name)
    }
}

fn describe(
    code: CUresult,
    text: Out<*const c_char>,
    part: impl Fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> CudaResult {
    match name(code) {
        Some(names) => text.set(part(names).as_ptr()),
        None => {
            text.set(std::ptr::null())?;
            Err(CudaError::InvalidValue)
        }
    }
}
