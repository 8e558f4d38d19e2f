//! Host functions and waits for memory words.

use std::ffi::c_void;

use crate::abi::CudaResult;
use crate::error::CudaError;

use super::ValueWait;

/// `CUhostFn`
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// A function of the program with its argument.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostFunction {
    /// `CUhostFn`
    Plain { function: HostFn, data: usize },
    /// `cuStreamWaitValue32`: no function, a word of memory that the stream waits for.
    WaitValue(ValueWait),
}

impl HostFunction {
    pub(crate) fn plain(function: Option<HostFn>, data: *mut c_void) -> CudaResult<Self> {
        let function = function.ok_or(CudaError::InvalidValue)?;
        let data = data.expose_provenance();
        Ok(Self::Plain { function, data })
    }

    pub(crate) fn call(self) {
        match self {
            Self::Plain { function, data } => {
                let data = std::ptr::with_exposed_provenance_mut(data);
                // SAFETY: the program asked for this call with this argument.
                unsafe { function(data) };
            }
            Self::WaitValue(_) => {}
        }
    }
}
