//! Creates, exports and releases physical memory repeatedly: the account returns to its start, and handles recur.

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd as _, OwnedFd};

use anyhow::{Result, ensure};
use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::card::{Card, error_name};
use crate::memory::on_device_0;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of allocations
    #[arg(long, default_value_t = 1000)]
    rounds: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Recurrence {
    rounds: usize,
    distinct_handles: usize,
    free_bytes_before: usize,
    free_bytes_after: usize,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    const BYTES: usize = 64 << 20;
    let _card = Card::open()?;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = kind;
        &mut properties.location
    });
    let (free_bytes_before, _) = result::mem_get_info()?;
    let mut handles = BTreeSet::new();
    for round in 0..arguments.rounds {
        let mut handle = 0;
        // SAFETY: writes one handle; the properties live through the call.
        let code = unsafe { sys::cuMemCreate(&raw mut handle, BYTES, &raw const properties, 0) };
        let error = error_name(code);
        ensure!(error.is_none(), "round {round}: cuMemCreate: {error:?}");
        handles.insert(handle);
        let mut exported = -1;
        let place = (&raw mut exported).cast();
        // SAFETY: writes one file descriptor; the handle is valid.
        let code = unsafe { sys::cuMemExportToShareableHandle(place, handle, kind, 0) };
        let error = error_name(code);
        ensure!(error.is_none(), "round {round}: cannot export: {error:?}");
        // SAFETY: just created, and owned by this process.
        drop(unsafe { OwnedFd::from_raw_fd(exported) });
        // SAFETY: the handle is valid, and not used afterwards.
        let error = error_name(unsafe { sys::cuMemRelease(handle) });
        ensure!(error.is_none(), "round {round}: cuMemRelease: {error:?}");
    }
    let (free_bytes_after, _) = result::mem_get_info()?;
    crate::print(&Recurrence {
        rounds: arguments.rounds,
        distinct_handles: handles.len(),
        free_bytes_before,
        free_bytes_after,
    })
}
