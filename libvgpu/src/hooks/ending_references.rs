//! References to physical memory that a call of libcuda ends: a handle, or mappings to addresses, sparse arrays and
//! multicast objects.
//!
//! All are removed before the call: afterwards other memory may have the same handles. They are restored if it fails.

use crate::charge_map::ChargeMap;
use crate::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemGenericAllocationHandle, CUresult,
};
use crate::hooks::physical::{self, DroppedReference};
use crate::process::Process;
use crate::records::{Binding, Mapping};
use crate::temporary_list::TemporaryList;

/// The record of a reference, with its key.
#[derive(Clone, Copy)]
enum Referrer {
    Handle,
    Mapping(CUdeviceptr, Mapping),
    Tile(u64, Binding),
    Binding(u64, Binding),
}

impl Referrer {
    fn restore(self, process: &Process) {
        // Without memory for the record, the charge stays until the process ends.
        let _is_inserted = match self {
            Self::Handle => true,
            Self::Mapping(at, mapping) => process.mappings.insert(at, mapping),
            Self::Tile(key, tile) => process.array_mappings.insert(key, tile),
            Self::Binding(key, binding) => process.bindings.insert(key, binding),
        };
    }
}

/// References that are removed until the call has succeeded.
pub(crate) struct EndingReferences {
    process: &'static Process,
    list: TemporaryList<(Referrer, DroppedReference)>,
}

/// Ends the references `of` a process with `call`.
pub(crate) fn end_references(
    of: impl FnOnce(&'static Process) -> Option<EndingReferences>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let Some(ending) = of(process) else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    let result = call();
    ending.end(result);
    result
}

/// The constructors return `None` without memory for the list.
impl EndingReferences {
    /// Returns a list for `count` references, and those of multicast objects that end with them.
    fn with_capacity(process: &'static Process, count: usize) -> Option<Self> {
        let count = count.checked_add(process.bindings.count(|_| true))?;
        let list = TemporaryList::with_capacity(count)?;
        Some(Self { process, list })
    }

    /// Removes a handle.
    pub(crate) fn of_handle(
        process: &'static Process,
        handle: CUmemGenericAllocationHandle,
    ) -> Option<Self> {
        let mut ending = Self::with_capacity(process, 1)?;
        ending.push(
            Referrer::Handle,
            physical::begin_drop_handle(process, handle),
        );
        Some(ending)
    }

    /// Removes the mappings in a range. It consists of whole mappings; libcuda rejects others.
    pub(crate) fn of_addresses(
        process: &'static Process,
        address: CUdeviceptr,
        bytes: u64,
    ) -> Option<Self> {
        let mappings = || mappings_in(process, address, bytes);
        let count = mappings().count();
        let mut ending = Self::with_capacity(process, count)?;
        for at in mappings().take(count) {
            if let Some(mapping) = process.mappings.remove(at) {
                let dropped = physical::begin_drop_mapping(process, mapping.memory);
                ending.push(Referrer::Mapping(at, mapping), dropped);
            }
        }
        Some(ending)
    }

    /// Removes the mappings to an array.
    pub(crate) fn of_array(process: &'static Process, array: u64) -> Option<Self> {
        let count = process.array_mappings.count(|tile| tile.object == array);
        let mut ending = Self::with_capacity(process, count)?;
        ending.push_all(array, &process.array_mappings, Referrer::Tile);
        Some(ending)
    }

    /// Removes a binding to a multicast object.
    pub(crate) fn of_binding(process: &'static Process, key: u64) -> Option<Self> {
        let mut ending = Self::with_capacity(process, 0)?;
        if let Some(binding) = process.bindings.remove(key) {
            let dropped = physical::begin_drop_mapping(process, binding.memory);
            ending.push(Referrer::Binding(key, binding), dropped);
        }
        Some(ending)
    }

    fn push(&mut self, referrer: Referrer, dropped: DroppedReference) {
        self.list.push((referrer, dropped));
        if let Some(object) = dropped.ended_object() {
            let bindings = &self.process.bindings;
            self.push_all(object, bindings, Referrer::Binding);
        }
    }

    /// Removes all references of an object. The charge of one that another thread adds meanwhile, to an object that is
    /// being destroyed, stays until the process ends.
    fn push_all(
        &mut self,
        object: u64,
        map: &ChargeMap<Binding>,
        referrer: fn(u64, Binding) -> Referrer,
    ) {
        let process = self.process;
        let ends = |binding: &Binding| binding.object == object;
        map.remove_all(ends, |key, binding| {
            let dropped = physical::begin_drop_mapping(process, binding.memory);
            self.list.push((referrer(key, binding), dropped));
        });
    }

    /// Confirms or restores the references after the call.
    fn end(mut self, result: CUresult) {
        let process = self.process;
        for (referrer, dropped) in self.list.as_mut_slice() {
            dropped.end(process, result);
            if result != CUDA_SUCCESS {
                referrer.restore(process);
            }
        }
    }
}

/// Returns the addresses of the mappings in a range.
fn mappings_in(
    process: &Process,
    address: CUdeviceptr,
    bytes: u64,
) -> impl Iterator<Item = CUdeviceptr> {
    let end = address.saturating_add(bytes);
    let mut at = address;
    core::iter::from_fn(move || {
        let mapping = process.mappings.get(at).filter(|_| at < end)?;
        let found = at;
        at = at.saturating_add(mapping.bytes.max(1));
        Some(found)
    })
}
