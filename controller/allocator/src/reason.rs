//! Why something does not fit: stable codes for machines, one line for people.

use std::fmt;

use drava_api::{Quantity, names};

use crate::taint::Taint;

/// Stable code of a reason. The text of the variant is part of the interface: events, metrics and tests use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No card of the node has that much memory free.
    InsufficientMemory,
    /// No card of the node has that many percent of its cores free.
    InsufficientCores,
    /// Every card of the node has as many tenants as it takes.
    SlotsExhausted,
    /// Another capacity is short.
    InsufficientCapacity,
    /// Fewer devices than asked for.
    InsufficientDevices,
    /// Cards are taken whole by, or shared among, other claims.
    ExclusiveConflict,
    /// The node has devices, but none of the class.
    TypeMismatch,
    /// No device of the node satisfies the selectors of the request.
    SelectorMismatch,
    /// A selector could not be evaluated.
    SelectorError,
    /// Devices are tainted.
    Tainted,
    /// Devices do not work.
    Unhealthy,
    /// The devices that are free cannot be combined as the claim or the container asks.
    TopologyUnsatisfied,
    /// The driver is publishing, or the slices of the node are malformed.
    PoolIncomplete,
    /// The pod cannot run on the node, whatever its devices.
    NodeUnfit,
    /// A claim asks several drivers.
    MixedDrivers,
    /// A device class does not exist.
    UnknownClass,
    /// An amount is a mistake.
    InvalidRequest,
    /// The opaque config is a mistake.
    InvalidConfig,
    /// A shape that this version does not serve.
    Unsupported,
    /// The node driver publishes no device anywhere.
    NoDevices,
    /// Too many combinations to try.
    SearchLimit,
}

impl Reason {
    /// The code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InsufficientMemory => "InsufficientMemory",
            Self::InsufficientCores => "InsufficientCores",
            Self::SlotsExhausted => "SlotsExhausted",
            Self::InsufficientCapacity => "InsufficientCapacity",
            Self::InsufficientDevices => "InsufficientDevices",
            Self::ExclusiveConflict => "ExclusiveConflict",
            Self::TypeMismatch => "TypeMismatch",
            Self::SelectorMismatch => "SelectorMismatch",
            Self::SelectorError => "SelectorError",
            Self::Tainted => "Tainted",
            Self::Unhealthy => "Unhealthy",
            Self::TopologyUnsatisfied => "TopologyUnsatisfied",
            Self::PoolIncomplete => "PoolIncomplete",
            Self::NodeUnfit => "NodeUnfit",
            Self::MixedDrivers => "MixedDrivers",
            Self::UnknownClass => "UnknownClass",
            Self::InvalidRequest => "InvalidRequest",
            Self::InvalidConfig => "InvalidConfig",
            Self::Unsupported => "Unsupported",
            Self::NoDevices => "NoDevices",
            Self::SearchLimit => "SearchLimit",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// As what a card is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CardUse {
    /// One claim has it all.
    Whole,
    /// Claims have shares of it.
    Shared,
    /// Claims have partitions of it.
    Partitioned,
    /// As a device of a type that this build does not know.
    Otherwise,
}

/// Why one device does not serve a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// The device is not of the class.
    ClassMismatch,
    /// A selector of the request does not select it.
    SelectorMismatch,
    /// The request names a capacity that the device lacks.
    CapacityUndefined {
        /// Name of the capacity.
        name: String,
    },
    /// A taint is not tolerated.
    Tainted(Taint),
    /// One request may not take that much of the device.
    AboveMaximum {
        /// Name of the capacity.
        name: String,
        /// Amount asked for.
        asked: Quantity,
        /// The most that one request may take.
        maximum: Quantity,
    },
    /// Another claim holds it alone.
    InUse,
    /// Another device of the same card is in use.
    CardInUse(CardUse),
    /// Too little is free.
    Capacity {
        /// Name of the capacity.
        name: String,
        /// Amount asked for.
        asked: Quantity,
        /// Amount free.
        free: Quantity,
        /// Amount published.
        total: Quantity,
    },
    /// Already taken for this pod.
    Chosen,
    /// A constraint of the claim excludes it.
    Constraint {
        /// Attribute of the constraint.
        attribute: String,
    },
    /// A container of the pod has another device of this card already.
    SameCard {
        /// Name of the container.
        container: String,
    },
    /// The device is no longer published.
    Vanished,
}

