//! Objects that take no memory of a card: linkers, textures and surfaces, tensor maps, user objects.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, call};

const MS: u64 = 1_000_000;
const NONE: Handle = std::ptr::null_mut();

#[test]
fn what_was_linked_loads_and_runs() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (mut linker, mut image, mut bytes) = (NONE, NONE, 0usize);
    assert_eq!(
        call!(api, "cuLinkCreate_v2", 0u32, NONE, NONE, &raw mut linker),
        0
    );
    assert_ne!(
        call!(
            api,
            "cuLinkComplete",
            linker,
            &raw mut image,
            &raw mut bytes
        ),
        0
    );
    const PTX: u32 = 1;
    let text = c".version 8.0";
    let add = |kind: u32| {
        call!(
            api,
            "cuLinkAddData_v2",
            linker,
            kind,
            text.as_ptr(),
            13usize,
            c"name".as_ptr(),
            0u32,
            NONE,
            NONE
        )
    };
    assert_eq!(add(PTX), 0);
    assert_eq!(add(77), INVALID_VALUE);
    let file = machine.root().join("code.ptx");
    let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    let add_file = || {
        call!(
            api,
            "cuLinkAddFile_v2",
            linker,
            PTX,
            path.as_ptr(),
            0u32,
            NONE,
            NONE
        )
    };
    const FILE_NOT_FOUND: u32 = 301;
    assert_eq!(add_file(), FILE_NOT_FOUND);
    std::fs::write(&file, "text").unwrap();
    assert_eq!(add_file(), 0);
    assert_eq!(
        call!(
            api,
            "cuLinkComplete",
            linker,
            &raw mut image,
            &raw mut bytes
        ),
        0
    );
    assert!(bytes > 0);
    assert_eq!(add(PTX), INVALID_VALUE);
    let (mut module, mut function) = (NONE, NONE);
    assert_eq!(
        call!(
            api,
            "cuModuleLoadDataEx",
            &raw mut module,
            image,
            0u32,
            NONE,
            NONE
        ),
        0
    );
    assert_eq!(call!(api, "cuLinkDestroy", linker), 0);
    assert_eq!(call!(api, "cuLinkDestroy", linker), INVALID_HANDLE);
    assert_eq!(
        call!(
            api,
            "cuModuleGetFunction",
            &raw mut function,
            module,
            c"spin".as_ptr()
        ),
        0
    );
    api.spin(function, NONE, 1, MS);
    api.synchronize();
    assert_eq!(machine.card(0).unwrap().busy_nanos, MS);
}

fn linear(address: u64) -> sys::CUDA_RESOURCE_DESC {
    let mut resource: sys::CUDA_RESOURCE_DESC = unsafe { std::mem::zeroed() };
    resource.resType = sys::CUresourcetype::CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = address;
    resource.res.linear.format = sys::CUarray_format::CU_AD_FORMAT_FLOAT;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = 4096;
    resource
}

#[test]
fn textures_and_surfaces_describe_memory_that_is_there() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let address = api.allocate(4096).unwrap();
    let descriptor = sys::CUDA_ARRAY_DESCRIPTOR {
        Width: 64,
        Height: 64,
        Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
        NumChannels: 1,
    };
    let mut array = NONE;
    assert_eq!(
        call!(
            api,
            "cuArrayCreate_v2",
            &raw mut array,
            &raw const descriptor
        ),
        0
    );
    let mut in_array: sys::CUDA_RESOURCE_DESC = unsafe { std::mem::zeroed() };
    in_array.resType = sys::CUresourcetype::CU_RESOURCE_TYPE_ARRAY;
    in_array.res.array.hArray = array.cast();
    let used = machine.card(0).unwrap().used_bytes;
    let mut texture: sys::CUDA_TEXTURE_DESC = unsafe { std::mem::zeroed() };
    texture.maxAnisotropy = 9;

    let create = |resource: &sys::CUDA_RESOURCE_DESC| {
        let mut object = 0u64;
        let resource = std::ptr::from_ref(resource);
        let code = call!(
            api,
            "cuTexObjectCreate",
            &raw mut object,
            resource,
            &raw const texture,
            NONE
        );
        (code, object)
    };
    let (code, object) = create(&linear(address));
    assert_eq!(code, 0);
    assert_eq!(create(&in_array).0, 0);
    assert_eq!(create(&linear(0xdead_0000)).0, INVALID_VALUE);
    let mut read: sys::CUDA_TEXTURE_DESC = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(api, "cuTexObjectGetTextureDesc", &raw mut read, object),
        0
    );
    assert_eq!(read.maxAnisotropy, 9);
    let mut resource = in_array;
    assert_eq!(
        call!(api, "cuTexObjectGetResourceDesc", &raw mut resource, object),
        0
    );
    assert_eq!(unsafe { resource.res.linear }.devPtr, address);
    let mut view: sys::CUDA_RESOURCE_VIEW_DESC = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(api, "cuTexObjectGetResourceViewDesc", &raw mut view, object),
        INVALID_VALUE
    );
    assert_eq!(call!(api, "cuTexObjectDestroy", object), 0);
    assert_eq!(call!(api, "cuTexObjectDestroy", object), INVALID_VALUE);

    let surface = |resource: &sys::CUDA_RESOURCE_DESC| {
        let mut object = 0u64;
        let code = call!(
            api,
            "cuSurfObjectCreate",
            &raw mut object,
            std::ptr::from_ref(resource)
        );
        (code, object)
    };
    let (code, object) = surface(&in_array);
    assert_eq!(code, 0);
    assert_eq!(surface(&linear(address)).0, INVALID_VALUE);
    assert_eq!(
        call!(
            api,
            "cuSurfObjectGetResourceDesc",
            &raw mut resource,
            object
        ),
        0
    );
    assert_eq!(unsafe { resource.res.array }.hArray.cast(), array);
    assert_eq!(call!(api, "cuSurfObjectDestroy", object), 0);
    assert_eq!(machine.card(0).unwrap().used_bytes, used);
}

