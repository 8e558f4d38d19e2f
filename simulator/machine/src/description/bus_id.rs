//! PCI bus ids in all usual notations.

use serde::{Deserialize, Serialize};

/// PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BusId {
    /// PCI domain.
    pub domain: u32,
    /// PCI bus.
    pub bus: u8,
    /// PCI device; the function is always 0.
    pub device: u8,
}

impl BusId {
    /// Parses `domain:bus:device.function`; the domain has four or eight digits or is absent.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, function) = text.rsplit_once('.')?;
        if function != "0" {
            return None;
        }
        let mut parts = address.rsplit(':');
        let device = u8::from_str_radix(parts.next()?, 16).ok()?;
        let bus = u8::from_str_radix(parts.next()?, 16).ok()?;
        let domain = match parts.next() {
            Some(domain) => u32::from_str_radix(domain, 16).ok()?,
            None => 0,
        };
        (parts.next().is_none() && device < 32).then_some(Self {
            domain,
            bus,
            device,
        })
    }

    /// Formats with a four-digit domain, like sysfs and CUDA.
    #[must_use]
    pub fn short(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

impl std::fmt::Display for BusId {
    /// Formats with an eight-digit domain, like NVML.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            domain,
            bus,
            device,
        } = self;
        write!(formatter, "{domain:08X}:{bus:02X}:{device:02X}.0")
    }
}

impl TryFrom<String> for BusId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text)
            .ok_or_else(|| format!("{text:?} must be a PCI address such as 0000:1b:00.0"))
    }
}

impl From<BusId> for String {
    fn from(bus_id: BusId) -> Self {
        bus_id.to_string()
    }
}
