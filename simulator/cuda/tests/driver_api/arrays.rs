//! Arrays, mipmapped arrays, 2D and 3D copies, and managed memory hints.

use std::ffi::c_void;

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, call};

const NONE: Handle = std::ptr::null_mut();
const FLOAT: sys::CUarray_format = sys::CUarray_format::CU_AD_FORMAT_FLOAT;
const BYTE: sys::CUarray_format = sys::CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8;

fn array(
    api: &Api,
    [width, height, depth]: [usize; 3],
    format: sys::CUarray_format,
) -> Result<Handle, u32> {
    let descriptor = sys::CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: format,
        NumChannels: 1,
        Flags: 0,
    };
    let mut array = NONE;
    match call!(
        api,
        "cuArray3DCreate_v2",
        &raw mut array,
        &raw const descriptor
    ) {
        0 => Ok(array),
        error => Err(error),
    }
}

/// One side of a copy.
#[derive(Clone, Copy)]
enum Side {
    Host(*mut u8, usize),
    Device(u64, usize),
    Array(Handle),
}

impl Side {
    fn kind(self) -> sys::CUmemorytype {
        match self {
            Self::Host(..) => sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            Self::Device(..) => sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            Self::Array(_) => sys::CUmemorytype::CU_MEMORYTYPE_ARRAY,
        }
    }

    fn host(self) -> *mut c_void {
        match self {
            Self::Host(address, _) => address.cast(),
            _ => NONE,
        }
    }

    fn device(self) -> u64 {
        match self {
            Self::Device(address, _) => address,
            _ => 0,
        }
    }

    fn array(self) -> sys::CUarray {
        match self {
            Self::Array(array) => array.cast(),
            _ => std::ptr::null_mut(),
        }
    }

    fn pitch(self) -> usize {
        match self {
            Self::Host(_, pitch) | Self::Device(_, pitch) => pitch,
            Self::Array(_) => 0,
        }
    }
}

fn copy(
    api: &Api,
    (to, to_at): (Side, [usize; 3]),
    (from, from_at): (Side, [usize; 3]),
    [width, height, depth]: [usize; 3],
) -> u32 {
    let copy = sys::CUDA_MEMCPY3D {
        srcXInBytes: from_at[0],
        srcY: from_at[1],
        srcZ: from_at[2],
        srcLOD: 0,
        srcMemoryType: from.kind(),
        srcHost: from.host(),
        srcDevice: from.device(),
        srcArray: from.array(),
        reserved0: NONE,
        srcPitch: from.pitch(),
        srcHeight: 0,
        dstXInBytes: to_at[0],
        dstY: to_at[1],
        dstZ: to_at[2],
        dstLOD: 0,
        dstMemoryType: to.kind(),
        dstHost: to.host(),
        dstDevice: to.device(),
        dstArray: to.array(),
        reserved1: NONE,
        dstPitch: to.pitch(),
        dstHeight: 0,
        WidthInBytes: width,
        Height: height,
        Depth: depth,
    };
    call!(api, "cuMemcpy3D_v2", &raw const copy)
}

#[test]
fn charges_arrays_until_destroyed() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let flat = array(&api, [1024, 1024, 0], FLOAT).unwrap();
    assert_eq!(used(), 4 * MIB);
    let deep = array(&api, [256, 256, 65], BYTE).unwrap();
    assert_eq!(used(), 4 * MIB + 6 * MIB);
    for destroyed in [flat, deep] {
        assert_eq!(call!(api, "cuArrayDestroy", destroyed), 0);
        let again = call!(api, "cuArrayDestroy", destroyed);
        assert_eq!(again, INVALID_HANDLE);
    }
    assert_eq!(used(), 0);
    assert_eq!(array(&api, [0, 1, 0], FLOAT), Err(INVALID_VALUE));
    let absurd = array(&api, [1 << 40, 1 << 40, 0], FLOAT);
    assert_eq!(absurd, Err(INVALID_VALUE));
}

#[test]
fn charges_all_levels_of_a_mipmapped_array() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let descriptor = sys::CUDA_ARRAY3D_DESCRIPTOR {
        Width: 1024,
        Height: 512,
        Depth: 0,
        Format: FLOAT,
        NumChannels: 4,
        Flags: 0,
    };
    let mut mipmap = NONE;
    let code = call!(
        api,
        "cuMipmappedArrayCreate",
        &raw mut mipmap,
        &raw const descriptor,
        99u32
    );
    assert_eq!(code, 0);
    // 8 MiB for the first level, less than a third of that for all others.
    assert_eq!(used(), 12 * MIB);
    assert_eq!(call!(api, "cuMipmappedArrayDestroy", mipmap), 0);
    assert_eq!(used(), 0);
    assert_eq!(
        call!(api, "cuMipmappedArrayDestroy", mipmap),
        INVALID_HANDLE
    );
}

