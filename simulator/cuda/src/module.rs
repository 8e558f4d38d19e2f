//! Modules and their functions. Every image loads and has a function of every name.
//!
//! As in the real driver, the code of a module takes memory at the first use of a function, or at load with
//! `CUDA_MODULE_LOADING=EAGER`. Its global variables take memory at load, see [`crate::image`]. A load waits for all work
//! of its context, and so does an unload. The first module of a context that prints takes a buffer, too.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use simulator_machine::protocol::{AllocationId, ContextId, Reply, Request};

use crate::State;
use crate::abi::{CudaResult, In, Out, Text, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::image::{Declared, declared};
use crate::types::{CUcontext, CUdeviceptr, CUfunction, CUmodule};

#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<CUmodule, Module>,
    functions: BTreeMap<CUfunction, Function>,
}

#[derive(Debug)]
struct Module {
    context: CUcontext,
    /// Whether the module has taken the memory of its code.
    loaded: bool,
    /// Memory of the global variables that the image declares.
    data: Option<AllocationId>,
    functions: BTreeMap<String, CUfunction>,
    globals: BTreeMap<String, CUdeviceptr>,
}

/// One function of a module.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) module: CUmodule,
    pub(crate) name: Arc<CStr>,
    attributes: BTreeMap<c_uint, c_int>,
    pub(crate) legacy: LegacyLaunchState,
}

/// State of launch functions before CUDA 4.
#[derive(Clone, Debug)]
pub(crate) struct LegacyLaunchState {
    pub(crate) block: [c_uint; 3],
}

impl Default for LegacyLaunchState {
    fn default() -> Self {
        Self { block: [1; 3] }
    }
}

impl Function {
    pub(crate) fn attribute(&self, which: c_uint) -> Option<c_int> {
        let set = self.attributes.get(&which).copied();
        set.or_else(|| default_attribute(&self.name, which))
    }
}

/// Size of every global variable.
const GLOBAL_BYTES: usize = 64 << 10;

impl Modules {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        let modules = self.modules.keys().map(|module| module.0);
        modules.chain(self.functions.keys().map(|function| function.0))
    }

    pub(crate) fn function(&self, handle: CUfunction) -> CudaResult<&Function> {
        self.functions.get(&handle).ok_or(CudaError::InvalidHandle)
    }

    pub(crate) fn function_mut(&mut self, handle: CUfunction) -> CudaResult<&mut Function> {
        let function = self.functions.get_mut(&handle);
        function.ok_or(CudaError::InvalidHandle)
    }

    /// Removes the modules of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        self.modules.retain(|_, module| module.context != context);
        let modules = &self.modules;
        self.functions
            .retain(|_, function| modules.contains_key(&function.module));
    }
}

impl State {
    pub(crate) fn load_module(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        declared: Declared,
    ) -> CudaResult<CUmodule> {
        let owner = self.contexts.get(&context);
        let owner = owner.ok_or(CudaError::ContextIsDestroyed)?.id;
        if declared.prints {
            self.require_print_buffer(driver, context)?;
        }
        let data = match declared.global_bytes {
            0 => None,
            bytes => Some(allocate(driver, owner, bytes)?),
        };
        let handle = CUmodule(self.handle());
        let module = Module {
            context,
            loaded: false,
            data,
            functions: BTreeMap::new(),
            globals: BTreeMap::new(),
        };
        self.modules.modules.insert(handle, module);
        if !lazy()
            && let Err(error) = self.make_resident(driver, handle)
        {
            self.modules.modules.remove(&handle);
            return Err(error);
        }
        Ok(handle)
    }

    /// Allocates the memory of a module, once.
    pub(crate) fn make_resident(&mut self, driver: &Driver, handle: CUmodule) -> CudaResult {
        let module = self
            .modules
            .modules
            .get(&handle)
            .ok_or(CudaError::InvalidHandle)?;
        if module.loaded {
            return Ok(());
        }
        let context = self
            .contexts
            .get(&module.context)
            .ok_or(CudaError::ContextIsDestroyed)?;
        let bytes = driver.model(context.device)?.memory.module_bytes;
        // Freed with the context: the real driver keeps code memory for later modules.
        allocate(driver, context.id, bytes)?;
        if let Some(module) = self.modules.modules.get_mut(&handle) {
            module.loaded = true;
        }
        Ok(())
    }

