//! A mixed load: allocates and frees by several functions at random, and pauses after each round, so that the account of
//! its memory can be compared.

use std::ffi::CString;
use std::ptr;

use anyhow::{Context as _, Result, bail};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};
use crate::memory::{allocation_graph, array_image, descriptor, on_device_0};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Start of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Function that allocates; several at random if absent
    #[arg(long, value_enum)]
    kind: Option<Kind>,
    /// Operations of a round
    #[arg(long, default_value_t = 20)]
    operations: usize,
}

/// State after a round.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Round {
    /// What is not free.
    used_bytes: usize,
    objects: usize,
    /// Denied requests so far.
    denied: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
enum Kind {
    /// `cuMemAlloc`
    Plain,
    /// `cuMemAllocAsync`
    Async,
    /// `cuMemCreate`
    Vmm,
    /// `cuArray3DCreate`
    Array,
    /// `__device__` variables of a module
    Globals,
    /// Allocation node of a graph
    Graph,
}

const KINDS: [Kind; 8] = [
    Kind::Plain,
    Kind::Plain,
    Kind::Plain,
    Kind::Async,
    Kind::Vmm,
    Kind::Array,
    Kind::Globals,
    Kind::Graph,
];

/// What an operation allocates.
#[derive(Clone, Copy)]
enum Object {
    Plain(sys::CUdeviceptr),
    Async(sys::CUdeviceptr),
    Vmm(sys::CUmemGenericAllocationHandle),
    Array(sys::CUarray),
    Globals(sys::CUmodule),
    Graph(sys::CUgraphExec),
}

const SMALLEST: usize = 4 << 10;
/// Sizes are [`SMALLEST`] times a power of two and something: up to 256 MiB.
const SIZES: usize = 16;
/// The smallest image with an array of its size is that of a few pages; larger ones take longer to load.
const MODULE: std::ops::Range<usize> = 1 << 20..64 << 20;

/// Prints the state after each round; begins with a line on stdin and ends when stdin closes.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let mut mix = Mix {
        stream: gpu.context.new_stream()?,
        kernel: gpu.kernel("noop")?,
        objects: Vec::new(),
        denied: 0,
        random: arguments.seed,
        kind: arguments.kind,
    };
    let next = || -> Result<bool> { Ok(std::io::stdin().read_line(&mut String::new())? > 0) };
    println!("ready");
    while next()? {
        for _ in 0..arguments.operations {
            mix.operate()?;
        }
        gpu.context.synchronize()?;
        let (free, total) = result::mem_get_info()?;
        crate::print(&Round {
            used_bytes: total - free,
            objects: mix.objects.len(),
            denied: mix.denied,
        })?;
    }
    Ok(())
}

struct Mix {
    stream: std::sync::Arc<CudaStream>,
    kernel: CudaFunction,
    objects: Vec<Object>,
    denied: usize,
    random: u64,
    kind: Option<Kind>,
}

