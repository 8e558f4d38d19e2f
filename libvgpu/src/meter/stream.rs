//! Which stream a null stream means: that depends on which of two ABIs the program uses.

use crate::cuda::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream};

/// One of the two.
pub(crate) trait NullStream {
    /// Where functions without a stream put their work.
    const STREAM: CUstream;

    /// What a stream argument means.
    fn meant_by(stream: CUstream) -> CUstream;
}

/// Functions without a suffix.
pub(crate) enum Legacy {}

/// `_ptds` and `_ptsz`.
pub(crate) enum PerThread {}

impl NullStream for Legacy {
    const STREAM: CUstream = CU_STREAM_LEGACY;

    #[inline]
    fn meant_by(stream: CUstream) -> CUstream {
        stream
    }
}

impl NullStream for PerThread {
    const STREAM: CUstream = CU_STREAM_PER_THREAD;

    #[inline]
    fn meant_by(stream: CUstream) -> CUstream {
        if stream.is_null() {
            CU_STREAM_PER_THREAD
        } else {
            stream
        }
    }
}
