//! The library under test, opened by path. Every machine has its own copy, so tests run
//! concurrently in one process.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use simulator_machine::testing::Machine;

pub(crate) type Handle = *mut c_void;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const ILLEGAL_STATE: u32 = 401;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const NOT_SUPPORTED: u32 = 801;

pub(crate) struct Api {
    library: *mut c_void,
}

// The library may be used from any thread.
unsafe impl Send for Api {}
unsafe impl Sync for Api {}

/// Calls an exported function: `call!(api, "cuMemAlloc_v2", &raw mut address, 4usize)`.
macro_rules! call {
    ($api:expr, $name:literal $(, $argument:expr)* $(,)?) => {{
        let symbol = $api.symbol($name);
        $crate::api::Invoke::invoke(symbol, ($($argument,)*))
    }};
}
pub(crate) use call;

/// Calls an address with arguments of the given types.
pub(crate) trait Invoke {
    fn invoke(address: *mut c_void, arguments: Self) -> u32;
}

#[allow(non_snake_case, reason = "a type parameter names its value")]
mod arguments {
    use super::{Invoke, c_void};

    macro_rules! invoke {
    ($($type:ident)*) => {
        impl<$($type),*> Invoke for ($($type,)*) {
            fn invoke(address: *mut c_void, ($($type,)*): Self) -> u32 {
                let function: unsafe extern "C" fn($($type),*) -> u32 = unsafe { std::mem::transmute(address) };
                unsafe { function($($type),*) }
            }
        }
    };
}
    invoke! {}
    invoke! { A }
    invoke! { A B }
    invoke! { A B C }
    invoke! { A B C D }
    invoke! { A B C D E }
    invoke! { A B C D E F }
    invoke! { A B C D E F G }
    invoke! { A B C D E F G H }
    invoke! { A B C D E F G H I }
    invoke! { A B C D E F G H I J K }
    invoke! { A B C D E F G H I J K L }
    invoke! { A B C D E F G H I J K L M N O }
}

impl Api {
    /// Opens the library without initializing it.
    pub(crate) fn open(machine: &Machine) -> Self {
        Self::open_path(&machine.lib_dir().join("libcuda.so.1"))
    }

    pub(crate) fn open_path(path: &std::path::Path) -> Self {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "cannot load {}", path.display());
        Self { library }
    }

    /// Opens and initializes the library, with device 0's primary context current.
    pub(crate) fn start(machine: &Machine) -> Self {
        let api = Self::open(machine);
        api.enter(0);
        api
    }

    pub(crate) fn enter(&self, device: c_int) {
        assert_eq!(call!(self, "cuInit", 0u32), 0);
        let mut context: Handle = std::ptr::null_mut();
        assert_eq!(
            call!(self, "cuDevicePrimaryCtxRetain", &raw mut context, device),
            0
        );
        assert_eq!(call!(self, "cuCtxSetCurrent", context), 0);
    }

    pub(crate) fn find(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        unsafe { libc::dlsym(self.library, name.as_ptr()) }
    }

    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        let symbol = self.find(name);
        assert!(!symbol.is_null(), "missing symbol {name}");
        symbol
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64, u32> {
        let mut address = 0u64;
        match call!(self, "cuMemAlloc_v2", &raw mut address, bytes) {
            0 => Ok(address),
            error => Err(error),
        }
    }

    pub(crate) fn free(&self, address: u64) {
        assert_eq!(call!(self, "cuMemFree_v2", address), 0);
    }

    pub(crate) fn memory_info(&self) -> (u64, u64) {
        let (mut free, mut total) = (0u64, 0u64);
        assert_eq!(
            call!(self, "cuMemGetInfo_v2", &raw mut free, &raw mut total),
            0
        );
        (free, total)
    }

    pub(crate) fn function(&self, name: &CStr) -> Handle {
        let (mut module, mut function): (Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut());
        let image = c"any image";
        assert_eq!(
            call!(self, "cuModuleLoadData", &raw mut module, image.as_ptr()),
            0
        );
        assert_eq!(
            call!(
                self,
                "cuModuleGetFunction",
                &raw mut function,
                module,
                name.as_ptr()
            ),
            0
        );
        function
    }

    pub(crate) fn stream(&self, flags: c_uint) -> Handle {
        let mut stream: Handle = std::ptr::null_mut();
        assert_eq!(call!(self, "cuStreamCreate", &raw mut stream, flags), 0);
        stream
    }

    pub(crate) fn write(&self, to: u64, bytes: &[u8]) {
        let from = bytes.as_ptr().cast::<c_void>();
        assert_eq!(call!(self, "cuMemcpyHtoD_v2", to, from, bytes.len()), 0);
    }

    pub(crate) fn read(&self, from: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; count];
        let to = bytes.as_mut_ptr().cast::<c_void>();
        assert_eq!(call!(self, "cuMemcpyDtoH_v2", to, from, count), 0);
        bytes
    }

    pub(crate) fn event(&self) -> Handle {
        let mut event: Handle = std::ptr::null_mut();
        assert_eq!(call!(self, "cuEventCreate", &raw mut event, 0u32), 0);
        event
    }

    /// Launches a kernel of `nanos` duration on `blocks` blocks of 1024 threads.
    pub(crate) fn spin(&self, function: Handle, stream: Handle, blocks: c_uint, mut nanos: u64) {
        let mut parameters = [(&raw mut nanos).cast::<c_void>()];
        let launched = self.launch(function, stream, [blocks, 1024], parameters.as_mut_ptr());
        assert_eq!(launched, 0);
    }

    /// Launches a kernel on that many blocks and threads of each. Returns the code.
    pub(crate) fn launch(
        &self,
        function: Handle,
        stream: Handle,
        [blocks, threads]: [c_uint; 2],
        parameters: *mut *mut c_void,
    ) -> u32 {
        let none = std::ptr::null_mut::<c_void>();
        call!(
            self,
            "cuLaunchKernel",
            function,
            blocks,
            1u32,
            1u32,
            threads,
            1u32,
            1u32,
            0u32,
            stream,
            parameters,
            none
        )
    }

    pub(crate) fn synchronize(&self) {
        assert_eq!(call!(self, "cuCtxSynchronize"), 0);
    }

    pub(crate) fn error_name(&self, code: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        assert_eq!(call!(self, "cuGetErrorName", code, &raw mut name), 0);
        unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned()
    }
}
