//! The functions behind the hooks: those of the NVIDIA libraries, and glibc's `dlsym`.
//!
//! An original is looked up on first use, in the library that the program itself loaded. No library is loaded on
//! the program's behalf: without one, a hook returns the error of an uninitialized library.
//!
//! If a stub replaces the library in the container (delivery mode `shim`), the library's name leads to the stub and
//! from there to the hooks. So the library is searched at its moved path first, then by name.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::marker::PhantomData;
use core::mem::{MaybeUninit, size_of};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use drava_vgpu_abi::paths;

/// Pseudo handle of `dlsym`: the default search order.
pub(crate) const RTLD_DEFAULT: *mut c_void = ptr::null_mut();
/// Pseudo handle of `dlsym`: the objects after the caller's.
pub(crate) const RTLD_NEXT: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// Search orders for glibc's functions: behind this library, which skips its own `dlsym`, then the whole program,
/// for a program linked with a stub, where the C library comes before this one.
const SEARCH_ORDERS: [*mut c_void; 2] = [RTLD_NEXT, RTLD_DEFAULT];

/// First symbol version of `dlsym`, which every glibc has: in libdl, since 2.34 in libc. (A search for a version that
/// no library has would return the hook, which has no version.)
#[cfg(target_arch = "x86_64")]
const DLSYM_VERSION: &CStr = c"GLIBC_2.2.5";
#[cfg(target_arch = "aarch64")]
const DLSYM_VERSION: &CStr = c"GLIBC_2.17";

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlmopen = unsafe extern "C" fn(c_long, *const c_char, c_int) -> *mut c_void;
type Dlinfo = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type Dladdr = unsafe extern "C" fn(*const c_void, *mut libc::Dl_info) -> c_int;

/// Requests of `dlinfo`, from `dlfcn.h`.
const RTLD_DI_LMID: c_int = 1;
const RTLD_DI_LINKMAP: c_int = 2;

/// Public beginning of glibc's `struct link_map`, from `link.h`.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
}

// Binds to the oldest version of `dlvsym`: the library loads with glibc 2.17.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(".symver dlvsym, dlvsym@GLIBC_2.2.5");
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(".symver dlvsym, dlvsym@GLIBC_2.17");

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// What `cuInit` of the libcuda in use has returned: the highest of these.
static INITIALIZATION: AtomicU8 = AtomicU8::new(NOT_ASKED);
const NOT_ASKED: u8 = 0;
const FAILED: u8 = 1;
const SUCCEEDED: u8 = 2;

/// Notes whether `cuInit` has succeeded.
pub(crate) fn note_initialization(has_succeeded: bool) {
    let state = if has_succeeded { SUCCEEDED } else { FAILED };
    INITIALIZATION.fetch_max(state, Ordering::AcqRel);
}

/// An NVIDIA library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Library {
    Cuda,
    Nvml,
}

impl Library {
    fn stub(self) -> paths::Stub {
        match self {
            Self::Cuda => paths::CUDA_STUB,
            Self::Nvml => paths::NVML_STUB,
        }
    }

    /// Returns the error of a hook whose library is missing or too old for the function: behind a stub, `dlsym`
    /// finds the hook of that name nevertheless.
    pub(crate) fn missing_error(self) -> c_int {
        match (self, self.handle()) {
            (Self::Cuda, None) => crate::driver_api::cuda::CUDA_ERROR_NOT_INITIALIZED,
            (Self::Cuda, Some(_)) => crate::driver_api::cuda::CUDA_ERROR_NOT_SUPPORTED,
            (Self::Nvml, None) => crate::driver_api::nvml::NVML_ERROR_LIBRARY_NOT_FOUND,
            (Self::Nvml, Some(_)) => crate::driver_api::nvml::NVML_ERROR_FUNCTION_NOT_FOUND,
        }
    }

