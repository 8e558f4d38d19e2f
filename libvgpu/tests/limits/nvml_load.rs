//! What NVML shows of the work of other shares: nothing, in every function that has the load, traffic, sessions or faults of
//! the whole GPU.

use std::process::Command;

use drava_vgpu_abi::Limits;
use simulator_machine::testing::python;

use crate::nvml_processes::script;
use crate::nvml_utilization::{Busy, half_of_gpu, idle_beside_busy};
use crate::test_process::{Container, GIB};

/// Python functions that call NVML without the wrappers of its binding.
const CALLS: &str = r#"

def call(name, *arguments):
    return n._nvmlGetFunctionPointer(name)(*arguments)
def values(name, count, *before):
    found = [ctypes.c_uint(77) for _ in range(count)]
    result = call(name, gpu, *before, *(ctypes.byref(one) for one in found))
    return (result, *(one.value for one in found)) if result == 0 else (result,)
def domains():
    info = n.c_nvmlGpuDynamicPstatesInfo_t()
    assert call('nvmlDeviceGetDynamicPstatesInfo', gpu, ctypes.byref(info)) == 0
    return [(one.bIsPresent, one.percentage) for one in info.utilization]
def sessions(kind):
    count = ctypes.c_uint(1)
    result = call(f'nvmlDeviceGet{kind}Sessions', gpu, ctypes.byref(count), ctypes.create_string_buffer(4096))
    return result, count.value
def engine_samples():
    kinds = (n.NVML_ENC_UTILIZATION_SAMPLES, n.NVML_DEC_UTILIZATION_SAMPLES, 8, 9)
    return [max(sample.sampleValue.uiVal for sample in n.nvmlDeviceGetSamples(gpu, kind, 0)[1]) for kind in kinds]
ENGINES = [f'nvmlDeviceGet{name}Utilization' for name in ('Encoder', 'Decoder', 'Jpg', 'Ofa')]
"#;

fn run(container: &Container, text: &str) -> String {
    let python = container.command(python::clients().unwrap().join("python"));
    script(python, &format!("{CALLS}{text}"))
}

/// As [`run`], outside of the container.
fn run_outside(container: &Container, text: &str) -> String {
    let python: Command = container
        .machine
        .command(python::clients().unwrap().join("python"));
    script(python, &format!("{CALLS}{text}"))
}

#[test]
fn shows_no_load_and_no_session_of_other_shares() {
    if python::is_unavailable() {
        return;
    }
    let (container, _idle, _busy) = idle_beside_busy();
    let text = "
print(domains()[:4])
print(*(values(name, 2)[1] for name in ENGINES), engine_samples())
print(values('nvmlDeviceGetEncoderStats', 3), len(n.nvmlDeviceGetEncoderSessions(gpu)))
stats = n.nvmlDeviceGetFBCStats(gpu)
print(stats.sessionsCount, stats.averageFPS, stats.averageLatency, len(n.nvmlDeviceGetFBCSessions(gpu)))
print(sessions('Encoder'), sessions('FBC'), call('nvmlDeviceGetFBCSessions', gpu, None, None))
print(values('nvmlDeviceGetPcieThroughput', 1, ctypes.c_uint(0))[0], values('nvmlDeviceGetEncoderCapacity', 1, ctypes.c_uint(0))[0])";
    let nothing = "[(1, 0), (1, 0), (0, 0), (0, 0)]\n0 0 0 0 [0, 0, 0, 0]\n(0, 0, 0, 0) 0\n0 0 0 0\n\
        (0, 0) (0, 0) 2\n3 3";
    assert_eq!(run(&container, text), nothing);
    let check = "
assert domains()[0][1] > 50 and domains()[3] != (0, 0), domains()
assert all(values(name, 2)[1] > 50 for name in ENGINES) and min(engine_samples()) > 50
assert values('nvmlDeviceGetEncoderStats', 3)[1] == len(n.nvmlDeviceGetEncoderSessions(gpu)) == 2
assert n.nvmlDeviceGetFBCStats(gpu).sessionsCount == len(n.nvmlDeviceGetFBCSessions(gpu)) == 2
assert sessions('Encoder') == sessions('FBC') == (7, 2)
assert values('nvmlDeviceGetPcieThroughput', 1, ctypes.c_uint(0))[1] > 1000
assert values('nvmlDeviceGetEncoderCapacity', 1, ctypes.c_uint(0)) == (0, 80)
print('everything')";
    assert_eq!(run_outside(&container, check), "everything");
}

