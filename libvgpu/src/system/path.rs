//! Paths formatted on the stack, and the entries of a directory.

use core::ffi::CStr;
use core::fmt::{self, Write};

const PATH_CAPACITY: usize = 512;

/// A path formatted on the stack.
#[derive(Clone, Copy)]
pub(crate) struct PathBuffer {
    bytes: [u8; PATH_CAPACITY],
    len: usize,
}

impl PathBuffer {
    /// Returns `None` if the path is too long.
    pub(crate) fn new(arguments: fmt::Arguments<'_>) -> Option<Self> {
        let mut path = Self {
            bytes: [0; PATH_CAPACITY],
            len: 0,
        };
        path.write_fmt(arguments).ok()?;
        Some(path)
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

impl Write for PathBuffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len.saturating_add(text.len());
        // One byte is left for the NUL.
        match self.bytes.get_mut(self.len..end) {
            Some(place) if end < PATH_CAPACITY => {
                // Not `copy_from_slice`, which would panic if the lengths differed.
                for (place, byte) in place.iter_mut().zip(text.bytes()) {
                    *place = byte;
                }
            }
            _ => return Err(fmt::Error),
        }
        self.len = end;
        Ok(())
    }
}

/// Buffer with the alignment that `getdents64` needs.
#[repr(align(8))]
pub(crate) struct EntryBuffer(pub(crate) [u8; 2048]);

impl EntryBuffer {
    pub(crate) fn new() -> Self {
        Self([0; 2048])
    }
}

/// Offsets of the record length and the name in a `struct linux_dirent64`.
const RECORD_LENGTH_OFFSET: usize = 16;
const NAME_OFFSET: usize = 19;

/// Returns the names in a buffer of directory entries, without hidden ones.
pub(crate) fn names(mut entries: &[u8]) -> impl Iterator<Item = &str> {
    core::iter::from_fn(move || {
        loop {
            let length = *entries.get(RECORD_LENGTH_OFFSET..)?.first_chunk::<2>()?;
            let length = usize::from(u16::from_ne_bytes(length));
            let entry = entries.get(..length).filter(|entry| !entry.is_empty())?;
            entries = entries.get(length..)?;
            let name = CStr::from_bytes_until_nul(entry.get(NAME_OFFSET..)?).ok()?;
            match name.to_str() {
                Ok(name) if !name.starts_with('.') => return Some(name),
                _ => {}
            }
        }
    })
}