    fn slot(self) -> &'static AtomicPtr<c_void> {
        static CUDA: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        static NVML: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        match self {
            Self::Cuda => &CUDA,
            Self::Nvml => &NVML,
        }
    }

    /// Returns the handle of the library, if the program has loaded it.
    pub(crate) fn handle(self) -> Option<NonNull<c_void>> {
        let slot = self.slot();
        if let Some(handle) = NonNull::new(slot.load(Ordering::Acquire)) {
            return Some(handle);
        }
        let stub = self.stub();
        let handle = open_loaded(stub.original_path).or_else(|| open_loaded(stub.soname))?;
        slot.store(handle.as_ptr(), Ordering::Release);
        Some(handle)
    }

    /// Returns the loader's name of the library of this kind that has `found`; `None` if another library has it.
    pub(crate) fn name_of(self, found: NonNull<c_void>) -> Option<&'static CStr> {
        let name = library_of(found.as_ptr())?;
        let bytes = name.to_bytes();
        let start = bytes.iter().rposition(|byte| *byte == b'/');
        let file = bytes.get(start.map_or(0, |at| at.saturating_add(1))..)?;
        let stem: &[u8] = match self {
            Self::Cuda => b"libcuda.so",
            Self::Nvml => b"libnvidia-ml.so",
        };
        file.starts_with(stem).then_some(name)
    }

    /// Uses the library that has `found`, which the program asks for, if none is in use, or if that one could not be
    /// initialized: programs open several, for example to ask for their versions, and use one.
    pub(crate) fn select(self, found: NonNull<c_void>) {
        let used = self.slot().load(Ordering::Acquire);
        let has_failed = self == Self::Cuda && INITIALIZATION.load(Ordering::Acquire) == FAILED;
        if (used.is_null() || has_failed)
            && let Some(handle) = self.name_of(found).and_then(open_loaded)
            && handle.as_ptr() != used
        {
            self.slot().store(handle.as_ptr(), Ordering::Release);
            if has_failed {
                INITIALIZATION.store(NOT_ASKED, Ordering::Release);
            }
        }
    }

    /// Uses the library of a program's handle if [`Library::handle`] does not find the library: it has another
    /// name, or a namespace of its own (`dlmopen`).
    pub(crate) fn adopt(self, handle: NonNull<c_void>) {
        if self.handle().is_none()
            && let Some(handle) = add_reference(handle)
        {
            self.slot().store(handle.as_ptr(), Ordering::Release);
        }
    }
}

/// A symbol of an NVIDIA library.
pub(crate) struct Symbol {
    library: Library,
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    /// Handle of the library that was in use when `address` was found. Written last.
    handle: AtomicPtr<c_void>,
}

