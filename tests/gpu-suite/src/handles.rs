//! Creates and releases objects of each kind repeatedly: their handles recur, and the account returns to its start.

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::ptr;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};
use crate::memory::{descriptor, on_device_0};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of objects of each kind; of contexts, a fiftieth
    #[arg(long, default_value_t = 1000)]
    rounds: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Recurrence {
    kind: &'static str,
    rounds: usize,
    distinct_values: usize,
    free_bytes_before: usize,
    free_bytes_after: usize,
}

/// Memory of an object that has some.
const BYTES: usize = 64 << 20;
/// Contexts are created in tenths of a second.
const ROUNDS_PER_CONTEXT: usize = 50;

/// A kind, and what creates and releases one object of it; returns its handle.
type Kind = (&'static str, fn() -> Result<u64>);

const KINDS: [Kind; 8] = [
    ("memory handle", physical),
    ("device pointer", pointer),
    ("array", array),
    ("pool", pool),
    ("stream", stream),
    ("event", event),
    (CONTEXT, context),
    ("graph", graph),
];
const CONTEXT: &str = "context";

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let _gpu = Gpu::open()?;
    let seen = KINDS.iter().map(|(kind, cycle)| {
        let rounds = match *kind {
            CONTEXT => (arguments.rounds / ROUNDS_PER_CONTEXT).max(2),
            _ => arguments.rounds,
        };
        // The first use of a function may take memory of the driver that stays.
        let mut values = BTreeSet::from([cycle().with_context(|| format!("{kind}, first"))?]);
        let (free_bytes_before, _) = result::mem_get_info()?;
        for round in 1..rounds {
            values.insert(cycle().with_context(|| format!("{kind}, round {round}"))?);
        }
        let (free_bytes_after, _) = result::mem_get_info()?;
        Ok(Recurrence {
            kind,
            rounds,
            distinct_values: values.len(),
            free_bytes_before,
            free_bytes_after,
        })
    });
    crate::print(&seen.collect::<Result<Vec<_>>>()?)
}

fn check(call: &str, code: sys::CUresult) -> Result<()> {
    let error = error_name(code);
    ensure!(error.is_none(), "{call}: {error:?}");
    Ok(())
}

fn value<T>(handle: *mut T) -> Result<u64> {
    Ok(u64::try_from(handle.addr())?)
}

/// Physical memory that is exported while it lives.
fn physical() -> Result<u64> {
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = kind;
        &mut properties.location
    });
    let mut handle = 0;
    // SAFETY: writes one handle; the properties live through the call.
    let code = unsafe { sys::cuMemCreate(&raw mut handle, BYTES, &raw const properties, 0) };
    check("cuMemCreate", code)?;
    let mut exported = -1;
    let place = (&raw mut exported).cast();
    // SAFETY: writes one file descriptor; the handle is valid.
    let code = unsafe { sys::cuMemExportToShareableHandle(place, handle, kind, 0) };
    check("cuMemExportToShareableHandle", code)?;
    // SAFETY: just created, and owned by this process.
    drop(unsafe { OwnedFd::from_raw_fd(exported) });
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuMemRelease", unsafe { sys::cuMemRelease(handle) })?;
    Ok(handle)
}

fn pointer() -> Result<u64> {
    let mut pointer = 0;
    // SAFETY: writes one pointer.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&raw mut pointer, BYTES)
    })?;
    // SAFETY: memory that is freed once.
    check("cuMemFree", unsafe { sys::cuMemFree_v2(pointer) })?;
    Ok(pointer)
}

fn array() -> Result<u64> {
    let (mut array, descriptor) = (ptr::null_mut(), descriptor(BYTES));
    // SAFETY: writes one handle; the descriptor lives through the call.
    let code = unsafe { sys::cuArray3DCreate_v2(&raw mut array, &raw const descriptor) };
    check("cuArray3DCreate", code)?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuArrayDestroy", unsafe { sys::cuArrayDestroy(array) })?;
    value(array)
}

/// A pool with memory that is allocated and freed.
fn pool() -> Result<u64> {
    let properties = on_device_0(|properties: &mut sys::CUmemPoolProps| {
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        &mut properties.location
    });
    let (mut pool, mut pointer, stream) = (ptr::null_mut(), 0, ptr::null_mut());
    // SAFETY: writes one handle; the properties live through the call.
    let code = unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) };
    check("cuMemPoolCreate", code)?;
    // SAFETY: writes one pointer; the null stream is the default one.
    let code = unsafe { sys::cuMemAllocFromPoolAsync(&raw mut pointer, BYTES, pool, stream) };
    check("cuMemAllocFromPoolAsync", code)?;
    // SAFETY: memory that is freed once.
    check("cuMemFreeAsync", unsafe {
        sys::cuMemFreeAsync(pointer, stream)
    })?;
    // SAFETY: the default stream.
    check("cuStreamSynchronize", unsafe {
        sys::cuStreamSynchronize(stream)
    })?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuMemPoolDestroy", unsafe { sys::cuMemPoolDestroy(pool) })?;
    value(pool)
}

fn stream() -> Result<u64> {
    let mut stream = ptr::null_mut();
    // SAFETY: writes one handle.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&raw mut stream, 1)
    })?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuStreamDestroy", unsafe {
        sys::cuStreamDestroy_v2(stream)
    })?;
    value(stream)
}

fn event() -> Result<u64> {
    let mut event = ptr::null_mut();
    // SAFETY: writes one handle.
    check("cuEventCreate", unsafe {
        sys::cuEventCreate(&raw mut event, 0)
    })?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) })?;
    value(event)
}

/// A context, which is current until it is destroyed, with memory that is never freed.
fn context() -> Result<u64> {
    let (mut context, mut pointer) = (ptr::null_mut(), 0);
    // SAFETY: writes one handle.
    check("cuCtxCreate", unsafe {
        sys::cuCtxCreate_v4(&raw mut context, ptr::null_mut(), 0, 0)
    })?;
    // SAFETY: writes one pointer.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&raw mut pointer, BYTES)
    })?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuCtxDestroy", unsafe { sys::cuCtxDestroy_v2(context) })?;
    value(context)
}

fn graph() -> Result<u64> {
    let mut graph = ptr::null_mut();
    // SAFETY: writes one handle.
    check("cuGraphCreate", unsafe {
        sys::cuGraphCreate(&raw mut graph, 0)
    })?;
    // SAFETY: the handle is valid, and not used afterwards.
    check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) })?;
    value(graph)
}
