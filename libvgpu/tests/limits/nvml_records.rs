//! NVML's process details, accounting and performance monitoring.

use simulator_machine::testing::python;

use crate::nvml_processes::script;
use crate::test_process::{Container, GIB};

/// Prelude of the scripts: functions that the process lists do not cover.
pub(crate) const RECORDS: &str = r#"
class Detail(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint), ("protected", ctypes.c_ulonglong)]
class Details(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("mode", ctypes.c_uint), ("count", ctypes.c_uint), ("array", ctypes.POINTER(Detail))]
class Stats(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint), ("most", ctypes.c_ulonglong), ("time", ctypes.c_ulonglong), ("start", ctypes.c_ulonglong), ("running", ctypes.c_uint), ("reserved", ctypes.c_uint * 5)]
class Stats2(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("running", ctypes.c_uint), ("gpu", ctypes.c_uint), ("memory", ctypes.c_uint), ("most", ctypes.c_ulonglong), ("samples", ctypes.c_uint), ("gpu_sum", ctypes.c_ulonglong), ("memory_sum", ctypes.c_ulonglong), ("time", ctypes.c_ulonglong), ("start", ctypes.c_ulonglong)]
class Support(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("supported", ctypes.c_uint)]
def call(name, *arguments):
    return n._nvmlGetFunctionPointer(name)(*arguments)
def details(mode, room, version=None):
    array = (Detail * 8)()
    asked = Details(version or (ctypes.sizeof(Details) | 1 << 24), mode, room, array)
    result = call("nvmlDeviceGetRunningProcessDetailList", gpu, ctypes.byref(asked))
    return result, asked.count, sorted((one.pid, one.used >> 20) for one in array if one.pid)
def accounted():
    count, array = ctypes.c_uint(64), (ctypes.c_uint * 64)()
    result = call("nvmlDeviceGetAccountingPids", gpu, ctypes.byref(count), array)
    return result, sorted(array[:count.value])
def stats(pid):
    found = Stats()
    return call("nvmlDeviceGetAccountingStats", gpu, ctypes.c_uint(pid), ctypes.byref(found)), found.running, found.most >> 30
def stats2(pid):
    found = Stats2(pid)
    return call("nvmlDeviceGetAccountingStats_v2", gpu, ctypes.byref(found)), found.running, found.most >> 30
"#;

fn run(container: &Container, text: &str) -> String {
    let python = container.command(python::clients().unwrap().join("python"));
    script(python, &format!("{RECORDS}{text}"))
}

/// As [`run`], outside of the container.
fn run_outside(container: &Container, text: &str) -> String {
    let python = container
        .machine
        .command(python::clients().unwrap().join("python"));
    script(python, &format!("{RECORDS}{text}"))
}

#[test]
fn reports_details_only_of_own_processes() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let mut first = container.process();
    first.alloc(3 * GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(5 * GIB);
    let text = "
assert details(0, 0) == (7, 1, []), details(0, 0)
assert details(0, 8, 1)[0] == 25
assert details(1, 8) == details(2, 8) == (0, 0, [])
assert details(3, 8)[0] == 2
print(details(0, 8))";
    let expected = format!("(0, 1, [({}, 3072)])", first.pid());
    assert_eq!(run(&container, text), expected);
    assert!(run_outside(&container, "print(details(0, 8))").starts_with("(0, 2, "));
}

#[test]
fn reports_accounting_only_of_own_processes() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let on = "assert call('nvmlDeviceSetAccountingMode', gpu, ctypes.c_uint(1)) == 0; print('on')";
    assert_eq!(run_outside(&container, on), "on");
    let mut first = container.process();
    first.alloc(3 * GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(5 * GIB);
    let (own, other) = (first.pid(), unlimited.pid());
    let mut both = [own, other];
    both.sort_unstable();
    for stats in ["stats", "stats2"] {
        let text = format!("print(accounted(), {stats}({own}), {stats}({other}))");
        assert_eq!(
            run(&container, &text),
            format!("(0, [{own}]) (0, 1, 3) (6, 0, 0)"),
            "{stats}"
        );
        assert_eq!(
            run_outside(&container, &text),
            format!("(0, {both:?}) (0, 1, 3) (0, 1, 5)"),
            "{stats}"
        );
    }
}

#[test]
fn denies_performance_monitoring_of_gpu() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(GIB);
    let text = "
support, sample = Support(1, 9), ctypes.c_void_p()
assert call('nvmlGpmQueryDeviceSupport', gpu, ctypes.byref(support)) == 0
assert call('nvmlGpmSampleAlloc', ctypes.byref(sample)) == 0
of_instance = call('nvmlGpmMigSampleGet', gpu, ctypes.c_uint(0), sample)
print(support.supported, call('nvmlGpmSampleGet', gpu, sample), of_instance)";
    assert_eq!(run(&container, text), "0 3 3");
    // No instance has that number.
    assert_eq!(run_outside(&container, text), "1 0 2");
}
