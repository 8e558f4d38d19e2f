//! C ABI: exported entry points and the pointers that C callers pass.
//!
//! [`Out`], [`In`] and [`Text`] have no public constructor from a raw caller pointer: they appear
//! as parameters of exported functions. `cuda.h` requires callers to pass null or a pointer to a
//! valid object.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::error::{CUresult, CudaError};

/// Result of the body of an entry point.
pub(crate) type CudaResult<T = ()> = Result<T, CudaError>;

/// One exported function, as `cuGetProcAddress` finds it.
pub(crate) struct EntryPoint {
    /// Name without version suffix.
    pub(crate) name: &'static str,
    /// First CUDA version with this form of the function.
    pub(crate) since: c_int,
    pub(crate) address: *const c_void,
    /// Variant for programs with per-thread default streams.
    pub(crate) per_thread: Option<*const c_void>,
}

// SAFETY: the pointers are addresses of functions, which never change.
unsafe impl Sync for EntryPoint {}

/// Defines exported functions and the module's `ENTRY_POINTS`.
///
/// `"cuMemAlloc" 3020 fn cuMemAlloc_v2(…) { body }`: name and CUDA version as `cuGetProcAddress`
/// knows them, then the function. The body returns an [`CudaResult`].
///
/// `ptsz(stream) cuFoo_ptsz` after the parameters adds the variant for per-thread default streams;
/// the variant maps the parameter `stream` from the default stream to the thread's. `ptds(stream)
/// cuFoo_ptds` is for functions without a stream parameter; `stream` is bound to the default stream
/// of the variant.
macro_rules! entry_points {
    ($(
        $(#[$meta:meta])*
        $name:literal $since:literal fn $symbol:ident $parameters:tt
        $(ptsz($given:ident) $ptsz:ident)? $(ptds($default:ident) $ptds:ident)?
        $body:block
    )*) => {
        pub(crate) const ENTRY_POINTS: &[$crate::abi::EntryPoint] = &[$(
            $crate::abi::EntryPoint {
                name: $name,
                since: $since,
                address: $symbol as *const ::std::ffi::c_void,
                per_thread: {
                    #[allow(unused_mut, unused_assignments, reason = "set where a variant exists")]
                    let mut variant: Option<*const ::std::ffi::c_void> = None;
                    $(variant = Some($ptsz as *const ::std::ffi::c_void);)?
                    $(variant = Some($ptds as *const ::std::ffi::c_void);)?
                    variant
                },
            },
        )*];
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol $parameters -> $crate::error::CUresult {
                $(let $default = $crate::types::CUstream::LEGACY;)?
                $crate::abi::code(move || -> $crate::abi::CudaResult {
                    $crate::context::require_usable(stringify!($symbol))?;
                    $body
                })
            }
            $(
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $ptsz $parameters -> $crate::error::CUresult {
                    let $given = $given.or_per_thread();
                    $crate::abi::code(move || -> $crate::abi::CudaResult {
                    $crate::context::require_usable(stringify!($symbol))?;
                    $body
                })
                }
            )?
            $(
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $ptds $parameters -> $crate::error::CUresult {
                    let $default = $crate::types::CUstream::PER_THREAD;
                    $crate::abi::code(move || -> $crate::abi::CudaResult {
                    $crate::context::require_usable(stringify!($symbol))?;
                    $body
                })
                }
            )?
        )*
    };
}
pub(crate) use entry_points;

/// Runs a body and converts its result to a `CUresult`.
pub(crate) fn code(body: impl FnOnce() -> CudaResult) -> CUresult {
    match body() {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}

/// An output pointer of the caller.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// An absent output.
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> CudaResult<*mut T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        Ok(self.0)
    }

    /// Writes the result.
    pub(crate) fn set(self, value: T) -> CudaResult {
        let pointer = self.checked()?;
        // SAFETY: not null, hence valid for a write of `T` by the caller's contract.
        unsafe { pointer.write(value) };
        Ok(())
    }

    /// Writes the result unless the pointer is null.
    pub(crate) fn set_if_not_null(self, value: T) {
        let _ = self.set(value);
    }

    /// Writes the elements of an array that has capacity for them.
    pub(crate) fn write_all(self, values: impl IntoIterator<Item = T>) -> CudaResult {
        let pointer = self.checked()?;
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: the caller states that the array has capacity for all values.
            let element = unsafe { pointer.add(index) };
            // SAFETY: within the array, by the same contract.
            unsafe { element.write(value) };
        }
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a NUL-terminated string into a buffer of `length` bytes, truncated to fit.
    pub(crate) fn set_text(self, length: c_int, text: &str) -> CudaResult {
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1));
        let room = room.ok_or(CudaError::InvalidValue)?;
        let bytes = text.bytes().take(room).chain([0]);
        self.write_all(bytes.map(|byte| c_char::from_ne_bytes([byte])))
    }
}

/// An input pointer of the caller, to one or more objects.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

/// A pointer of the caller to an object that is read and written.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct InOut<T>(Out<T>);

impl<T: Copy> InOut<T> {
    pub(crate) fn get(self) -> CudaResult<T> {
        In(self.0.0.cast_const()).get()
    }

    pub(crate) fn set(self, value: T) -> CudaResult {
        self.0.set(value)
    }
}

impl<T> In<T> {
    /// An absent input.
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// Wraps a pointer stored in another object of the caller.
    pub(crate) fn at(pointer: *const T) -> Self {
        Self(pointer)
    }
}

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> CudaResult<T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: not null, hence valid by the caller's contract.
        Ok(unsafe { self.0.read() })
    }
}

impl<T: Copy> In<T> {
    /// Reads one element of an array that is long enough.
    pub(crate) fn element(self, index: usize) -> CudaResult<T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: the caller states that the array has this element.
        let element = unsafe { self.0.add(index) };
        Self(element).get()
    }

    /// Reads an array. The address of an empty array is not used.
    pub(crate) fn list(self, count: usize) -> CudaResult<Vec<T>> {
        (0..count).map(|index| self.element(index)).collect()
    }
}

impl<T> In<T> {
    /// The same address as a pointer to another type, as the caller declared.
    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

/// A pointer to an object whose type another parameter determines.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Untyped(*mut c_void);

impl Untyped {
    /// The pointer as a number.
    pub(crate) fn number(self) -> usize {
        self.0.expose_provenance()
    }

    /// The pointer as an output of type `T`.
    pub(crate) fn out<T>(self) -> Out<T> {
        Out(self.0.cast())
    }

    /// The pointer as an input of type `T`.
    pub(crate) fn input<T>(self) -> In<T> {
        In(self.0.cast_const().cast())
    }
}

/// A C string of the caller.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Returns the string; errors unless it is valid UTF-8.
    pub(crate) fn get(self) -> CudaResult<String> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: not null, hence a terminated string by the caller's contract.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| CudaError::InvalidValue)?;
        Ok(text.to_owned())
    }
}

/// A host or device address of a copy.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address(*mut c_void);

impl Address {
    pub(crate) fn at(number: u64) -> Self {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        Self(std::ptr::with_exposed_provenance_mut(number))
    }

    pub(crate) fn number(self) -> u64 {
        self.0.expose_provenance() as u64
    }
}
