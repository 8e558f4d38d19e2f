use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, OUT_OF_MEMORY, call};

const CHUNK: u64 = 32 * MIB;
const DEFAULT: Handle = std::ptr::null_mut();
const RELEASE_THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;

fn pool(api: &Api) -> Handle {
    let mut pool: Handle = std::ptr::null_mut();
    assert_eq!(call!(api, "cuDeviceGetDefaultMemPool", &raw mut pool, 0), 0);
    pool
}

fn attribute(api: &Api, pool: Handle, which: u32) -> u64 {
    let mut value = 0u64;
    assert_eq!(
        call!(api, "cuMemPoolGetAttribute", pool, which, &raw mut value),
        0
    );
    value
}

fn allocate(api: &Api, bytes: u64) -> Result<u64, u32> {
    let mut address = 0u64;
    match call!(api, "cuMemAllocAsync", &raw mut address, bytes, DEFAULT) {
        0 => Ok(address),
        error => Err(error),
    }
}

pub(crate) fn free(api: &Api, address: u64) {
    assert_eq!(call!(api, "cuMemFreeAsync", address, DEFAULT), 0);
}

#[test]
fn reserves_chunks_and_releases_at_synchronization() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let pool = pool(&api);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let small: Vec<u64> = (0..3).map(|_| allocate(&api, 1000).unwrap()).collect();
    assert_eq!((used(), attribute(&api, pool, USED)), (CHUNK, 3000));
    let large = allocate(&api, 100 * MIB + 1).unwrap();
    assert_eq!(
        (used(), attribute(&api, pool, RESERVED)),
        (CHUNK + 102 * MIB, CHUNK + 102 * MIB)
    );
    free(&api, large);
    assert_eq!(used(), CHUNK + 102 * MIB);
    assert_eq!(allocate(&api, 102 * MIB), Ok(large));
    free(&api, large);
    api.synchronize();
    assert_eq!(used(), CHUNK);
    small.iter().for_each(|address| free(&api, *address));
    api.synchronize();
    assert_eq!((used(), attribute(&api, pool, USED)), (0, 0));
}

#[test]
fn keeps_pool_memory_below_the_release_threshold() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let mut threshold = u64::MAX;
    assert_eq!(
        call!(
            api,
            "cuMemPoolSetAttribute",
            pool(&api),
            RELEASE_THRESHOLD,
            &raw mut threshold
        ),
        0
    );
    let (free_bytes, _) = api.memory_info();
    let most = free_bytes / (2 * MIB) * 2 * MIB;
    let all = allocate(&api, most).unwrap();
    free(&api, all);
    api.synchronize();
    assert!(api.memory_info().0 < 2 * MIB);
    assert_eq!(api.allocate(1), Err(OUT_OF_MEMORY));
    // An allocation of the pool reuses its idle memory.
    allocate(&api, most / 2).unwrap();
    assert_eq!(call!(api, "cuMemPoolTrimTo", pool(&api), 0usize), 0);
    assert!(api.memory_info().0 >= most / 2 - 2 * MIB);
}

#[test]
fn keeps_trimmed_memory_until_stream_reaches_free() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let pool = pool(&api);
    let mut threshold = u64::MAX;
    let name = RELEASE_THRESHOLD;
    let set = call!(api, "cuMemPoolSetAttribute", pool, name, &raw mut threshold);
    assert_eq!(set, 0);
    let spin = api.function(c"spin");
    let stream = api.stream(1);
    let trim = || assert_eq!(call!(api, "cuMemPoolTrimTo", pool, 0usize), 0);
    let mut address = 0u64;
    let bytes = 100 * MIB;
    let allocated = call!(api, "cuMemAllocAsync", &raw mut address, bytes, stream);
    assert_eq!(allocated, 0);
    api.spin(spin, stream, 1, 300_000_000);
    assert_eq!(call!(api, "cuMemFreeAsync", address, stream), 0);
    trim();
    assert_eq!(attribute(&api, pool, RESERVED), bytes);
    assert_eq!(attribute(&api, pool, USED), 0);
    api.synchronize();
    assert_eq!(attribute(&api, pool, RESERVED), bytes);
    trim();
    assert_eq!(attribute(&api, pool, RESERVED), 0);
}

#[test]
fn keeps_destroyed_pool_until_its_last_free() {
    #[repr(C)]
    struct Properties {
        kind: u32,
        handle_types: u32,
        location: [i32; 2],
        security: usize,
        max_size: usize,
        rest: [u8; 56],
    }
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let properties = Properties {
        kind: 1,
        handle_types: 0,
        location: [1, 0],
        security: 0,
        max_size: 64 << 20,
        rest: [0; 56],
    };
    let mut pool: Handle = std::ptr::null_mut();
    assert_eq!(
        call!(api, "cuMemPoolCreate", &raw mut pool, &raw const properties),
        0
    );
    let mut address = 0u64;
    assert_eq!(
        call!(
            api,
            "cuMemAllocFromPoolAsync",
            &raw mut address,
            65usize << 20,
            pool,
            DEFAULT
        ),
        OUT_OF_MEMORY
    );
    assert_eq!(
        call!(
            api,
            "cuMemAllocFromPoolAsync",
            &raw mut address,
            40usize << 20,
            pool,
            DEFAULT
        ),
        0
    );
    assert_eq!(call!(api, "cuMemPoolDestroy", pool), 0);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle + 40 * MIB);
    free(&api, address);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle);
}

