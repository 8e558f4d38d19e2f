//! The stream that a null stream means, which depends on the ABI of the function.

use crate::driver_api::cuda::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream};

/// ABI of a function.
pub(crate) trait NullStream {
    /// Stream of functions without a stream argument.
    const STREAM: CUstream;

    /// Returns the stream that a stream argument means.
    fn resolve(stream: CUstream) -> CUstream;
}

/// Functions without a suffix: the null stream is the legacy default stream.
pub(crate) enum Legacy {}

/// Functions with the suffix `_ptds` or `_ptsz`: the null stream is the default stream of the thread.
pub(crate) enum PerThread {}

impl NullStream for Legacy {
    const STREAM: CUstream = CU_STREAM_LEGACY;

    #[inline]
    fn resolve(stream: CUstream) -> CUstream {
        stream
    }
}

impl NullStream for PerThread {
    const STREAM: CUstream = CU_STREAM_PER_THREAD;

    #[inline]
    fn resolve(stream: CUstream) -> CUstream {
        if stream.is_null() {
            CU_STREAM_PER_THREAD
        } else {
            stream
        }
    }
}
