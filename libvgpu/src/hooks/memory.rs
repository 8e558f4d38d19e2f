//! Linear memory of the current context: plain, pitched, managed. And what all allocating hooks share.
//!
//! Reserve, call the driver, keep the charge or give it back. What does not fit is refused without calling the
//! driver.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;

use crate::blocks::{self, BLOCK, BlockClass, SmallArrays};
use crate::card::{Card, Target, current_context, current_device, target_of_current_context};
use crate::charge_map::{Charge, ChargeMap};
use crate::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUresult,
};
use crate::driver::{Library, Original};
use crate::guard::GateGuard;
use crate::hooks::driver_cache::{deny, reserve, reserve_ahead};
use crate::hooks::shared_memory;
use crate::process::Process;
use crate::table::{
    cuMemAlloc, cuMemAlloc_v2, cuMemAllocManaged, cuMemAllocPitch, cuMemAllocPitch_v2, cuMemFree_v2,
};

static ADVISE: Original = Original::new(Library::Cuda, c"cuMemAdvise");
type Advise = unsafe extern "C" fn(CUdeviceptr, usize, c_int, CUdevice) -> CUresult;

const CU_MEM_ATTACH_GLOBAL: c_uint = 1;
const CU_MEM_ADVISE_SET_PREFERRED_LOCATION: c_int = 3;
const CU_MEM_ADVISE_SET_ACCESSED_BY: c_int = 5;
const CU_DEVICE_CPU: CUdevice = -1;

/// What a pitched request takes if the driver pads rows to this.
const ROW_STEP: u64 = 512;

/// An allocation that is about to be made.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) target: Target,
    pub(crate) bytes: u64,
    /// Finds what is remembered as [`Charge::context`]; asked only once the allocation is made.
    pub(crate) context: fn() -> u64,
}

impl Request {
    /// Memory of the current context.
    pub(crate) fn in_current_context(bytes: u64) -> Self {
        Self {
            target: target_of_current_context(),
            bytes,
            context: || current_context().unwrap_or(0),
        }
    }