    pub(crate) fn function(&mut self, module: CUmodule, name: &str) -> CudaResult<CUfunction> {
        let known = &self
            .modules
            .modules
            .get(&module)
            .ok_or(CudaError::InvalidHandle)?
            .functions;
        if let Some(function) = known.get(name) {
            return Ok(*function);
        }
        let c_name = std::ffi::CString::new(name).map_err(|_| CudaError::InvalidValue)?;
        let handle = CUfunction(self.handle());
        let function = Function {
            module,
            name: c_name.into(),
            attributes: BTreeMap::new(),
            legacy: LegacyLaunchState::default(),
        };
        self.modules.functions.insert(handle, function);
        if let Some(module) = self.modules.modules.get_mut(&module) {
            module.functions.insert(name.to_owned(), handle);
        }
        Ok(handle)
    }

    pub(crate) fn unload_module(&mut self, driver: &Driver, handle: CUmodule) -> CudaResult {
        let removed = self.modules.modules.remove(&handle);
        let removed = removed.ok_or(CudaError::InvalidHandle)?;
        let functions = &mut self.modules.functions;
        functions.retain(|_, function| function.module != handle);
        if let Some(allocation) = removed.data {
            driver.request(&Request::Free { allocation })?;
        }
        let mut globals = removed.globals.into_values();
        globals.try_for_each(|global| self.free(driver, global))
    }

    /// Returns address and size of a global variable, creating it on first use.
    pub(crate) fn global(
        &mut self,
        driver: &Driver,
        handle: CUmodule,
        name: &str,
    ) -> CudaResult<(CUdeviceptr, usize)> {
        let module = self.modules.modules.get(&handle);
        let module = module.ok_or(CudaError::InvalidHandle)?;
        if let Some(address) = module.globals.get(name) {
            return Ok((*address, GLOBAL_BYTES));
        }
        let address = self.allocate(driver, GLOBAL_BYTES as u64)?;
        if let Some(module) = self.modules.modules.get_mut(&handle) {
            module.globals.insert(name.to_owned(), address);
        }
        Ok((address, GLOBAL_BYTES))
    }
}

/// Allocates memory of a context that no program sees.
fn allocate(driver: &Driver, context: ContextId, bytes: u64) -> CudaResult<AllocationId> {
    match driver.request(&Request::Allocate { context, bytes })? {
        Reply::Allocated { allocation, .. } => Ok(allocation),
        _ => Err(CudaError::Unknown),
    }
}

/// `CUDA_MODULE_LOADING`, lazy by default.
pub(crate) fn lazy() -> bool {
    std::env::var("CUDA_MODULE_LOADING").map_or(true, |mode| mode != "EAGER")
}

