//! Memory that processes make available to each other and open, whichever function it is done with.
//!
//! Whoever opens it pays for it unless it is of the same share; see [`crate::imports`]. CUDA wants whoever opened memory
//! to give it back before its maker frees it. If the maker dies first, it stays charged to the maker's share.

use core::ffi::c_void;
use core::ptr::NonNull;

use crate::blocks::BLOCK;
use crate::card::Card;
use crate::charge_map::Charge;
use crate::cuda::{CUDA_SUCCESS, CUdeviceptr, CUresult};
use crate::driver::{Library, Original};
use crate::hooks::driver_cache::reserve_with;
use crate::process::Process;
use crate::shared_chunks::{Chunk, Shared};

static GET_RANGE: Original = Original::new(Library::Cuda, c"cuMemGetAddressRange_v2");
type GetRange = unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> CUresult;

/// Start and size of the allocation that a pointer points into.
pub(crate) fn range_of(pointer: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
    let get = GET_RANGE.address()?;
    // SAFETY: the signature of `cuMemGetAddressRange_v2`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetRange>(get) };
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: writes a pointer and a size.
    let result = unsafe { get(&raw mut base, &raw mut bytes, pointer) };
    (result == CUDA_SUCCESS).then_some((base, bytes as u64))
}

/// The blocks that memory lies in.
pub(crate) fn blocks_around(start: CUdeviceptr, bytes: u64) -> Chunk {
    let address = start & !(BLOCK.saturating_sub(1));
    let bytes = start.saturating_sub(address).saturating_add(bytes);
    Chunk {
        address,
        bytes: bytes.checked_next_multiple_of(BLOCK).unwrap_or(bytes),
    }
}

/// Notes that others can open an allocation from now on.
pub(crate) fn add_export(
    process: &'static Process,
    card: Card,
    pointer: CUdeviceptr,
    chunk: Chunk,
) {
    let shared = Shared {
        pointer,
        card: card.index(),
        chunk,
        context: 0,
    };
    process
        .exported
        .add_once(shared, |bytes| card.export(bytes));
}

/// After an allocation was freed: others cannot open it any more.
pub(crate) fn end_export(process: &'static Process, pointer: CUdeviceptr) {
    process.exported.remove(pointer, |chunk| {
        if let Some(card) = Card::at(process, chunk.card) {
            card.end_export(chunk.bytes);
        }
    });
}

/// Pays for memory that was opened at `pointer`, in that chunk, until it is closed or the context ends, if it is not 0;
/// `false` if the share has not so much.
pub(crate) fn open(card: Card, pointer: CUdeviceptr, chunk: Chunk, context: u64) -> bool {
    let opened = &card.process().opened;
    let pay = |bytes| card.import(bytes).is_ok();
    let shared = Shared {
        pointer,
        card: card.index(),
        chunk,
        context,
    };
    reserve_with(card, || opened.add(shared, pay))
}

/// After memory of another process was given back.
pub(crate) fn close(process: &'static Process, pointer: CUdeviceptr) {
    process
        .opened
        .remove(pointer, |chunk| end_import(process, chunk));
}

/// After a context has ended, and with it what was opened in it.
pub(crate) fn end_context(process: &'static Process, context: u64) {
    process
        .opened
        .end_context(context, |chunk| end_import(process, chunk));
}

fn end_import(process: &'static Process, chunk: Charge) {
    if let Some(card) = Card::at(process, chunk.card) {
        card.end_import(chunk.bytes);
    }
}