    /// Makes the allocation with `call` if it fits, and remembers it in `map` under the key that `key` finds.
    pub(crate) fn allocate(
        self,
        map: impl FnOnce(&'static Process) -> &'static ChargeMap,
        call: impl FnOnce() -> CUresult,
        key: impl FnOnce() -> u64,
    ) -> CUresult {
        let (card, process) = match self.limited() {
            Ok(Some(limited)) => limited,
            Ok(None) => return call(),
            Err(result) => return result,
        };
        if !reserve(card, self.bytes) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        let result = call();
        if result == CUDA_SUCCESS {
            map(process).insert(key(), self.charge(card));
        } else {
            card.release(self.bytes);
        }
        result
    }

    /// As [`Request::allocate`], for linear memory, which shares a block of the card if it is small.
    ///
    /// Where no block can be reserved, a small allocation is made all the same if one that is there certainly has a
    /// hole for it, and alone, so that none else gets that hole meanwhile: a program is not refused what it has paid
    /// for.
    fn allocate_linear(self, linear: &Linear<'_>) -> CUresult {
        let (card, process) = match self.limited() {
            Ok(Some(limited)) => limited,
            Ok(None) => return (linear.call)(),
            Err(result) => return result,
        };
        if !blocks::is_small(self.bytes) {
            if !reserve(card, self.bytes) {
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            return self.allocate_reserved(linear, card, self.bytes, None);
        }
        let at_once = || {
            if !card.may_have(BLOCK) {
                return None;
            }
            let attempt = process.pending_reservations.begin();
            card.try_reserve(BLOCK).then_some(attempt)
        };
        let attempt = match at_once() {
            Some(attempt) => attempt,
            None => {
                if let Some(result) = self.allocate_in_hole(linear, card) {
                    return result;
                }
                match reserve_ahead(card, BLOCK) {
                    Some(attempt) => attempt,
                    // Whoever has been waited for may have opened a block.
                    None => {
                        return self
                            .allocate_in_hole(linear, card)
                            .unwrap_or_else(|| deny(card));
                    }
                }
            }
        };
        let _passage = process.reuse_gate.enter();
        self.allocate_reserved(linear, card, BLOCK, Some(attempt))
    }

    /// Makes an allocation for which `reserved` bytes are charged, all of which it may not need if it is an `attempt`. It
    /// may turn out to be larger than it seemed: then it is undone if the rest does not fit.
    fn allocate_reserved(
        self,
        linear: &Linear<'_>,
        card: Card,
        reserved: u64,
        attempt: Option<GateGuard<'_>>,
    ) -> CUresult {
        let process = card.process();
        let result = (linear.call)();
        if result != CUDA_SUCCESS {
            card.release(reserved);
            return result;
        }
        let address = (linear.pointer)();
        let held = Charge {
            bytes: (linear.actual)(),
            ..self.charge(card)
        };
        let class = linear.block_class(held.card, held.context);
        let needed = if !blocks::is_small(held.bytes) {
            held.bytes
        } else if process.blocks.add(class, address, held.bytes) {
            BLOCK
        } else {
            0
        };
        card.release(reserved.saturating_sub(needed));
        // It is known now what is needed.
        drop(attempt);
        if needed > reserved && !reserve(card, needed.saturating_sub(reserved)) {
            card.release(reserved);
            if blocks::is_small(held.bytes) {
                process.blocks.remove(held.card, address, held.bytes);
            }
            linear.undo(address);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        process.pointers.insert(address, held);
        CUDA_SUCCESS
    }

    /// Makes a small allocation in a hole of a block that is charged already. `None` if there is none for certain.
    ///
    /// Should the driver open another block nevertheless, which the share does not have, the allocation is undone.
    fn allocate_in_hole(self, linear: &Linear<'_>, card: Card) -> Option<CUresult> {
        let process = card.process();
        let index = card.index();
        let has_arrays = process
            .small_arrays
            .get(usize::from(index))
            .is_none_or(SmallArrays::is_any);
        // Nobody knows where small arrays lie, or how rows will be padded. And none needs to be kept waiting where there is no room anyway.
        let is_exact = linear.kind != LinearKind::Pitched;
        if has_arrays || !is_exact || !process.blocks.may_have_hole(index, self.bytes) {
            return None;
        }
        let _alone = process.reuse_gate.enter_exclusive()?;
        let class = linear.block_class(index, current_context()?);
        let block_number = process
            .blocks
            .reserve_hole(&process.pointers, class, self.bytes)?;
        let result = (linear.call)();
        if result != CUDA_SUCCESS {
            let block = block_number.saturating_mul(BLOCK);
            if process.blocks.remove(index, block, self.bytes) {
                card.release(BLOCK);
            }
            return Some(result);
        }
        let address = (linear.pointer)();
        let (is_opened, is_closed) =
            process
                .blocks
                .settle(class, block_number, address, self.bytes);
        // Nobody may be waited for here, who may be waiting until this call is through.
        if is_opened && !is_closed && card.reserve(BLOCK).is_err() {
            process.blocks.remove(index, address, self.bytes);
            linear.undo(address);
            return Some(deny(card));
        }
        if is_closed && !is_opened {
            card.release(BLOCK);
        }
        process.pointers.insert(address, self.charge(card));
        Some(CUDA_SUCCESS)
    }

    /// The card whose limit applies, `None` if none does, or what to refuse with.
    pub(crate) fn limited(self) -> Result<Option<(Card, &'static Process)>, CUresult> {
        match self.target {
            Target::Unlimited => Ok(None),
            Target::Denied => Err(CUDA_ERROR_OUT_OF_MEMORY),
            Target::Limited(card) => Ok(Some((card, card.process()))),
        }
    }

    /// Whether what does not fit on the device goes to the host.
    fn spills(self) -> bool {
        matches!(self.target, Target::Limited(card) if card.spills())
    }

    pub(crate) fn charge(self, card: Card) -> Charge {
        Charge {
            bytes: self.bytes,
            card: card.index(),
            context: (self.context)(),
        }
    }
}

/// Which function linear memory is allocated with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinearKind {
    Plain,
    /// Its size is known only when the driver has padded the rows.
    Pitched,
    Managed,
}

/// How linear memory is allocated.
struct Linear<'a> {
    kind: LinearKind,
    /// Asks the driver.
    call: &'a dyn Fn() -> CUresult,
    /// What the driver has written.
    pointer: &'a dyn Fn() -> u64,
    /// The size as the driver has made it.
    actual: &'a dyn Fn() -> u64,
    /// Takes the pointer back from the program.
    erase: &'a dyn Fn(),
}

impl Linear<'_> {
    fn block_class(&self, card: u8, context: u64) -> BlockClass {
        BlockClass {
            card,
            context,
            is_managed: self.kind == LinearKind::Managed,
        }
    }

