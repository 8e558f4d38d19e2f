//! Every way to look up a function of the driver: `dlsym` on the library, and both forms of `cuGetProcAddress` with every
//! version and flag.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use anyhow::{Context as _, Result, ensure};

/// `CUDA_VERSION`s at which the ABI of some function changed.
const VERSIONS: [i32; 14] = [
    2000, 3020, 4000, 6000, 7000, 9000, 10_020, 11_000, 11_030, 11_040, 12_000, 12_030, 12_080,
    13_000,
];

/// Default, legacy stream, stream per thread.
const FLAGS: [u64; 3] = [0, 1, 2];

/// `cuGetProcAddress` of CUDA 11.3.
type First = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> i32;
/// `cuGetProcAddress_v2`
type Second = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;

/// A loaded library. It stays loaded.
pub(crate) struct Library(*mut c_void);

impl Library {
    pub(crate) fn open(name: &CStr) -> Result<Self> {
        // SAFETY: a terminated string; loading runs the library's initializers, as in any program.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        ensure!(!library.is_null(), "cannot load {}", name.to_string_lossy());
        Ok(Self(library))
    }

    /// Returns what `dlsym` finds.
    pub(crate) fn symbol(&self, name: &str) -> Result<Option<*mut c_void>> {
        let name = CString::new(name)?;
        // SAFETY: a library that stays open and a terminated string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        Ok((!found.is_null()).then_some(found))
    }
}

/// Result of `cuGetProcAddress`.
pub(crate) struct Procedure {
    /// `cuGetProcAddress` or `cuGetProcAddress_v2`.
    form: &'static str,
    pub(crate) version: i32,
    flags: u64,
    pub(crate) address: *mut c_void,
}

impl std::fmt::Display for Procedure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            form,
            version,
            flags,
            ..
        } = self;
        write!(f, "{form}/{version}/{flags}")
    }
}

/// The initialized driver.
pub(crate) struct Driver {
    pub(crate) library: Library,
    first: Option<First>,
    second: Second,
}

impl Driver {
    pub(crate) fn open() -> Result<Self> {
        type Init = unsafe extern "C" fn(u32) -> i32;
        let library = Library::open(c"libcuda.so.1")?;
        let init = library.symbol("cuInit")?.context("no cuInit")?;
        // SAFETY: the function of that name has this type.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(init) };
        // SAFETY: the argument is a plain number.
        let code = unsafe { init(0) };
        ensure!(code == 0, "cuInit failed with {code}");
        let second = library.symbol("cuGetProcAddress_v2")?;
        let second = second.context("no cuGetProcAddress_v2")?;
        let first = library.symbol("cuGetProcAddress")?;
        Ok(Self {
            // SAFETY: the function of that name has this type.
            first: first.map(|first| unsafe { std::mem::transmute::<*mut c_void, First>(first) }),
            // SAFETY: the function of that name has this type.
            second: unsafe { std::mem::transmute::<*mut c_void, Second>(second) },
            library,
        })
    }

    /// Returns what both forms of `cuGetProcAddress` find, by version and flags.
    pub(crate) fn procedures(&self, name: &str) -> Result<Vec<Procedure>> {
        let name = CString::new(name)?;
        let mut found = Vec::new();
        for version in VERSIONS {
            for flags in FLAGS {
                let mut add = |form, code: i32, address: *mut c_void| {
                    if code == 0 && !address.is_null() {
                        found.push(Procedure {
                            form,
                            version,
                            flags,
                            address,
                        });
                    }
                };
                let (mut address, mut status) = (ptr::null_mut(), 0);
                let place = &raw mut address;
                // SAFETY: a terminated string; writes a pointer and an integer.
                let code =
                    unsafe { (self.second)(name.as_ptr(), place, version, flags, &raw mut status) };
                add("cuGetProcAddress_v2", code, address);
                if let Some(first) = self.first {
                    let mut address = ptr::null_mut();
                    // SAFETY: a terminated string; writes a pointer.
                    let code = unsafe { first(name.as_ptr(), &raw mut address, version, flags) };
                    add("cuGetProcAddress", code, address);
                }
            }
        }
        Ok(found)
    }
}