impl Rejection {
    /// Code of the reason.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::ClassMismatch => Reason::TypeMismatch,
            Self::SelectorMismatch => Reason::SelectorMismatch,
            Self::CapacityUndefined { .. } => Reason::InsufficientCapacity,
            Self::Tainted(taint) if taint.is_unhealthy() => Reason::Unhealthy,
            Self::Tainted(_) => Reason::Tainted,
            Self::AboveMaximum { name, .. } | Self::Capacity { name, .. } => match name.as_str() {
                names::capacity::MEMORY => Reason::InsufficientMemory,
                names::capacity::CORES => Reason::InsufficientCores,
                names::capacity::SLOTS => Reason::SlotsExhausted,
                _ => Reason::InsufficientCapacity,
            },
            Self::InUse | Self::CardInUse(_) => Reason::ExclusiveConflict,
            Self::Chosen => Reason::InsufficientDevices,
            Self::Constraint { .. } | Self::SameCard { .. } => Reason::TopologyUnsatisfied,
            Self::Vanished => Reason::PoolIncomplete,
        }
    }

    /// How near the device came to serving the request; the nearest miss of a node is what is reported.
    #[must_use]
    pub fn nearness(&self) -> u8 {
        match self {
            Self::Vanished => 0,
            Self::ClassMismatch => 1,
            Self::SelectorMismatch => 2,
            Self::CapacityUndefined { .. } => 3,
            Self::Tainted(_) => 4,
            Self::Chosen => 5,
            Self::AboveMaximum { .. } => 6,
            Self::InUse | Self::CardInUse(_) => 7,
            Self::Capacity { name, .. } => match name.as_str() {
                names::capacity::MEMORY => 10,
                names::capacity::CORES => 9,
                _ => 8,
            },
            Self::Constraint { .. } => 11,
            Self::SameCard { .. } => 12,
        }
    }

    /// Whether the device is of the kind asked for.
    #[must_use]
    pub const fn is_near(&self) -> bool {
        !matches!(
            self,
            Self::Vanished | Self::ClassMismatch | Self::SelectorMismatch
        )
    }

    /// Whether the device could not serve the request if nothing were in use.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::CapacityUndefined { .. } | Self::AboveMaximum { .. }
        )
    }

    /// What is free of the capacity that is short, for comparing near misses.
    #[must_use]
    pub fn free(&self) -> Quantity {
        match self {
            Self::Capacity { free, .. } => *free,
            Self::AboveMaximum { maximum, .. } => *maximum,
            _ => Quantity::ZERO,
        }
    }

    /// The particulars, for the line in an event; `place` is `node/device`.
    #[must_use]
    pub fn detail(&self, place: &str) -> String {
        match self {
            Self::ClassMismatch | Self::SelectorMismatch | Self::Chosen => String::new(),
            Self::InUse | Self::CardInUse(CardUse::Whole) => format!("{place} is taken whole"),
            Self::CardInUse(CardUse::Shared) => format!("{place} is shared by other claims"),
            Self::CardInUse(CardUse::Partitioned) => format!("{place} is partitioned"),
            Self::CardInUse(CardUse::Otherwise) => format!("{place} is in use"),
            Self::CapacityUndefined { name } => format!("no capacity {name:?}"),
            Self::Tainted(taint) => {
                if taint.is_unhealthy() && !taint.value.is_empty() {
                    taint.value.clone()
                } else {
                    taint.to_string()
                }
            }
            Self::AboveMaximum {
                name,
                asked,
                maximum,
            } => match name.as_str() {
                names::capacity::MEMORY => format!(
                    "{} is more than any card has: the largest has {}, {place}",
                    bytes(*asked),
                    bytes(*maximum)
                ),
                _ => format!("{name} {asked} is above the maximum of {maximum}, {place}"),
            },
            Self::Capacity { name, free, .. } => match name.as_str() {
                names::capacity::MEMORY => {
                    format!("largest free piece {} on {place}", bytes(*free))
                }
                names::capacity::CORES => format!("most free cores {free} on {place}"),
                names::capacity::SLOTS => String::new(),
                _ => format!("most free {name} {free} on {place}"),
            },
            Self::Constraint { attribute } => format!("constraint on {attribute}"),
            Self::SameCard { container } => {
                format!("container {container} needs devices of different cards")
            }
            Self::Vanished => "device withdrawn".to_owned(),
        }
    }
}

/// An amount of memory for people: `6 GiB`, `1.5 GiB`, `512 MiB`.
#[must_use]
pub fn bytes(amount: Quantity) -> String {
    let bytes = amount.to_u64_rounded_up().unwrap_or_default();
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift {
            let (whole, rest) = (bytes >> shift, bytes & ((1 << shift) - 1));
            // Rounded down: what is said to be free must be there.
            let tenths = (rest * 10) >> shift;
            return if tenths == 0 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{tenths} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_people() {
        for (text, expected) in [
            ("6Gi", "6 GiB"),
            ("1536Mi", "1.5 GiB"),
            ("512Mi", "512 MiB"),
            ("81038Mi", "79.1 GiB"),
            ("0", "0 B"),
            ("1Ti", "1 TiB"),
        ] {
            assert_eq!(bytes(text.parse().unwrap()), expected);
        }
    }
}
