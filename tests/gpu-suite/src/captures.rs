//! Captures in mode global while another thread, or the capturing thread itself, calls what the driver allows beside a
//! capture.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::mpsc;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};
use crate::lookup::Library;
use crate::memory::{allocation_graph, on_device_0};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Captures of each kind
    #[arg(long, default_value_t = 25)]
    captures: usize,
}

/// What is called during a capture. No driver objects to these: measured on an H200 with driver 580.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Call {
    /// `cuMemGetInfo`
    MemoryInfo,
    /// `nvmlDeviceGetMemoryInfo`
    NvmlMemory,
    /// Launch of a kernel on another stream
    Launch,
    /// First launch of a kernel of a library, which loads it
    FirstLaunch,
    /// `cuModuleLoadData` and `cuModuleGetFunction`
    ModuleLoad,
    /// `cuGraphLaunch` of a graph that owns memory
    GraphLaunch,
    /// `cuMemCreate` and `cuMemRelease`
    Physical,
    /// `cuMemCreate` of more than there is
    DeniedPhysical,
    /// Creation and destruction of a stream and an event
    Stream,
}

const CALLS: [Call; 9] = [
    Call::MemoryInfo,
    Call::NvmlMemory,
    Call::Launch,
    Call::FirstLaunch,
    Call::ModuleLoad,
    Call::GraphLaunch,
    Call::Physical,
    Call::DeniedPhysical,
    Call::Stream,
];

/// Calls during each capture.
const CALLS_PER_CAPTURE: usize = 3;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Captured {
    call: Call,
    /// Whether the capturing thread made the calls.
    is_own_thread: bool,
    captures: usize,
    calls: usize,
    /// Errors, and how often each occurred.
    failures: BTreeMap<String, usize>,
}

const SHAPE: LaunchConfig = LaunchConfig {
    grid_dim: (1, 1, 1),
    block_dim: (1, 1, 1),
    shared_mem_bytes: 0,
};

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let mut seen = Vec::new();
    for call in CALLS {
        for is_own_thread in [false, true] {
            let failures = capture(&gpu, arguments.captures, call, is_own_thread)
                .with_context(|| format!("beside {}", serde_json::json!(call)))?;
            seen.push(Captured {
                call,
                is_own_thread,
                captures: arguments.captures,
                calls: arguments.captures * CALLS_PER_CAPTURE,
                failures,
            });
        }
    }
    crate::print(&seen)
}

/// Captures with calls beside each; returns the errors.
fn capture(
    gpu: &Gpu,
    captures: usize,
    call: Call,
    is_own_thread: bool,
) -> Result<BTreeMap<String, usize>> {
    let (stream, kernel) = (gpu.context.new_stream()?, gpu.kernel("noop")?);
    launch(&stream, &kernel)?;
    let own = Caller::new(gpu)?;
    gpu.context.synchronize()?;
    let mut failures = BTreeMap::new();
    let mut count = |error: Option<String>| {
        if let Some(error) = error {
            *failures.entry(error).or_default() += 1;
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let (begin, begun) = mpsc::channel();
        let (done, results) = mpsc::channel();
        if !is_own_thread {
            scope.spawn(move || {
                let mut caller = None;
                // The first message comes before the first capture.
                for () in begun {
                    let made = match &caller {
                        None => gpu
                            .context
                            .bind_to_thread()
                            .map_err(anyhow::Error::from)
                            .and_then(|()| Caller::new(gpu))
                            .map(|new| caller = Some(new))
                            .map_err(|error| vec![Some(format!("{error:#}"))])
                            .err()
                            .unwrap_or_default(),
                        Some(caller) => (0..CALLS_PER_CAPTURE).map(|_| caller.call(call)).collect(),
                    };
                    if done.send(made).is_err() {
                        return;
                    }
                }
            });
            begin.send(())?;
            results.recv()?.into_iter().for_each(&mut count);
            gpu.context.synchronize()?;
        }
        for _ in 0..captures {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: a stream of this function.
            unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode) }.result()?;
            let calls = if is_own_thread {
                (0..CALLS_PER_CAPTURE).map(|_| own.call(call)).collect()
            } else {
                begin.send(())?;
                results.recv()?
            };
            calls.into_iter().for_each(&mut count);
            let launched = launch(&stream, &kernel).err();
            count(launched.map(|error| format!("launch of the capture: {error:#}")));
            let mut graph = ptr::null_mut();
            // SAFETY: the stream is capturing; writes one handle.
            let code = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) };
            count(error_name(code).map(|name| format!("end of the capture: {name}")));
            if !graph.is_null() {
                // SAFETY: a graph that nothing else uses.
                unsafe { sys::cuGraphDestroy(graph) };
            }
            gpu.context.synchronize()?;
        }
        drop(begin);
        Ok(())
    })?;
    Ok(failures)
}

