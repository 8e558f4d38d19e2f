//! Event sets. Each has a connection of its own, on which the daemon sends registered events:
//! waiting blocks no other call, and a forked child's copy keeps the set alive.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeDoubleBitEccError,
    nvmlEventTypeXidCriticalError,
};
use simulator_machine::client::Connection;
use simulator_machine::protocol::{ClientKind, GpuEvent, Reply, Request};

use crate::abi::{NvmlResult, Out, entry_points};
use crate::error::NvmlError;
use crate::handle::{device, handle as handle_of};
use crate::library::{require_initialized, root};

type EventSet = Arc<Mutex<Connection>>;

/// Event sets by handle. Handles are never reused.
static SETS: Mutex<(usize, BTreeMap<usize, EventSet>)> =
    Mutex::new((FIRST_HANDLE, BTreeMap::new()));
const FIRST_HANDLE: usize = 0x0100_6e76_6576_0000;

/// Supported event types.
const SUPPORTED: c_ulonglong =
    (nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError) as c_ulonglong;

entry_points! {
    fn nvmlEventSetCreate(set: Out<nvmlEventSet_t>) {
        require_initialized()?;
        if set.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        let (connection, _) = Connection::open(&root(), ClientKind::EventSet)?;
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = sets.0;
        sets.0 += 1;
        sets.1.insert(handle, Arc::new(Mutex::new(connection)));
        set.set(std::ptr::without_provenance_mut(handle))
    }

    fn nvmlEventSetFree(set: nvmlEventSet_t) {
        require_initialized()?;
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        sets.1.remove(&set.addr()).map(drop).ok_or(NvmlError::InvalidArgument)
    }

    fn nvmlDeviceGetSupportedEventTypes(handle: nvmlDevice_t, types: Out<c_ulonglong>) {
        device(handle)?;
        types.set(SUPPORTED)
    }

    fn nvmlDeviceRegisterEvents(handle: nvmlDevice_t, types: c_ulonglong, set: nvmlEventSet_t) {
        let gpu = device(handle)?.gpu;
        let set = event_set(set)?;
        if types & !SUPPORTED != 0 {
            return Err(NvmlError::NotSupported);
        }
        if types == 0 {
            return Ok(());
        }
        let mut connection = set.lock().unwrap_or_else(PoisonError::into_inner);
        connection.request(&Request::RegisterEvents { gpu })?;
        Ok(())
    }

    fn nvmlEventSetWait(set: nvmlEventSet_t, data: Out<nvmlEventData_t>, milliseconds: c_uint) { wait(set, data, milliseconds) }
    fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: Out<nvmlEventData_t>, milliseconds: c_uint) { wait(set, data, milliseconds) }
}

fn event_set(handle: nvmlEventSet_t) -> NvmlResult<EventSet> {
    require_initialized()?;
    let sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    sets.1
        .get(&handle.addr())
        .cloned()
        .ok_or(NvmlError::InvalidArgument)
}

fn wait(set: nvmlEventSet_t, data: Out<nvmlEventData_t>, milliseconds: c_uint) -> NvmlResult {
    let set = event_set(set)?;
    if data.is_null() {
        return Err(NvmlError::InvalidArgument);
    }
    let mut connection = set.lock().unwrap_or_else(PoisonError::into_inner);
    let event = match connection.next_event(Duration::from_millis(milliseconds.into()))? {
        Some(Reply::Event(event)) => event,
        Some(_) => return Err(NvmlError::Unknown),
        None => return Err(NvmlError::Timeout),
    };
    let (kind, code, instance) = match event {
        GpuEvent::Xid { code, instance, .. } => (nvmlEventTypeXidCriticalError, code, instance),
        GpuEvent::DoubleBitEcc { .. } => (nvmlEventTypeDoubleBitEccError, 0, None),
    };
    data.set(nvmlEventData_t {
        device: handle_of(event.gpu()),
        eventType: kind.into(),
        eventData: code,
        gpuInstanceId: instance.unwrap_or(c_uint::MAX),
        computeInstanceId: c_uint::MAX,
    })
}
