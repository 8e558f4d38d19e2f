//! Kernel launches: duration and number of multiprocessors.

use std::ffi::{c_uint, c_void};

use simulator_machine::protocol::{Nanos, Work};

use crate::State;
use crate::abi::{CudaResult, In, entry_points};
use crate::context::fail;
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::module::{FAULT, LOCAL_SIZE_BYTES, SPIN};
use crate::operation::{Launch, Operation, Shape, enqueue};
use crate::stream::Stream;
use crate::types::{CUcontext, CUfunction, CUlaunchConfig, CUlaunchParams, CUstream};

pub(crate) mod legacy;

/// Duration of kernels without a special name.
pub(crate) const DEFAULT_KERNEL_NANOS: Nanos = 5_000;

impl State {
    /// Reads a launch.
    pub(crate) fn launch(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        function: CUfunction,
        shape: Shape,
        shared_bytes: c_uint,
        parameters: Parameters,
    ) -> CudaResult<Launch> {
        shape.check()?;
        let function = self.function_in(driver, self.owner(context), function)?;
        let (nanos, parameter) = match self.modules.function(function)?.name.to_bytes() {
            name if name == SPIN.to_bytes() => {
                let nanos = parameters.first()?;
                (nanos, Some(nanos))
            }
            name if name == FAULT.to_bytes() => {
                let code = parameters.first()?;
                CudaError::sticky(code).ok_or(CudaError::InvalidValue)?;
                (0, Some(code))
            }
            b"noop" => (0, None),
            _ => (DEFAULT_KERNEL_NANOS, None),
        };
        Ok(Launch {
            function,
            shape,
            shared_bytes,
            nanos,
            parameter,
        })
    }

    /// Submits a launch to a stream.
    pub(crate) fn run_kernel(
        &mut self,
        driver: &Driver,
        stream: Stream,
        launch: Launch,
    ) -> CudaResult<Option<Point>> {
        let function = self.modules.function(launch.function)?;
        let local = function.attribute(LOCAL_SIZE_BYTES).unwrap_or(0);
        let local = u64::try_from(local).unwrap_or(0);
        let module = function.module;
        if *function.name == *FAULT {
            let error = launch.parameter.and_then(CudaError::sticky);
            let error = error.unwrap_or(CudaError::Unknown);
            fail(self.owner(stream.context), error);
            driver.report_fault(error)?;
            return Ok(None);
        }
        self.make_resident(driver, module)?;
        self.require_local(driver, self.owner(stream.context), local)?;
        if launch.nanos == 0 && self.is_idle(driver, stream) {
            // Zero duration on an idle stream: complete.
            return Ok(None);
        }
        let context = self
            .contexts
            .get(&stream.context)
            .ok_or(CudaError::ContextIsDestroyed)?;
        // The machine limits an MPS client, whose kernel takes longer.
        let compute = &driver.whole_model(context.device)?.compute;
        let most = context
            .green
            .map_or(u32::MAX, |green| green.multiprocessors);
        let multiprocessors = launch.shape.multiprocessors(compute).min(most);
        let work = Work::Kernel {
            nanos: launch.nanos,
            multiprocessors,
        };
        self.submit(driver, stream, work).map(Some)
    }
}

/// Kernel parameters in their two forms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters {
    /// Pointers to the parameters.
    pub(crate) pointers: In<In<u64>>,
    /// `CU_LAUNCH_PARAM_*` keys and values.
    pub(crate) extra: In<*const c_void>,
}

impl Parameters {
    /// The first parameter, as a 64-bit number.
    fn first(self) -> CudaResult<u64> {
        if let Ok(pointer) = self.pointers.get() {
            return pointer.get();
        }
        const END: usize = 0;
        const BUFFER_POINTER: usize = 1;
        // Pairs of key and value; at most four exist.
        for pair in 0..4 {
            let key = self.extra.element(pair * 2)?;
            match key.addr() {
                END => break,
                BUFFER_POINTER => {
                    return In::<u64>::at(self.extra.element(pair * 2 + 1)?.cast()).get();
                }
                _ => {}
            }
        }
        Err(CudaError::InvalidValue)
    }
}

