//! Texture and surface objects: descriptions of how kernels read and write memory that is there
//! already. They take none, and nobody reads through them here.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use crate::abi::{Answer, In, Out, entry_points};
use crate::driver::{State, driver};
use crate::error::CudaError;
use crate::types::{
    CUarray, CUdevice, CUmipmappedArray, CUresourceDesc, CUresourceViewDesc, CUtextureDesc,
};

/// `CUtexObject` and `CUsurfObject`
type Object = u64;

/// All objects of this process.
#[derive(Debug, Default)]
pub(crate) struct Textures {
    textures: BTreeMap<Object, Texture>,
    surfaces: BTreeMap<Object, CUresourceDesc>,
}

#[derive(Clone, Copy, Debug)]
struct Texture {
    resource: CUresourceDesc,
    texture: CUtextureDesc,
    view: Option<CUresourceViewDesc>,
}

/// `CUresourcetype`
const ARRAY: c_uint = 0;
const MIPMAPPED_ARRAY: c_uint = 1;
const LINEAR: c_uint = 2;
const PITCH_2D: c_uint = 3;

impl State {
    /// Refuses what is not there.
    fn require_resource(&self, resource: &CUresourceDesc) -> Answer {
        let [place, ..] = resource.place;
        let handle = usize::try_from(place).map_err(|_| CudaError::InvalidValue)?;
        match resource.kind {
            ARRAY => self.arrays.get(CUarray(handle)).map(drop),
            MIPMAPPED_ARRAY => self.arrays.require_mipmap(CUmipmappedArray(handle)),
            // What begins there has to be some device's; how long it is said to be is not checked.
            LINEAR | PITCH_2D => self.require_range(place, 1),
            _ => Err(CudaError::InvalidValue),
        }
    }

    fn texture(&self, object: Object) -> Answer<Texture> {
        let texture = self.textures.textures.get(&object);
        texture.copied().ok_or(CudaError::InvalidValue)
    }
}

entry_points! {
    "cuTexObjectCreate" 5000 fn cuTexObjectCreate(object: Out<Object>, resource: In<CUresourceDesc>, texture: In<CUtextureDesc>, view: In<CUresourceViewDesc>) {
        let made = Texture { resource: resource.get()?, texture: texture.get()?, view: view.get().ok() };
        if object.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver()?.state();
        state.require_resource(&made.resource)?;
        let handle = state.handle() as Object;
        state.textures.textures.insert(handle, made);
        object.set(handle)
    }
    "cuTexObjectDestroy" 5000 fn cuTexObjectDestroy(object: Object) {
        let removed = driver()?.state().textures.textures.remove(&object);
        removed.map(drop).ok_or(CudaError::InvalidValue)
    }
    "cuTexObjectGetResourceDesc" 5000 fn cuTexObjectGetResourceDesc(resource: Out<CUresourceDesc>, object: Object) {
        resource.set(driver()?.state().texture(object)?.resource)
    }
    "cuTexObjectGetTextureDesc" 5000 fn cuTexObjectGetTextureDesc(texture: Out<CUtextureDesc>, object: Object) {
        texture.set(driver()?.state().texture(object)?.texture)
    }
    "cuTexObjectGetResourceViewDesc" 5000 fn cuTexObjectGetResourceViewDesc(view: Out<CUresourceViewDesc>, object: Object) {
        view.set(driver()?.state().texture(object)?.view.ok_or(CudaError::InvalidValue)?)
    }

    "cuSurfObjectCreate" 5000 fn cuSurfObjectCreate(object: Out<Object>, resource: In<CUresourceDesc>) {
        let resource = resource.get()?;
        if resource.kind != ARRAY || object.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver()?.state();
        state.require_resource(&resource)?;
        let handle = state.handle() as Object;
        state.textures.surfaces.insert(handle, resource);
        object.set(handle)
    }
    "cuSurfObjectDestroy" 5000 fn cuSurfObjectDestroy(object: Object) {
        let removed = driver()?.state().textures.surfaces.remove(&object);
        removed.map(drop).ok_or(CudaError::InvalidValue)
    }
    "cuSurfObjectGetResourceDesc" 5000 fn cuSurfObjectGetResourceDesc(resource: Out<CUresourceDesc>, object: Object) {
        let state = driver()?.state();
        resource.set(*state.textures.surfaces.get(&object).ok_or(CudaError::InvalidValue)?)
    }

    "cuDeviceGetTexture1DLinearMaxWidth" 11010 fn cuDeviceGetTexture1DLinearMaxWidth(width: Out<usize>, _format: c_uint, channels: c_uint, device: CUdevice) {
        const MOST: usize = 1 << 28;
        driver()?.device(device)?;
        match channels {
            1 | 2 | 4 => width.set(MOST),
            _ => Err(CudaError::InvalidValue),
        }
    }
}