entry_points! {
    "cuModuleLoad" 2000 fn cuModuleLoad(module: Out<CUmodule>, path: Text) {
        let mut image = std::fs::read(path.get()?).map_err(|_| CudaError::FileNotFound)?;
        image.push(0);
        load(module, In::at(image.as_ptr().cast()))
    }

    "cuModuleLoadData" 2000 fn cuModuleLoadData(module: Out<CUmodule>, image: In<c_char>) { load(module, image) }
    "cuModuleLoadDataEx" 2010 fn cuModuleLoadDataEx(module: Out<CUmodule>, image: In<c_char>, _count: c_uint, _options: In<c_uint>, _values: In<*mut c_void>) { load(module, image) }

    "cuModuleLoadFatBinary" 2000 fn cuModuleLoadFatBinary(module: Out<CUmodule>, image: In<c_char>) { load(module, image) }

    "cuModuleUnload" 2000 fn cuModuleUnload(module: CUmodule) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let context = state.modules.modules.get(&module).ok_or(CudaError::InvalidHandle)?.context;
        drop(state);
        driver.wait_for_context(context)?;
        driver.state().unload_module(driver, module)
    }

    "cuModuleGetFunction" 2000 fn cuModuleGetFunction(function: Out<CUfunction>, module: CUmodule, name: Text) {
        let name = name.get()?;
        function.set(driver()?.state().function(module, &name)?)
    }

    "cuModuleGetGlobal" 3020 fn cuModuleGetGlobal_v2(address: Out<CUdeviceptr>, bytes: Out<usize>, module: CUmodule, name: Text) {
        let name = name.get()?;
        let driver = driver()?;
        let (found, size) = driver.state().global(driver, module, &name)?;
        address.set_if_not_null(found);
        bytes.set_if_not_null(size);
        Ok(())
    }

    "cuFuncGetAttribute" 2020 fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: CUfunction) {
        let driver = driver()?;
        let state = driver.state();
        let found = state.modules.function(function)?.attribute(attribute);
        value.set(found.ok_or(CudaError::InvalidValue)?)
    }

    "cuFuncSetAttribute" 9000 fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) {
        let driver = driver()?;
        let mut state = driver.state();
        let function = state.modules.function_mut(function)?;
        default_attribute(&function.name, attribute).ok_or(CudaError::InvalidValue)?;
        function.attributes.insert(attribute, value);
        Ok(())
    }

    "cuFuncSetCacheConfig" 3000 fn cuFuncSetCacheConfig(function: CUfunction, _config: c_uint) {
        driver()?.state().modules.function(function).map(drop)
    }

    "cuOccupancyMaxActiveBlocksPerMultiprocessor" 6050 fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: CUfunction, block_size: c_int, _shared: usize) { occupancy(blocks, function, block_size) }
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" 7000 fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: Out<c_int>, function: CUfunction, block_size: c_int, _shared: usize, _flags: c_uint) { occupancy(blocks, function, block_size) }
}

fn load(module: Out<CUmodule>, image: In<c_char>) -> CudaResult {
    load_here(module, declared(image)?)
}

fn load_here(module: Out<CUmodule>, declared: Declared) -> CudaResult {
    let context = current_handle()?;
    let driver = driver()?;
    driver.wait_for_context(context)?;
    module.set(driver.state().load_module(driver, context, declared)?)
}

/// The kernel whose first parameter is its duration.
pub(crate) const SPIN: &CStr = c"spin";

/// The kernel that fails with the sticky error whose code is the first parameter.
pub(crate) const FAULT: &CStr = c"fault";

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`
pub(crate) const LOCAL_SIZE_BYTES: c_uint = 3;

/// Local memory per thread, from a name like `local_4096`.
fn local_bytes(name: &CStr) -> c_int {
    let name = name.to_str().unwrap_or_default();
    let number = name.strip_prefix("local_");
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// `CU_FUNC_ATTRIBUTE_*` defaults.
pub(crate) fn default_attribute(name: &CStr, attribute: c_uint) -> Option<c_int> {
    Some(match attribute {
        // MAX_THREADS_PER_BLOCK
        0 => 1024,
        // SHARED_ and CONST_SIZE_BYTES
        1 | 2 => 0,
        LOCAL_SIZE_BYTES => local_bytes(name),
        // NUM_REGS, PTX_VERSION, BINARY_VERSION, CACHE_MODE_CA
        4 => 32,
        5 | 6 => 90,
        7 => 0,
        // MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT
        8 => 48 << 10,
        9 => -1,
        // Clusters
        10..=16 => 0,
        _ => return None,
    })
}

fn occupancy(blocks: Out<c_int>, function: CUfunction, block_size: c_int) -> CudaResult {
    let driver = driver()?;
    let state = driver.state();
    state.modules.function(function)?;
    let device = state.current()?.device;
    let threads = driver.model(device)?.compute.threads_per_multiprocessor;
    let size = u32::try_from(block_size).ok().filter(|size| *size > 0);
    let fit = (threads / size.ok_or(CudaError::InvalidValue)?).min(32);
    blocks.set(c_int::try_from(fit).map_err(|_| CudaError::InvalidValue)?)
}
