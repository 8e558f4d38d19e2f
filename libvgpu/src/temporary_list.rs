//! Lists that live for one call, without an allocator.

use core::mem::size_of;
use core::ptr::NonNull;
use core::slice;

use crate::sys;

/// A list of a fixed capacity in memory that is mapped for it.
pub(crate) struct TemporaryList<T> {
    values: NonNull<T>,
    capacity: usize,
    length: usize,
}

impl<T: Copy> TemporaryList<T> {
    /// Returns an empty list for up to `capacity` values; `None` without memory for it.
    pub(crate) fn with_capacity(capacity: usize) -> Option<Self> {
        let size = capacity.checked_mul(size_of::<T>())?;
        let values = if size == 0 {
            NonNull::dangling()
        } else {
            // A page is aligned for any value.
            sys::map_zeroes(size)?.cast()
        };
        Some(Self {
            values,
            capacity,
            length: 0,
        })
    }

    /// Appends `value` if the list is not full.
    pub(crate) fn push(&mut self, value: T) {
        if self.length < self.capacity {
            // SAFETY: within the mapped capacity.
            let end = unsafe { self.values.add(self.length) };
            // SAFETY: as above.
            unsafe { end.write(value) };
            self.length = self.length.saturating_add(1);
        }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: that many values were written, and only this list accesses them.
        unsafe { slice::from_raw_parts_mut(self.values.as_ptr(), self.length) }
    }
}

impl<T> Drop for TemporaryList<T> {
    fn drop(&mut self) {
        let size = self.capacity.saturating_mul(size_of::<T>());
        if size != 0 {
            sys::unmap(self.values.cast(), size);
        }
    }
}