#[test]
fn copies_3d_between_host_device_and_arrays() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let array = array(&api, [8, 4, 3], BYTE).unwrap();
    let device = api.allocate(16 * 4 * 3).unwrap();
    let mut written: Vec<u8> = (0..8 * 4 * 3).collect();
    let mut read = vec![0xffu8; 2 * 2 * 2];
    let (from, to) = (written.as_mut_ptr(), read.as_mut_ptr());
    let origin = [0; 3];
    // All to the array, then to rows of 16 bytes, then part of the middle to the host.
    let whole = [8, 4, 3];
    let host = Side::Host(from, 8);
    let in_array = Side::Array(array);
    let on_device = Side::Device(device, 16);
    assert_eq!(copy(&api, (in_array, origin), (host, origin), whole), 0);
    assert_eq!(
        copy(&api, (on_device, origin), (in_array, origin), whole),
        0
    );
    let part = copy(
        &api,
        (Side::Host(to, 2), origin),
        (in_array, [3, 1, 1]),
        [2, 2, 2],
    );
    assert_eq!(part, 0);
    let at = |x: u8, y: u8, z: u8| z * 32 + y * 8 + x;
    let expected = [
        at(3, 1, 1),
        at(4, 1, 1),
        at(3, 2, 1),
        at(4, 2, 1),
        at(3, 1, 2),
        at(4, 1, 2),
        at(3, 2, 2),
        at(4, 2, 2),
    ];
    assert_eq!(read, expected);
    let mut row = [0u8; 8];
    let code = call!(
        api,
        "cuMemcpyDtoH_v2",
        row.as_mut_ptr(),
        device + 16 * (4 + 1),
        8usize
    );
    assert_eq!(code, 0);
    assert_eq!(row, [40, 41, 42, 43, 44, 45, 46, 47]);
    // Out of the array, out of the allocation, and overlapping rows.
    for (to, at, size) in [
        (in_array, [1, 0, 0], whole),
        (in_array, [0, 0, 3], [1, 1, 1]),
        (on_device, [9, 0, 0], whole),
        (Side::Device(device, 4), origin, whole),
    ] {
        assert_eq!(copy(&api, (to, at), (host, origin), size), INVALID_VALUE);
    }
}

#[test]
fn copies_rows_by_pitch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let device = api.allocate(3 * 32).unwrap();
    let written: Vec<u8> = (0..30).collect();
    let mut read = [0u8; 4];
    let mut copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 2,
        srcY: 1,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: written.as_ptr().cast(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 10,
        dstXInBytes: 5,
        dstY: 1,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: NONE,
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: 32,
        WidthInBytes: 4,
        Height: 2,
    };
    assert_eq!(call!(api, "cuMemcpy2D_v2", &raw const copy), 0);
    let second = device + 2 * 32 + 5;
    let host = read.as_mut_ptr();
    assert_eq!(call!(api, "cuMemcpyDtoH_v2", host, second, 4usize), 0);
    assert_eq!(read, [22, 23, 24, 25]);
    // The last row is outside the 512 bytes of the smallest allocation.
    copy.dstY = 15;
    assert_eq!(call!(api, "cuMemcpy2D_v2", &raw const copy), INVALID_VALUE);
}

#[test]
fn copies_array_rows_by_offset() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let first = array(&api, [16, 0, 0], BYTE).unwrap();
    let second = array(&api, [16, 0, 0], BYTE).unwrap();
    let device = api.allocate(16).unwrap();
    api.write(device, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut read = [0u8; 4];
    assert_eq!(
        call!(api, "cuMemcpyDtoA_v2", first, 8usize, device, 8usize),
        0
    );
    let code = call!(
        api,
        "cuMemcpyAtoA_v2",
        second,
        0usize,
        first,
        10usize,
        6usize
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(api, "cuMemcpyAtoD_v2", device, second, 0usize, 6usize),
        0
    );
    let host = read.as_mut_ptr();
    assert_eq!(call!(api, "cuMemcpyDtoH_v2", host, device + 2, 4usize), 0);
    assert_eq!(read, [5, 6, 7, 8]);
    assert_eq!(
        call!(api, "cuMemcpyDtoA_v2", first, 12usize, device, 4usize),
        0
    );
    let beyond = call!(api, "cuMemcpyDtoA_v2", first, 13usize, device, 4usize);
    assert_eq!(beyond, INVALID_VALUE);
}

#[test]
fn validates_managed_memory_hints() {
    const GLOBAL: u32 = 1;
    const HOST: i32 = -1;
    const READ_MOSTLY: u32 = 1;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let (mut managed, plain) = (0u64, api.allocate(4096).unwrap());
    let code = call!(api, "cuMemAllocManaged", &raw mut managed, 64 * MIB, GLOBAL);
    assert_eq!(code, 0);
    let prefetch = |address: u64, bytes: u64, device: i32| {
        call!(api, "cuMemPrefetchAsync", address, bytes, device, NONE)
    };
    assert_eq!(prefetch(managed, 64 * MIB, 0), 0);
    assert_eq!(prefetch(managed, MIB, HOST), 0);
    assert_eq!(prefetch(managed, 64 * MIB + 1, 0), INVALID_VALUE);
    assert_eq!(prefetch(plain, 4096, 0), INVALID_VALUE);
    assert_ne!(prefetch(managed, MIB, 7), 0);
    let advise = |advice: u32| call!(api, "cuMemAdvise", managed, MIB, advice, 0);
    assert_eq!((advise(READ_MOSTLY), advise(7)), (0, INVALID_VALUE));
    api.synchronize();
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle + 2 * MIB);
}

#[test]
fn creates_arrays_with_descriptors_before_cuda_3_2() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    // Width, height, format, channels.
    let flat = [1024u32, 1024, 0x20, 1];
    let mut array: Handle = std::ptr::null_mut();
    assert_eq!(
        call!(api, "cuArrayCreate", &raw mut array, flat.as_ptr()),
        0
    );
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle + 4 * MIB);
    assert_eq!(call!(api, "cuArrayDestroy", array), 0);
    // Width, height, depth, format, channels, flags.
    let deep = [256u32, 256, 32, 0x20, 1, 0];
    assert_eq!(
        call!(api, "cuArray3DCreate", &raw mut array, deep.as_ptr()),
        0
    );
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle + 8 * MIB);
    assert_eq!(call!(api, "cuArrayDestroy", array), 0);
}
