//! The linker: images go in, one image comes out, which loads as any other does.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_uint, c_void};

use crate::abi::{Answer, In, Out, Text, entry_points};
use crate::context::current_handle;
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUlinkState;

/// What begins every image that a linker makes.
const MAGIC: &[u8] = b"\x7fELF linked";
/// `CU_JIT_INPUT_CUBIN` to `CU_JIT_INPUT_NVVM`
const INPUTS: std::ops::RangeInclusive<c_uint> = 0..=5;

/// Linkers of this process, each with what was put into it.
#[derive(Debug, Default)]
pub(crate) struct Linkers(BTreeMap<CUlinkState, Linker>);

#[derive(Debug, Default)]
struct Linker {
    inputs: usize,
    image: Option<Box<[u8]>>,
}

fn create(result: Out<CUlinkState>) -> Answer {
    current_handle()?;
    if result.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let mut state = driver()?.state();
    let handle = CUlinkState(state.handle());
    state.linkers.0.insert(handle, Linker::default());
    result.set(handle)
}

/// Takes an input; none is taken once the image is made.
fn add(handle: CUlinkState, kind: c_uint) -> Answer {
    let mut state = driver()?.state();
    let linker = state
        .linkers
        .0
        .get_mut(&handle)
        .ok_or(CudaError::InvalidHandle)?;
    if linker.image.is_some() || !INPUTS.contains(&kind) {
        return Err(CudaError::InvalidValue);
    }
    linker.inputs += 1;
    Ok(())
}

fn add_data(handle: CUlinkState, kind: c_uint, data: In<u8>, bytes: usize) -> Answer {
    if bytes == 0 {
        return Err(CudaError::InvalidImage);
    }
    data.get()?;
    add(handle, kind)
}

fn add_file(handle: CUlinkState, kind: c_uint, path: Text) -> Answer {
    match std::fs::metadata(path.get()?) {
        Ok(file) if file.is_file() => add(handle, kind),
        _ => Err(CudaError::FileNotFound),
    }
}

entry_points! {
    "cuLinkCreate" 5050 fn cuLinkCreate(_count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>, linker: Out<CUlinkState>) { create(linker) }
    "cuLinkCreate" 6050 fn cuLinkCreate_v2(_count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>, linker: Out<CUlinkState>) { create(linker) }

    "cuLinkAddData" 5050 fn cuLinkAddData(linker: CUlinkState, kind: c_uint, data: In<u8>, bytes: usize, _name: In<c_char>, _count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>) { add_data(linker, kind, data, bytes) }
    "cuLinkAddData" 6050 fn cuLinkAddData_v2(linker: CUlinkState, kind: c_uint, data: In<u8>, bytes: usize, _name: In<c_char>, _count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>) { add_data(linker, kind, data, bytes) }
    "cuLinkAddFile" 5050 fn cuLinkAddFile(linker: CUlinkState, kind: c_uint, path: Text, _count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>) { add_file(linker, kind, path) }
    "cuLinkAddFile" 6050 fn cuLinkAddFile_v2(linker: CUlinkState, kind: c_uint, path: Text, _count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>) { add_file(linker, kind, path) }

    // The image is the linker's, and goes with it.
    "cuLinkComplete" 5050 fn cuLinkComplete(linker: CUlinkState, image: Out<*mut c_void>, bytes: Out<usize>) {
        let mut state = driver()?.state();
        let linker = state.linkers.0.get_mut(&linker).ok_or(CudaError::InvalidHandle)?;
        if linker.inputs == 0 {
            return Err(CudaError::InvalidImage);
        }
        let made = linker.image.get_or_insert_with(|| MAGIC.into());
        bytes.set_if_wanted(made.len());
        image.set(made.as_mut_ptr().cast())
    }

    "cuLinkDestroy" 5050 fn cuLinkDestroy(linker: CUlinkState) {
        let removed = driver()?.state().linkers.0.remove(&linker);
        removed.map(drop).ok_or(CudaError::InvalidHandle)
    }
}
