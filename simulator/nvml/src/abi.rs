//! C ABI: exported entry points and the pointers that C callers pass.
//!
//! Contains every unsafe access of this crate. [`Out`], [`In`] and [`Text`] are parameters of
//! exported functions, or addresses from a struct that was one. `nvml.h` requires callers to pass
//! null or a pointer to a valid object.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_uint};

use nvml_wrapper_sys::bindings::{nvmlReturn_t, nvmlUUIDValue_t};

use crate::error::NvmlError;

/// Result of the body of an entry point.
pub(crate) type NvmlResult<T = ()> = Result<T, NvmlError>;

/// Defines exported functions. The body is an expression of type [`NvmlResult`].
macro_rules! entry_points {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($argument: $kind),*
        ) -> ::nvml_wrapper_sys::bindings::nvmlReturn_t {
            $crate::abi::entry(stringify!($name), move || -> $crate::abi::NvmlResult { $body })
        }
    )*};
}
pub(crate) use entry_points;

thread_local! {
    /// The exported function that runs.
    static FUNCTION: Cell<&'static str> = const { Cell::new("") };
}

/// Returns the name of the exported function that runs in this thread.
pub(crate) fn function() -> &'static str {
    FUNCTION.get()
}

/// Runs the body of an exported function.
pub(crate) fn entry(name: &'static str, body: impl FnOnce() -> NvmlResult) -> nvmlReturn_t {
    FUNCTION.set(name);
    code(body)
}

/// Runs a body and converts its result to an `nvmlReturn_t`.
pub(crate) fn code(body: impl FnOnce() -> NvmlResult) -> nvmlReturn_t {
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
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> NvmlResult<*mut T> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        Ok(self.0)
    }

    pub(crate) fn set(self, value: T) -> NvmlResult {
        let pointer = self.checked()?;
        // SAFETY: not null, hence valid for a write of `T` by the caller's contract.
        unsafe { pointer.write(value) };
        Ok(())
    }

    /// Reads the value that the caller stored.
    pub(crate) fn get(self) -> NvmlResult<T>
    where
        T: Copy,
    {
        let pointer = self.checked()?;
        // SAFETY: not null, hence initialized by the caller's contract.
        Ok(unsafe { pointer.read() })
    }

    /// Reads the `version` field at the start of a versioned struct, which identifies the struct
    /// that the caller passed.
    pub(crate) fn version(self) -> NvmlResult<c_uint> {
        Out(self.checked()?.cast::<c_uint>()).get()
    }

    /// The same object as the version of the struct that [`Self::version`] returned.
    pub(crate) fn as_version<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Errors unless the struct has this version.
    pub(crate) fn require_version(self, number: c_uint) -> NvmlResult<c_uint> {
        let version = struct_version::<T>(number);
        match self.version()? {
            given if given == version => Ok(version),
            _ => Err(NvmlError::ArgumentVersionMismatch),
        }
    }

    /// Writes the elements of an array that has capacity for them.
    pub(crate) fn set_all(self, values: impl ExactSizeIterator<Item = T>) -> NvmlResult {
        if values.len() == 0 {
            return Ok(());
        }
        let pointer = self.checked()?;
        for (index, value) in values.enumerate() {
            // SAFETY: the caller states that the array has capacity for all values.
            let element = unsafe { pointer.add(index) };
            // SAFETY: within the array, by the same contract.
            unsafe { element.write(value) };
        }
        Ok(())
    }

    /// The elements of an array of `length` as separate outputs.
    pub(crate) fn elements(self, length: usize) -> NvmlResult<impl Iterator<Item = Out<T>>> {
        let pointer = self.checked()?;
        Ok((0..length).map(move |index| {
            // SAFETY: the caller states that the array has `length` elements.
            Out(unsafe { pointer.add(index) })
        }))
    }
}

impl Out<c_char> {
    /// Writes a NUL-terminated string into a buffer of `length` bytes.
    pub(crate) fn set_text(self, length: c_uint, text: &str) -> NvmlResult {
        self.checked()?;
        let length = usize::try_from(length).map_err(|_| NvmlError::InvalidArgument)?;
        if text.len() >= length {
            return Err(NvmlError::InsufficientSize);
        }
        let bytes: Vec<u8> = text.bytes().chain([0]).collect();
        self.set_all(bytes.into_iter().map(|byte| c_char::from_ne_bytes([byte])))
    }
}

/// Writes a list: `count` has the capacity before and the length after. A longer list sets the
/// length and returns `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(crate) fn set_list<T>(count: Out<c_uint>, array: Out<T>, values: Vec<T>) -> NvmlResult {
    let capacity = count.get()?;
    let length = c_uint::try_from(values.len()).map_err(|_| NvmlError::Unknown)?;
    count.set(length)?;
    if length > capacity {
        return Err(NvmlError::InsufficientSize);
    }
    array.set_all(values.into_iter())
}

/// An input pointer of the caller.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> NvmlResult<T> {
        Out(self.0.cast_mut()).get()
    }
}

/// An array whose address is in a struct of the caller.
pub(crate) fn array_at<T>(address: *mut T) -> Out<T> {
    Out(address)
}

/// A C string of the caller.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Returns the string; errors unless it is valid UTF-8.
    pub(crate) fn get(self) -> NvmlResult<String> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        // SAFETY: not null, hence a terminated string by the caller's contract.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| NvmlError::InvalidArgument)?;
        Ok(text.to_owned())
    }
}

/// A C string whose address is in a struct of the caller.
pub(crate) fn text_at(address: *mut c_char) -> Text {
    Text(address)
}

/// The bytes of a UUID union.
pub(crate) fn uuid_bytes(value: nvmlUUIDValue_t) -> [u8; 41] {
    // SAFETY: a union of two byte arrays, the larger of which is read; the caller initialized the
    // struct.
    let text = unsafe { value.str_ };
    text.map(|byte| byte.to_ne_bytes()[0])
}

/// A string in a fixed array of a struct, truncated to fit.
pub(crate) fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    let room = N.saturating_sub(1);
    for (slot, byte) in array.iter_mut().take(room).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    array
}

/// The `version` value of a struct: its size and version number, as in `nvml.h`.
pub(crate) const fn struct_version<T>(number: c_uint) -> c_uint {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the header's structs are small"
    )]
    let size = size_of::<T>() as c_uint;
    size | (number << 24)
}
