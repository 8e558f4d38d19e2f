//! Fault injection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::protocol::{GpuIndex, MigRequest, Refusal, ReportedValue, Request};

use super::Kernel;

/// Faults of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// The GPU fell off the bus: requests about it are answered with "lost".
    pub lost: bool,
    /// Additional delay of every reply about the GPU.
    pub delay: Duration,
    /// Context creation fails as if memory were full.
    pub refuses_contexts: bool,
    /// Creation of GPU and compute instances fails.
    pub refuses_instances: bool,
    /// Recovery action that the driver requests (`nvmlDeviceGpuRecoveryAction_t`), until a reset; 0 is none.
    pub recovery_action: u32,
    /// State of the registration with the NVLink fabric (`nvmlGpuFabricState_t`) instead of "completed".
    #[serde(default)]
    pub fabric_state: Option<u8>,
    /// Health of the NVLink fabric (`NVML_GPU_FABRIC_HEALTH_MASK_*`); 0 reports nothing.
    #[serde(default)]
    pub fabric_health_mask: u32,
    /// A repair of the memory waits for a reset.
    #[serde(default)]
    pub repair_pending: bool,
    /// A row of the memory could not be remapped.
    #[serde(default)]
    pub repair_failed: bool,
    /// A monitor such as dcgm-exporter has the MIG instances open, which cannot be destroyed.
    #[serde(default)]
    pub holds_instances: bool,
    /// Temperature instead of that of the load.
    pub temperature_celsius: Option<u32>,
    /// Values that NVML does not report.
    pub unsupported: BTreeSet<ReportedValue>,
    /// NVML functions that fail for the GPU, by name, with their `nvmlReturn_t`.
    #[serde(default)]
    pub failing: BTreeMap<String, u32>,
}

impl Kernel {
    /// Replaces the faults of a GPU.
    ///
    /// # Errors
    /// If the GPU does not exist.
    pub fn set_faults(&mut self, gpu: GpuIndex, faults: Faults) -> Result<(), Refusal> {
        self.gpu_mut(gpu)?.faults = faults;
        Ok(())
    }

    /// Additional delay of the reply to a request.
    #[must_use]
    pub fn delay(&self, request: &Request) -> Duration {
        let gpu = self
            .gpu_of_request(request)
            .and_then(|gpu| self.gpu(gpu).ok());
        gpu.map_or(Duration::ZERO, |gpu| gpu.faults.delay)
    }

    /// Rejects requests about a GPU that cannot answer.
    pub(super) fn check_faults(&self, request: &Request) -> Result<(), Refusal> {
        let Some(faults) = self
            .gpu_of_request(request)
            .and_then(|gpu| self.gpu(gpu).ok())
        else {
            return Ok(());
        };
        let faults = &faults.faults;
        match request {
            _ if faults.lost => Err(Refusal::Lost),
            Request::CreateContext { .. } if faults.refuses_contexts => Err(Refusal::OutOfMemory),
            Request::Mig {
                request:
                    MigRequest::CreateGpuInstance { .. } | MigRequest::CreateComputeInstance { .. },
                ..
            } if faults.refuses_instances => Err(Refusal::InsufficientResources),
            Request::Mig {
                request: MigRequest::DestroyGpuInstance { .. },
                ..
            } if faults.holds_instances => Err(Refusal::InUse),
            _ => Ok(()),
        }
    }

    /// The GPU of a request. Requests that free resources always work, so they have none.
    fn gpu_of_request(&self, request: &Request) -> Option<GpuIndex> {
        match request {
            Request::GpuState { gpu }
            | Request::Samples { gpu, .. }
            | Request::Counters { gpu, .. }
            | Request::Accounting { gpu, .. }
            | Request::MemoryLimits { gpu, .. }
            | Request::Mig { gpu, .. }
            | Request::RegisterEvents { gpu }
            | Request::CreateContext { gpu }
            | Request::SetComputeMode { gpu, .. }
            | Request::CreateMemory { gpu, .. }
            | Request::MemoryInfo { gpu } => Some(*gpu),
            Request::Allocate { context, .. } => Some(self.contexts.get(context)?.gpu),
            Request::Hello { .. }
            | Request::Checkpoint { .. }
            | Request::SetManaged { .. }
            | Request::Mps(_)
            | Request::DestroyContext { .. }
            | Request::Free { .. }
            | Request::Release { .. }
            | Request::Share { .. }
            | Request::Open { .. }
            | Request::Export { .. }
            | Request::Import => None,
        }
    }
}
