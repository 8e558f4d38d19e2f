//! Waits for a value of a word of memory.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::State;
use crate::abi::CudaResult;
use crate::error::CudaError;

/// Size of the word.
pub(crate) const WORD_BYTES: u64 = 4;

/// A wait for a value of a 32-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueWait {
    address: u64,
    value: u32,
    condition: Condition,
}

/// `CU_STREAM_WAIT_VALUE_*`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    AtLeast,
    Equal,
    AnyBitOf,
    AnyBitMissing,
}

impl Condition {
    fn from_flags(flags: c_uint) -> CudaResult<Self> {
        const FLUSH: c_uint = 1 << 30;
        match flags & !FLUSH {
            0 => Ok(Self::AtLeast),
            1 => Ok(Self::Equal),
            2 => Ok(Self::AnyBitOf),
            3 => Ok(Self::AnyBitMissing),
            _ => Err(CudaError::InvalidValue),
        }
    }

    fn holds(self, found: u32, value: u32) -> bool {
        match self {
            // Cyclic: the signed difference is not negative.
            Self::AtLeast => found.wrapping_sub(value) <= u32::MAX >> 1,
            Self::Equal => found == value,
            Self::AnyBitOf => found & value != 0,
            Self::AnyBitMissing => !(found | value) != 0,
        }
    }
}

impl ValueWait {
    pub(crate) fn new(address: u64, value: u32, flags: c_uint) -> CudaResult<Self> {
        if !address.is_multiple_of(WORD_BYTES) {
            return Err(CudaError::InvalidValue);
        }
        Ok(Self {
            address,
            value,
            condition: Condition::from_flags(flags)?,
        })
    }

    fn load(self) -> Option<u32> {
        let address = usize::try_from(self.address).ok()?;
        let pointer = std::ptr::with_exposed_provenance::<AtomicU32>(address);
        // SAFETY: aligned, and within an allocation, which stays while the state is locked.
        let word = unsafe { pointer.as_ref() }?;
        Some(word.load(Ordering::Acquire))
    }
}

impl State {
    /// Returns whether a wait is over. A wait on freed memory is.
    pub(crate) fn is_satisfied(&self, wait: ValueWait) -> bool {
        if self.require_range(wait.address, WORD_BYTES).is_err() {
            return true;
        }
        wait.load()
            .is_none_or(|found| wait.condition.holds(found, wait.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_words_as_the_header_defines() {
        let cases = [
            (0, 5, 5, true),
            (0, 4, 5, false),
            (0, 3, u32::MAX, true),
            (1, 7, 7, true),
            (1, 8, 7, false),
            (2, 0b1010, 0b0010, true),
            (2, 0b1010, 0b0101, false),
            (3, 0xffff_0000, 0x0000_ffff, false),
            (3, 0xffff_0000, 0x0000_fffe, true),
        ];
        for (flags, found, value, expected) in cases {
            let condition = Condition::from_flags(flags).unwrap();
            let holds = condition.holds(found, value);
            assert_eq!(holds, expected, "{condition:?} {found:#x} {value:#x}");
        }
        assert_eq!(Condition::from_flags(4), Err(CudaError::InvalidValue));
    }
}
