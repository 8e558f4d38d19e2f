//! The border to C: entry points, and pointers that a C caller passed.
//!
//! [`Out`], [`In`] and [`Text`] have no constructor: they appear only as parameters of exported
//! functions, so their contents come from a caller which promised, as `cuda.h` asks, that they are
//! null or point to a valid object.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::error::CudaError;
use crate::types::CUresult;

/// What an entry point's body returns.
pub(crate) type Answer<T = ()> = Result<T, CudaError>;

/// One exported function, as `cuGetProcAddress` finds it.
pub(crate) struct EntryPoint {
    /// Name without version suffix.
    pub(crate) name: &'static str,
    /// First CUDA version with this form of the function.
    pub(crate) since: c_int,
    pub(crate) address: *const c_void,
    /// The variant for programs whose default stream is per thread.
    pub(crate) per_thread: Option<*const c_void>,
}

// SAFETY: the pointers are addresses of functions, which never change.
unsafe impl Sync for EntryPoint {}

/// Defines exported functions and the module's `ENTRY_POINTS`.
///
/// `"cuMemAlloc" 3020 fn cuMemAlloc_v2(…) { body }`: the name and CUDA version under which
/// `cuGetProcAddress` knows the function, then the function; the body is an [`Answer`].
///
/// Where the function has a variant for per-thread default streams, `ptsz(stream) cuFoo_ptsz`
/// follows the parameters: in that variant the parameter `stream` is mapped from the default
/// stream to the thread's. `ptds(stream) cuFoo_ptds` is for functions without such a parameter:
/// it binds `stream` to the default stream that the variant works on.
macro_rules! entry_points {
    ($(
        $(#[$meta:meta])*
        $name:literal $since:literal fn $symbol:ident $parameters:tt
        $(ptsz($given:ident) $ptsz:ident)? $(ptds($default:ident) $ptds:ident)?
        $body:block
    )*) => {
        /// The entry points of this module.
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
            unsafe extern "C" fn $symbol $parameters -> $crate::types::CUresult {
                $(let $default = $crate::types::CUstream::LEGACY;)?
                $crate::abi::code(move || -> $crate::abi::Answer { $body })
            }
            $(
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $ptsz $parameters -> $crate::types::CUresult {
                    let $given = $given.or_per_thread();
                    $crate::abi::code(move || -> $crate::abi::Answer { $body })
                }
            )?
            $(
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $ptds $parameters -> $crate::types::CUresult {
                    let $default = $crate::types::CUstream::PER_THREAD;
                    $crate::abi::code(move || -> $crate::abi::Answer { $body })
                }
            )?
        )*
    };
}
pub(crate) use entry_points;

/// Runs a body and returns its result as C wants it.
pub(crate) fn code(body: impl FnOnce() -> Answer) -> CUresult {
    match body() {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}

/// A pointer through which a result goes to the caller.
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
    /// Nobody wants the result.
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> Answer<*mut T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        Ok(self.0)
    }

    /// Writes the result.
    pub(crate) fn set(self, value: T) -> Answer {
        let pointer = self.checked()?;
        // SAFETY: not null, hence valid for a write of `T` by the caller's promise.
        unsafe { pointer.write(value) };
        Ok(())
    }

    /// Writes the result where the caller wants it.
    pub(crate) fn set_if_wanted(self, value: T) {
        let _ = self.set(value);
    }

    /// Writes the elements of an array that has room for them.
    pub(crate) fn set_all(self, values: impl IntoIterator<Item = T>) -> Answer {
        let pointer = self.checked()?;
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: the caller said that the array has room for all values.
            let element = unsafe { pointer.add(index) };
            // SAFETY: within the array, by the same promise.
            unsafe { element.write(value) };
        }
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a string and its terminator into a buffer of `length` bytes, cut where it does not
    /// fit.
    pub(crate) fn set_text(self, length: c_int, text: &str) -> Answer {
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1));
        let room = room.ok_or(CudaError::InvalidValue)?;
        let bytes = text.bytes().take(room).chain([0]);
        self.set_all(bytes.map(|byte| c_char::from_ne_bytes([byte])))
    }
}

/// A pointer to one or more objects of the caller's.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

/// A pointer to an object of the caller's that is read and written.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct InOut<T>(Out<T>);

impl<T: Copy> InOut<T> {
    /// Reads the object.
    pub(crate) fn get(self) -> Answer<T> {
        In(self.0.0.cast_const()).get()
    }

    /// Writes it.
    pub(crate) fn set(self, value: T) -> Answer {
        self.0.set(value)
    }
}

impl<T> In<T> {
    /// No object.
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// The object that a pointer in another object of the caller's leads to.
    pub(crate) fn at(pointer: *const T) -> Self {
        Self(pointer)
    }
}

impl<T: Copy> In<T> {
    /// Reads the object.
    pub(crate) fn get(self) -> Answer<T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: not null, hence valid by the caller's promise.
        Ok(unsafe { self.0.read() })
    }
}

impl<T: Copy> In<T> {
    /// Reads one element of an array that is long enough.
    pub(crate) fn element(self, index: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: the caller said that the array has this element.
        let element = unsafe { self.0.add(index) };
        Self(element).get()
    }

    /// Reads an array; without elements its address means nothing.
    pub(crate) fn list(self, count: usize) -> Answer<Vec<T>> {
        (0..count).map(|index| self.element(index)).collect()
    }
}

impl<T> In<T> {
    /// The same place as an object of another type, which the caller said it is.
    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

/// A pointer to an object whose type another parameter names.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Untyped(*mut c_void);

impl Untyped {
    /// The pointer as a number.
    pub(crate) fn number(self) -> usize {
        self.0.expose_provenance()
    }

    /// As a result of a type.
    pub(crate) fn out<T>(self) -> Out<T> {
        Out(self.0.cast())
    }

    /// As an object of a type.
    pub(crate) fn input<T>(self) -> In<T> {
        In(self.0.cast_const().cast())
    }
}

/// A C string of the caller's.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The string, where it is one and in UTF-8.
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: not null, hence a terminated string by the caller's promise.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| CudaError::InvalidValue)?;
        Ok(text.to_owned())
    }
}

/// An address on the host or on a card, for copies.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address(*mut c_void);

impl Address {
    /// The address with a number.
    pub(crate) fn at(number: u64) -> Self {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        Self(std::ptr::with_exposed_provenance_mut(number))
    }

    /// The address as a number.
    pub(crate) fn number(self) -> u64 {
        self.0.expose_provenance() as u64
    }
}