    /// Frees what the program shall not see.
    fn undo(&self, address: u64) {
        // SAFETY: allocated just now, and unknown to the program.
        unsafe { undo_allocation(address) };
        (self.erase)();
    }
}

/// Returns the charge of linear memory that is gone.
pub(crate) fn release_linear(process: &'static Process, pointer: u64, held: Charge) {
    let Some(card) = Card::at(process, held.card) else {
        return;
    };
    shared_memory::end_export(process, pointer);
    if !blocks::is_small(held.bytes) {
        card.release(held.bytes);
    } else if process.blocks.remove(held.card, pointer, held.bytes) {
        card.release(BLOCK);
    }
}

/// Frees linear memory with `call` and returns its charge, if it has one.
///
/// It is forgotten before the driver is called: afterwards the driver may have given the same pointer to
/// another thread.
pub(crate) fn free_linear(pointer: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    free_charged(|process| &process.pointers, pointer, call, release_linear)
}

/// Frees with `call` what is remembered under `key`, if anything is, and hands it to `release`.
pub(crate) fn free_charged(
    map: impl FnOnce(&'static Process) -> &'static ChargeMap,
    key: u64,
    call: impl FnOnce() -> CUresult,
    release: impl FnOnce(&'static Process, u64, Charge),
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let map = map(process);
    let held = map.remove(key);
    let result = call();
    let Some(held) = held else { return result };
    if result != CUDA_SUCCESS {
        map.insert(key, held);
    } else {
        release(process, key, held);
    }
    result
}

/// Frees an allocation that the program shall not see.
///
/// # Safety
/// The driver has just returned `address`.
pub(crate) unsafe fn undo_allocation(address: u64) {
    let Some(free) = cuMemFree_v2::ORIGINAL.address() else {
        return;
    };
    // SAFETY: the driver's function of that name has this signature.
    let free = unsafe { core::mem::transmute::<NonNull<c_void>, cuMemFree_v2::Function>(free) };
    // SAFETY: allocated just now, and unknown to the program.
    unsafe { free(address) };
}

/// Memory of the host, which the card reaches through its page tables, in the place of memory beyond the share.
///
/// # Safety
/// As for `cuMemAlloc_v2`.
unsafe fn spill(device: CUdevice, pointer: *mut CUdeviceptr, bytes: usize) -> CUresult {
    let Some(allocate) = cuMemAllocManaged::ORIGINAL.address() else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    // SAFETY: the driver's function of that name has this signature.
    let allocate =
        unsafe { core::mem::transmute::<NonNull<c_void>, cuMemAllocManaged::Function>(allocate) };
    // SAFETY: the caller's arguments.
    let result = unsafe { allocate(pointer, bytes, CU_MEM_ATTACH_GLOBAL) };
    if result == CUDA_SUCCESS
        && let Some(advise) = ADVISE.address()
    {
        // SAFETY: the signature of `cuMemAdvise`.
        let advise = unsafe { core::mem::transmute::<NonNull<c_void>, Advise>(advise) };
        // SAFETY: the driver has written the pointer.
        let address = unsafe { pointer.read() };
        for (advice, device) in [
            (CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU),
            (CU_MEM_ADVISE_SET_ACCESSED_BY, device),
        ] {
            // SAFETY: the range was allocated just now. Advice that a card does not take changes nothing.
            unsafe { advise(address, bytes, advice, device) };
        }
    }
    result
}

pub(crate) unsafe fn alloc(
    original: cuMemAlloc_v2::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let bytes_taken = blocks::rounded(bytes as u64);
    let request = Request::in_current_context(bytes_taken);
    let result = request.allocate_linear(&Linear {
        kind: LinearKind::Plain,
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes) },
        // SAFETY: the driver has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        actual: &|| bytes_taken,
        // SAFETY: the driver has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    });
    if result == CUDA_ERROR_OUT_OF_MEMORY
        && request.spills()
        && let Some(device) = current_device()
    {
        // SAFETY: the caller's arguments.
        return unsafe { spill(device, pointer, bytes) };
    }
    result
}

pub(crate) unsafe fn alloc_v1(
    original: cuMemAlloc::Function,
    pointer: *mut CUdeviceptr_v1,
    bytes: c_uint,
) -> CUresult {
    let bytes_taken = blocks::rounded(u64::from(bytes));
    Request::in_current_context(bytes_taken).allocate_linear(&Linear {
        kind: LinearKind::Plain,
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes) },
        // SAFETY: the driver has written the pointer.
        pointer: &|| u64::from(unsafe { pointer.read() }),
        actual: &|| bytes_taken,
        // SAFETY: the driver has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

pub(crate) unsafe fn alloc_managed(
    original: cuMemAllocManaged::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    let bytes_taken = blocks::rounded(bytes as u64);
    Request::in_current_context(bytes_taken).allocate_linear(&Linear {
        kind: LinearKind::Managed,
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes, flags) },
        // SAFETY: the driver has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        actual: &|| bytes_taken,
        // SAFETY: the driver has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

/// What rows of that pitch take together.
fn rows(pitch: u64, height: u64) -> u64 {
    pitch.checked_mul(height).map_or(u64::MAX, blocks::rounded)
}

/// What a pitched request takes, before the driver has said how it pads rows.
fn pitched(width: u64, height: u64) -> u64 {
    width
        .checked_next_multiple_of(ROW_STEP)
        .map_or(u64::MAX, |pitch| rows(pitch, height))
}

pub(crate) unsafe fn alloc_pitch(
    original: cuMemAllocPitch_v2::Function,
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    Request::in_current_context(pitched(width as u64, height as u64)).allocate_linear(&Linear {
        kind: LinearKind::Pitched,
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, pitch, width, height, element) },
        // SAFETY: the driver has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        // SAFETY: the driver has written the pitch.
        actual: &|| rows(unsafe { pitch.read() } as u64, height as u64),
        // SAFETY: the driver has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

pub(crate) unsafe fn alloc_pitch_v1(
    original: cuMemAllocPitch::Function,
    pointer: *mut CUdeviceptr_v1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    Request::in_current_context(pitched(u64::from(width), u64::from(height))).allocate_linear(
        &Linear {
            kind: LinearKind::Pitched,
            // SAFETY: the caller's arguments.
            call: &|| unsafe { original(pointer, pitch, width, height, element) },
            // SAFETY: the driver has written the pointer.
            pointer: &|| u64::from(unsafe { pointer.read() }),
            // SAFETY: the driver has written the pitch.
            actual: &|| rows(u64::from(unsafe { pitch.read() }), u64::from(height)),
            // SAFETY: the driver has written the pointer.
            erase: &|| unsafe { pointer.write(0) },
        },
    )
}
