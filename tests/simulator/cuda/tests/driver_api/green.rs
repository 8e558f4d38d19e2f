//! Device resources and green contexts.

use cudarc::driver::sys;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_CONTEXT, INVALID_VALUE, call};

const MS: u64 = 1_000_000;
const NONE: Handle = std::ptr::null_mut();
const SM: u32 = 1;
const NON_BLOCKING: u32 = 1;

fn multiprocessors(resource: &sys::CUdevResource) -> u32 {
    unsafe { resource.__bindgen_anon_1.sm }.smCount
}

fn whole(api: &Api) -> sys::CUdevResource {
    let mut resource: sys::CUdevResource = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(api, "cuDeviceGetDevResource", 0, &raw mut resource, SM),
        0
    );
    resource
}

/// Groups of a device of at least so many multiprocessors each, and what is left.
fn split(api: &Api, least: u32, most: u32) -> (Vec<sys::CUdevResource>, sys::CUdevResource) {
    let input = whole(api);
    let mut groups = vec![input; most as usize];
    let (mut count, mut rest) = (most, input);
    let code = call!(
        api,
        "cuDevSmResourceSplitByCount",
        groups.as_mut_ptr(),
        &raw mut count,
        &raw const input,
        &raw mut rest,
        0u32,
        least
    );
    assert_eq!(code, 0);
    groups.truncate(count as usize);
    (groups, rest)
}

fn green(api: &Api, resources: &mut [sys::CUdevResource]) -> Handle {
    let (mut description, mut green) = (NONE, NONE);
    let count = u32::try_from(resources.len()).unwrap();
    let code = call!(
        api,
        "cuDevResourceGenerateDesc",
        &raw mut description,
        resources.as_mut_ptr(),
        count
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(
            api,
            "cuGreenCtxCreate",
            &raw mut green,
            description,
            0,
            0u32
        ),
        INVALID_VALUE
    );
    assert_eq!(
        call!(
            api,
            "cuGreenCtxCreate",
            &raw mut green,
            description,
            0,
            1u32
        ),
        0
    );
    green
}

fn stream(api: &Api, green: Handle) -> Handle {
    let mut stream = NONE;
    let create = |stream: &mut Handle, flags: u32| {
        call!(
            api,
            "cuGreenCtxStreamCreate",
            std::ptr::from_mut(stream),
            green,
            flags,
            0
        )
    };
    assert_eq!(create(&mut stream, 0), INVALID_VALUE);
    assert_eq!(create(&mut stream, NON_BLOCKING), 0);
    stream
}

#[test]
fn multiprocessors_are_split_in_groups_of_eight() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    assert_eq!(multiprocessors(&whole(&api)), 132);
    let (groups, rest) = split(&api, 30, 9);
    let counts: Vec<u32> = groups.iter().map(multiprocessors).collect();
    assert_eq!((counts, multiprocessors(&rest)), (vec![32; 4], 4));
    let input = whole(&api);
    let mut count = 0u32;
    let ask = |least: u32, count: &mut u32| {
        call!(
            api,
            "cuDevSmResourceSplitByCount",
            NONE,
            std::ptr::from_mut(count),
            &raw const input,
            NONE,
            0u32,
            least
        )
    };
    assert_eq!((ask(16, &mut count), count), (0, 8));
    assert_eq!(ask(133, &mut count), INVALID_VALUE);
}

#[test]
fn green_contexts_compute_side_by_side_on_their_own_multiprocessors() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (mut groups, _) = split(&api, 64, 2);
    let [first, second] = &mut groups[..] else {
        panic!("two halves fit");
    };
    let greens = [
        green(&api, std::slice::from_mut(first)),
        green(&api, std::slice::from_mut(second)),
    ];
    let streams = greens.map(|one| stream(&api, one));
    let spin = api.function(c"spin");
    let before = machine.card(0).unwrap().busy_nanos;
    // Each would fill the whole card.
    for stream in streams {
        api.spin(spin, stream, 10_000, 40 * MS);
    }
    api.synchronize();
    let busy = machine.card(0).unwrap().busy_nanos - before;
    assert!((40 * MS..80 * MS).contains(&busy), "{busy}");
    let mut of = NONE;
    assert_eq!(
        call!(api, "cuStreamGetGreenCtx", streams[1], &raw mut of),
        0
    );
    assert_eq!(of, greens[1]);
    let mut context = NONE;
    assert_eq!(
        call!(
            api,
            "cuStreamGetCtx_v2",
            streams[1],
            &raw mut context,
            &raw mut of
        ),
        0
    );
    assert_eq!((context, of), (NONE, greens[1]));
    let mut resource = whole(&api);
    assert_eq!(
        call!(
            api,
            "cuGreenCtxGetDevResource",
            greens[0],
            &raw mut resource,
            SM
        ),
        0
    );
    assert_eq!(multiprocessors(&resource), 64);
    assert_eq!(
        call!(
            api,
            "cuStreamGetDevResource",
            streams[0],
            &raw mut resource,
            SM
        ),
        0
    );
    assert_eq!(multiprocessors(&resource), 64);
}