#[test]
fn shows_own_load_by_domain() {
    if python::is_unavailable() {
        return;
    }
    let container = half_of_gpu();
    let _busy = Busy::inside(&container);
    // Alone on the GPU it uses more than its 50%.
    let text = "
deadline = time.time() + 60
while domains()[0] != (1, 100):
    assert time.time() < deadline, domains()
    time.sleep(0.02)
print(call('nvmlDeviceGetDynamicPstatesInfo', gpu, None))";
    assert_eq!(run(&container, text), "2");
}

#[test]
fn reports_sizes_of_share_only() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let text = "
sizes = n.nvmlDeviceGetConfComputeMemSizeInfo(gpu)
protected = n.nvmlDeviceGetConfComputeProtectedMemoryUsage(gpu)
bar1 = n.c_nvmlBAR1Memory_t()
print(sizes.protectedMemSizeKib, sizes.unprotectedMemSizeKib >> 20, protected.total, call('nvmlDeviceGetBAR1MemoryInfo', gpu, ctypes.byref(bar1)))";
    assert_eq!(run(&container, text), "0 8 0 3");
    assert_eq!(run_outside(&container, text), "0 79 0 0");
}

/// Fields of the traffic of all shares are not supported; each other field has the same result inside and outside.
#[test]
fn hides_fields_of_all_shares() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(GIB);
    let text = "
class Field(ctypes.Structure):
    _fields_ = [('id', ctypes.c_uint), ('scope', ctypes.c_uint), ('at', ctypes.c_longlong), ('us', ctypes.c_longlong),
                ('kind', ctypes.c_uint), ('result', ctypes.c_int), ('value', ctypes.c_ulonglong)]
fields = (Field * 307)()
for index, field in enumerate(fields):
    field.id = index + 1
    field.value = 0
assert call('nvmlDeviceGetFieldValues', gpu, ctypes.c_int(307), fields) == 0
assert call('nvmlDeviceGetFieldValues', gpu, ctypes.c_int(1), None) == 2
print(*(f'{field.id}={field.result}' for field in fields))
assert all(field.value == 0 for field in fields if field.result)";
    let (inside, outside) = (run(&container, text), run_outside(&container, text));
    let table = include_str!("../../nvml-fields.tsv");
    let hidden: Vec<&str> = table
        .lines()
        .filter(|line| line.ends_with("\thidden"))
        .filter_map(|line| line.split('\t').nth(1))
        .collect();
    let mut shown = 0;
    for (inside, outside) in inside.split(' ').zip(outside.split(' ')) {
        let (id, result) = inside.split_once('=').unwrap();
        if hidden.contains(&id) {
            assert_eq!(result, "3", "field {id}");
            shown += u32::from(outside.ends_with("=0"));
        } else {
            assert_eq!(inside, outside);
        }
    }
    assert!(
        shown >= 10,
        "the simulated GPU has few of these fields: {outside}"
    );
}

/// An XID names no process: most are faults of programs, also of other tenants.
#[test]
fn reports_no_xids_of_other_shares() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    container.add_share("share", crate::test_process::GPUS[0], &Limits::memory(GIB));
    let text = "
events = n.nvmlEventSetCreate()
register = lambda types: call('nvmlDeviceRegisterEvents', gpu, ctypes.c_ulonglong(types), events)
print(n.nvmlDeviceGetSupportedEventTypes(gpu), register(8), register(10), register(2))
other = n.nvmlDeviceGetHandleByIndex(1)
print(n.nvmlDeviceGetSupportedEventTypes(other), call('nvmlDeviceRegisterEvents', other, ctypes.c_ulonglong(8), events))
config = n.c_nvmlGpuOperationalEventConfig_v1_t()
print(call('nvmlEventSetRegisterGpuOperationalEvents_v1', events, ctypes.byref(config)))";
    assert_eq!(run(&container, text), "2 3 3 0\n10 0\n3");
    assert!(run_outside(&container, text).starts_with("10 0 0 0\n10 0\n"));
}
