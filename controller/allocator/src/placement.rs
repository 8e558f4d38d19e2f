//! The placement of a pod: its node, the devices of its claims, and the reason for both.

use std::sync::Arc;

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::DeviceToleration;

use crate::claim::ClaimId;
use crate::device::Device;
use crate::score::{GpuRanking, NodeRanking};
use crate::usage::{AllocatedDevice, DeviceAccess};

/// Policies by which nodes and GPUs are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policies {
    /// Between nodes.
    pub node: NodePlacementPolicy,
    /// Between the GPUs of a node.
    pub gpu: GpuPlacementPolicy,
}

/// Placement of a pod.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Name of the node.
    pub node: String,
    /// Why the node was selected.
    pub ranking: NodeRanking,
    /// In the order of the pod's claims.
    pub claims: Vec<ClaimPlacement>,
}

/// Devices of one claim.
#[derive(Debug, Clone)]
pub struct ClaimPlacement {
    /// The claim.
    pub claim: ClaimId,
    /// Its devices, in the order of its requests.
    pub devices: Vec<DevicePlacement>,
}

/// One device for one request.
#[derive(Debug, Clone)]
pub struct DevicePlacement {
    /// Result name of the request: `main` or `main/sub`.
    pub request: String,
    /// Device class of the request.
    pub class: String,
    /// Name of the pool.
    pub pool: String,
    /// The device.
    pub device: Arc<Device>,
    /// How the claim uses the device.
    pub access: DeviceAccess,
    /// Tolerations of the request.
    pub tolerations: Vec<DeviceToleration>,
    /// Why the device was selected.
    pub ranking: GpuRanking,
}

impl Placement {
    /// Returns why the node and the devices of `claim` were selected, in one line:
    /// `node n1: only feasible node; gpu-0: binpack: 40% of memory allocated, gpu-1 10%`.
    #[must_use]
    pub fn reason(&self, claim: &ClaimPlacement) -> String {
        let mut parts = vec![format!("node {}: {}", self.node, self.ranking)];
        parts.extend(
            claim
                .devices
                .iter()
                .map(|placed| format!("{}: {}", placed.device.display_name(), placed.ranking)),
        );
        parts.join("; ")
    }
}

impl ClaimPlacement {
    /// Returns the devices as the claim will have them.
    #[must_use]
    pub fn allocated_devices(&self) -> Vec<AllocatedDevice> {
        let claim = Arc::new(self.claim.clone());
        self.devices
            .iter()
            .map(|placed| AllocatedDevice {
                claim: Arc::clone(&claim),
                pool: placed.pool.clone(),
                device: placed.device.name.to_string(),
                request: placed.request.clone(),
                access: placed.access.clone(),
            })
            .collect()
    }
}