fn launch(stream: &CudaStream, kernel: &CudaFunction) -> Result<()> {
    // SAFETY: the kernel takes nothing and does nothing.
    unsafe { stream.launch_builder(kernel).launch(SHAPE) }?;
    Ok(())
}

/// One thread's objects for the calls.
struct Caller {
    stream: std::sync::Arc<CudaStream>,
    kernel: CudaFunction,
    graph: sys::CUgraphExec,
    nvml: Nvml,
    image: CString,
}

impl Caller {
    /// Uses a pool and the memory of a graph, both of which then keep memory.
    fn new(gpu: &Gpu) -> Result<Self> {
        let stream = gpu.context.new_stream()?;
        let kernel = gpu.kernel("noop")?;
        launch(&stream, &kernel)?;
        let (mut pool, mut keep) = (ptr::null_mut(), u64::MAX);
        // SAFETY: writes one handle.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0) }.result()?;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a number of 64 bits.
        unsafe { sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()) }.result()?;
        let mut pointer = 0;
        // SAFETY: writes one pointer.
        unsafe { sys::cuMemAllocAsync(&raw mut pointer, 1 << 20, stream.cu_stream()) }.result()?;
        // SAFETY: memory that is freed once.
        unsafe { sys::cuMemFreeAsync(pointer, stream.cu_stream()) }.result()?;
        let graph = allocation_graph(1 << 20, true);
        let graph = graph.map_err(|code| anyhow::anyhow!("a graph with memory: {code:?}"))?;
        // SAFETY: an executable graph, and a stream of its context.
        unsafe { sys::cuGraphLaunch(graph, stream.cu_stream()) }.result()?;
        stream.synchronize()?;
        Ok(Self {
            stream,
            kernel,
            graph,
            nvml: Nvml::open()?,
            image: CString::new(include_str!("kernels.ptx"))?,
        })
    }

    /// Makes a call; returns the error that it should not have.
    fn call(&self, call: Call) -> Option<String> {
        let made = match call {
            Call::MemoryInfo => result::mem_get_info().map(drop).map_err(Into::into),
            Call::NvmlMemory => self.nvml.memory(),
            Call::Launch => launch(&self.stream, &self.kernel),
            Call::FirstLaunch => self.first_launch(),
            Call::ModuleLoad => self.module_load(),
            // SAFETY: an executable graph, and a stream of its context.
            Call::GraphLaunch => unsafe { sys::cuGraphLaunch(self.graph, self.stream.cu_stream()) }
                .result()
                .map_err(Into::into),
            Call::Physical => physical(2 << 20),
            Call::DeniedPhysical => denied(),
            Call::Stream => stream(),
        };
        made.err().map(|error| format!("{error:#}"))
    }

    fn first_launch(&self) -> Result<()> {
        let (mut library, mut kernel) = (ptr::null_mut(), ptr::null_mut());
        let (image, none) = (self.image.as_ptr().cast(), ptr::null_mut());
        // SAFETY: writes one handle; a terminated image, and no options.
        unsafe {
            let values = ptr::null_mut::<*mut c_void>();
            sys::cuLibraryLoadData(
                &raw mut library,
                image,
                none,
                values,
                0,
                ptr::null_mut(),
                values,
                0,
            )
        }
        .result()?;
        // SAFETY: writes one handle; a terminated name.
        unsafe { sys::cuLibraryGetKernel(&raw mut kernel, library, c"noop".as_ptr()) }.result()?;
        let (stream, parameters) = (self.stream.cu_stream(), ptr::null_mut());
        // SAFETY: a kernel without parameters, launched by its handle.
        unsafe {
            sys::cuLaunchKernel(
                kernel.cast(),
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream,
                parameters,
                parameters,
            )
        }
        .result()?;
        Ok(())
    }

    fn module_load(&self) -> Result<()> {
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: writes one handle; a terminated image.
        unsafe { sys::cuModuleLoadData(&raw mut module, self.image.as_ptr().cast()) }.result()?;
        // SAFETY: writes one handle; a terminated name.
        unsafe { sys::cuModuleGetFunction(&raw mut function, module, c"noop".as_ptr()) }
            .result()?;
        Ok(())
    }
}

