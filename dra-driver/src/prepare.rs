//! Makes a claim's devices usable for containers, and undoes it.
//!
//! | Step | Module |
//! |---|---|
//! | what the allocation means here | [`plan`] (pure) |
//! | does it fit with what is prepared | [`guard`] (pure) |
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

use std::fmt;

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use serde::{Deserialize, Serialize};

use crate::args;
use crate::artifacts::{Installed, Stubs};
use crate::claim::ClaimUid;

pub mod apply;
pub mod effects;
pub mod guard;
pub mod plan;
pub mod record;
pub mod recover;
pub mod spec;

/// ID of a share of a device: the allocation result's `shareID`, a lowercase UUID. It names directories.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareId(String);

/// A text that is no share ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no share ID: a lowercase UUID")]
pub struct InvalidShareId(String);

impl ShareId {
    /// Checks `text`.
    ///
    /// # Errors
    /// When it is not a lowercase UUID.
    pub fn parse(text: &str) -> Result<Self, InvalidShareId> {
        let sound = text.len() == 36
            && text
                .bytes()
                .enumerate()
                .all(|(position, byte)| match position {
                    8 | 13 | 18 | 23 => byte == b'-',
                    _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
                });
        if sound {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidShareId(text.to_owned()))
        }
    }

    /// The ID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ShareId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ShareId {
    type Error = InvalidShareId;

    fn try_from(text: String) -> Result<Self, InvalidShareId> {
        Self::parse(&text)
    }
}

impl From<ShareId> for String {
    fn from(id: ShareId) -> Self {
        id.0
    }
}

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
    pub fn of(option: args::Delivery, installed: &Installed) -> Self {
        match option {
            args::Delivery::Preload => Self::Preload,
            args::Delivery::Shim => Self::Shim(installed.stubs.clone()),
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
