use std::ffi::c_void;

use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, INVALID_VALUE, call};

const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

fn lookup(api: &Api, name: &std::ffi::CStr, version: i32, flags: u64) -> (*mut c_void, u32) {
    let mut address: *mut c_void = std::ptr::null_mut();
    let mut status = 9u32;
    let code = call!(
        api,
        "cuGetProcAddress_v2",
        name.as_ptr(),
        &raw mut address,
        version,
        flags,
        &raw mut status
    );
    assert_eq!(code, 0);
    (address, status)
}

#[test]
fn returns_the_form_of_the_requested_version() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::open(&machine);
    let cases = [
        (c"cuMemAlloc", 3020, LEGACY, "cuMemAlloc_v2"),
        (c"cuMemAlloc", 13000, LEGACY, "cuMemAlloc_v2"),
        (c"cuMemAlloc", 3010, LEGACY, "cuMemAlloc"),
        (c"cuCtxCreate", 11040, LEGACY, "cuCtxCreate_v3"),
        (c"cuCtxCreate", 13000, LEGACY, "cuCtxCreate_v4"),
        (c"cuGetProcAddress", 11030, LEGACY, "cuGetProcAddress"),
        (c"cuGetProcAddress", 12000, LEGACY, "cuGetProcAddress_v2"),
        (c"cuLaunchKernel", 12000, 0, "cuLaunchKernel"),
        (c"cuLaunchKernel", 12000, PER_THREAD, "cuLaunchKernel_ptsz"),
        (c"cuMemcpyHtoD", 12000, PER_THREAD, "cuMemcpyHtoD_v2_ptds"),
        (
            c"cuGraphInstantiate",
            11000,
            LEGACY,
            "cuGraphInstantiate_v2",
        ),
        (
            c"cuGraphInstantiate",
            12000,
            LEGACY,
            "cuGraphInstantiateWithFlags",
        ),
        (c"cuGraphLaunch", 12000, PER_THREAD, "cuGraphLaunch_ptsz"),
        (
            c"cuStreamGetCaptureInfo",
            12030,
            PER_THREAD,
            "cuStreamGetCaptureInfo_v3_ptsz",
        ),
        (c"cuMemFree", 12000, PER_THREAD, "cuMemFree_v2"),
    ];
    for (name, version, flags, symbol) in cases {
        assert_eq!(
            lookup(&api, name, version, flags),
            (api.symbol(symbol), 0),
            "{name:?} {version} {flags}"
        );
    }
}

#[test]
fn distinguishes_unknown_names_from_newer_versions() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::open(&machine);
    assert_eq!(
        lookup(&api, c"cuNoSuchThing", 13000, 0),
        (std::ptr::null_mut(), 1)
    );
    assert_eq!(
        lookup(&api, c"cuLaunchKernelEx", 11000, 0),
        (std::ptr::null_mut(), 2)
    );
    let mut address: *mut c_void = std::ptr::null_mut();
    let code = call!(
        api,
        "cuGetProcAddress",
        c"cuInit".as_ptr(),
        &raw mut address,
        12000,
        8u64
    );
    assert_eq!(code, INVALID_VALUE);
}