impl Symbol {
    const fn new(library: Library, name: &'static CStr) -> Self {
        Self {
            library,
            name,
            address: AtomicPtr::new(ptr::null_mut()),
            handle: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns its address, if the program has loaded the library and the library has the function.
    #[inline]
    pub(crate) fn address(&self) -> Option<NonNull<c_void>> {
        let used = self.library.slot().load(Ordering::Acquire);
        let is_current = self.handle.load(Ordering::Acquire) == used;
        match NonNull::new(self.address.load(Ordering::Acquire)) {
            Some(address) if is_current => Some(address),
            _ => self.find(),
        }
    }

    #[cold]
    fn find(&self) -> Option<NonNull<c_void>> {
        let handle = self.library.handle()?;
        let address = symbol(handle.as_ptr(), self.name)?;
        self.remember(address, handle.as_ptr());
        Some(address)
    }

    /// Returns its address, or `found` if the library cannot be found by name.
    pub(crate) fn address_or(&self, found: NonNull<c_void>) -> NonNull<c_void> {
        self.address().unwrap_or_else(|| {
            self.remember(found, self.library.slot().load(Ordering::Acquire));
            found
        })
    }

    fn remember(&self, address: NonNull<c_void>, handle: *mut c_void) {
        self.address.store(address.as_ptr(), Ordering::Release);
        self.handle.store(handle, Ordering::Release);
    }
}

/// A function of an NVIDIA library. `F` is the pointer to functions of its signature, which the caller of the
/// function relies on.
pub(crate) struct Original<F> {
    symbol: Symbol,
    function: PhantomData<F>,
}

impl<F> Original<F> {
    pub(crate) const fn new(library: Library, name: &'static CStr) -> Self {
        Self {
            symbol: Symbol::new(library, name),
            function: PhantomData,
        }
    }

    pub(crate) const fn symbol(&self) -> &Symbol {
        &self.symbol
    }
}

impl<F: Copy> Original<F> {
    /// Returns the function, if the program has loaded the library and the library has it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        Some(function(self.symbol.address()?))
    }
}

/// Converts an address to a pointer of type `F`, to call the function at that address.
#[inline]
fn function<F: Copy>(address: NonNull<c_void>) -> F {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    // SAFETY: `F` is a pointer to functions, of this size; a call is the caller's claim about the signature.
    unsafe { core::mem::transmute_copy::<NonNull<c_void>, F>(&address) }
}

/// Returns the symbol that glibc's own `dlsym` finds.
pub(crate) fn symbol(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let dlsym: Dlsym = function(real_dlsym()?);
    // SAFETY: the handle came from the program or from `dlopen`; the name is terminated.
    NonNull::new(unsafe { dlsym(handle, name.as_ptr()) })
}

/// Returns glibc's own `dlsym`.
pub(crate) fn real_dlsym() -> Option<NonNull<c_void>> {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    if let Some(real) = NonNull::new(REAL.load(Ordering::Acquire)) {
        return Some(real);
    }
    let real = SEARCH_ORDERS.iter().find_map(|order| {
        // SAFETY: name and version are terminated.
        NonNull::new(unsafe { dlvsym(*order, c"dlsym".as_ptr(), DLSYM_VERSION.as_ptr()) })
    })?;
    REAL.store(real.as_ptr(), Ordering::Release);
    Some(real)
}

/// Returns a function of glibc's loader.
fn loader_function(name: &CStr) -> Option<NonNull<c_void>> {
    SEARCH_ORDERS.iter().find_map(|order| symbol(*order, name))
}

/// Returns the loader's name of the library that has `address`.
fn library_of(address: *const c_void) -> Option<&'static CStr> {
    let dladdr: Dladdr = function(loader_function(c"dladdr")?);
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address; writes at most one `Dl_info`.
    let found = unsafe { dladdr(address, info.as_mut_ptr()) };
    // SAFETY: zeroed, which is a valid `Dl_info`.
    let name = unsafe { info.assume_init() }.dli_fname;
    if found == 0 || name.is_null() {
        return None;
    }
    // SAFETY: not null; terminated, and it lives as long as its library.
    Some(unsafe { CStr::from_ptr(name) })
}

/// Returns whether the node driver delivered this library: it was loaded from its path in containers.
pub(crate) fn is_delivered() -> bool {
    let own: *const c_void = (is_delivered as fn() -> bool as *const ()).cast();
    library_of(own).is_some_and(|name| name.to_bytes() == paths::LIBRARY.as_bytes())
}

/// Stands for the functions of a libcuda that cannot be limited; their arguments are ignored.
pub(crate) extern "C" fn refused() -> c_int {
    crate::driver_api::cuda::CUDA_ERROR_NOT_PERMITTED
}

/// Opens a loaded library by path or SONAME. The new reference keeps it loaded.
fn open_loaded(name: &CStr) -> Option<NonNull<c_void>> {
    let dlopen: Dlopen = function(loader_function(c"dlopen")?);
    // SAFETY: the name is terminated.
    NonNull::new(unsafe { dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}

/// Adds a reference to a loaded library, which keeps it loaded.
fn add_reference(handle: NonNull<c_void>) -> Option<NonNull<c_void>> {
    let dlinfo: Dlinfo = function(loader_function(c"dlinfo")?);
    let mut namespace: c_long = 0;
    // SAFETY: the program's handle; writes one `Lmid_t`.
    let found = unsafe { dlinfo(handle.as_ptr(), RTLD_DI_LMID, (&raw mut namespace).cast()) };
    if found != 0 {
        return None;
    }
    let mut map: *const LinkMap = ptr::null();
    // SAFETY: the program's handle; writes one pointer.
    let found = unsafe { dlinfo(handle.as_ptr(), RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if found != 0 {
        return None;
    }
    // SAFETY: null or a link map, which lives as long as its library.
    let name = unsafe { map.as_ref() }?.name;
    let dlmopen: Dlmopen = function(loader_function(c"dlmopen")?);
    // SAFETY: the loader's own name of the library, terminated.
    NonNull::new(unsafe { dlmopen(namespace, name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}
