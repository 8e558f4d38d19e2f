//! The border to C: entry points, and pointers that a C caller passed.
//!
//! Every unsafe access of this crate is here. [`Out`], [`In`] and [`Text`] appear only as
//! parameters of exported functions, or hold an address from a struct that was one, so their
//! contents come from a caller which promised, as `nvml.h` asks, that they are null or point to a
//! valid object.

use std::ffi::{CStr, c_char, c_uint};

use nvml_wrapper_sys::bindings::{nvmlReturn_t, nvmlUUIDValue_t};

use crate::error::NvmlError;

/// What an entry point's body returns.
pub(crate) type Answer<T = ()> = Result<T, NvmlError>;

/// Defines exported functions. The body is an expression of type [`Answer`].
macro_rules! entry_points {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($argument: $kind),*
        ) -> ::nvml_wrapper_sys::bindings::nvmlReturn_t {
            $crate::abi::code(move || -> $crate::abi::Answer { $body })
        }
    )*};
}
pub(crate) use entry_points;

/// Runs a body and returns its result as C wants it.
pub(crate) fn code(body: impl FnOnce() -> Answer) -> nvmlReturn_t {
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
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> Answer<*mut T> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
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

    /// Reads what the caller put there.
    pub(crate) fn get(self) -> Answer<T>
    where
        T: Copy,
    {
        let pointer = self.checked()?;
        // SAFETY: not null, hence initialised by the caller's promise.
        Ok(unsafe { pointer.read() })
    }

    /// The `version` field that every versioned struct begins with. It says which struct the
    /// caller passed, whatever the declared type.
    pub(crate) fn version(self) -> Answer<c_uint> {
        Out(self.checked()?.cast::<c_uint>()).get()
    }

    /// The same object as another version of its struct, which [`Self::version`] found it to be.
    pub(crate) fn as_version<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Refuses a struct of another version.
    pub(crate) fn require_version(self, number: c_uint) -> Answer<c_uint> {
        let version = struct_version::<T>(number);
        match self.version()? {
            given if given == version => Ok(version),
            _ => Err(NvmlError::ArgumentVersionMismatch),
        }
    }

    /// Writes the elements of an array that has room for them.
    pub(crate) fn set_all(self, values: impl ExactSizeIterator<Item = T>) -> Answer {
        if values.len() == 0 {
            return Ok(());
        }
        let pointer = self.checked()?;
        for (index, value) in values.enumerate() {
            // SAFETY: the caller said that the array has room for all values.
            let element = unsafe { pointer.add(index) };
            // SAFETY: within the array, by the same promise.
            unsafe { element.write(value) };
        }
        Ok(())
    }

    /// The elements of an array of `length` as separate results.
    pub(crate) fn elements(self, length: usize) -> Answer<impl Iterator<Item = Out<T>>> {
        let pointer = self.checked()?;
        Ok((0..length).map(move |index| {
            // SAFETY: the caller said that the array has `length` elements.
            Out(unsafe { pointer.add(index) })
        }))
    }
}

impl Out<c_char> {
    /// Writes a string and its terminator into a buffer of `length` bytes.
    pub(crate) fn set_text(self, length: c_uint, text: &str) -> Answer {
        self.checked()?;
        let length = usize::try_from(length).map_err(|_| NvmlError::InvalidArgument)?;
        if text.len() >= length {
            return Err(NvmlError::InsufficientSize);
        }
        let bytes: Vec<u8> = text.bytes().chain([0]).collect();
        self.set_all(bytes.into_iter().map(|byte| c_char::from_ne_bytes([byte])))
    }
}

/// Writes a list the way NVML does: `count` holds the capacity before and the length after;
/// a list that does not fit sets the length and answers `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(crate) fn set_list<T>(count: Out<c_uint>, array: Out<T>, values: Vec<T>) -> Answer {
    let capacity = count.get()?;
    let length = c_uint::try_from(values.len()).map_err(|_| NvmlError::Unknown)?;
    count.set(length)?;
    if length > capacity {
        return Err(NvmlError::InsufficientSize);
    }
    array.set_all(values.into_iter())
}

/// A pointer to something that the caller only lends.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads it.
    pub(crate) fn get(self) -> Answer<T> {
        Out(self.0.cast_mut()).get()
    }
}

/// An array whose address came in a struct of the caller's.
pub(crate) fn array_at<T>(address: *mut T) -> Out<T> {
    Out(address)
}

/// A C string of the caller's.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The string, where it is one and in UTF-8.
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        // SAFETY: not null, hence a terminated string by the caller's promise.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| NvmlError::InvalidArgument)?;
        Ok(text.to_owned())
    }
}

/// The bytes of a UUID, of which a union says nothing.
pub(crate) fn uuid_bytes(value: nvmlUUIDValue_t) -> [u8; 41] {
    // SAFETY: a union of two arrays of bytes, the larger of which is read; the caller initialised
    // the struct.
    let text = unsafe { value.str_ };
    text.map(|byte| byte.to_ne_bytes()[0])
}

/// A string in a fixed array of a struct, cut where it does not fit.
pub(crate) fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    let room = N.saturating_sub(1);
    for (slot, byte) in array.iter_mut().take(room).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    array
}

/// The value of a struct's `version` field: its size and version number, as `nvml.h` composes them.
pub(crate) const fn struct_version<T>(number: c_uint) -> c_uint {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the header's structs are small"
    )]
    let size = size_of::<T>() as c_uint;
    size | (number << 24)
}
