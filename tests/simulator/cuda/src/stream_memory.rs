//! Operations of a stream on words of memory: waits for a value, and writes.
//!
//! They are done by the thread that calls host functions, when their stream comes to them; a wait
//! whose value is not there is looked at again and again, and holds up its own stream only.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::abi::{Answer, In, entry_points};
use crate::driver::State;
use crate::error::CudaError;
use crate::operation::{Operation, enqueue};
use crate::types::{CUdeviceptr, CUstream, CUstreamMemOp};

/// Most operations of one batch.
const MOST: usize = 256;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryOperation {
    word: Word,
    address: u64,
    value: u64,
    action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Narrow,
    Wide,
}

impl Word {
    fn bytes(self) -> u64 {
        match self {
            Self::Narrow => 4,
            Self::Wide => 8,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Write,
    Wait(Condition),
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
    fn from_flags(flags: c_uint) -> Answer<Self> {
        const FLUSH: c_uint = 1 << 30;
        match flags & !FLUSH {
            0 => Ok(Self::AtLeast),
            1 => Ok(Self::Equal),
            2 => Ok(Self::AnyBitOf),
            3 => Ok(Self::AnyBitMissing),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// Whether a word that is `found` is what a wait for `value` waits for.
    fn holds(self, word: Word, found: u64, value: u64) -> bool {
        let mask = match word {
            Word::Narrow => u64::from(u32::MAX),
            Word::Wide => u64::MAX,
        };
        match self {
            // Cyclic: the difference is not negative.
            Self::AtLeast => found.wrapping_sub(value) & mask <= mask >> 1,
            Self::Equal => found & mask == value & mask,
            Self::AnyBitOf => found & value & mask != 0,
            Self::AnyBitMissing => !(found | value) & mask != 0,
        }
    }
}

impl MemoryOperation {
    fn new(word: Word, address: u64, value: u64, action: Action) -> Answer<Self> {
        if !address.is_multiple_of(word.bytes()) {
            return Err(CudaError::InvalidValue);
        }
        Ok(Self {
            word,
            address,
            value,
            action,
        })
    }

    fn wait(word: Word, address: u64, value: u64, flags: c_uint) -> Answer<Self> {
        let action = Action::Wait(Condition::from_flags(flags)?);
        Self::new(word, address, value, action)
    }

    fn write(word: Word, address: u64, value: u64, flags: c_uint) -> Answer<Self> {
        const NO_MEMORY_BARRIER: c_uint = 1;
        match flags & !NO_MEMORY_BARRIER {
            0 => Self::new(word, address, value, Action::Write),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// `None` for barriers and flushes: everything is seen at once here.
    fn from_batch(one: &CUstreamMemOp) -> Answer<Option<Self>> {
        let (address, value, flags) = (one.address, one.value, one.flags);
        let narrow = value & u64::from(u32::MAX);
        Ok(Some(match one.kind {
            1 => Self::wait(Word::Narrow, address, narrow, flags)?,
            2 => Self::write(Word::Narrow, address, narrow, flags)?,
            4 => Self::wait(Word::Wide, address, value, flags)?,
            5 => Self::write(Word::Wide, address, value, flags)?,
            3 | 6 => return Ok(None),
            _ => return Err(CudaError::InvalidValue),
        }))
    }

    fn load(self) -> Option<u64> {
        let address = usize::try_from(self.address).ok()?;
        match self.word {
            Word::Narrow => {
                let place = std::ptr::with_exposed_provenance::<AtomicU32>(address);
                // SAFETY: aligned, and within an allocation, which stays while the state is locked.
                let word = unsafe { place.as_ref() }?;
                Some(word.load(Ordering::Acquire).into())
            }
            Word::Wide => {
                let place = std::ptr::with_exposed_provenance::<AtomicU64>(address);
                // SAFETY: as above.
                Some(unsafe { place.as_ref() }?.load(Ordering::Acquire))
            }
        }
    }

    fn store(self) -> Option<()> {
        let address = usize::try_from(self.address).ok()?;
        match self.word {
            Word::Narrow => {
                let place = std::ptr::with_exposed_provenance::<AtomicU32>(address);
                let value = u32::try_from(self.value).ok()?;
                // SAFETY: aligned, and within an allocation, which stays while the state is locked.
                unsafe { place.as_ref() }?.store(value, Ordering::Release);
            }
            Word::Wide => {
                let place = std::ptr::with_exposed_provenance::<AtomicU64>(address);
                // SAFETY: as above.
                unsafe { place.as_ref() }?.store(self.value, Ordering::Release);
            }
        }
        Some(())
    }
}

impl State {
    /// Carries out an operation. False when it is a wait for a value that is not there. Memory that
    /// was freed in the meantime holds nobody up.
    pub(crate) fn try_memory_operation(&self, one: MemoryOperation) -> bool {
        if self.require_range(one.address, one.word.bytes()).is_err() {
            return true;
        }
        match one.action {
            Action::Write => {
                one.store();
                true
            }
            Action::Wait(condition) => one
                .load()
                .is_none_or(|found| condition.holds(one.word, found, one.value)),
        }
    }

    fn require_memory(&self, operations: &[MemoryOperation]) -> Answer {
        operations
            .iter()
            .try_for_each(|one| self.require_range(one.address, one.word.bytes()))
    }

    /// The operations of a batch, as a node of a graph or work of a stream.
    pub(crate) fn memory_operations(&self, batch: &[CUstreamMemOp]) -> Answer<Operation> {
        if batch.is_empty() || batch.len() > MOST {
            return Err(CudaError::InvalidValue);
        }
        let operations = batch.iter().map(MemoryOperation::from_batch);
        let operations: Vec<Option<_>> = operations.collect::<Answer<_>>()?;
        let operations: Vec<MemoryOperation> = operations.into_iter().flatten().collect();
        self.require_memory(&operations)?;
        Ok(Operation::Memory(operations))
    }
}

fn put(stream: CUstream, operation: MemoryOperation) -> Answer {
    enqueue(stream, |_, state, _| {
        state.require_memory(&[operation])?;
        Ok(Operation::Memory(vec![operation]))
    })
    .map(drop)
}

fn put_batch(stream: CUstream, count: c_uint, batch: In<CUstreamMemOp>, flags: c_uint) -> Answer {
    if flags != 0 || count as usize > MOST {
        return Err(CudaError::InvalidValue);
    }
    let batch = batch.list(count as usize)?;
    enqueue(stream, |_, state, _| state.memory_operations(&batch)).map(drop)
}

use Word::{Narrow, Wide};

entry_points! {
    "cuStreamWaitValue32" 8000 fn cuStreamWaitValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) ptsz(stream) cuStreamWaitValue32_ptsz { put(stream, MemoryOperation::wait(Narrow, address, value.into(), flags)?) }
    "cuStreamWaitValue32" 11070 fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) ptsz(stream) cuStreamWaitValue32_v2_ptsz { put(stream, MemoryOperation::wait(Narrow, address, value.into(), flags)?) }
    "cuStreamWaitValue64" 9000 fn cuStreamWaitValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) ptsz(stream) cuStreamWaitValue64_ptsz { put(stream, MemoryOperation::wait(Wide, address, value, flags)?) }
    "cuStreamWaitValue64" 11070 fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) ptsz(stream) cuStreamWaitValue64_v2_ptsz { put(stream, MemoryOperation::wait(Wide, address, value, flags)?) }
    "cuStreamWriteValue32" 8000 fn cuStreamWriteValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) ptsz(stream) cuStreamWriteValue32_ptsz { put(stream, MemoryOperation::write(Narrow, address, value.into(), flags)?) }
    "cuStreamWriteValue32" 11070 fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) ptsz(stream) cuStreamWriteValue32_v2_ptsz { put(stream, MemoryOperation::write(Narrow, address, value.into(), flags)?) }
    "cuStreamWriteValue64" 9000 fn cuStreamWriteValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) ptsz(stream) cuStreamWriteValue64_ptsz { put(stream, MemoryOperation::write(Wide, address, value, flags)?) }
    "cuStreamWriteValue64" 11070 fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) ptsz(stream) cuStreamWriteValue64_v2_ptsz { put(stream, MemoryOperation::write(Wide, address, value, flags)?) }
    "cuStreamBatchMemOp" 8000 fn cuStreamBatchMemOp(stream: CUstream, count: c_uint, batch: In<CUstreamMemOp>, flags: c_uint) ptsz(stream) cuStreamBatchMemOp_ptsz { put_batch(stream, count, batch, flags) }
    "cuStreamBatchMemOp" 11070 fn cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, batch: In<CUstreamMemOp>, flags: c_uint) ptsz(stream) cuStreamBatchMemOp_v2_ptsz { put_batch(stream, count, batch, flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_those_of_the_header() {
        let cases = [
            (0, Narrow, 5, 5, true),
            (0, Narrow, 4, 5, false),
            // Cyclic, in the width of the word.
            (0, Narrow, 3, u64::from(u32::MAX), true),
            (0, Wide, 3, u64::from(u32::MAX), false),
            (0, Wide, 3, u64::MAX, true),
            (1, Wide, 7, 7, true),
            (1, Wide, 8, 7, false),
            (2, Narrow, 0b1010, 0b0010, true),
            (2, Narrow, 0b1010, 0b0101, false),
            (3, Narrow, 0xffff_0000, 0x0000_ffff, false),
            (3, Narrow, 0xffff_0000, 0x0000_fffe, true),
        ];
        for (flags, word, found, value, expected) in cases {
            let condition = Condition::from_flags(flags).unwrap_or(Condition::Equal);
            let holds = condition.holds(word, found, value);
            assert_eq!(
                holds, expected,
                "{condition:?} {word:?} {found:#x} {value:#x}"
            );
        }
        assert!(Condition::from_flags(4).is_err());
    }
}
