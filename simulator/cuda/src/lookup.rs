//! `cuGetProcAddress`: entry points by name, CUDA version and default stream mode.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{CudaResult, EntryPoint, Out, Text, entry_points};
use crate::error::CudaError;
use crate::{
    array, capture, checkpoint, context, copy, device, error_names, event, export_table, external,
    fill, graph, green, host, ipc, launch, library, linker, managed, memory, module, multicast,
    pointer, pool, stream, stream_memory, unlisted, virtual_memory,
};

const TABLES: &[&[EntryPoint]] = &[
    array::ENTRY_POINTS,
    array::SPARSE_ENTRY_POINTS,
    capture::ENTRY_POINTS,
    checkpoint::ENTRY_POINTS,
    context::ENTRY_POINTS,
    copy::ENTRY_POINTS,
    copy::BATCH_ENTRY_POINTS,
    copy::SHAPED_ENTRY_POINTS,
    device::ENTRY_POINTS,
    error_names::ENTRY_POINTS,
    event::ENTRY_POINTS,
    export_table::ENTRY_POINTS,
    external::ENTRY_POINTS,
    fill::ENTRY_POINTS,
    graph::ENTRY_POINTS,
    graph::EXEC_ENTRY_POINTS,
    graph::MEMORY_ENTRY_POINTS,
    graph::NODE_ENTRY_POINTS,
    green::ENTRY_POINTS,
    host::ENTRY_POINTS,
    ipc::ENTRY_POINTS,
    launch::ENTRY_POINTS,
    launch::legacy::ENTRY_POINTS,
    library::ENTRY_POINTS,
    linker::ENTRY_POINTS,
    ENTRY_POINTS,
    managed::ENTRY_POINTS,
    memory::ENTRY_POINTS,
    module::ENTRY_POINTS,
    multicast::ENTRY_POINTS,
    pointer::ENTRY_POINTS,
    pool::ENTRY_POINTS,
    pool::ATTRIBUTE_ENTRY_POINTS,
    pool::SHARE_ENTRY_POINTS,
    stream::ENTRY_POINTS,
    stream_memory::ENTRY_POINTS,
    unlisted::ENTRY_POINTS,
    virtual_memory::ENTRY_POINTS,
];

/// Functions with another name from a version on: name, version, exported name.
const RENAMED: &[(&str, c_int, &str)] =
    &[("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags")];

/// `CU_GET_PROC_ADDRESS_*`
const LEGACY_STREAM: u64 = 1 << 0;
const PER_THREAD_DEFAULT_STREAM: u64 = 1 << 1;

/// `CU_GET_PROC_ADDRESS_SUCCESS`, `_SYMBOL_NOT_FOUND`, `_VERSION_NOT_SUFFICIENT`
const FOUND: c_uint = 0;
const NAME_NOT_FOUND: c_uint = 1;
const VERSION_NOT_SUFFICIENT: c_uint = 2;

entry_points! {
    "cuGetProcAddress" 11030 fn cuGetProcAddress(name: Text, address: Out<*const c_void>, version: c_int, flags: u64) {
        match find(&name.get()?, version, flags)? {
            Ok(found) => address.set(found),
            Err(_) => {
                address.set(std::ptr::null())?;
                Err(CudaError::NotFound)
            }
        }
    }

    "cuGetProcAddress" 12000 fn cuGetProcAddress_v2(name: Text, address: Out<*const c_void>, version: c_int, flags: u64, status: Out<c_uint>) {
        match find(&name.get()?, version, flags)? {
            Ok(found) => {
                status.set_if_not_null(FOUND);
                address.set(found)
            }
            Err(reason) => {
                status.set_if_not_null(reason);
                address.set(std::ptr::null())?;
                // The status output carries the reason.
                if status.is_null() { Err(CudaError::NotFound) } else { Ok(()) }
            }
        }
    }
}

/// Returns the newest form of a function that a program for CUDA `version` can use. The inner error
/// is the status.
fn find(name: &str, version: c_int, flags: u64) -> CudaResult<Result<*const c_void, c_uint>> {
    if version < 0 || flags & !(LEGACY_STREAM | PER_THREAD_DEFAULT_STREAM) != 0 {
        return Err(CudaError::InvalidValue);
    }
    let renamed = RENAMED
        .iter()
        .find(|(old, since, _)| *old == name && *since <= version);
    let name = renamed.map_or(name, |(_, _, exported)| exported);
    let forms = || {
        TABLES
            .iter()
            .copied()
            .flatten()
            .filter(|entry| entry.name == name)
    };
    let newest = forms()
        .filter(|entry| entry.since <= version)
        .max_by_key(|entry| entry.since);
    Ok(match newest {
        Some(entry) if flags & PER_THREAD_DEFAULT_STREAM != 0 => {
            Ok(entry.per_thread.unwrap_or(entry.address))
        }
        Some(entry) => Ok(entry.address),
        None if forms().next().is_some() => Err(VERSION_NOT_SUFFICIENT),
        None => Err(NAME_NOT_FOUND),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn lists_each_name_and_version_once() {
        let mut forms = BTreeSet::new();
        for entry in TABLES.iter().copied().flatten() {
            assert!(
                forms.insert((entry.name, entry.since)),
                "duplicate form: {} {}",
                entry.name,
                entry.since
            );
        }
        assert!(forms.len() > 200, "only {} forms", forms.len());
    }

    #[test]
    fn finds_every_form_by_version_and_stream_mode() {
        for entry in TABLES.iter().copied().flatten() {
            let of_version = |flags| find(entry.name, entry.since, flags).unwrap().unwrap();
            let renamed = RENAMED
                .iter()
                .any(|(name, since, _)| entry.name == *name && entry.since >= *since);
            assert!(!renamed, "{} hides its renamed form", entry.name);
            assert_eq!(of_version(LEGACY_STREAM), entry.address, "{}", entry.name);
            let other = of_version(PER_THREAD_DEFAULT_STREAM);
            assert_eq!(other, entry.per_thread.unwrap_or(entry.address));
        }
    }
}
