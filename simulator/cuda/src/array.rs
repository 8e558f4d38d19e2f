//! Arrays and mipmapped arrays: device memory that only copies reach.
//!
//! The layout is plain rows. No program can observe it, since no call returns the address of an
//! array.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::kernel::PAGE_BYTES;

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::types::{
    CUarray, CUarray3DDescriptor, CUarray3DDescriptorV1, CUarrayDescriptor, CUarrayDescriptorV1,
    CUcontext, CUdeviceptr, CUmipmappedArray,
};

mod sparse;

pub(crate) use sparse::ENTRY_POINTS as SPARSE_ENTRY_POINTS;

/// `CUDA_ARRAY3D_SPARSE`
const SPARSE: c_uint = 0x40;

/// `CUDA_ARRAY3D_LAYERED`, `_SURFACE_LDST`, `_CUBEMAP`, `_TEXTURE_GATHER`, `_COLOR_ATTACHMENT`
const FLAGS: c_uint = 0x01 | 0x02 | 0x04 | 0x08 | 0x20;

#[derive(Debug, Default)]
pub(crate) struct Arrays {
    arrays: BTreeMap<CUarray, Array>,
    mipmaps: BTreeMap<CUmipmappedArray, Mipmap>,
    tiles: sparse::Tiles,
}

/// One array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array {
    /// Address of its memory; 0 if sparse.
    pub(crate) address: CUdeviceptr,
    context: CUcontext,
    descriptor: CUarray3DDescriptor,
}

#[derive(Debug)]
struct Mipmap {
    context: CUcontext,
    address: CUdeviceptr,
}

impl CUarray3DDescriptor {
    fn check(&self) -> CudaResult {
        if self.width == 0 || self.element_bytes().is_none() {
            return Err(CudaError::InvalidValue);
        }
        match self.flags & !FLAGS {
            0 => Ok(()),
            SPARSE if self.height > 0 && self.block_side() == 1 => Ok(()),
            SPARSE => Err(CudaError::InvalidValue),
            // Deferred mappings and other arrays without memory.
            _ => Err(CudaError::NotSupported),
        }
    }

    /// Bytes of one element, or of one compressed block, by `CUarray_format`. `None` for planar
    /// formats, which are not simulated.
    fn element_bytes(&self) -> Option<usize> {
        let (channel, of_format) = match self.format {
            0x01 | 0x08 => (1, None),
            0x02 | 0x09 | 0x10 => (2, None),
            0x03 | 0x0a | 0x20 => (4, None),
            // Normalized integers of a fixed number of channels.
            0xc0 | 0xc6 => (1, Some(1)),
            0xc1 | 0xc7 => (1, Some(2)),
            0xc2 | 0xc8 => (1, Some(4)),
            0xc3 | 0xc9 => (2, Some(1)),
            0xc4 | 0xca => (2, Some(2)),
            0xc5 | 0xcb => (2, Some(4)),
            // BC1; BC2, BC3 and BC7.
            0x91 | 0x92 => (2, Some(4)),
            0x93..=0x96 | 0x9d | 0x9e => (4, Some(4)),
            // BC4; BC5; BC6H, which has three channels.
            0x97 | 0x98 => (8, Some(1)),
            0x99 | 0x9a => (8, Some(2)),
            0x9b | 0x9c => return (self.channels == 3).then_some(16),
            _ => return None,
        };
        let is_right = match of_format {
            None => matches!(self.channels, 1 | 2 | 4),
            Some(channels) => self.channels == channels,
        };
        is_right.then_some(channel * self.channels as usize)
    }

    /// Elements along one side of a compressed block; 1 for plain formats.
    fn block_side(&self) -> usize {
        match self.format {
            0x91..=0x9e => 4,
            _ => 1,
        }
    }

    /// Bytes per row, rows per layer, layers.
    fn sides(&self) -> [usize; 3] {
        let side = self.block_side();
        let row = self.width.div_ceil(side);
        let row = row.saturating_mul(self.element_bytes().unwrap_or(0));
        [row, self.height.div_ceil(side).max(1), self.depth.max(1)]
    }

    fn bytes(&self) -> CudaResult<u64> {
        let product = self
            .sides()
            .iter()
            .try_fold(1, |product: u64, side| product.checked_mul(*side as u64));
        product.ok_or(CudaError::InvalidValue)
    }

    /// Descriptor of one mipmap level. Layers and cube faces keep their number.
    fn level(&self, level: u32) -> Self {
        const LAYERED: c_uint = 0x01 | 0x04;
        let halved = |side: usize| match side {
            0 => 0,
            side => (side >> level.min(63)).max(1),
        };
        Self {
            width: halved(self.width),
            height: halved(self.height),
            depth: match self.flags & LAYERED {
                0 => halved(self.depth),
                _ => self.depth,
            },
            ..*self
        }
    }
}

impl From<CUarrayDescriptor> for CUarray3DDescriptor {
    fn from(flat: CUarrayDescriptor) -> Self {
        Self {
            width: flat.width,
            height: flat.height,
            depth: 0,
            format: flat.format,
            channels: flat.channels,
            flags: 0,
        }
    }
}

impl From<CUarrayDescriptorV1> for CUarray3DDescriptor {
    fn from(flat: CUarrayDescriptorV1) -> Self {
        Self {
            width: flat.width as usize,
            height: flat.height as usize,
            depth: 0,
            format: flat.format,
            channels: flat.channels,
            flags: 0,
        }
    }
}

impl From<CUarray3DDescriptorV1> for CUarray3DDescriptor {
    fn from(narrow: CUarray3DDescriptorV1) -> Self {
        Self {
            width: narrow.width as usize,
            height: narrow.height as usize,
            depth: narrow.depth as usize,
            format: narrow.format,
            channels: narrow.channels,
            flags: narrow.flags,
        }
    }
}

