//! Images of modules.

use std::ffi::CStr;

use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, call};

#[test]
fn rejects_ptx_with_other_characters_than_ascii() {
    const INVALID_PTX: u32 = 218;
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let load = |image: &CStr| {
        let mut module: Handle = std::ptr::null_mut();
        call!(api, "cuModuleLoadData", &raw mut module, image.as_ptr())
    };
    assert_eq!(load(c".version 6.4\n// c = a * b"), 0);
    assert_eq!(load(c".version 6.4\n// c = a · b"), INVALID_PTX);
    assert_eq!(load(c"// c = a · b\n.version 6.4"), INVALID_PTX);
    assert_eq!(api.error_name(INVALID_PTX), "CUDA_ERROR_INVALID_PTX");
}
