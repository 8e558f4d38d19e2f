//! Conversion between C node parameters and operations.

use std::ffi::c_uint;
use std::sync::Arc;

use crate::State;
use crate::abi::{CudaResult, In};
use crate::context::current_handle;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::launch::Parameters;
use crate::operation::{Launch, Operation, Shape};
use crate::types::{CUcontext, CUfunction, CUkernelNodeParams, CUkernelNodeParamsV2};

/// Storage for the parameters of a kernel node.
#[derive(Debug)]
pub(super) struct Arguments {
    /// Address of the value.
    pointers: Box<[usize; 1]>,
    _value: Box<u64>,
}

impl Arguments {
    pub(super) fn of(operation: &Operation) -> Option<Arc<Self>> {
        let Operation::Kernel(launch) = operation else {
            return None;
        };
        let value = Box::new(launch.parameter?);
        let address = std::ptr::from_ref(value.as_ref()).expose_provenance();
        Some(Arc::new(Self {
            pointers: Box::new([address]),
            _value: value,
        }))
    }

    fn pointers(&self) -> *const *const u64 {
        std::ptr::from_ref(self.pointers.as_ref()).cast()
    }
}

impl State {
    /// Reads the parameters of a kernel node.
    pub(super) fn kernel_from(
        &mut self,
        driver: &Driver,
        params: &CUkernelNodeParamsV2,
    ) -> CudaResult<Operation> {
        let v1 = &params.v1;
        let function = if v1.function == CUfunction(0) {
            params.kernel
        } else {
            v1.function
        };
        let shape = Shape {
            grid: v1.grid,
            block: v1.block,
        };
        let parameters = Parameters {
            pointers: In::at(v1.pointers.cast()),
            extra: In::at(v1.extra),
        };
        let context = match params.context {
            CUcontext::NULL => current_handle()?,
            context => context,
        };
        let launch = self.launch(
            driver,
            context,
            function,
            shape,
            v1.shared_bytes,
            parameters,
        )?;
        Ok(Operation::Kernel(launch))
    }
}

/// Returns the parameters of a kernel node.
pub(super) fn kernel_to(
    launch: &Launch,
    arguments: Option<&Arguments>,
    context: CUcontext,
) -> CUkernelNodeParamsV2 {
    let v1 = CUkernelNodeParams {
        function: launch.function,
        grid: launch.shape.grid,
        block: launch.shape.block,
        shared_bytes: launch.shared_bytes,
        pointers: arguments.map_or(std::ptr::null(), Arguments::pointers),
        extra: std::ptr::null(),
    };
    CUkernelNodeParamsV2 {
        v1,
        kernel: CUfunction(0),
        context,
    }
}

/// Supported values of `CUgraphNodeType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeType {
    Kernel,
    Copy,
    Fill,
    Host,
    Child,
    Empty,
    Wait,
    Allocate,
    Free,
}

impl NodeType {
    pub(super) fn from_code(code: c_uint) -> CudaResult<Self> {
        Ok(match code {
            0 => Self::Kernel,
            1 => Self::Copy,
            2 => Self::Fill,
            3 => Self::Host,
            4 => Self::Child,
            5 => Self::Empty,
            6 => Self::Wait,
            10 => Self::Allocate,
            11 => Self::Free,
            // Event records, external semaphores, batched memory operations, conditions.
            7 | 8 | 9 | 12 | 13 => return Err(CudaError::NotSupported),
            _ => return Err(CudaError::InvalidValue),
        })
    }
}
