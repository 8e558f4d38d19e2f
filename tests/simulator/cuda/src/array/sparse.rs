//! Sparse arrays: without memory, until physical memory is mapped to tiles of them.
//!
//! A tile is 64 KiB. What is mapped to one stays taken until the tile is unmapped, gets other memory, or the array is
//! gone. Operations take effect at once, in the order in which they are put on streams.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::protocol::AllocationId;

use crate::abi::{Answer, In, Out, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::stream::with_room;
use crate::types::{
    CUarray, CUarray3DDescriptor, CUarrayMapInfo, CUarraySparseProperties, CUcontext, CUstream,
};

const TILE_BYTES: usize = 64 << 10;

/// `CU_RESOURCE_TYPE_ARRAY`, `CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL`, `CU_MEM_OPERATION_TYPE_MAP` and `_UNMAP`
const ARRAY: c_uint = 0;
const SPARSE_LEVEL: c_uint = 0;
const MAP: c_uint = 1;
const UNMAP: c_uint = 2;

/// The tiles that have memory: array, layer, place in the layer.
#[derive(Debug, Default)]
pub(super) struct Tiles(BTreeMap<(CUarray, [usize; 4]), AllocationId>);

impl CUarray3DDescriptor {
    const LAYERED: c_uint = 0x01;

    /// Elements of a tile in each direction.
    fn tile(&self) -> Answer<[usize; 3]> {
        let element = self.element_bytes().ok_or(CudaError::InvalidValue)?;
        let elements = TILE_BYTES / element;
        let is_volume = self.depth > 0 && self.flags & Self::LAYERED == 0;
        // Powers of two, as near to a square or a cube as they get, longer in the first direction.
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

/// The tiles from an offset on; extents end at a tile or at the array.
fn range(offset: usize, extent: usize, tile: usize, size: usize) -> Answer<std::ops::Range<usize>> {
    let end = offset.checked_add(extent).ok_or(CudaError::InvalidValue)?;
    let is_whole = offset.is_multiple_of(tile) && (end.is_multiple_of(tile) || end == size);
    if extent == 0 || end > size || !is_whole {
        return Err(CudaError::InvalidValue);
    }
    Ok(offset / tile..end.div_ceil(tile))
}

impl State {
    fn sparse(&self, array: CUarray) -> Answer<CUarray3DDescriptor> {
        let array = self.arrays.get(array)?;
        if !array.is_sparse() {
            return Err(CudaError::InvalidValue);
        }
        Ok(array.descriptor)
    }

    /// The tiles that an operation is about.
    fn places(&self, info: &CUarrayMapInfo) -> Answer<Vec<(CUarray, [usize; 4])>> {
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
        let mut places = Vec::new();
        for slice in slices {
            for row in rows.clone() {
                places.extend(
                    columns
                        .clone()
                        .map(|column| (array, [layer, slice, row, column])),
                );
            }
        }
        Ok(places)
    }

    fn map_tiles(&mut self, driver: &Driver, info: &CUarrayMapInfo) -> Answer {
        let places = self.places(info)?;
        let memory = match info.operation {
            MAP => {
                let memory = self.virtual_memory.allocation(info.memory)?;
                let (_, bytes) = self.virtual_memory.whereabouts(memory)?;
                let needed = (places.len() * TILE_BYTES) as u64;
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
        for place in places {
            let before = self.arrays.tiles.0.remove(&place);
            if let Some(memory) = memory {
                self.virtual_memory.hold(memory)?;
                self.arrays.tiles.0.insert(place, memory);
            }
            if let Some(before) = before {
                self.let_go(driver, before)?;
            }
        }
        Ok(())
    }

    /// Unmaps everything from an array that is about to go.
    pub(super) fn unmap_array(&mut self, driver: &Driver, array: CUarray) -> Answer {
        let every = (array, [0; 4])..=(array, [usize::MAX; 4]);
        let places: Vec<_> = self
            .arrays
            .tiles
            .0
            .range(every)
            .map(|(place, _)| *place)
            .collect();
        for place in places {
            if let Some(memory) = self.arrays.tiles.0.remove(&place) {
                self.let_go(driver, memory)?;
            }
        }
        Ok(())
    }

    /// Unmaps everything from the arrays of a context that is about to go.
    pub(crate) fn unmap_arrays(&mut self, driver: &Driver, context: CUcontext) -> Answer {
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
            // One level, none of which is in a tail.
            first_level_of_tail: 1,
            tail_bytes: 0,
            flags: 0,
            reserved: [0; 4],
        })
    }

    "cuMemMapArrayAsync" 11010 fn cuMemMapArrayAsync(operations: In<CUarrayMapInfo>, count: c_uint, stream: CUstream) ptsz(stream) cuMemMapArrayAsync_ptsz {
        let operations = operations.list(count as usize)?;
        with_room(stream, |driver, state, _| {
            operations.iter().try_for_each(|operation| state.map_tiles(driver, operation))
        })
    }
}
