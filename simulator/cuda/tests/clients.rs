//! Unmodified client libraries: cudarc and cuda-bindings.

use std::process::Output;
use std::sync::Arc;

use anyhow::{Context, ensure};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::testing::{Machine, python};

fn text(output: &Output) -> anyhow::Result<String> {
    let text = String::from_utf8(output.stdout.clone())?;
    ensure!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text)
}

/// Set in the child process that uses cudarc, which loads the library by name.
const AS_CLIENT: &str = "DRAVA_TEST_CUDARC";

/// Not a test by itself: the child process of `runs_cudarc`.
#[test]
fn cudarc_child() -> anyhow::Result<()> {
    if std::env::var_os(AS_CLIENT).is_none() {
        return Ok(());
    }
    let context: Arc<CudaContext> = CudaContext::new(1)?;
    assert_eq!(context.name()?, "NVIDIA H100 80GB HBM3");
    assert_eq!(context.compute_capability()?, (9, 0));
    let stream = context.new_stream()?;
    let written: Vec<f32> = (0u16..1000).map(f32::from).collect();
    let on_gpu = stream.clone_htod(&written)?;
    let copied = stream.clone_dtod(&on_gpu)?;
    assert_eq!(stream.clone_dtoh(&copied)?, written);
    let zeros = stream.alloc_zeros::<u8>(100)?;
    assert_eq!(stream.clone_dtoh(&zeros)?, [0; 100]);

    let spin = context
        .load_module(Ptx::from_src("any image"))?
        .load_function("spin")?;
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let (start, end) = (context.new_event(flags)?, context.new_event(flags)?);
    let nanos = 20_000_000u64;
    start.record(&stream)?;
    let mut launch = stream.launch_builder(&spin);
    launch.arg(&nanos);
    // SAFETY: the kernel takes one 64-bit number and touches no memory.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1 << 20)) }?;
    end.record(&stream)?;
    let milliseconds = start.elapsed_ms(&end)?;
    // Longer if the process delays the launch after the first event.
    assert!(milliseconds >= 20.0, "{milliseconds}");

    // A graph captured through the safe interface and launched twice.
    // SAFETY: everything below is on one stream.
    unsafe { context.disable_event_tracking() };
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let mut launch = stream.launch_builder(&spin);
    launch.arg(&nanos);
    // SAFETY: as above.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1 << 20)) }?;
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
    let graph = graph.context("the capture returned no graph")?;
    graph.launch()?;
    graph.launch()?;
    stream.synchronize()?;

    let refused = stream.alloc_zeros::<u8>(200 << 30);
    assert!(refused.is_err_and(|error| error.0 == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY));
    Ok(())
}

#[test]
fn runs_cudarc() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(std::env::current_exe()?)
        .args(["cudarc_child", "--exact"])
        .env(AS_CLIENT, "1")
        .output()?;
    text(&output)?;
    machine.wait_for_gpu(1, |gpu| gpu.used_bytes == 0 && gpu.busy_nanos >= 60_000_000)?;
    Ok(())
}

#[test]
fn runs_cuda_bindings() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let script = r#"
import ctypes
from cuda.bindings import driver

def call(function, *arguments):
    error, *results = function(*arguments)
    assert error == driver.CUresult.CUDA_SUCCESS, (function.__name__, error)
    return results[0] if len(results) == 1 else results

call(driver.cuInit, 0)
device = call(driver.cuDeviceGet, 0)
context = call(driver.cuDevicePrimaryCtxRetain, device)
call(driver.cuCtxSetCurrent, context)
before, total = call(driver.cuMemGetInfo)
memory = call(driver.cuMemAlloc, 64 << 20)
assert before - call(driver.cuMemGetInfo)[0] == 64 << 20
written = bytes(range(256))
call(driver.cuMemcpyHtoD, memory, written, 256)
read = bytearray(256)
call(driver.cuMemcpyDtoH, read, memory, 256)
assert read == written
stream = call(driver.cuStreamCreate, 0)
module = call(driver.cuModuleLoadData, b"any image\0")
spin = call(driver.cuModuleGetFunction, module, b"spin")
start, end = call(driver.cuEventCreate, 0), call(driver.cuEventCreate, 0)
call(driver.cuEventRecord, start, stream)
call(driver.cuLaunchKernel, spin, 1, 1, 1, 32, 1, 1, 0, stream, ((7_000_000,), (ctypes.c_uint64,)), 0)
call(driver.cuEventRecord, end, stream)
call(driver.cuStreamSynchronize, stream)
assert call(driver.cuEventElapsedTime, start, end) >= 7
error, _ = driver.cuMemAlloc(1 << 40)
assert error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
print(call(driver.cuDeviceGetUuid, device).bytes.hex(), total >> 20)
"#;
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", script])
        .output()?;
    let gpu = machine.gpu(0)?;
    let usable = (gpu.total_bytes - gpu.reserved_bytes) / MIB;
    assert_eq!(
        text(&output)?,
        format!("5f1c8a200b7e4d399a641e0d6c9b7a01 {usable}\n")
    );
    Ok(())
}

