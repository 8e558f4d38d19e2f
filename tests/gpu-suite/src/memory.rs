//! Allocates memory by one function in ever smaller pieces until nothing fits, or by a kernel or a limit of the context.

use std::io::Read;
use std::ptr;
use std::sync::{Arc, Barrier};

use anyhow::{Result, anyhow, ensure};
use cudarc::driver::{CudaContext, LaunchConfig, result, sys};
use cudarc::nvrtc::Ptx;
use serde::Serialize;

use crate::gpu::{Gpu, error_name};

const MIB: usize = 1 << 20;
const FIRST_PIECE: usize = 512 * MIB;
/// At least the granularity of every function.
const LAST_PIECE: usize = 2 * MIB;
/// The load of a module is measured in steps of 16 MiB.
const LAST_GLOBALS: usize = 32 * MIB;
/// Sizes of [`Path::Steps`], KiB: below, at and above the block size of the driver.
const STEPS_KIB: [usize; 8] = [4, 12, 100, 512, 1000, 1024, 2048, 3072];
/// Size of [`Path::Heap`].
const HEAP: usize = 256 * MIB;
/// Bytes per thread of [`Path::Stack`] and [`Path::Local`].
const PER_THREAD: usize = 4096;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Function that allocates
    #[arg(long, value_enum)]
    path: Path,
    /// Keep the memory, after printing, until stdin closes
    #[arg(long)]
    hold: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Path {
    /// `cuMemAlloc`
    Plain,
    /// `cuMemAllocPitch`
    Pitch,
    /// `cuMemAllocManaged`
    Managed,
    /// `cuMemAllocAsync`
    Async,
    /// `cuMemAllocFromPoolAsync` with a new pool
    Pool,
    /// `cuMemCreate`
    Vmm,
    /// `cuArray3DCreate`
    Array,
    /// `cuMipmappedArrayCreate`
    Mipmap,
    /// `__device__` variables of a module (`cuModuleLoadData`)
    Globals,
    /// Allocation node of a graph (`cuGraphLaunch`)
    Graph,
    /// `cuMemAlloc` of 4 KiB to 3 MiB in turn
    Steps,
    /// The heap of kernels (`cuCtxSetLimit`)
    Heap,
    /// The stacks of kernels (`cuCtxSetLimit`)
    Stack,
    /// Local memory of a kernel (`cuLaunchKernel`)
    Local,
    /// No allocation: memory of the context alone
    Nothing,
    /// The same with a context that two threads use first at the same time
    Threads,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Taken {
    path: Path,
    pid: u32,
    free_bytes_before: usize,
    total_bytes: usize,
    /// Sum of the granted requests.
    taken_bytes: usize,
    free_bytes_after: usize,
    /// Name of the error of the denied request.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let _contexts = match arguments.path {
        Path::Threads => open_at_once()?,
        _ => Vec::new(),
    };
    let gpu = Gpu::open()?;
    let (free_bytes_before, total_bytes) = result::mem_get_info()?;
    let (taken_bytes, refusal) = take(&gpu, arguments.path)?;
    gpu.context.synchronize()?;
    let (free_bytes_after, _) = result::mem_get_info()?;
    crate::print(&Taken {
        path: arguments.path,
        pid: std::process::id(),
        free_bytes_before,
        total_bytes,
        taken_bytes,
        free_bytes_after,
        refusal,
    })?;
    if arguments.hold {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

/// Makes the primary context current in two threads at the same time.
fn open_at_once() -> Result<Vec<Arc<CudaContext>>> {
    const THREADS: usize = 2;
    let barrier = Barrier::new(THREADS);
    let open = || {
        barrier.wait();
        CudaContext::new(0)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(open)).collect();
        let joined = threads.into_iter().map(|thread| {
            let opened = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            Ok(opened?)
        });
        joined.collect()
    })
}