impl Mix {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        // Knuth's linear congruential generator; its high bits are the random ones.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.random >> 33).unwrap_or(0) % bound.max(1)
    }

    fn operate(&mut self) -> Result<()> {
        // So that the load goes up and down, and is denied at times.
        let is_growing = self.below(5) < 3;
        if !is_growing && !self.objects.is_empty() {
            let index = self.below(self.objects.len());
            let object = self.objects.swap_remove(index);
            return self.release(object);
        }
        let power = self.below(SIZES);
        let bytes = (SMALLEST << power) + self.below(SMALLEST << power);
        let mut pointer = 0;
        if self.below(9) == 0 {
            return self.work();
        }
        let random = KINDS.get(self.below(KINDS.len())).copied();
        let kind = self.kind.or(random).unwrap_or(Kind::Plain);
        let stream = self.stream.cu_stream();
        let (code, object) = match kind {
            Kind::Plain => {
                // SAFETY: writes one pointer.
                let code = unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) };
                (code, Object::Plain(pointer))
            }
            Kind::Async => {
                // SAFETY: writes one pointer; a stream of this process.
                let code = unsafe { sys::cuMemAllocAsync(&raw mut pointer, bytes, stream) };
                (code, Object::Async(pointer))
            }
            Kind::Vmm => physical(bytes.next_multiple_of(2 << 20)),
            Kind::Array => array(bytes.next_multiple_of(64 << 10)),
            Kind::Globals => module(MODULE.start + self.below(MODULE.end - MODULE.start))?,
            Kind::Graph => match allocation_graph(bytes, true) {
                // Nodes and instances of graphs are denied, too.
                Err(code) => (code, Object::Graph(ptr::null_mut())),
                Ok(graph) => {
                    // SAFETY: an executable graph, and a stream of its context.
                    let code = unsafe { sys::cuGraphLaunch(graph, stream) };
                    if error_name(code).is_some() {
                        self.release(Object::Graph(graph))?;
                    }
                    (code, Object::Graph(graph))
                }
            },
        };
        match error_name(code).as_deref() {
            None => self.objects.push(object),
            Some("CUDA_ERROR_OUT_OF_MEMORY") => self.denied += 1,
            Some(name) => bail!("{kind:?} of {bytes} bytes: {name}"),
        }
        Ok(())
    }

    /// Launches kernels, and writes to a part of the memory.
    fn work(&self) -> Result<()> {
        for _ in 0..20 {
            let shape = LaunchConfig {
                grid_dim: (1, 1, 1),
                block_dim: (1, 1, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: the kernel takes nothing and does nothing.
            unsafe { self.stream.launch_builder(&self.kernel).launch(shape) }?;
        }
        for object in &self.objects {
            if let Object::Plain(pointer) | Object::Async(pointer) = *object {
                // SAFETY: memory of at least that size.
                unsafe { sys::cuMemsetD8Async(pointer, 1, SMALLEST, self.stream.cu_stream()) }
                    .result()?;
            }
        }
        Ok(())
    }

    fn release(&self, object: Object) -> Result<()> {
        let stream = self.stream.cu_stream();
        let code = match object {
            // SAFETY: memory that is freed once.
            Object::Plain(pointer) => unsafe { sys::cuMemFree_v2(pointer) },
            // SAFETY: memory that is freed once.
            Object::Async(pointer) => unsafe { sys::cuMemFreeAsync(pointer, stream) },
            // SAFETY: a handle that is released once.
            Object::Vmm(handle) => unsafe { sys::cuMemRelease(handle) },
            // SAFETY: an array that is destroyed once.
            Object::Array(array) => unsafe { sys::cuArrayDestroy(array) },
            // SAFETY: a module that is unloaded once.
            Object::Globals(module) => unsafe { sys::cuModuleUnload(module) },
            Object::Graph(graph) => {
                self.stream.synchronize()?;
                // SAFETY: an executable graph that does not run and is destroyed once.
                let code = unsafe { sys::cuGraphExecDestroy(graph) };
                // SAFETY: no pointers.
                unsafe { sys::cuDeviceGraphMemTrim(0) }.result()?;
                code
            }
        };
        code.result().context("cannot release")?;
        Ok(())
    }
}

fn physical(bytes: usize) -> (sys::CUresult, Object) {
    let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        &mut properties.location
    });
    let mut handle = 0;
    // SAFETY: writes one handle; the properties live through the call.
    let code = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
    (code, Object::Vmm(handle))
}

fn array(bytes: usize) -> (sys::CUresult, Object) {
    let (mut array, descriptor) = (ptr::null_mut(), descriptor(bytes));
    // SAFETY: writes one handle; the descriptor lives through the call.
    let code = unsafe { sys::cuArray3DCreate_v2(&raw mut array, &raw const descriptor) };
    (code, Object::Array(array))
}

fn module(bytes: usize) -> Result<(sys::CUresult, Object)> {
    let (mut module, image) = (ptr::null_mut(), CString::new(array_image(bytes))?);
    // SAFETY: writes one handle; a terminated image that lives through the call.
    let code = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
    Ok((code, Object::Globals(module)))
}
