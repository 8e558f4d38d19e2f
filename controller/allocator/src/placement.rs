//! Where a pod goes, by which policies, and what its claims get there.

use std::sync::Arc;

use drava_api::config::PlacementPolicy;
use k8s_openapi::api::resource::v1::DeviceToleration;

use crate::claim::ClaimId;
use crate::device::Device;
use crate::usage::{Grant, Holding};

/// Policies between nodes and between cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policies {
    /// Between nodes.
    pub node: PlacementPolicy,
    /// Between the cards of a node.
    pub gpu: PlacementPolicy,
}

/// Where a pod goes and what its claims get.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Name of the node.
    pub node: String,
    /// In the order of the pod's claims.
    pub claims: Vec<ClaimPlacement>,
}

/// What one claim gets.
#[derive(Debug, Clone)]
pub struct ClaimPlacement {
    /// The claim.
    pub claim: ClaimId,
    /// Its devices, in the order of its requests.
    pub devices: Vec<DeviceGrant>,
}

/// One device for one request.
#[derive(Debug, Clone)]
pub struct DeviceGrant {
    /// Result name of the request: `main` or `main/sub`.
    pub request: String,
    /// Class that the request named.
    pub class: String,
    /// Name of the pool.
    pub pool: String,
    /// The device.
    pub device: Arc<Device>,
    /// How it is taken.
    pub grant: Grant,
    /// Tolerations of the request.
    pub tolerations: Vec<DeviceToleration>,
    /// Why this one, for people.
    pub why: String,
}

impl ClaimPlacement {
    /// What the claim will hold.
    #[must_use]
    pub fn holdings(&self) -> Vec<Holding> {
        let claim = Arc::new(self.claim.clone());
        self.devices
            .iter()
            .map(|device| Holding {
                claim: Arc::clone(&claim),
                pool: device.pool.clone(),
                device: device.device.name.to_string(),
                request: device.request.clone(),
                grant: device.grant.clone(),
            })
            .collect()
    }
}