/// Allocates, and returns the granted bytes and the name of the error of a denied request.
fn take(gpu: &Gpu, path: Path) -> Result<(usize, Option<String>)> {
    let granted = |bytes: usize, refusal: Option<String>| match refusal {
        None => (bytes, None),
        Some(name) => (0, Some(name)),
    };
    let limit = |limit: sys::CUlimit, value: usize| {
        // SAFETY: no pointers; the context of the GPU is current.
        error_name(unsafe { sys::cuCtxSetLimit(limit, value) })
    };
    Ok(match path {
        Path::Nothing | Path::Threads => (0, None),
        Path::Heap => granted(HEAP, limit(sys::CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE, HEAP)),
        Path::Stack => {
            let refusal = limit(sys::CUlimit::CU_LIMIT_STACK_SIZE, PER_THREAD);
            let stacks = granted(threads(gpu)? * PER_THREAD, refusal);
            launch(gpu, "noop", include_str!("kernels.ptx"))?;
            stacks
        }
        Path::Local => {
            launch(gpu, "local_4096", include_str!("local.ptx"))?;
            (threads(gpu)? * PER_THREAD, None)
        }
        Path::Steps => steps(),
        _ => fill(path)?,
    })
}

/// Threads that the GPU runs at once.
fn threads(gpu: &Gpu) -> Result<usize> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR;
    let each = gpu
        .context
        .attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    Ok(usize::try_from(gpu.multiprocessors()?)? * usize::try_from(each)?)
}

/// Runs a kernel without parameters.
fn launch(gpu: &Gpu, name: &str, source: &str) -> Result<()> {
    let module = gpu.context.load_module(Ptx::from_src(source))?;
    let kernel = module.load_function(name)?;
    let stream = gpu.context.default_stream();
    let shape = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the kernel has no parameters.
    unsafe { stream.launch_builder(&kernel).launch(shape) }?;
    stream.synchronize()?;
    Ok(())
}

/// Allocates the sizes of [`STEPS_KIB`] in turn until one is denied.
fn steps() -> (usize, Option<String>) {
    let mut taken_bytes = 0;
    for kib in STEPS_KIB.into_iter().cycle() {
        let mut pointer = 0;
        // SAFETY: writes one pointer.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut pointer, kib << 10) };
        if let Some(name) = error_name(code) {
            return (taken_bytes, Some(name));
        }
        taken_bytes += kib << 10;
    }
    (taken_bytes, None)
}

/// Allocates ever smaller pieces.
fn fill(path: Path) -> Result<(usize, Option<String>)> {
    let mut allocator = Allocator::new(path)?;
    let mut taken_bytes = 0;
    let mut piece = FIRST_PIECE;
    let mut last = None;
    let last_piece = match path {
        Path::Globals => LAST_GLOBALS,
        _ => LAST_PIECE,
    };
    while piece >= last_piece {
        match allocator.allocate(piece) {
            None => taken_bytes += piece,
            Some(name) => {
                last = Some(name);
                piece /= 2;
            }
        }
    }
    Ok((taken_bytes, last))
}

struct Allocator {
    path: Path,
    pool: sys::CUmemoryPool,
}

impl Allocator {
    fn new(path: Path) -> Result<Self> {
        let mut pool = ptr::null_mut();
        if path == Path::Pool {
            let properties = on_device_0(|properties: &mut sys::CUmemPoolProps| {
                properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                &mut properties.location
            });
            // SAFETY: writes the pool; the properties live through the call.
            let code = unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) };
            let error = error_name(code);
            ensure!(error.is_none(), "cuMemPoolCreate: {error:?}");
        }
        Ok(Self { path, pool })
    }

    /// Allocates a piece; returns the name of the error if denied. Granted memory stays with the process.
    fn allocate(&mut self, bytes: usize) -> Option<String> {
        let mut pointer = 0;
        let code = match self.path {
            Path::Nothing
            | Path::Threads
            | Path::Steps
            | Path::Heap
            | Path::Stack
            | Path::Local => {
                return Some("no allocation".to_owned());
            }
            // SAFETY: writes one pointer.
            Path::Plain => unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) },
            Path::Pitch => {
                let mut pitch = 0;
                // Rows of 1 MiB need no padding.
                // SAFETY: writes one pointer and one size.
                unsafe {
                    sys::cuMemAllocPitch_v2(&raw mut pointer, &raw mut pitch, MIB, bytes / MIB, 4)
                }
            }
            // SAFETY: writes one pointer.
            Path::Managed => unsafe { sys::cuMemAllocManaged(&raw mut pointer, bytes, 1) },
            // SAFETY: writes one pointer; the null stream is the default one.
            Path::Async => unsafe {
                sys::cuMemAllocAsync(&raw mut pointer, bytes, ptr::null_mut())
            },
            // SAFETY: writes one pointer; the pool lives as long as the process.
            Path::Pool => unsafe {
                sys::cuMemAllocFromPoolAsync(&raw mut pointer, bytes, self.pool, ptr::null_mut())
            },
            Path::Vmm => {
                let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
                    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                    &mut properties.location
                });
                // SAFETY: writes one handle; the properties live through the call.
                unsafe { sys::cuMemCreate(&raw mut pointer, bytes, &raw const properties, 0) }
            }
            Path::Globals => {
                let mut module = ptr::null_mut();
                let image = array_image(bytes) + "\0";
                // SAFETY: writes one handle; a terminated image that lives through the call.
                unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }
            }
            Path::Graph => launch_allocation(bytes),
            Path::Array => {
                let mut array = ptr::null_mut();
                let descriptor = descriptor(bytes);
                // SAFETY: writes one handle; the descriptor lives through the call.
                unsafe { sys::cuArray3DCreate_v2(&raw mut array, &raw const descriptor) }
            }
            Path::Mipmap => {
                let mut array = ptr::null_mut();
                let descriptor = descriptor(bytes);
                // SAFETY: writes one handle; the descriptor lives through the call.
                unsafe { sys::cuMipmappedArrayCreate(&raw mut array, &raw const descriptor, 1) }
            }
        };
        error_name(code)
    }
}