#[test]
fn a_tensor_map_is_128_bytes_that_differ_with_their_arguments() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let address = api.allocate(MIB).unwrap();
    let (sides, strides, box_sides, steps) = ([256u64, 256], [1024u64], [64u32, 64], [1u32, 1]);
    let encode = |address: u64, box_sides: [u32; 2]| {
        let mut map = sys::CUtensorMap {
            opaque: [u64::MAX; 16],
        };
        let code = call!(
            api,
            "cuTensorMapEncodeTiled",
            &raw mut map,
            7u32,
            2u32,
            address,
            sides.as_ptr(),
            strides.as_ptr(),
            box_sides.as_ptr(),
            steps.as_ptr(),
            0u32,
            0u32,
            0u32,
            0u32
        );
        (code, map)
    };
    let (code, map) = encode(address, box_sides);
    assert_eq!(code, 0);
    assert!(!map.opaque.contains(&u64::MAX));
    assert_eq!(encode(address, box_sides).1, map);
    assert_ne!(encode(address, [32, 64]).1, map);
    assert_eq!(encode(address + 8, box_sides).0, INVALID_VALUE);
    assert_eq!(encode(address, [257, 1]).0, INVALID_VALUE);
    let mut moved = map;
    assert_eq!(
        call!(
            api,
            "cuTensorMapReplaceAddress",
            &raw mut moved,
            address + 4096
        ),
        0
    );
    assert_eq!(moved, encode(address + 4096, box_sides).1);

    let (sides, strides, steps, corner) = ([64u64; 4], [256u64; 3], [1u32; 4], [-1i32; 2]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let code = call!(
        api,
        "cuTensorMapEncodeIm2col",
        &raw mut map,
        7u32,
        4u32,
        address,
        sides.as_ptr(),
        strides.as_ptr(),
        corner.as_ptr(),
        corner.as_ptr(),
        64u32,
        64u32,
        steps.as_ptr(),
        0u32,
        0u32,
        0u32,
        0u32
    );
    assert_eq!(code, 0);
    assert_ne!(map.opaque, [0; 16]);
}

static DESTROYED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn destroy(data: *mut c_void) {
    DESTROYED.fetch_add(data.addr(), Ordering::SeqCst);
}

fn await_destroyed(expected: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while DESTROYED.load(Ordering::SeqCst) != expected {
        assert!(Instant::now() < deadline, "not destroyed");
        std::thread::yield_now();
    }
}

#[test]
fn a_user_object_is_destroyed_with_its_last_reference() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let create = |weight: usize, references: u32| {
        let mut object = NONE;
        let destroy = destroy as extern "C" fn(*mut c_void);
        let code = call!(
            api,
            "cuUserObjectCreate",
            &raw mut object,
            weight,
            destroy,
            references,
            1u32
        );
        assert_eq!(code, 0);
        object
    };
    let release = |object: Handle, count: u32| call!(api, "cuUserObjectRelease", object, count);

    let first = create(1, 1);
    assert_eq!(call!(api, "cuUserObjectRetain", first, 1u32), 0);
    assert_eq!(release(first, 1), 0);
    assert_eq!(release(first, 2), INVALID_VALUE);
    assert_eq!(DESTROYED.load(Ordering::SeqCst), 0);
    assert_eq!(release(first, 1), 0);
    await_destroyed(1);

    // A graph, its copy and what was made of it hold one each.
    let second = create(10, 1);
    let (mut graph, mut copy, mut exec) = (NONE, NONE, NONE);
    assert_eq!(call!(api, "cuGraphCreate", &raw mut graph, 0u32), 0);
    const MOVE: u32 = 1;
    assert_eq!(
        call!(api, "cuGraphRetainUserObject", graph, second, 1u32, MOVE),
        0
    );
    assert_eq!(call!(api, "cuGraphClone", &raw mut copy, graph), 0);
    assert_eq!(
        call!(
            api,
            "cuGraphInstantiateWithFlags",
            &raw mut exec,
            graph,
            0u64
        ),
        0
    );
    assert_eq!(call!(api, "cuGraphDestroy", graph), 0);
    assert_eq!(
        call!(api, "cuGraphReleaseUserObject", copy, second, 2u32),
        INVALID_VALUE
    );
    assert_eq!(
        call!(api, "cuGraphReleaseUserObject", copy, second, 1u32),
        0
    );
    // Objects are destroyed one after the other: with this one nothing else is due.
    assert_eq!(release(create(100, 1), 1), 0);
    await_destroyed(101);
    assert_eq!(call!(api, "cuGraphExecDestroy", exec), 0);
    await_destroyed(111);
    assert_eq!(call!(api, "cuGraphDestroy", copy), 0);
}
