//! References to physical memory that a call of libcuda ends: a handle, or mappings to addresses, sparse arrays and
//! multicast objects.
//!
//! All are removed before the call: afterwards other memory may have the same handles. They are restored if it fails.

use core::cell::Cell;

use crate::accounts::charge_map::ChargeMap;
use crate::accounts::records::{Binding, Mapping, NO_GPU};
use crate::driver_api::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemGenericAllocationHandle, CUresult,
};
use crate::hooks::physical::{self, DroppedReference};
use crate::process::Process;
use crate::system::temporary_list::TemporaryList;

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

/// Ends references with `call`; `of` removes them from the records of the process.
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
    fn with_capacity(process: &'static Process, capacity: usize) -> Option<Self> {
        let list = TemporaryList::with_capacity(capacity)?;
        Some(Self { process, list })
    }

    /// Removes a handle.
    pub(crate) fn of_handle(
        process: &'static Process,
        handle: CUmemGenericAllocationHandle,
    ) -> Option<Self> {
        let mut ending = Self::with_capacity(process, most_ended(process, handle))?;
        let dropped = physical::begin_drop_handle(process, handle);
        ending.push(Referrer::Handle, dropped);
        Some(ending)
    }

    /// Removes the mappings in a range. It consists of whole mappings; libcuda rejects others.
    pub(crate) fn of_addresses(
        process: &'static Process,
        address: CUdeviceptr,
        bytes: u64,
    ) -> Option<Self> {
        let mappings = || mappings_in(process, address, bytes);
        let capacity = mappings()
            .map(|(_, mapping)| most_ended(process, mapping.memory))
            .fold(0, usize::saturating_add);
        let mut ending = Self::with_capacity(process, capacity)?;
        for (at, _) in mappings() {
            if ending.list.room() == 0 {
                break;
            }
            if let Some(mapping) = process.mappings.remove(at) {
                let dropped = physical::begin_drop_mapping(process, mapping.memory);
                ending.push(Referrer::Mapping(at, mapping), dropped);
            }
        }
        Some(ending)
    }

    /// Removes the mappings to an array.
    pub(crate) fn of_array(process: &'static Process, array: u64) -> Option<Self> {
        let map = &process.array_mappings;
        let mut ending = Self::with_capacity(process, references_of(map, array))?;
        ending.push_all(array, map, Referrer::Tile);
        Some(ending)
    }

    /// Removes a binding to a multicast object.
    pub(crate) fn of_binding(process: &'static Process, key: u64) -> Option<Self> {
        let mut ending = Self::with_capacity(process, 1)?;
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

    /// Removes all references of an object, except those that another thread adds meanwhile.
    fn push_all(
        &mut self,
        object: u64,
        map: &ChargeMap<Binding>,
        referrer: fn(u64, Binding) -> Referrer,
    ) {
        let process = self.process;
        let room = Cell::new(self.list.room());
        let ends = |binding: &Binding| binding.object == object && room.get() != 0;
        map.remove_all(ends, |key, binding| {
            let dropped = physical::begin_drop_mapping(process, binding.memory);
            self.list.push((referrer(key, binding), dropped));
            room.set(self.list.room());
        });
    }

    /// Confirms or restores the references after the call.
    fn end(mut self, result: CUresult) {
        let process = self.process;
        // The reference that took the record along is the last.
        for (referrer, dropped) in self.list.as_mut_slice().iter().rev() {
            dropped.end(process, result);
            if result != CUDA_SUCCESS {
                referrer.restore(process);
            }
        }
    }
}

/// Returns how many references end with one of this memory: its own, and all of a multicast object.
fn most_ended(process: &Process, memory: CUmemGenericAllocationHandle) -> usize {
    let known = process.physical.get(memory);
    match known.is_some_and(|known| known.gpu == NO_GPU) {
        true => references_of(&process.bindings, memory).saturating_add(1),
        false => 1,
    }
}

fn references_of(map: &ChargeMap<Binding>, object: u64) -> usize {
    map.count(|binding| binding.object == object)
}

/// Returns the mappings in a range, with their addresses.
fn mappings_in(
    process: &Process,
    address: CUdeviceptr,
    bytes: u64,
) -> impl Iterator<Item = (CUdeviceptr, Mapping)> {
    let end = address.saturating_add(bytes);
    let mut at = address;
    core::iter::from_fn(move || {
        let mapping = process.mappings.get(at).filter(|_| at < end)?;
        let found = at;
        at = at.saturating_add(mapping.bytes.max(1));
        Some((found, mapping))
    })
}