/// Beginning of the Python programs below.
const PRELUDE: &str = r#"
import ctypes, os, subprocess, sys
from cuda.bindings import driver

def call(function, *arguments):
    error, *results = function(*arguments)
    assert error == driver.CUresult.CUDA_SUCCESS, (function.__name__, error)
    return results[0] if len(results) == 1 else results

call(driver.cuInit, 0)
device = call(driver.cuDeviceGet, 0)
context = call(driver.cuDevicePrimaryCtxRetain, device)
call(driver.cuCtxSetCurrent, context)
"#;

fn run_python(machine: &Machine, script: &str) -> anyhow::Result<String> {
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", &format!("{PRELUDE}{script}")])
        .output()?;
    text(&output)
}

#[test]
fn runs_graph_capture_and_update_with_cuda_bindings() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let script = r#"
stream, side = (call(driver.cuStreamCreate, 1) for _ in range(2))
module = call(driver.cuModuleLoadData, b"any image\0")
spin = call(driver.cuModuleGetFunction, module, b"spin")
def launch(stream, nanos):
    call(driver.cuLaunchKernel, spin, 1, 1, 1, 32, 1, 1, 0, stream, ((nanos,), (ctypes.c_uint64,)), 0)
def capture(nanos):
    forked, joined = (call(driver.cuEventCreate, 0) for _ in range(2))
    call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    launch(stream, nanos)
    call(driver.cuEventRecord, forked, stream)
    call(driver.cuStreamWaitEvent, side, forked, 0)
    launch(side, nanos)
    launch(stream, nanos)
    call(driver.cuEventRecord, joined, side)
    call(driver.cuStreamWaitEvent, stream, joined, 0)
    status = call(driver.cuStreamGetCaptureInfo, stream)[0]
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return call(driver.cuStreamEndCapture, stream)
graph = capture(5_000_000)
nodes, count = call(driver.cuGraphGetNodes, graph, 10)
assert count == 3, count
assert call(driver.cuGraphNodeGetType, nodes[0]) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
execution = call(driver.cuGraphInstantiate, graph, 0)
for _ in range(4):
    call(driver.cuGraphLaunch, execution, stream)
update = call(driver.cuGraphExecUpdate, execution, capture(10_000_000))
assert update.result == driver.CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
call(driver.cuGraphLaunch, execution, stream)
call(driver.cuStreamSynchronize, stream)
"#;
    let machine = Machine::start(H100X2)?;
    run_python(&machine, script)?;
    // Per launch two sequential kernels, and a third concurrent with the second: four launches of
    // 10 ms and one of 20 ms.
    let gpu = machine.wait_for_gpu(0, |gpu| gpu.used_bytes == 0)?;
    ensure!(gpu.busy_nanos == 60_000_000, "{}", gpu.busy_nanos);
    Ok(())
}

#[test]
fn shares_memory_between_processes_with_cuda_bindings() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let script = r#"
def properties():
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = FILE
    return properties
FILE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
SIZE = 32 << 20
def mapped(handle):
    address = call(driver.cuMemAddressReserve, SIZE, 0, 0, 0)
    call(driver.cuMemMap, address, SIZE, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(driver.cuMemSetAccess, address, SIZE, [access], 1)
    return address
def read(address):
    read = bytearray(4)
    call(driver.cuMemcpyDtoH, read, address, 4)
    return bytes(read)
if os.environ.get("SHARED"):
    descriptor, handle = os.environ["SHARED"].split()
    imported = call(driver.cuMemImportFromShareableHandle, int(descriptor), FILE)
    opened = driver.CUipcMemHandle()
    opened.reserved = bytes.fromhex(handle)
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    print(read(mapped(imported)), read(call(driver.cuIpcOpenMemHandle, opened, flags.value)))
    sys.exit(0)
granularity = call(driver.cuMemGetAllocationGranularity, properties(), driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
assert SIZE % granularity == 0
handle = call(driver.cuMemCreate, SIZE, properties(), 0)
call(driver.cuMemcpyHtoD, mapped(handle), b"both", 4)
descriptor = int(call(driver.cuMemExportToShareableHandle, handle, FILE, 0))
memory = call(driver.cuMemAlloc, 4096)
call(driver.cuMemcpyHtoD, memory, b"mine", 4)
shared = bytes(call(driver.cuIpcGetMemHandle, memory).reserved).ljust(64, b"\0")
environment = dict(os.environ, SHARED=f"{descriptor} {shared.hex()}")
child = subprocess.run([sys.executable, "-c", os.environ["SCRIPT"]], env=environment, pass_fds=[descriptor], check=True)
"#;
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", &format!("{PRELUDE}{script}")])
        .env("SCRIPT", format!("{PRELUDE}{script}"))
        .output()?;
    assert_eq!(text(&output)?, "b'both' b'mine'\n");
    machine.wait_for_gpu(0, |gpu| gpu.used_bytes == 0)?;
    Ok(())
}