/// Scheduling of blocks.
#[derive(Clone, Copy)]
enum Blocks {
    /// In any order.
    Independent,
    /// All resident at once, since they may wait for each other.
    Cooperative,
}

/// Waits for all work of the context if the launch loads a library into it or extends its local memory.
fn await_load(function: CUfunction, stream: CUstream) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    let context = state.stream(driver, stream)?.context;
    let context = state.owner(context);
    let local = state.modules.function(function).ok();
    let local = local.and_then(|function| function.attribute(LOCAL_SIZE_BYTES));
    let local = local.and_then(|bytes| u64::try_from(bytes).ok());
    let waits = state.loads_library_of(function, context)
        || state.grows_local(driver, context, local.unwrap_or(0))?;
    drop(state);
    match waits {
        true => driver.wait_for_context(context),
        false => Ok(()),
    }
}

fn launch(
    function: CUfunction,
    shape: Shape,
    blocks: Blocks,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: Parameters,
) -> CudaResult {
    await_load(function, stream)?;
    enqueue(stream, |driver, state, stream| {
        let launch = state.launch(
            driver,
            stream.context,
            function,
            shape,
            shared_bytes,
            parameters,
        )?;
        if let Blocks::Cooperative = blocks {
            let context = state.contexts.get(&stream.context);
            let context = context.ok_or(CudaError::ContextIsDestroyed)?;
            let compute = &driver.model(context.device)?.compute;
            let all = compute.multiprocessors;
            let own = context.green.map_or(all, |green| green.multiprocessors);
            let resident = u64::from(compute.threads_per_multiprocessor) / shape.threads();
            if shape.blocks() > resident.min(32) * u64::from(own) {
                return Err(CudaError::CooperativeLaunchTooLarge);
            }
        }
        Ok(Operation::Kernel(launch))
    })
    .map(drop)
}

entry_points! {
    "cuLaunchKernel" 4000 fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: CUstream, pointers: In<In<u64>>, extra: In<*const c_void>,
    ) ptsz(stream) cuLaunchKernel_ptsz {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
        launch(function, shape, Blocks::Independent, shared, stream, Parameters { pointers, extra })
    }

    "cuLaunchKernelEx" 11060 fn cuLaunchKernelEx(config: In<CUlaunchConfig>, function: CUfunction, pointers: In<In<u64>>, extra: In<*const c_void>) ptds(default) cuLaunchKernelEx_ptsz {
        let config = config.get()?;
        let stream = if config.stream == CUstream::NULL { default } else { config.stream };
        let shape = Shape { grid: config.grid, block: config.block };
        launch(function, shape, Blocks::Independent, config.shared_bytes, stream, Parameters { pointers, extra })
    }

    "cuLaunchCooperativeKernel" 9000 fn cuLaunchCooperativeKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: CUstream, pointers: In<In<u64>>,
    ) ptsz(stream) cuLaunchCooperativeKernel_ptsz {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
        launch(function, shape, Blocks::Cooperative, shared, stream, Parameters { pointers, extra: In::NULL })
    }

    // Devices do not wait for each other.
    "cuLaunchCooperativeKernelMultiDevice" 9000 fn cuLaunchCooperativeKernelMultiDevice(launches: In<CUlaunchParams>, count: c_uint, _flags: c_uint) {
        let launches = launches.list(count as usize)?;
        if launches.is_empty() {
            return Err(CudaError::InvalidValue);
        }
        launches.into_iter().try_for_each(|one| {
            let shape = Shape { grid: one.grid, block: one.block };
            let parameters = Parameters { pointers: In::at(one.pointers.cast()), extra: In::NULL };
            launch(one.function, shape, Blocks::Cooperative, one.shared_bytes, one.stream, parameters)
        })
    }
}
