//! Linking of images in host memory. The linked image declares the global variables of all its inputs.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::abi::{In, Out, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::image::{cubin, declared};
use crate::types::CUlinkState;

#[derive(Debug, Default)]
pub(crate) struct Links(BTreeMap<CUlinkState, Link>);

#[derive(Debug, Default)]
struct Link {
    /// Bytes of the global variables that the inputs declare.
    global_bytes: u64,
    /// The linked image, which lives as long as the link.
    image: Vec<u8>,
}

impl Links {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.0.keys().map(|link| link.0)
    }
}

entry_points! {
    "cuLinkCreate" 5050 fn cuLinkCreate_v2(_count: c_uint, _options: In<c_int>, _values: In<*mut c_void>, link: Out<CUlinkState>) {
        crate::context::current_handle()?;
        let mut state = driver()?.state();
        let made = CUlinkState(state.handle());
        state.links.0.insert(made, Link::default());
        link.set(made)
    }

    "cuLinkAddData" 5050 fn cuLinkAddData_v2(
        link: CUlinkState, _kind: c_int, image: In<c_char>, _bytes: usize, _name: In<c_char>,
        _count: c_uint, _options: In<c_int>, _values: In<*mut c_void>,
    ) {
        let more = declared(image)?.global_bytes;
        let mut state = driver()?.state();
        let link = state.links.0.get_mut(&link).ok_or(CudaError::InvalidHandle)?;
        link.global_bytes = link.global_bytes.saturating_add(more);
        Ok(())
    }

    "cuLinkComplete" 5050 fn cuLinkComplete(link: CUlinkState, image: Out<*const c_char>, bytes: Out<usize>) {
        let mut state = driver()?.state();
        let link = state.links.0.get_mut(&link).ok_or(CudaError::InvalidHandle)?;
        link.image = cubin(link.global_bytes);
        bytes.set_if_not_null(link.image.len());
        image.set(link.image.as_ptr().cast())
    }

    "cuLinkDestroy" 5050 fn cuLinkDestroy(link: CUlinkState) {
        let removed = driver()?.state().links.0.remove(&link);
        removed.map(drop).ok_or(CudaError::InvalidHandle)
    }
}
