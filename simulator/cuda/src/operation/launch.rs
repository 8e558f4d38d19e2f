//! Launches of kernels.

use std::ffi::c_uint;

use simulator_machine::description::Compute;
use simulator_machine::protocol::Nanos;

use crate::abi::CudaResult;
use crate::error::CudaError;
use crate::types::CUfunction;

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
}

/// One launch with the parameters that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) function: CUfunction,
    pub(crate) shape: Shape,
    pub(crate) shared_bytes: c_uint,
    pub(crate) nanos: Nanos,
    /// The first parameter, if the function has one.
    pub(crate) parameter: Option<u64>,
}

impl Shape {
    pub(crate) fn threads(self) -> u64 {
        self.block
            .iter()
            .fold(1, |product, side| product.saturating_mul(u64::from(*side)))
    }

    pub(crate) fn blocks(self) -> u64 {
        self.grid
            .iter()
            .fold(1, |product, side| product.saturating_mul(u64::from(*side)))
    }

    /// Errors unless a GPU can run the shape.
    pub(crate) fn check(self) -> CudaResult {
        match self.threads() {
            1..=1024 if self.blocks() > 0 => Ok(()),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// Number of multiprocessors that the blocks fill.
    pub(crate) fn multiprocessors(self, compute: &Compute) -> u32 {
        let resident = u64::from(compute.threads_per_multiprocessor) / self.threads().max(1);
        let needed = self.blocks().div_ceil(resident.clamp(1, 32));
        u32::try_from(needed)
            .unwrap_or(u32::MAX)
            .clamp(1, compute.multiprocessors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPUTE: Compute = Compute {
        multiprocessors: 132,
        cores: 16896,
        threads_per_multiprocessor: 2048,
        time_slice_microseconds: 2050,
        context_switch_microseconds: 200,
        copy_engines: 3,
    };

    fn shape(blocks: c_uint, threads: c_uint) -> Shape {
        Shape {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
        }
    }

    #[test]
    fn counts_the_multiprocessors_that_blocks_fill() {
        let cases = [
            (1, 1, 1),
            (32, 1, 1),
            (33, 1, 2),
            (8, 256, 1),
            (132, 1024, 66),
            (1 << 30, 1024, 132),
        ];
        for (blocks, threads, expected) in cases {
            assert_eq!(
                shape(blocks, threads).multiprocessors(&COMPUTE),
                expected,
                "{blocks}x{threads}"
            );
        }
        let huge = Shape {
            grid: [c_uint::MAX; 3],
            block: [1, 1, 1],
        };
        assert_eq!(huge.multiprocessors(&COMPUTE), 132);
    }

    #[test]
    fn rejects_impossible_shapes() {
        for (blocks, threads) in [(0, 1), (1, 0), (1, 1025)] {
            assert_eq!(shape(blocks, threads).check(), Err(CudaError::InvalidValue));
        }
    }
}