/// Creates a pool from a `CUmemAllocationType` and a location.
pub(crate) fn create_pool(api: &Api, kind: i32, location: [i32; 2]) -> Result<Handle, u32> {
    let mut properties = [0i32; 22];
    properties[0] = kind;
    properties[2..4].copy_from_slice(&location);
    let mut pool: Handle = std::ptr::null_mut();
    match call!(api, "cuMemPoolCreate", &raw mut pool, properties.as_ptr()) {
        0 => Ok(pool),
        error => Err(error),
    }
}

const PINNED: i32 = 1;
pub(crate) const MANAGED: i32 = 2;
pub(crate) const NOWHERE: [i32; 2] = [0, 0];
const GPU: [i32; 2] = [1, 0];
const HOST: [i32; 2] = [2, 0];

pub(crate) fn allocate_from(api: &Api, pool: Handle, bytes: u64) -> Result<u64, u32> {
    let mut address = 0u64;
    match call!(
        api,
        "cuMemAllocFromPoolAsync",
        &raw mut address,
        bytes,
        pool,
        DEFAULT
    ) {
        0 => Ok(address),
        error => Err(error),
    }
}

#[test]
fn takes_no_gpu_memory_for_host_and_managed_pools() {
    let yaml = T4.replace("cudaVersion: \"13.0\"", "cudaVersion: \"13.2\"");
    assert_ne!(yaml, T4);
    let machine = Machine::start(&yaml).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    const LOCATION_TYPE: u32 = 12;
    for (kind, location) in [
        (PINNED, HOST),
        (MANAGED, NOWHERE),
        (MANAGED, GPU),
        (MANAGED, HOST),
    ] {
        let pool = create_pool(&api, kind, location).unwrap();
        let address = allocate_from(&api, pool, 48 * MIB).unwrap();
        assert_eq!(
            machine.gpu(0).unwrap().used_bytes,
            idle,
            "{kind} {location:?}"
        );
        assert_eq!(attribute(&api, pool, USED), 48 * MIB);
        let mut managed = 9u8;
        assert_eq!(
            call!(
                api,
                "cuPointerGetAttribute",
                &raw mut managed,
                8u32,
                address
            ),
            0
        );
        assert_eq!(managed == 1, kind == MANAGED);
        let mut of = 0i32;
        assert_eq!(
            call!(
                api,
                "cuMemPoolGetAttribute",
                pool,
                LOCATION_TYPE,
                &raw mut of
            ),
            0
        );
        assert_eq!(of, location[0]);
        api.write(address, b"bytes");
        assert_eq!(api.read(address, 5), b"bytes");
        free(&api, address);
        api.synchronize();
        assert_eq!(attribute(&api, pool, RESERVED), 0);
        assert_eq!(call!(api, "cuMemPoolDestroy", pool), 0);
    }
    for (kind, location) in [(PINNED, NOWHERE), (0, GPU), (3, GPU), (PINNED, [1, 7])] {
        assert!(
            create_pool(&api, kind, location).is_err(),
            "{kind} {location:?}"
        );
    }
}

#[test]
fn replaces_the_current_pool_of_a_device() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let get = |name: &str, location: [i32; 2], kind: i32| {
        let mut pool: Handle = std::ptr::null_mut();
        let symbol = api.symbol(name);
        let code: u32 =
            crate::api::Invoke::invoke(symbol, (&raw mut pool, location.as_ptr(), kind));
        assert_eq!(code, 0, "{name}");
        pool
    };
    let default = |location, kind| get("cuMemGetDefaultMemPool", location, kind);
    let current = |location, kind| get("cuMemGetMemPool", location, kind);
    assert_eq!(default(GPU, PINNED), pool(&api));
    // CUDA 13.0 does not define the attribute.
    let mut location = 0i32;
    let code = call!(
        api,
        "cuMemPoolGetAttribute",
        pool(&api),
        12u32,
        &raw mut location
    );
    assert_eq!(code, 1);
    let mut all = vec![
        default(GPU, PINNED),
        default(HOST, PINNED),
        default(GPU, MANAGED),
        default(NOWHERE, MANAGED),
    ];
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4);
    let other = create_pool(&api, PINNED, GPU).unwrap();
    assert_eq!(call!(api, "cuDeviceSetMemPool", 0, other), 0);
    assert_eq!(current(GPU, PINNED), other);
    assert_eq!(current(HOST, PINNED), default(HOST, PINNED));
    // Allocations without a pool use the current one.
    allocate(&api, 1000).unwrap();
    assert_eq!(attribute(&api, other, USED), 1000);
}
