//! Libraries and their kernels: code that is loaded into a context on first use, which waits for all work of the context;
//! with `CUDA_MODULE_LOADING=EAGER` into all contexts at once.
//!
//! A library has one module per context. A kernel handle is accepted wherever a function handle is;
//! the launch uses the function of the stream's context.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_uint, c_void};
use std::sync::Arc;

use crate::State;
use crate::abi::{CudaResult, In, Out, Text, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::image::{Declared, declared};
use crate::module::lazy;
use crate::types::{CUcontext, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule};

/// The only kernel that an enumeration returns, though a library has one of every name.
const ENUMERATED: &str = "enumerated";

#[derive(Debug, Default)]
pub(crate) struct Libraries {
    libraries: BTreeMap<CUlibrary, Library>,
    kernels: BTreeMap<CUkernel, Kernel>,
}

#[derive(Debug, Default)]
struct Library {
    modules: BTreeMap<CUcontext, CUmodule>,
    /// Kernels requested so far: a library has a kernel of every name.
    kernels: BTreeMap<String, CUkernel>,
    declared: Declared,
}

#[derive(Debug)]
struct Kernel {
    library: CUlibrary,
    name: Arc<std::ffi::CStr>,
}

impl Libraries {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        let libraries = self.libraries.keys().map(|library| library.0);
        libraries.chain(self.kernels.keys().map(|kernel| kernel.0))
    }

    fn library(&mut self, handle: CUlibrary) -> CudaResult<&mut Library> {
        let library = self.libraries.get_mut(&handle);
        library.ok_or(CudaError::InvalidHandle)
    }

    fn kernel(&self, handle: CUkernel) -> CudaResult<&Kernel> {
        self.kernels.get(&handle).ok_or(CudaError::InvalidHandle)
    }

    /// Removes the modules of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        for library in self.libraries.values_mut() {
            library.modules.remove(&context);
        }
    }
}

impl State {
    fn load_library(&mut self, declared: Declared) -> CUlibrary {
        let handle = CUlibrary(self.handle());
        let library = Library {
            declared,
            ..Library::default()
        };
        self.libraries.libraries.insert(handle, library);
        handle
    }

    fn unload_library(&mut self, driver: &Driver, handle: CUlibrary) -> CudaResult {
        let library = self.libraries.libraries.remove(&handle);
        let library = library.ok_or(CudaError::InvalidHandle)?;
        let kernels = &mut self.libraries.kernels;
        kernels.retain(|_, kernel| kernel.library != handle);
        let mut modules = library.modules.into_values();
        modules.try_for_each(|module| self.unload_module(driver, module))
    }

    fn library_kernel(&mut self, handle: CUlibrary, name: &str) -> CudaResult<CUkernel> {
        if let Some(kernel) = self.libraries.library(handle)?.kernels.get(name) {
            return Ok(*kernel);
        }
        let text = std::ffi::CString::new(name).map_err(|_| CudaError::InvalidValue)?;
        let kernel = CUkernel(self.handle());
        let record = Kernel {
            library: handle,
            name: text.into(),
        };
        self.libraries.kernels.insert(kernel, record);
        let library = self.libraries.library(handle)?;
        library.kernels.insert(name.to_owned(), kernel);
        Ok(kernel)
    }

    /// Returns the module of a library in a context, loading it if needed.
    fn library_module(
        &mut self,
        driver: &Driver,
        handle: CUlibrary,
        context: CUcontext,
    ) -> CudaResult<CUmodule> {
        if let Some(module) = self.libraries.library(handle)?.modules.get(&context) {
            return Ok(*module);
        }
        let declared = self.libraries.library(handle)?.declared;
        let module = self.load_module(driver, context, declared)?;
        let library = self.libraries.library(handle)?;
        library.modules.insert(context, module);
        Ok(module)
    }

    /// Returns whether the first use of a library in a context is still to come.
    fn loads_library(&self, handle: CUlibrary, context: CUcontext) -> bool {
        let library = self.libraries.libraries.get(&handle);
        library.is_some_and(|library| !library.modules.contains_key(&context))
    }

    /// Returns whether the use of a function or kernel in a context loads its library.
    pub(crate) fn loads_library_of(&self, handle: CUfunction, context: CUcontext) -> bool {
        let kernel = self.libraries.kernels.get(&CUkernel(handle.0));
        kernel.is_some_and(|kernel| self.loads_library(kernel.library, context))
    }

    fn kernel_function(
        &mut self,
        driver: &Driver,
        handle: CUkernel,
        context: CUcontext,
    ) -> CudaResult<CUfunction> {
        let kernel = self.libraries.kernel(handle)?;
        let (library, name) = (kernel.library, Arc::clone(&kernel.name));
        let module = self.library_module(driver, library, context)?;
        let name = name.to_str().map_err(|_| CudaError::InvalidValue)?;
        self.function(module, name)
    }

