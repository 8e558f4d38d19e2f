//! Side effects of calls that a machine file leaves out.

use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, call};

const NONE: Handle = std::ptr::null_mut();
const NON_BLOCKING: u32 = 1;
const NOT_READY: u32 = 600;
const CAPTURE_UNSUPPORTED: u32 = 900;
/// Longer than the test takes before its last call.
const MINUTE: u64 = 60_000_000_000;

/// Starts a T4 with these side effects.
fn start(side_effects: &str) -> Machine {
    Machine::start(&format!("sideEffects: {{{side_effects}}}\n{T4}")).unwrap()
}

/// Begins a capture in global mode, allocates memory, and returns the results of the allocation and of the end of the capture.
fn allocate_in_capture(api: &Api) -> [u32; 2] {
    let stream = api.stream(NON_BLOCKING);
    assert_eq!(call!(api, "cuStreamBeginCapture_v2", stream, 0u32), 0);
    let (mut address, mut graph) = (0u64, NONE);
    let allocated = call!(api, "cuMemAlloc_v2", &raw mut address, 4096usize);
    let ended = call!(api, "cuStreamEndCapture", stream, &raw mut graph);
    [allocated, ended]
}

#[test]
fn unsafe_calls_leave_captures_valid_where_machine_says_so() {
    let machine = start("unsafeCallsInvalidateCaptures: false");
    assert_eq!(allocate_in_capture(&Api::start(&machine)), [0, 0]);
    let [allocated, ended] = allocate_in_capture(&Api::start(&start("")));
    assert_eq!(allocated, CAPTURE_UNSUPPORTED);
    assert_ne!(ended, 0);
}

#[test]
fn loads_do_not_wait_where_machine_says_so() {
    let machine = start("loadsWait: false");
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let stream = api.stream(NON_BLOCKING);
    api.spin(spin, stream, 1, MINUTE);
    let mut module = NONE;
    let image = c"any image".as_ptr();
    assert_eq!(call!(api, "cuModuleLoadData", &raw mut module, image), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
}

#[test]
fn contexts_do_not_grow_where_machine_says_so() {
    let launched = |side_effects: &str| {
        let machine = start(side_effects);
        let api = Api::start(&machine);
        let function = api.function(c"local_4096");
        let before = machine.gpu(0).unwrap().used_bytes;
        let launched = api.launch(function, NONE, [1, 32], std::ptr::null_mut());
        assert_eq!(launched, 0);
        machine.gpu(0).unwrap().used_bytes - before
    };
    assert!(launched("contextsGrow: false") <= 2 * MIB);
    assert!(launched("") > 2 * MIB);
}