fn physical(bytes: usize) -> Result<()> {
    let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        &mut properties.location
    });
    let mut handle = 0;
    // SAFETY: writes one handle; the properties live through the call.
    unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) }.result()?;
    // SAFETY: a handle that is released once.
    unsafe { sys::cuMemRelease(handle) }.result()?;
    Ok(())
}

/// More than the GPU has, which is denied with and without a share.
fn denied() -> Result<()> {
    let refusal = physical(1 << 44).err().map(|error| format!("{error:#}"));
    let is_denied = refusal
        .as_deref()
        .is_some_and(|text| text.contains("OUT_OF_MEMORY"));
    ensure!(is_denied, "16 TiB: {refusal:?}");
    Ok(())
}

fn stream() -> Result<()> {
    let (mut stream, mut event) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: writes one handle.
    unsafe { sys::cuStreamCreate(&raw mut stream, 1) }.result()?;
    // SAFETY: writes one handle.
    unsafe { sys::cuEventCreate(&raw mut event, 0) }.result()?;
    // SAFETY: the handle is valid, and not used afterwards.
    unsafe { sys::cuEventDestroy_v2(event) }.result()?;
    // SAFETY: the handle is valid, and not used afterwards.
    unsafe { sys::cuStreamDestroy_v2(stream) }.result()?;
    Ok(())
}

/// `nvmlDeviceGetMemoryInfo` of the first GPU.
struct Nvml {
    memory: MemoryInfo,
    device: *mut c_void,
}

type Init = unsafe extern "C" fn() -> i32;
type ByIndex = unsafe extern "C" fn(u32, *mut *mut c_void) -> i32;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut [u64; 3]) -> i32;

impl Nvml {
    fn open() -> Result<Self> {
        let library = Library::open(c"libnvidia-ml.so.1")?;
        let symbol = |name: &str| library.symbol(name)?.with_context(|| format!("no {name}"));
        // SAFETY: the function of that name has this type.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(symbol("nvmlInit_v2")?) };
        let by_index = symbol("nvmlDeviceGetHandleByIndex_v2")?;
        // SAFETY: the function of that name has this type.
        let by_index = unsafe { std::mem::transmute::<*mut c_void, ByIndex>(by_index) };
        let memory = symbol("nvmlDeviceGetMemoryInfo")?;
        // SAFETY: the function of that name has this type.
        let memory = unsafe { std::mem::transmute::<*mut c_void, MemoryInfo>(memory) };
        let mut device = ptr::null_mut();
        // SAFETY: no arguments.
        let code = unsafe { init() };
        ensure!(code == 0, "nvmlInit failed with {code}");
        // SAFETY: writes one handle.
        let code = unsafe { by_index(0, &raw mut device) };
        ensure!(code == 0, "nvmlDeviceGetHandleByIndex failed with {code}");
        Ok(Self { memory, device })
    }

    fn memory(&self) -> Result<()> {
        let mut info = [0; 3];
        // SAFETY: a handle of NVML; writes three numbers of 64 bits.
        let code = unsafe { (self.memory)(self.device, &raw mut info) };
        ensure!(code == 0, "nvmlDeviceGetMemoryInfo: {code}");
        Ok(())
    }
}