    /// Resolves a handle of a function or kernel in a context.
    pub(crate) fn function_in(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        handle: CUfunction,
    ) -> CudaResult<CUfunction> {
        let kernel = CUkernel(handle.0);
        match self.libraries.kernels.contains_key(&kernel) {
            true => self.kernel_function(driver, kernel, context),
            false => Ok(handle),
        }
    }
}

/// Waits for the work of a context into which the library is going to be loaded.
fn await_load(library: CUlibrary, context: CUcontext) -> CudaResult {
    let driver = driver()?;
    let loads = driver.state().loads_library(library, context);
    match loads {
        true => driver.wait_for_context(context),
        false => Ok(()),
    }
}

fn load(library: Out<CUlibrary>, declared: Declared) -> CudaResult {
    let driver = driver()?;
    let loaded = driver.state().load_library(declared);
    if !lazy() {
        let contexts: Vec<CUcontext> = driver.state().contexts.keys().copied().collect();
        for context in contexts {
            driver.wait_for_context(context)?;
            driver.state().library_module(driver, loaded, context)?;
        }
    }
    library.set(loaded)
}

entry_points! {
    "cuLibraryLoadData" 12000 fn cuLibraryLoadData(
        library: Out<CUlibrary>, code: In<c_char>,
        _jit: In<c_uint>, _jit_values: In<*mut c_void>, _jit_count: c_uint,
        _options: In<c_uint>, _values: In<*mut c_void>, _count: c_uint,
    ) {
        load(library, declared(code)?)
    }

    "cuLibraryLoadFromFile" 12000 fn cuLibraryLoadFromFile(
        library: Out<CUlibrary>, path: Text,
        _jit: In<c_uint>, _jit_values: In<*mut c_void>, _jit_count: c_uint,
        _options: In<c_uint>, _values: In<*mut c_void>, _count: c_uint,
    ) {
        let mut image = std::fs::read(path.get()?).map_err(|_| CudaError::FileNotFound)?;
        image.push(0);
        load(library, declared(In::at(image.as_ptr().cast()))?)
    }

    "cuLibraryUnload" 12000 fn cuLibraryUnload(library: CUlibrary) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let used: Vec<CUcontext> = state.libraries.library(library)?.modules.keys().copied().collect();
        drop(state);
        used.into_iter().try_for_each(|context| driver.wait_for_context(context))?;
        driver.state().unload_library(driver, library)
    }

    "cuLibraryGetKernel" 12000 fn cuLibraryGetKernel(kernel: Out<CUkernel>, library: CUlibrary, name: Text) {
        let name = name.get()?;
        kernel.set(driver()?.state().library_kernel(library, &name)?)
    }

    "cuLibraryGetKernelCount" 12040 fn cuLibraryGetKernelCount(count: Out<c_uint>, library: CUlibrary) {
        driver()?.state().libraries.library(library)?;
        count.set(1)
    }

    "cuLibraryEnumerateKernels" 12040 fn cuLibraryEnumerateKernels(kernels: Out<CUkernel>, count: c_uint, library: CUlibrary) {
        let mut state = driver()?.state();
        match count {
            0 => state.libraries.library(library).map(drop),
            _ => kernels.set(state.library_kernel(library, ENUMERATED)?),
        }
    }

    "cuLibraryGetModule" 12000 fn cuLibraryGetModule(module: Out<CUmodule>, library: CUlibrary) {
        let driver = driver()?;
        let context = current_handle()?;
        await_load(library, context)?;
        module.set(driver.state().library_module(driver, library, context)?)
    }

    "cuLibraryGetGlobal" 12000 fn cuLibraryGetGlobal(address: Out<CUdeviceptr>, bytes: Out<usize>, library: CUlibrary, name: Text) {
        let name = name.get()?;
        let driver = driver()?;
        let context = current_handle()?;
        await_load(library, context)?;
        let mut state = driver.state();
        let module = state.library_module(driver, library, context)?;
        let (found, size) = state.global(driver, module, &name)?;
        address.set_if_not_null(found);
        bytes.set_if_not_null(size);
        Ok(())
    }

    "cuLibraryGetUnifiedFunction" 12000 fn cuLibraryGetUnifiedFunction(function: Out<usize>, library: CUlibrary, name: Text) {
        let name = name.get()?;
        let driver = driver()?;
        let context = current_handle()?;
        await_load(library, context)?;
        let mut state = driver.state();
        let module = state.library_module(driver, library, context)?;
        function.set(state.function(module, &name)?.0)
    }

    "cuKernelGetFunction" 12000 fn cuKernelGetFunction(function: Out<CUfunction>, kernel: CUkernel) {
        let driver = driver()?;
        let context = current_handle()?;
        let library = driver.state().libraries.kernel(kernel)?.library;
        await_load(library, context)?;
        function.set(driver.state().kernel_function(driver, kernel, context)?)
    }
}