#[test]
fn what_a_green_context_allocates_is_the_primary_ones() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    let used = || machine.card(0).unwrap().used_bytes;
    assert_eq!(used(), 0);
    let (mut groups, _) = split(&api, 16, 1);
    // Makes the primary context, which nobody else holds.
    let green = green(&api, &mut groups);
    let context_bytes = used();
    assert!(context_bytes > 0);
    let mut context = NONE;
    assert_eq!(call!(api, "cuCtxFromGreenCtx", &raw mut context, green), 0);
    assert_eq!(call!(api, "cuCtxSetCurrent", context), 0);
    let mut current = NONE;
    assert_eq!(call!(api, "cuCtxGetCurrent", &raw mut current), 0);
    assert_eq!(current, context);
    let mut resource = whole(&api);
    assert_eq!(
        call!(api, "cuCtxGetDevResource", NONE, &raw mut resource, SM),
        0
    );
    assert_eq!(multiprocessors(&resource), 16);
    let address = api.allocate(64 * MIB).unwrap();
    let small = api.allocate(100).unwrap();
    assert_eq!(used(), context_bytes + 66 * MIB);
    assert_eq!(call!(api, "cuCtxDestroy_v2", context), INVALID_CONTEXT);

    let mut primary = NONE;
    assert_eq!(
        call!(api, "cuDevicePrimaryCtxRetain", &raw mut primary, 0),
        0
    );
    assert_eq!(call!(api, "cuGreenCtxDestroy", green), 0);
    assert_eq!(used(), context_bytes + 66 * MIB);
    assert_eq!(call!(api, "cuCtxSetCurrent", primary), 0);
    api.free(small);
    assert_eq!(used(), context_bytes + 64 * MIB);
    assert_eq!(call!(api, "cuMemsetD8_v2", address, 1u8, 16usize), 0);
    assert_eq!(call!(api, "cuDevicePrimaryCtxRelease_v2", 0), 0);
    assert_eq!(used(), 0);
}

#[test]
fn the_last_green_context_takes_the_primary_one_with_it() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    let (mut groups, _) = split(&api, 16, 2);
    let greens: Vec<Handle> = groups.chunks_mut(1).map(|one| green(&api, one)).collect();
    let mut context = NONE;
    assert_eq!(
        call!(api, "cuCtxFromGreenCtx", &raw mut context, greens[0]),
        0
    );
    assert_eq!(call!(api, "cuCtxSetCurrent", context), 0);
    api.allocate(8 * MIB).unwrap();
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[0]), 0);
    assert!(machine.card(0).unwrap().used_bytes > 8 * MIB);
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[1]), 0);
    assert_eq!(machine.card(0).unwrap().used_bytes, 0);
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[1]), INVALID_CONTEXT);
}

#[test]
fn an_event_of_a_context_is_reached_when_all_its_streams_are_there() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (mut groups, _) = split(&api, 32, 1);
    let green = green(&api, &mut groups);
    let streams = [stream(&api, green), stream(&api, green)];
    let spin = api.function(c"spin");
    let (start, end, after) = (api.event(), api.event(), api.event());
    assert_eq!(call!(api, "cuEventRecord", start, streams[0]), 0);
    api.spin(spin, streams[0], 1, 5 * MS);
    api.spin(spin, streams[1], 1, 20 * MS);
    assert_eq!(call!(api, "cuGreenCtxRecordEvent", green, end), 0);
    // Streams outside wait for it, all of them together.
    let outside = api.stream(NON_BLOCKING);
    assert_eq!(call!(api, "cuCtxWaitEvent", NONE, end), 0);
    api.spin(spin, outside, 1, MS);
    assert_eq!(call!(api, "cuCtxRecordEvent", NONE, after), 0);
    assert_eq!(call!(api, "cuEventSynchronize", after), 0);
    let elapsed = |from: Handle, to: Handle| {
        let mut milliseconds = 0f32;
        assert_eq!(
            call!(
                api,
                "cuEventElapsedTime_v2",
                &raw mut milliseconds,
                from,
                to
            ),
            0
        );
        milliseconds
    };
    assert!(elapsed(start, end) >= 20.0, "{}", elapsed(start, end));
    assert!(elapsed(end, after) >= 1.0, "{}", elapsed(end, after));
    assert_eq!(call!(api, "cuGreenCtxWaitEvent", green, after), 0);
}
