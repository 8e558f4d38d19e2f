//! What drava's parts say to each other and to users: names, quantities, opaque config, validation, errors as text.
//!
//! No I/O, no client, no clock.

pub mod condition;
pub mod config;
pub mod error;
pub mod event;
pub mod names;
pub mod quantity;
pub mod request;

pub use quantity::Quantity;

/// The three kinds of device that a card is published as, coupled by its counter set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceType {
    /// The whole card; nothing is injected.
    Gpu,
    /// A share of a card's memory and compute, enforced by libvgpu.
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

    /// The type that an attribute value names, if it names one.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        [Self::Gpu, Self::Vgpu, Self::Mig]
            .into_iter()
            .find(|kind| kind.as_str() == value)
    }
}
