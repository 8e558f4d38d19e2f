//! Prepare and unprepare: the state of a claim on the node.
//!
//! | Step | Module |
//! |---|---|
//! | devices of the allocation | [`plan`] (pure) |
//! | conflicts with prepared claims | [`overcommit`] (pure) |
//! | CDI spec | [`spec`] |
//! | changes on the node | [`effects`] |
//! | claim record | [`record`] |
//! | versions of artifacts, also after loss of a record | [`recover`] |
//! | order of the steps | [`apply`] |
//!
//! Invariants:
//! - The record is written before the first effect and removed after the last effect. All state of a claim has a record,
//!   and overcommit checks see the claim. The record is the only durable write.
//! - Prepare is idempotent from any state: existing state is kept, missing state is created. The limits page of a live
//!   claim is never rewritten.
//! - The state of a claim whose record another build wrote is not changed.
//! - Unprepare needs neither the API server nor the GPU library.

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use serde::{Deserialize, Serialize};

use crate::artifacts::{Installed, Stubs};
use crate::claim::{ClaimUid, ShareId};
use crate::options;

pub mod apply;
pub mod effects;
mod limits;
pub mod overcommit;
pub mod plan;
pub mod record;
pub mod recover;
pub mod spec;

/// GPU of a prepared device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CardRef {
    /// UUID of the GPU.
    pub uuid: String,
    /// Number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
    /// PCI address as in sysfs.
    pub pci_bus_id: String,
}

/// One allocation result on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    /// Name of the main request.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// GPU of the device.
    pub card: CardRef,
    /// Access of the claim to the device.
    pub access: Access,
}

/// Access of a claim to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Access {
    /// Exclusive use of the whole GPU.
    Whole,
    /// A share whose limits libvgpu enforces.
    Share(Share),
    /// Access without allocation, for monitoring (`adminAccess`).
    Admin,
}

/// A share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// ID of the share.
    pub id: ShareId,
    /// GPU memory, bytes.
    pub memory_bytes: u64,
    /// Guaranteed percent of GPU time; 0 is best effort.
    pub cores: u64,
    /// Slots of the GPU that the share uses.
    pub slots: u64,
    /// Enforcement of GPU time.
    pub compute_policy: ComputePolicy,
    /// Priority among the shares of the GPU.
    pub priority: Priority,
    /// Behavior at the memory limit.
    pub memory_policy: MemoryPolicy,
    /// Action on processes that exceed or bypass the limits. Records of older builds lack the field.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Whether graphics and video libraries of the NVIDIA driver are mounted.
    pub unmetered: bool,
}

/// Delivery of libvgpu to the containers of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// `/etc/ld.so.preload`; the default of records of older builds.
    #[default]
    Preload,
    /// These stubs, which replace libraries of the NVIDIA driver.
    Shim(Stubs),
}

impl Delivery {
    /// Returns the delivery that the option selects, with the installed stubs.
    #[must_use]
    pub fn from_option(option: options::Delivery, installed: &Installed) -> Self {
        match option {
            options::Delivery::Preload => Self::Preload,
            options::Delivery::Shim => Self::Shim(installed.stubs.clone()),
        }
    }
}

impl Prepared {
    /// Returns the share; `None` for other access.
    #[must_use]
    pub fn share(&self) -> Option<&Share> {
        match &self.access {
            Access::Share(share) => Some(share),
            Access::Whole | Access::Admin => None,
        }
    }

    /// Returns the name of the CDI device. The name is unique on the node and stable.
    #[must_use]
    pub fn cdi_name(&self, uid: &ClaimUid) -> String {
        match self.share() {
            Some(share) => format!("{uid}-{}-{}-{}", self.request, self.device, share.id),
            None => format!("{uid}-{}-{}", self.request, self.device),
        }
    }

    /// Returns whether both are the same device with the same amounts. Policies may differ: they can change during the
    /// life of a claim.
    #[must_use]
    pub fn is_same_allocation(&self, other: &Self) -> bool {
        let allocation = |device: &Self| {
            let share = device.share().map(|share| {
                (
                    share.id.clone(),
                    share.memory_bytes,
                    share.cores,
                    share.slots,
                )
            });
            let admin = device.access == Access::Admin;
            (
                device.request.clone(),
                device.pool.clone(),
                device.device.clone(),
                device.card.uuid.clone(),
                admin,
                share,
            )
        };
        allocation(self) == allocation(other)
    }
}
