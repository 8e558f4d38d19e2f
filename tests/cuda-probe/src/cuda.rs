//! Functions of `libcuda.so.1` that the probe uses, resolved at run time with `dlsym`, so that interposers apply.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

type Code = c_uint;
type Context = *mut c_void;
type Module = *mut c_void;
type Function = *mut c_void;
type EventHandle = *mut c_void;

/// Error of a CUDA call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CudaError {
    /// libcuda is missing.
    #[error("cannot load libcuda.so.1: {0}")]
    NoLibrary(String),
    /// The driver is too old for a function.
    #[error("libcuda.so.1 has no {0}")]
    NoFunction(&'static str),
    /// The call returned an error.
    #[error("{call}: {name}")]
    Rejected {
        /// Name of the function.
        call: &'static str,
        /// `CUDA_ERROR_…`
        name: String,
    },
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The library.
        #[derive(Debug)]
        pub(crate) struct Cuda {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Cuda {
            /// Loads the library and initializes it.
            pub(crate) fn load() -> Result<Self, CudaError> {
                let library = open()?;
                let cuda = Self {
                    $($field: {
                        let symbol = find(library, $symbol)?;
                        type Entry = unsafe extern "C" fn($($argument),*) -> Code;
                        // SAFETY: a function of this name has this type.
                        unsafe { std::mem::transmute::<*mut c_void, Entry>(symbol) }
                    },)*
                };
                // SAFETY: 0 is the only valid argument.
                let code = unsafe { (cuda.init)(0) };
                cuda.check("cuInit", code)?;
                Ok(cuda)
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    error_name = "cuGetErrorName": fn(Code, *mut *const c_char);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_total = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_uint, c_int);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut Context, c_int);
    set_current = "cuCtxSetCurrent": fn(Context);
    synchronize = "cuCtxSynchronize": fn();
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    copy_in = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    copy_out = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    module_load = "cuModuleLoadData": fn(*mut Module, *const c_void);
    module_function = "cuModuleGetFunction": fn(*mut Function, Module, *const c_char);
    event_create = "cuEventCreate": fn(*mut EventHandle, c_uint);
    event_record = "cuEventRecord": fn(EventHandle, *mut c_void);
    event_synchronize = "cuEventSynchronize": fn(EventHandle);
    launch = "cuLaunchKernel": fn(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void,
        *mut *mut c_void, *mut *mut c_void
    );
}

fn open() -> Result<*mut c_void, CudaError> {
    // SAFETY: a terminated string; every CUDA program runs the library's constructors.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err(CudaError::NoLibrary(loader_error()));
    }
    Ok(library)
}

fn find(library: *mut c_void, name: &'static str) -> Result<*mut c_void, CudaError> {
    let symbol = CString::new(name).map_err(|_| CudaError::NoFunction(name))?;
    // SAFETY: a library that stays open and a terminated string.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    if address.is_null() {
        return Err(CudaError::NoFunction(name));
    }
    Ok(address)
}

fn loader_error() -> String {
    // SAFETY: returns null or a string that is valid until the next call of this thread.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: not null, hence a terminated string.
    unsafe { CStr::from_ptr(error) }
        .to_string_lossy()
        .into_owned()
}

/// Free and total bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemoryInfo {
    pub(crate) free_bytes: usize,
    pub(crate) total_bytes: usize,
}

/// A kernel; valid until the process exits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(Function);

/// An event; valid until the process exits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event(EventHandle);

impl Cuda {
    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or null.
        unsafe { (self.error_name)(code, &raw mut name) };
        let name = if name.is_null() {
            format!("error {code}")
        } else {
            // SAFETY: not null, hence a terminated static string.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        };
        Err(CudaError::Rejected { call, name })
    }

