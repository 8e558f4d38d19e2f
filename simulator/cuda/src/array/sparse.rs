//! Sparse arrays: no memory until physical memory is mapped to their tiles.
//!
//! A tile is 64 KiB. Mapped memory stays allocated until the tile is unmapped or remapped, or the
//! array is destroyed. Operations take effect immediately, in submission order.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::protocol::AllocationId;

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::stream::with_capacity;
use crate::types::{
    CUarray, CUarray3DDescriptor, CUarrayMapInfo, CUarraySparseProperties, CUcontext, CUstream,
};

const TILE_BYTES: usize = 64 << 10;

/// `CU_RESOURCE_TYPE_ARRAY`, `CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL`, `CU_MEM_OPERATION_TYPE_MAP` and `_UNMAP`
const ARRAY: c_uint = 0;
const SPARSE_LEVEL: c_uint = 0;
const MAP: c_uint = 1;
const UNMAP: c_uint = 2;

/// Tiles with memory: array, layer and position in the layer.
#[derive(Debug, Default)]
pub(super) struct Tiles(BTreeMap<(CUarray, [usize; 4]), AllocationId>);

impl CUarray3DDescriptor {
    const LAYERED: c_uint = 0x01;

    /// Tile extent in elements.
    fn tile(&self) -> CudaResult<[usize; 3]> {
        let element = self.element_bytes().ok_or(CudaError::InvalidValue)?;
        let elements = TILE_BYTES / element;
        let is_volume = self.depth > 0 && self.flags & Self::LAYERED == 0;
        // Powers of two, as near to a square or cube as possible, longest in the first dimension.
        let bits = elements.ilog2();
        let parts = if is_volume { 3 } else { 2 };
        let side = |index: u32| 1 << ((bits + parts - 1 - index) / parts);
        Ok([side(0), side(1), if is_volume { side(2) } else { 1 }])
    }

    fn extent(&self) -> [usize; 3] {
        let depth = match self.flags & Self::LAYERED {
            0 => self.depth.max(1),
            _ => 1,
        };
        [self.width, self.height.max(1), depth]
    }
}

/// The tiles of a range; the range ends at a tile boundary or at the array's.
fn range(
    offset: usize,
    extent: usize,
    tile: usize,
    size: usize,
) -> CudaResult<std::ops::Range<usize>> {
    let end = offset.checked_add(extent).ok_or(CudaError::InvalidValue)?;
    let is_whole = offset.is_multiple_of(tile) && (end.is_multiple_of(tile) || end == size);
    if extent == 0 || end > size || !is_whole {
        return Err(CudaError::InvalidValue);
    }
    Ok(offset / tile..end.div_ceil(tile))
}

impl State {
    fn sparse(&self, array: CUarray) -> CudaResult<CUarray3DDescriptor> {
        let array = self.arrays.get(array)?;
        if !array.is_sparse() {
            return Err(CudaError::InvalidValue);
        }
        Ok(array.descriptor)
    }

    /// The tiles of an operation.
    fn tiles_of(&self, info: &CUarrayMapInfo) -> CudaResult<Vec<(CUarray, [usize; 4])>> {
        if info.resource_type != ARRAY || info.subresource_type != SPARSE_LEVEL {
            return Err(CudaError::NotSupported);
        }
        let array = CUarray(info.resource);
        let descriptor = self.sparse(array)?;
        let [level, layer, x, y, z, width, height, depth] =
            info.subresource.map(|number| number as usize);
        if level != 0 || info.flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        let (tile, size) = (descriptor.tile()?, descriptor.extent());
        let [columns, rows, slices] = [
            range(x, width, tile[0], size[0])?,
            range(y, height, tile[1], size[1])?,
            range(z, depth, tile[2], size[2])?,
        ];
        let mut tiles = Vec::new();
        for slice in slices {
            for row in rows.clone() {
                tiles.extend(
                    columns
                        .clone()
                        .map(|column| (array, [layer, slice, row, column])),
                );
            }
        }
        Ok(tiles)
    }

    fn map_tiles(&mut self, driver: &Driver, info: &CUarrayMapInfo) -> CudaResult {
        let tiles = self.tiles_of(info)?;
        let memory = match info.operation {
            MAP => {
                let memory = self.virtual_memory.allocation(info.memory)?;
                let (_, bytes) = self.virtual_memory.device_and_size(memory)?;
                let needed = (tiles.len() * TILE_BYTES) as u64;
                if info
                    .offset
                    .checked_add(needed)
                    .is_none_or(|end| end > bytes)
                {
                    return Err(CudaError::InvalidValue);
                }
                Some(memory)
            }
            UNMAP if info.memory == 0 => None,
            _ => return Err(CudaError::InvalidValue),
        };
        for tile_key in tiles {
            let before = self.arrays.tiles.0.remove(&tile_key);
            if let Some(memory) = memory {
                self.virtual_memory.add_binding(memory)?;
                self.arrays.tiles.0.insert(tile_key, memory);
            }
            if let Some(before) = before {
                self.remove_binding(driver, before)?;
            }
        }
        Ok(())
    }

    /// Unmaps all tiles of an array.
    pub(super) fn unmap_array(&mut self, driver: &Driver, array: CUarray) -> CudaResult {
        let every = (array, [0; 4])..=(array, [usize::MAX; 4]);
        let tiles: Vec<_> = self
            .arrays
            .tiles
            .0
            .range(every)
            .map(|(tile_key, _)| *tile_key)
            .collect();
        for tile_key in tiles {
            if let Some(memory) = self.arrays.tiles.0.remove(&tile_key) {
                self.remove_binding(driver, memory)?;
            }
        }
        Ok(())
    }

    /// Unmaps all tiles of a context's arrays.
    pub(crate) fn unmap_arrays(&mut self, driver: &Driver, context: CUcontext) -> CudaResult {
        let arrays = self.arrays.arrays.iter();
        let gone: Vec<CUarray> = arrays
            .filter(|(_, array)| array.context == context && array.is_sparse())
            .map(|(handle, _)| *handle)
            .collect();
        gone.into_iter()
            .try_for_each(|array| self.unmap_array(driver, array))
    }
}

entry_points! {
    "cuArrayGetSparseProperties" 11010 fn cuArrayGetSparseProperties(properties: Out<CUarraySparseProperties>, array: CUarray) {
        let tile = driver()?.state().sparse(array)?.tile()?;
        properties.set(CUarraySparseProperties {
            tile: tile.map(|side| c_uint::try_from(side).unwrap_or(c_uint::MAX)),
            // One level, without a mip tail.
            first_level_of_tail: 1,
            tail_bytes: 0,
            flags: 0,
            reserved: [0; 4],
        })
    }

    "cuMemMapArrayAsync" 11010 fn cuMemMapArrayAsync(operations: In<CUarrayMapInfo>, count: c_uint, stream: CUstream) ptsz(stream) cuMemMapArrayAsync_ptsz {
        let operations = operations.list(count as usize)?;
        with_capacity(stream, |driver, state, _| {
            operations.iter().try_for_each(|operation| state.map_tiles(driver, operation))
        })
    }
}
