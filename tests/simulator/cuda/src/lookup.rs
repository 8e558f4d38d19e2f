//! `cuGetProcAddress`: every entry point by name, CUDA version and stream flavour; and
//! `cuGetExportTable`.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Answer, EntryPoint, Out, Text, entry_points};
use crate::error::CudaError;
use crate::{
    array, capture, checkpoint, context, copy, device, error, event, external, fill, graph, green,
    host, ipc, launch, library, managed, memory, module, multicast, pointer, pool, stream,
    stream_memory, unlisted, virtual_memory,
};

/// The tables of all modules.
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
    error::ENTRY_POINTS,
    event::ENTRY_POINTS,
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

/// Functions that a later version knows under another name: the name, the version, and the name
/// under which it is exported.
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
                status.set_if_wanted(FOUND);
                address.set(found)
            }
            Err(reason) => {
                status.set_if_wanted(reason);
                address.set(std::ptr::null())?;
                // With a status the caller learns the reason there.
                if status.is_null() { Err(CudaError::NotFound) } else { Ok(()) }
            }
        }
    }
}

/// The newest form of a function that a program for CUDA `version` can use; the inner error is the
/// status why there is none.
fn find(name: &str, version: c_int, flags: u64) -> Answer<Result<*const c_void, c_uint>> {
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
    fn a_name_and_a_version_mean_one_form() {
        let mut forms = BTreeSet::new();
        for entry in TABLES.iter().copied().flatten() {
            assert!(
                forms.insert((entry.name, entry.since)),
                "{} {} twice",
                entry.name,
                entry.since
            );
        }
        assert!(forms.len() > 200, "{} functions", forms.len());
    }

    #[test]
    fn every_form_is_found_under_its_version_and_flavour() {
        for entry in TABLES.iter().copied().flatten() {
            let of_version = |flags| find(entry.name, entry.since, flags).unwrap().unwrap();
            let renamed = RENAMED
                .iter()
                .any(|(name, since, _)| entry.name == *name && entry.since >= *since);
            assert!(!renamed, "{} hides its new name", entry.name);
            assert_eq!(of_version(LEGACY_STREAM), entry.address, "{}", entry.name);
            let other = of_version(PER_THREAD_DEFAULT_STREAM);
            assert_eq!(other, entry.per_thread.unwrap_or(entry.address));
        }
    }
}