impl Array {
    /// Bytes of one element; `None` for block-compressed formats.
    pub(crate) fn element_bytes(&self) -> Option<usize> {
        let is_single = self.descriptor.block_side() == 1;
        self.descriptor.element_bytes().filter(|_| is_single)
    }

    /// Bytes per row, rows per layer, layers.
    pub(crate) fn sides(&self) -> [usize; 3] {
        self.descriptor.sides()
    }

    pub(crate) fn is_sparse(&self) -> bool {
        self.descriptor.flags & SPARSE != 0
    }
}

impl Arrays {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        let arrays = self.arrays.keys().map(|array| array.0);
        arrays.chain(self.mipmaps.keys().map(|mipmap| mipmap.0))
    }

    pub(crate) fn get(&self, handle: CUarray) -> CudaResult<&Array> {
        self.arrays.get(&handle).ok_or(CudaError::InvalidHandle)
    }

    /// Removes the arrays of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        self.arrays.retain(|_, array| array.context != context);
        self.mipmaps.retain(|_, mipmap| mipmap.context != context);
    }
}

impl State {
    /// Allocates the memory of an array: blocks of its own. On an H200 arrays of random sizes take more than any packing
    /// of them into shared blocks.
    fn allocate_array(&mut self, driver: &Driver, bytes: u64) -> CudaResult<CUdeviceptr> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES);
        self.allocate(driver, bytes.ok_or(CudaError::InvalidValue)?)
    }

    fn create_array(
        &mut self,
        driver: &Driver,
        descriptor: CUarray3DDescriptor,
    ) -> CudaResult<CUarray> {
        descriptor.check()?;
        self.require_safe_in_capture()?;
        let context = crate::context::current_handle()?;
        let address = match descriptor.flags & SPARSE {
            0 => self.allocate_array(driver, descriptor.bytes()?)?,
            _ => 0,
        };
        let handle = CUarray(self.handle());
        let array = Array {
            address,
            context,
            descriptor,
        };
        self.arrays.arrays.insert(handle, array);
        Ok(handle)
    }

    fn destroy_array(&mut self, driver: &Driver, handle: CUarray) -> CudaResult {
        self.require_safe_in_capture()?;
        let array = self.arrays.get(handle)?;
        let (address, is_sparse) = (array.address, array.is_sparse());
        self.arrays.arrays.remove(&handle);
        if is_sparse {
            return self.unmap_array(driver, handle);
        }
        self.free(driver, address)
    }

    fn create_mipmap(
        &mut self,
        driver: &Driver,
        descriptor: CUarray3DDescriptor,
        levels: u32,
    ) -> CudaResult<CUmipmappedArray> {
        descriptor.check()?;
        if descriptor.flags & SPARSE != 0 {
            return Err(CudaError::NotSupported);
        }
        self.require_safe_in_capture()?;
        let longest = descriptor
            .width
            .max(descriptor.height)
            .max(descriptor.depth);
        let most = longest.max(1).ilog2() + 1;
        let context = crate::context::current_handle()?;
        let mut bytes = 0;
        for level in 0..levels.clamp(1, most) {
            let more = descriptor.level(level).bytes()?;
            bytes = u64::checked_add(bytes, more).ok_or(CudaError::InvalidValue)?;
        }
        let address = self.allocate_array(driver, bytes)?;
        let handle = CUmipmappedArray(self.handle());
        self.arrays
            .mipmaps
            .insert(handle, Mipmap { context, address });
        Ok(handle)
    }

    fn destroy_mipmap(&mut self, driver: &Driver, handle: CUmipmappedArray) -> CudaResult {
        self.require_safe_in_capture()?;
        let mipmap = self.arrays.mipmaps.remove(&handle);
        let mipmap = mipmap.ok_or(CudaError::InvalidHandle)?;
        self.free(driver, mipmap.address)
    }
}

entry_points! {
    "cuArrayCreate" 2000 fn cuArrayCreate(array: Out<CUarray>, descriptor: In<CUarrayDescriptorV1>) {
        let driver = driver()?;
        array.set(driver.state().create_array(driver, descriptor.get()?.into())?)
    }
    "cuArrayCreate" 3020 fn cuArrayCreate_v2(array: Out<CUarray>, descriptor: In<CUarrayDescriptor>) {
        let driver = driver()?;
        array.set(driver.state().create_array(driver, descriptor.get()?.into())?)
    }

    "cuArray3DCreate" 2000 fn cuArray3DCreate(array: Out<CUarray>, descriptor: In<CUarray3DDescriptorV1>) {
        let driver = driver()?;
        array.set(driver.state().create_array(driver, descriptor.get()?.into())?)
    }
    "cuArray3DCreate" 3020 fn cuArray3DCreate_v2(array: Out<CUarray>, descriptor: In<CUarray3DDescriptor>) {
        let driver = driver()?;
        array.set(driver.state().create_array(driver, descriptor.get()?)?)
    }

    "cuArrayDestroy" 2000 fn cuArrayDestroy(array: CUarray) {
        let driver = driver()?;
        driver.state().destroy_array(driver, array)
    }

    "cuMipmappedArrayCreate" 5000 fn cuMipmappedArrayCreate(mipmap: Out<CUmipmappedArray>, descriptor: In<CUarray3DDescriptor>, levels: c_uint) {
        let driver = driver()?;
        mipmap.set(driver.state().create_mipmap(driver, descriptor.get()?, levels)?)
    }

    "cuMipmappedArrayDestroy" 5000 fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray) {
        let driver = driver()?;
        driver.state().destroy_mipmap(driver, mipmap)
    }
}