/// An image with an array.
pub(crate) fn array_image(bytes: usize) -> String {
    format!(
        ".version 6.4\n.target sm_50\n.address_size 64\n.visible .global .align 8 .b8 data[{bytes}];\n"
    )
}

/// Launches a graph that allocates. The executable graph of a denied launch is destroyed.
fn launch_allocation(bytes: usize) -> sys::CUresult {
    let exec = match allocation_graph(bytes, false) {
        Ok(exec) => exec,
        Err(code) => return code,
    };
    // SAFETY: the null stream is the default one.
    let code = unsafe { sys::cuGraphLaunch(exec, ptr::null_mut()) };
    if error_name(code).is_some() {
        // SAFETY: instantiated above, and not running.
        unsafe { sys::cuGraphExecDestroy(exec) };
    }
    code
}

/// Returns an executable graph that allocates, and frees at its end so that it can be launched again.
pub(crate) fn allocation_graph(
    bytes: usize,
    is_freed: bool,
) -> std::result::Result<sys::CUgraphExec, sys::CUresult> {
    let (mut graph, mut node, mut exec) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let mut parameters = on_device_0(|parameters: &mut sys::CUDA_MEM_ALLOC_NODE_PARAMS| {
        parameters.poolProps.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        parameters.bytesize = bytes;
        &mut parameters.poolProps.location
    });
    let check = |code: sys::CUresult| error_name(code).map_or(Ok(()), |_| Err(code));
    // SAFETY: writes one graph.
    check(unsafe { sys::cuGraphCreate(&raw mut graph, 0) })?;
    let place = &raw mut parameters;
    // SAFETY: writes one node, and reads and writes the parameters.
    check(unsafe { sys::cuGraphAddMemAllocNode(&raw mut node, graph, ptr::null(), 0, place) })?;
    if is_freed {
        let (after, mut free) = (node, ptr::null_mut());
        let after = &raw const after;
        // SAFETY: writes one node; depends on one node, which allocates the pointer.
        check(unsafe {
            sys::cuGraphAddMemFreeNode(&raw mut free, graph, after, 1, parameters.dptr)
        })?;
    }
    // SAFETY: writes one executable graph.
    check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) })?;
    Ok(exec)
}

/// Zeroed properties with device 0 as the location and the values of `set`.
pub(crate) fn on_device_0<P>(set: impl FnOnce(&mut P) -> &mut sys::CUmemLocation) -> P {
    // SAFETY: the driver's property structs are plain C structs whose enums all have a zero value.
    let mut properties: P = unsafe { std::mem::zeroed() };
    set(&mut properties).type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties
}

/// A 2D array with elements of four floats, 4096 elements per row.
pub(crate) fn descriptor(bytes: usize) -> sys::CUDA_ARRAY3D_DESCRIPTOR {
    const ROW: usize = 4096;
    sys::CUDA_ARRAY3D_DESCRIPTOR {
        Width: ROW,
        Height: bytes / (16 * ROW),
        Depth: 0,
        Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
        NumChannels: 4,
        Flags: 0,
    }
}
