//! Makes a claim's devices usable for containers, and undoes it.
//!
//! | Step | Module |
//! |---|---|
//! | what the allocation means here | [`plan`] (pure) |
//! | does it fit with what is prepared | [`overcommit`] (pure) |
//! | what the containers get | [`spec`] |
//! | what changes on the node | [`effects`] |
//! | what must survive a crash | [`record`] |
//! | what a damaged record said | [`recover`] |
//! | the order of it all | [`apply`] |
//!
//! Invariants:
//! - The record is written before the first effect and removed after the last one, so whatever exists for a claim has
//!   a record, and the guard sees it.
//! - Prepare may be called in any state and gives the same answer each time. What exists is kept, what is missing is
//!   made; a limits page of a live claim is never rewritten.
//! - Unprepare needs neither the API server nor the GPU library.

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use serde::{Deserialize, Serialize};

use crate::artifacts::{Installed, Stubs};
use crate::claim::{ClaimUid, ShareId};
use crate::options;

pub mod apply;
pub mod effects;
pub mod overcommit;
pub mod plan;
pub mod record;
pub mod recover;
pub mod spec;

/// A card that a claim uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CardRef {
    /// UUID of the card.
    pub uuid: String,
    /// Number of its device file.
    pub minor: u32,
    /// PCI address in sysfs spelling.
    pub pci_bus_id: String,
}

/// One allocation result on this node: a device, and how containers get it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    /// Main request of the claim.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Card of the device.
    pub card: CardRef,
    /// What the claim may do with it.
    pub access: Access,
}

/// What a claim may do with a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Access {
    /// All of it, alone.
    Whole,
    /// A share, enforced by libvgpu.
    Share(Share),
    /// Look at it whoever uses it, and hold nothing (`adminAccess`).
    Admin,
}

/// A share of a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// Its ID.
    pub id: ShareId,
    /// Device memory.
    pub memory_bytes: u64,
    /// Percent of the card's compute that is guaranteed; 0 is best effort.
    pub cores: u64,
    /// Tenants that it counts as.
    pub slots: u64,
    /// How compute is enforced.
    pub compute_policy: ComputePolicy,
    /// Priority among the tenants of the card.
    pub priority: Priority,
    /// What happens at the memory limit.
    pub memory_policy: MemoryPolicy,
    /// What happens to processes that exceed or escape the limits. A record of an older build has none.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Whether graphics and video parts of the driver are mounted.
    pub unmetered: bool,
}

/// How the containers of a claim get libvgpu for their shares.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// By `/etc/ld.so.preload`. A record of an older build says nothing else.
    #[default]
    Preload,
    /// By these stubs in the place of the driver's libraries.
    Shim(Stubs),
}

impl Delivery {
    /// What the node's option means with the artifacts of this build.
    #[must_use]
    pub fn of(option: options::Delivery, installed: &Installed) -> Self {
        match option {
            options::Delivery::Preload => Self::Preload,
            options::Delivery::Shim => Self::Shim(installed.stubs.clone()),
        }
    }
}

impl Prepared {
    /// The share, if it is one.
    #[must_use]
    pub fn share(&self) -> Option<&Share> {
        match &self.access {
            Access::Share(share) => Some(share),
            Access::Whole | Access::Admin => None,
        }
    }

    /// Name of the CDI device that gives it to a container: unique on the node, and the same each time.
    #[must_use]
    pub fn cdi_name(&self, uid: &ClaimUid) -> String {
        match self.share() {
            Some(share) => format!("{uid}-{}-{}-{}", self.request, self.device, share.id),
            None => format!("{uid}-{}-{}", self.request, self.device),
        }
    }

    /// Whether both are the same piece of the same card. Policies may differ: they can change while a claim lives.
    #[must_use]
    pub fn is_same_piece(&self, other: &Self) -> bool {
        let piece = |device: &Self| {
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
        piece(self) == piece(other)
    }
}
