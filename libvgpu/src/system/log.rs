//! Error messages: one line on standard error if limits cannot be read or enforced.
//!
//! Never on a path that succeeds. The line is formatted on the stack and written with one call.

use core::fmt::{self, Write};

use crate::system::sys;

const CAPACITY: usize = 512;

struct Line {
    bytes: [u8; CAPACITY],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // One byte is left for the newline.
            let next = self.len.saturating_add(1);
            if next < CAPACITY
                && let Some(place) = self.bytes.get_mut(self.len)
            {
                *place = byte;
                self.len = next;
            }
        }
        Ok(())
    }
}

/// Writes one line.
pub(crate) fn line(arguments: fmt::Arguments<'_>) {
    let mut line = Line {
        bytes: [0; CAPACITY],
        len: 0,
    };
    // Writing to a `Line` cannot fail; the excess is cut off.
    let _ = write!(line, "libvgpu: {arguments}");
    if let Some(place) = line.bytes.get_mut(line.len) {
        *place = b'\n';
    }
    sys::write_stderr(line.bytes.get(..=line.len).unwrap_or_default());
}
