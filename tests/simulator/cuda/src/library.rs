//! Libraries and their kernels: code that belongs to no context until it is used in one.
//!
//! A library has a module in each context in which something of it was used. A kernel can be
//! launched wherever a function can; the launch uses the function of the stream's context.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::abi::{Answer, In, Out, Text, Untyped, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::module::{SPIN, default_attribute};
use crate::types::{CUcontext, CUdevice, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule};

/// All libraries of this process.
#[derive(Debug, Default)]
pub(crate) struct Libraries {
    libraries: BTreeMap<CUlibrary, Library>,
    kernels: BTreeMap<CUkernel, Kernel>,
}

#[derive(Debug, Default)]
struct Library {
    modules: BTreeMap<CUcontext, CUmodule>,
    /// Those that were asked for: a library has every kernel.
    kernels: BTreeMap<String, CUkernel>,
}

#[derive(Debug)]
struct Kernel {
    library: CUlibrary,
    name: Arc<std::ffi::CStr>,
    attributes: BTreeMap<(CUdevice, c_uint), c_int>,
}

impl Libraries {
    fn library(&mut self, handle: CUlibrary) -> Answer<&mut Library> {
        let library = self.libraries.get_mut(&handle);
        library.ok_or(CudaError::InvalidHandle)
    }

    fn kernel(&self, handle: CUkernel) -> Answer<&Kernel> {
        self.kernels.get(&handle).ok_or(CudaError::InvalidHandle)
    }

    /// Forgets the modules of a context that is destroyed.
    pub(crate) fn forget_context(&mut self, context: CUcontext) {
        for library in self.libraries.values_mut() {
            library.modules.remove(&context);
        }
    }
}

impl State {
    fn load_library(&mut self) -> CUlibrary {
        let handle = CUlibrary(self.handle());
        let library = Library::default();
        self.libraries.libraries.insert(handle, library);
        handle
    }

    fn unload_library(&mut self, driver: &Driver, handle: CUlibrary) -> Answer {
        let library = self.libraries.libraries.remove(&handle);
        let library = library.ok_or(CudaError::InvalidHandle)?;
        let kernels = &mut self.libraries.kernels;
        kernels.retain(|_, kernel| kernel.library != handle);
        let mut modules = library.modules.into_values();
        modules.try_for_each(|module| self.unload_module(driver, module))
    }

    fn library_kernel(&mut self, handle: CUlibrary, name: &str) -> Answer<CUkernel> {
        if let Some(kernel) = self.libraries.library(handle)?.kernels.get(name) {
            return Ok(*kernel);
        }
        let text = std::ffi::CString::new(name).map_err(|_| CudaError::InvalidValue)?;
        let kernel = CUkernel(self.handle());
        let record = Kernel {
            library: handle,
            name: text.into(),
            attributes: BTreeMap::new(),
        };
        self.libraries.kernels.insert(kernel, record);
        let library = self.libraries.library(handle)?;
        library.kernels.insert(name.to_owned(), kernel);
        Ok(kernel)
    }

    /// The module of a library in a context.
    fn library_module(
        &mut self,
        driver: &Driver,
        handle: CUlibrary,
        context: CUcontext,
    ) -> Answer<CUmodule> {
        if let Some(module) = self.libraries.library(handle)?.modules.get(&context) {
            return Ok(*module);
        }
        let module = self.load_module(driver, context)?;
        let library = self.libraries.library(handle)?;
        library.modules.insert(context, module);
        Ok(module)
    }

    fn kernel_function(
        &mut self,
        driver: &Driver,
        handle: CUkernel,
        context: CUcontext,
    ) -> Answer<CUfunction> {
        let kernel = self.libraries.kernel(handle)?;
        let (library, name) = (kernel.library, Arc::clone(&kernel.name));
        let module = self.library_module(driver, library, context)?;
        let name = name.to_str().map_err(|_| CudaError::InvalidValue)?;
        self.function(module, name)
    }

    /// The function that a handle of a function or of a kernel means in a context.
    pub(crate) fn function_in(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        handle: CUfunction,
    ) -> Answer<CUfunction> {
        let kernel = CUkernel(handle.0);
        match self.libraries.kernels.contains_key(&kernel) {
            true => self.kernel_function(driver, kernel, context),
            false => Ok(handle),
        }
    }
}

