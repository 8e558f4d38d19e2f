//! Interface of drava's programs to each other and to users: names, quantities, opaque config, custom resources,
//! validation, event and condition reasons.
//!
//! No I/O, no client, no clock.

pub mod condition;
pub mod condition_state;
pub mod config;
pub mod error;
pub mod event;
pub mod explanation;
pub mod leader;
pub mod listed;
pub mod metric;
pub mod names;
pub mod node_profile;
pub mod obstacle;
pub mod placement_record;
pub mod policy;
pub mod quantity;
pub mod quota;
pub mod reason;
pub mod recommendation;
pub mod request;
pub mod suspension;
pub mod unavailable;
pub mod xid;

pub use quantity::Quantity;
use serde::{Deserialize, Serialize};

/// Types of device that a GPU is published as, coupled by its counter set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceType {
    /// The whole GPU; nothing is injected.
    Gpu,
    /// A share of a GPU's memory and GPU time, enforced by libvgpu.
    Vgpu,
    /// A MIG partition.
    Mig,
}

impl DeviceType {
    /// Value of the attribute [`names::attribute::TYPE`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Vgpu => "vgpu",
            Self::Mig => "mig",
        }
    }

    /// Returns the type with this attribute value.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        [Self::Gpu, Self::Vgpu, Self::Mig]
            .into_iter()
            .find(|kind| kind.as_str() == value)
    }
}