    /// Returns the version: `13000` for CUDA 13.0.
    pub(crate) fn driver_version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.driver_version)(&raw mut version) };
        self.check("cuDriverGetVersion", code)?;
        Ok(version)
    }

    pub(crate) fn device_count(&self) -> Result<c_int, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.device_count)(&raw mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(count)
    }

    pub(crate) fn device_name(&self, device: c_int) -> Result<String, CudaError> {
        const NAME_BYTES: c_int = 96;
        let mut name = [0; 96];
        // SAFETY: writes at most `NAME_BYTES` bytes, terminator included.
        let code = unsafe { (self.device_name)(name.as_mut_ptr(), NAME_BYTES, device) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: terminated by the call above.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned())
    }

    pub(crate) fn device_total(&self, device: c_int) -> Result<usize, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one size.
        let code = unsafe { (self.device_total)(&raw mut bytes, device) };
        self.check("cuDeviceTotalMem", code)?;
        Ok(bytes)
    }

    pub(crate) fn multiprocessors(&self, device: c_int) -> Result<c_int, CudaError> {
        const MULTIPROCESSOR_COUNT: c_uint = 16;
        let mut count = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.device_attribute)(&raw mut count, MULTIPROCESSOR_COUNT, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(count)
    }

    /// Makes the device's primary context current to this thread.
    pub(crate) fn use_device(&self, device: c_int) -> Result<(), CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (self.retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: the context was just retained.
        let code = unsafe { (self.set_current)(context) };
        self.check("cuCtxSetCurrent", code)
    }

    pub(crate) fn memory_info(&self) -> Result<MemoryInfo, CudaError> {
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: writes two sizes.
        let code = unsafe { (self.memory_info)(&raw mut free_bytes, &raw mut total_bytes) };
        self.check("cuMemGetInfo", code)?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
        })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.allocate)(&raw mut address, bytes) };
        self.check("cuMemAlloc", code)?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Result<(), CudaError> {
        // SAFETY: an invalid address is an error.
        let code = unsafe { (self.free)(address) };
        self.check("cuMemFree", code)
    }

    /// Writes the bytes to GPU memory.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: reads the slice; an invalid address is an error.
        let code = unsafe { (self.copy_in)(address, bytes.as_ptr().cast(), bytes.len()) };
        self.check("cuMemcpyHtoD", code)
    }

    /// Fills the slice with bytes of GPU memory.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: writes the slice; an invalid address is an error.
        let code = unsafe { (self.copy_out)(bytes.as_mut_ptr().cast(), address, bytes.len()) };
        self.check("cuMemcpyDtoH", code)
    }

    /// Loads a function from an image; PTX must end with a zero byte.
    pub(crate) fn kernel(&self, image: &CStr, name: &CStr) -> Result<Kernel, CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: writes one pointer; the image is terminated.
        let code = unsafe { (self.module_load)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", code)?;
        let mut function = std::ptr::null_mut();
        // SAFETY: writes one pointer; the module was just loaded and the name is terminated.
        let code = unsafe { (self.module_function)(&raw mut function, module, name.as_ptr()) };
        self.check("cuModuleGetFunction", code)?;
        Ok(Kernel(function))
    }

    /// Launches a kernel of `blocks` blocks with one 64-bit parameter on the default stream.
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        blocks: c_uint,
        mut parameter: u64,
    ) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut parameter).cast::<c_void>()];
        // SAFETY: the function lives as long as the process; the parameters are read before the
        // call returns.
        let code = unsafe {
            (self.launch)(
                kernel.0,
                blocks,
                1,
                1,
                256,
                1,
                1,
                0,
                std::ptr::null_mut(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", code)
    }

    pub(crate) fn event(&self) -> Result<Event, CudaError> {
        const DISABLE_TIMING: c_uint = 2;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (self.event_create)(&raw mut event, DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(Event(event))
    }

    /// Records an event after all launches on the default stream.
    pub(crate) fn record(&self, event: Event) -> Result<(), CudaError> {
        // SAFETY: the event lives as long as the process.
        let code = unsafe { (self.event_record)(event.0, std::ptr::null_mut()) };
        self.check("cuEventRecord", code)
    }

    /// Waits for an event.
    pub(crate) fn wait(&self, event: Event) -> Result<(), CudaError> {
        // SAFETY: the event lives as long as the process.
        let code = unsafe { (self.event_synchronize)(event.0) };
        self.check("cuEventSynchronize", code)
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: no arguments.
        let code = unsafe { (self.synchronize)() };
        self.check("cuCtxSynchronize", code)
    }
}