/// Offset and size of a parameter: only `spin` has any.
pub(crate) fn parameter(
    name: &std::ffi::CStr,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> Answer {
    if name != SPIN || index > 0 {
        return Err(CudaError::InvalidValue);
    }
    size.set_if_wanted(8);
    offset.set(0)
}

entry_points! {
    "cuLibraryLoadData" 12000 fn cuLibraryLoadData(
        library: Out<CUlibrary>, code: In<c_char>,
        _jit: In<c_uint>, _jit_values: In<*mut c_void>, _jit_count: c_uint,
        _options: In<c_uint>, _values: In<*mut c_void>, _count: c_uint,
    ) {
        code.get()?;
        library.set(driver()?.state().load_library())
    }

    "cuLibraryLoadFromFile" 12000 fn cuLibraryLoadFromFile(
        library: Out<CUlibrary>, path: Text,
        _jit: In<c_uint>, _jit_values: In<*mut c_void>, _jit_count: c_uint,
        _options: In<c_uint>, _values: In<*mut c_void>, _count: c_uint,
    ) {
        if !std::path::Path::new(&path.get()?).exists() {
            return Err(CudaError::FileNotFound);
        }
        library.set(driver()?.state().load_library())
    }

    "cuLibraryUnload" 12000 fn cuLibraryUnload(library: CUlibrary) {
        let driver = driver()?;
        driver.state().unload_library(driver, library)
    }

    "cuLibraryGetKernel" 12000 fn cuLibraryGetKernel(kernel: Out<CUkernel>, library: CUlibrary, name: Text) {
        let name = name.get()?;
        kernel.set(driver()?.state().library_kernel(library, &name)?)
    }

    "cuLibraryGetKernelCount" 12040 fn cuLibraryGetKernelCount(count: Out<c_uint>, library: CUlibrary) {
        let known = driver()?.state().libraries.library(library)?.kernels.len();
        count.set(c_uint::try_from(known).map_err(|_| CudaError::InvalidValue)?)
    }

    "cuLibraryEnumerateKernels" 12040 fn cuLibraryEnumerateKernels(kernels: Out<CUkernel>, count: c_uint, library: CUlibrary) {
        let mut state = driver()?.state();
        let known = state.libraries.library(library)?.kernels.values().copied();
        kernels.set_all(known.take(count as usize))
    }

    "cuLibraryGetModule" 12000 fn cuLibraryGetModule(module: Out<CUmodule>, library: CUlibrary) {
        let driver = driver()?;
        let context = current_handle()?;
        module.set(driver.state().library_module(driver, library, context)?)
    }

    "cuLibraryGetGlobal" 12000 fn cuLibraryGetGlobal(address: Out<CUdeviceptr>, bytes: Out<usize>, library: CUlibrary, name: Text) {
        let name = name.get()?;
        let driver = driver()?;
        let context = current_handle()?;
        let mut state = driver.state();
        let module = state.library_module(driver, library, context)?;
        let (found, size) = state.global(driver, module, &name)?;
        address.set_if_wanted(found);
        bytes.set_if_wanted(size);
        Ok(())
    }

    // No image has managed variables or unified functions.
    "cuLibraryGetManaged" 12000 fn cuLibraryGetManaged(_address: Out<CUdeviceptr>, _bytes: Out<usize>, library: CUlibrary, _name: Text) {
        driver()?.state().libraries.library(library)?;
        Err(CudaError::NotFound)
    }
    "cuLibraryGetUnifiedFunction" 12000 fn cuLibraryGetUnifiedFunction(_function: Untyped, library: CUlibrary, _name: Text) {
        driver()?.state().libraries.library(library)?;
        Err(CudaError::NotFound)
    }

    "cuKernelGetFunction" 12000 fn cuKernelGetFunction(function: Out<CUfunction>, kernel: CUkernel) {
        let driver = driver()?;
        let context = current_handle()?;
        function.set(driver.state().kernel_function(driver, kernel, context)?)
    }

    "cuKernelGetLibrary" 12050 fn cuKernelGetLibrary(library: Out<CUlibrary>, kernel: CUkernel) {
        library.set(driver()?.state().libraries.kernel(kernel)?.library)
    }

    "cuKernelGetName" 12030 fn cuKernelGetName(name: Out<*const c_char>, kernel: CUkernel) {
        // The kernel, and with it the string, lives as long as its library.
        name.set(driver()?.state().libraries.kernel(kernel)?.name.as_ptr())
    }

    "cuKernelGetParamInfo" 12040 fn cuKernelGetParamInfo(kernel: CUkernel, index: usize, offset: Out<usize>, size: Out<usize>) {
        let state = driver()?.state();
        parameter(&state.libraries.kernel(kernel)?.name, index, offset, size)
    }

    "cuKernelGetAttribute" 12000 fn cuKernelGetAttribute(value: Out<c_int>, attribute: c_uint, kernel: CUkernel, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        let state = driver.state();
        let kernel = state.libraries.kernel(kernel)?;
        let set = kernel.attributes.get(&(device, attribute)).copied();
        let known = set.or_else(|| default_attribute(&kernel.name, attribute));
        value.set(known.ok_or(CudaError::InvalidValue)?)
    }

    "cuKernelSetAttribute" 12000 fn cuKernelSetAttribute(attribute: c_uint, value: c_int, kernel: CUkernel, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        let mut state = driver.state();
        let kernel = state.libraries.kernels.get_mut(&kernel).ok_or(CudaError::InvalidHandle)?;
        default_attribute(&kernel.name, attribute).ok_or(CudaError::InvalidValue)?;
        kernel.attributes.insert((device, attribute), value);
        Ok(())
    }

    "cuKernelSetCacheConfig" 12000 fn cuKernelSetCacheConfig(kernel: CUkernel, _config: c_uint, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        driver.state().libraries.kernel(kernel).map(drop)
    }
}
