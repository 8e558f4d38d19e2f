//! Lists that live for one call, without an allocator.

use core::mem::{MaybeUninit, size_of};
use core::ptr::NonNull;
use core::slice;

use crate::system::sys;

/// Largest capacity without memory of its own. Most calls change few objects, and a call that frees memory should
/// succeed in a process that can map no more.
const FEW: usize = 8;

/// A list of a fixed capacity.
pub(crate) struct TemporaryList<T> {
    few: [MaybeUninit<T>; FEW],
    /// Memory that is mapped for a larger capacity.
    many: Option<NonNull<T>>,
    capacity: usize,
    length: usize,
}

impl<T: Copy> TemporaryList<T> {
    /// Returns an empty list for up to `capacity` values; `None` without memory for it.
    pub(crate) fn with_capacity(capacity: usize) -> Option<Self> {
        let many = if capacity <= FEW {
            None
        } else {
            // A page is aligned for any value.
            Some(sys::map_zeroes(capacity.checked_mul(size_of::<T>())?)?.cast())
        };
        Some(Self {
            few: [const { MaybeUninit::uninit() }; FEW],
            many,
            capacity,
            length: 0,
        })
    }

    /// Appends `value` if the list is not full.
    pub(crate) fn push(&mut self, value: T) {
        if self.length < self.capacity {
            // SAFETY: within the capacity.
            let end = unsafe { self.start().add(self.length) };
            // SAFETY: as above.
            unsafe { end.write(value) };
            self.length = self.length.saturating_add(1);
        }
    }

    /// Returns how many more values fit.
    pub(crate) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.length)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: that many values were written, and only this list accesses them.
        unsafe { slice::from_raw_parts_mut(self.start(), self.length) }
    }

    fn start(&mut self) -> *mut T {
        match self.many {
            Some(many) => many.as_ptr(),
            None => self.few.as_mut_ptr().cast(),
        }
    }
}

impl<T> Drop for TemporaryList<T> {
    fn drop(&mut self) {
        if let Some(many) = self.many {
            sys::unmap(many.cast(), self.capacity.saturating_mul(size_of::<T>()));
        }
    }
}
