//! Uses a library in one context while a kernel of another one waits: what waits for it, and what the library takes.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cudarc::driver::{LaunchConfig, PushKernelArg as _, result, sys};
use serde::Serialize;

use crate::gpu::Gpu;
use crate::memory::array_image;
use crate::wait::Kernel;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Longest duration of the kernel, in seconds
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The kernel
    #[arg(long, value_enum, default_value_t = Kernel::AwaitFlag)]
    kernel: Kernel,
}

/// Size of the library's array.
const ARRAY: usize = 64 << 20;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Used {
    is_second_gpu: bool,
    /// Calls that returned while the kernel ran.
    returned: Vec<Returned>,
    /// Call that did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    waited: Option<&'static str>,
    array_bytes: usize,
    /// Memory that is not free any more for the context of the kernel.
    taken_bytes: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Returned {
    call: &'static str,
    milliseconds: f64,
}

/// A context by its handle, which any thread may use.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Context {}

impl Context {
    fn make_current(self) -> Result<()> {
        // SAFETY: a context that is never destroyed.
        unsafe { sys::cuCtxSetCurrent(self.0) }.result()?;
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let gpu = Gpu::open()?;
    let first = Context(gpu.context.cu_ctx());
    let (second, is_second_gpu) = second()?;
    first.make_current()?;
    let stream = gpu.context.new_stream()?;
    let (spin, await_flag) = (gpu.kernel("spin")?, gpu.kernel("await_flag")?);
    let flag = Flag::new()?;
    let address = flag.address()?;
    let launch = |nanoseconds: u64| -> Result<()> {
        let mut launch = match arguments.kernel {
            Kernel::AwaitFlag => stream.launch_builder(&await_flag),
            Kernel::Spin => stream.launch_builder(&spin),
        };
        if arguments.kernel == Kernel::AwaitFlag {
            launch.arg(&address);
        }
        launch.arg(&nanoseconds);
        let shape = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (1, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the kernel takes an address that stays valid, if any, and a number.
        unsafe { launch.launch(shape) }?;
        Ok(())
    };
    // Loads the kernel.
    launch(1)?;
    stream.synchronize()?;
    let (free_before, _) = result::mem_get_info()?;
    let length = Duration::from_secs_f64(arguments.seconds);
    launch(u64::try_from(length.as_nanos())?)?;
    let (report, reports) = mpsc::channel();
    let user = std::thread::spawn(move || use_library(first, second, &report));
    // Before the kernel ends by itself.
    let deadline = Instant::now() + length.mul_f64(0.5);
    let (mut returned, mut waited) = (Vec::new(), None);
    loop {
        match reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Step::Begins(call)) => waited = Some(call),
            Ok(Step::Returned(done)) => {
                returned.push(done);
                waited = None;
            }
            // All are done, or the deadline is over.
            Err(_) => break,
        }
    }
    let (free_after, _) = result::mem_get_info()?;
    flag.set(1);
    // Their errors are those of the run.
    if waited.is_some() {
        drop(reports);
    } else {
        user.join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    }
    crate::print(&Used {
        is_second_gpu,
        returned,
        waited,
        array_bytes: ARRAY,
        taken_bytes: i64::try_from(free_before)? - i64::try_from(free_after)?,
    })
}

/// The second GPU's context, or a second one of the first GPU.
fn second() -> Result<(Context, bool)> {
    let (mut count, mut context) = (0, ptr::null_mut());
    // SAFETY: writes one number.
    unsafe { sys::cuDeviceGetCount(&raw mut count) }.result()?;
    let is_second_gpu = count > 1;
    // SAFETY: writes one handle.
    unsafe {
        sys::cuCtxCreate_v4(
            &raw mut context,
            ptr::null_mut(),
            0,
            i32::from(is_second_gpu),
        )
    }
    .result()
    .context("cannot create a second context")?;
    Ok((Context(context), is_second_gpu))
}

enum Step {
    Begins(&'static str),
    Returned(Returned),
}

/// Loads and uses a library in the second context, and asks for a kernel in the first one.
fn use_library(first: Context, second: Context, report: &mpsc::Sender<Step>) -> Result<()> {
    let image = CString::new(array_image(ARRAY) + ".visible .entry noop() { ret; }\n")?;
    let (mut library, mut kernel, mut function) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let step = |call: &'static str, code: &mut dyn FnMut() -> sys::CUresult| -> Result<()> {
        // The main thread may have seen enough.
        let _ = report.send(Step::Begins(call));
        let begun = Instant::now();
        code().result().context(call)?;
        let milliseconds = begun.elapsed().as_secs_f64() * 1000.0;
        let _ = report.send(Step::Returned(Returned { call, milliseconds }));
        Ok(())
    };
    second.make_current()?;
    step("cuLibraryLoadData", &mut || load(&mut library, &image))?;
    step("cuLibraryGetKernel", &mut || {
        get_kernel(&mut kernel, library)
    })?;
    // SAFETY: writes one handle.
    step("cuKernelGetFunction", &mut || unsafe {
        sys::cuKernelGetFunction(&raw mut function, kernel)
    })?;
    let none = ptr::null_mut();
    // SAFETY: a kernel without parameters on the default stream of the second context.
    step("cuLaunchKernel", &mut || unsafe {
        sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, ptr::null_mut(), none, none)
    })?;
    // SAFETY: no arguments.
    step("cuCtxSynchronize", &mut || unsafe {
        sys::cuCtxSynchronize()
    })?;
    first.make_current()?;
    step("cuLibraryLoadData in the kernel's context", &mut || {
        load(&mut library, &image)
    })?;
    step("cuLibraryGetKernel in the kernel's context", &mut || {
        get_kernel(&mut kernel, library)
    })
}

fn load(library: &mut sys::CUlibrary, image: &CString) -> sys::CUresult {
    let (options, values) = (ptr::null_mut(), ptr::null_mut::<*mut c_void>());
    let image = image.as_ptr().cast();
    // SAFETY: writes one handle; a terminated image, and no options.
    unsafe {
        sys::cuLibraryLoadData(
            library,
            image,
            options,
            values,
            0,
            ptr::null_mut(),
            values,
            0,
        )
    }
}

fn get_kernel(kernel: &mut sys::CUkernel, library: sys::CUlibrary) -> sys::CUresult {
    // SAFETY: writes one handle; a terminated name.
    unsafe { sys::cuLibraryGetKernel(kernel, library, c"noop".as_ptr()) }
}

/// A word of host memory that a kernel reads by the same address.
struct Flag(*mut u32);

impl Flag {
    fn new() -> Result<Self> {
        let mut host = ptr::null_mut();
        // CU_MEMHOSTALLOC_DEVICEMAP
        // SAFETY: writes one pointer.
        unsafe { sys::cuMemHostAlloc(&raw mut host, 4096, 2) }.result()?;
        let flag = Self(host.cast());
        flag.set(0);
        Ok(flag)
    }

    fn address(&self) -> Result<sys::CUdeviceptr> {
        Ok(u64::try_from(self.0.addr())?)
    }

    fn set(&self, value: u32) {
        // SAFETY: memory of at least one word, which is never freed.
        unsafe { self.0.write_volatile(value) };
    }
}
