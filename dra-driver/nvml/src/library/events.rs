//! Event sets.
//!
//! After a GPU fell off the bus, NVML fails every wait on a set with that GPU. Lost GPUs are therefore detected, reported
//! once and excluded, and the other GPUs are watched with a new set.

use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::processes::instance;
use super::{Handle, Shared, call};
use crate::{Event, EventKind, GpuUuid, RecoveryAction, Status, WatchError};

/// Events to register, if the GPU supports them.
const WANTED: [u32; 6] = [
    sys::nvmlEventTypeXidCriticalError,
    sys::nvmlEventTypeDoubleBitEccError,
    sys::nvmlEventMigConfigChange,
    sys::nvmlEventTypeFatalPoisonError,
    sys::nvmlEventTypeGpuUnavailableError,
    sys::nvmlEventTypeGpuRecoveryAction,
];

/// An NVML event set and its GPUs.
pub(super) struct EventSet {
    shared: Arc<Shared>,
    set: RawSet,
    gpus: Vec<(GpuUuid, Handle)>,
    /// Events of lost GPUs that were not returned yet.
    pending: VecDeque<Event>,
}

struct RawSet(sys::nvmlEventSet_t);

// SAFETY: any thread may use a set, one at a time; `&mut self` of `EventSet` ensures that.
unsafe impl Send for RawSet {}

impl EventSet {
    pub(super) fn open(shared: Arc<Shared>, uuids: &[GpuUuid]) -> Result<Self, WatchError> {
        let mut gpus = Vec::with_capacity(uuids.len());
        for gpu in uuids {
            let handle = shared.handle(gpu).map_err(|status| WatchError::Register {
                gpu: gpu.clone(),
                status,
            })?;
            gpus.push((gpu.clone(), handle));
        }
        Self::register(shared, gpus)
    }

    fn register(shared: Arc<Shared>, gpus: Vec<(GpuUuid, Handle)>) -> Result<Self, WatchError> {
        let mut set: sys::nvmlEventSet_t = null_mut();
        call!(shared.lib(), nvmlEventSetCreate(&raw mut set)).map_err(WatchError::Create)?;
        let this = Self {
            shared,
            set: RawSet(set),
            gpus,
            pending: VecDeque::new(),
        };
        for (gpu, handle) in &this.gpus {
            this.add(*handle).map_err(|status| WatchError::Register {
                gpu: gpu.clone(),
                status,
            })?;
        }
        Ok(this)
    }

    fn add(&self, handle: Handle) -> Result<(), Status> {
        let mut supported = 0;
        call!(
            self.shared.lib(),
            nvmlDeviceGetSupportedEventTypes(handle.0, &raw mut supported)
        )?;
        let wanted = WANTED
            .into_iter()
            .fold(0, |bits, bit| bits | u64::from(bit))
            & supported;
        call!(
            self.shared.lib(),
            nvmlDeviceRegisterEvents(handle.0, wanted, self.set.0)
        )
    }

    pub(super) fn wait(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError> {
        if let Some(event) = self.pending.pop_front() {
            return Ok(Some(event));
        }
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let mut data = sys::nvmlEventData_t {
            device: null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        match call!(
            self.shared.lib(),
            nvmlEventSetWait_v2(self.set.0, &raw mut data, milliseconds)
        ) {
            Ok(()) => self.event(&data).map(Some),
            Err(Status::Timeout) => Ok(None),
            Err(Status::GpuLost) => self.exclude_lost().map(Some),
            Err(status) => Err(WatchError::Wait(status)),
        }
    }

    fn event(&self, data: &sys::nvmlEventData_t) -> Result<Event, WatchError> {
        let known = self
            .gpus
            .iter()
            .find(|(_, handle)| handle.0 == data.device)
            .map(|(gpu, _)| gpu.clone());
        let gpu = match known {
            Some(gpu) => gpu,
            None => self
                .shared
                .device(Handle(data.device))
                .uuid()
                .map(GpuUuid::new)
                .map_err(|error| WatchError::Wait(error.into()))?,
        };
        Ok(Event {
            gpu,
            gpu_instance: instance(data.gpuInstanceId),
            compute_instance: instance(data.computeInstanceId),
            kind: kind(data.eventType, data.eventData),
        })
    }

    /// Replaces the set by one without the lost GPUs. Returns the first event of a lost GPU; the others become pending.
    fn exclude_lost(&mut self) -> Result<Event, WatchError> {
        let (lost, alive): (Vec<_>, Vec<_>) = std::mem::take(&mut self.gpus)
            .into_iter()
            .partition(|(_, handle)| matches!(self.shared.memory(*handle), Err(Status::GpuLost)));
        let mut pending: VecDeque<Event> = lost
            .into_iter()
            .map(|(gpu, _)| Event {
                gpu,
                gpu_instance: None,
                compute_instance: None,
                kind: EventKind::Lost,
            })
            .collect();
        let first = pending
            .pop_front()
            .ok_or(WatchError::Wait(Status::GpuLost))?;
        *self = Self::register(Arc::clone(&self.shared), alive)?;
        self.pending = pending;
        Ok(first)
    }
}

impl Drop for EventSet {
    fn drop(&mut self) {
        if let Err(status) = call!(self.shared.lib(), nvmlEventSetFree(self.set.0)) {
            tracing::debug!(%status, "cannot free the NVML event set");
        }
    }
}

fn kind(event_type: u64, data: u64) -> EventKind {
    match u32::try_from(event_type) {
        Ok(sys::nvmlEventTypeXidCriticalError) => EventKind::Xid(data),
        Ok(sys::nvmlEventTypeDoubleBitEccError) => EventKind::DoubleBitEcc,
        Ok(sys::nvmlEventMigConfigChange) => EventKind::MigConfigChange,
        Ok(sys::nvmlEventTypeGpuUnavailableError) => EventKind::Unavailable,
        Ok(sys::nvmlEventTypeGpuRecoveryAction) => {
            EventKind::RecoveryAction(RecoveryAction::from_value(data))
        }
        _ => EventKind::Other(event_type),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_event_types_of_the_header() {
        assert_eq!(kind(8, 79), EventKind::Xid(79));
        assert_eq!(kind(2, 0), EventKind::DoubleBitEcc);
        assert_eq!(kind(0x100, 0), EventKind::MigConfigChange);
        assert_eq!(kind(0x4000, 0), EventKind::Unavailable);
        assert_eq!(
            kind(0x8000, 1),
            EventKind::RecoveryAction(RecoveryAction::GpuReset)
        );
        assert_eq!(kind(1 << 40, 1), EventKind::Other(1 << 40));
    }
}
