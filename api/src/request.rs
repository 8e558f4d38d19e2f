//! Checks on the amounts that a claim asks for, with the text a user can act on.
//!
//! The API server accepts any quantity and kube-scheduler rounds a zero up to the smallest share; drava refuses what
//! is certainly a mistake, at the place where the user looks.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use crate::quantity::ParseQuantityError;
use crate::{Quantity, names};

/// Why a capacity request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The value is no quantity.
    #[error("capacity {capacity}: {source}")]
    Quantity {
        /// Name of the capacity as written.
        capacity: String,
        /// What is wrong with the text.
        source: ParseQuantityError,
    },
    /// An amount below zero.
    #[error("capacity {capacity}: {value} is negative")]
    Negative {
        /// Name of the capacity as written.
        capacity: String,
        /// The amount.
        value: Quantity,
    },
    /// Zero bytes of memory or zero slots.
    #[error(
        "capacity {capacity}: 0 asks for nothing; leave it out for the default or ask for an amount"
    )]
    Zero {
        /// Name of the capacity as written.
        capacity: String,
    },
    /// More percent than a card has.
    #[error(
        "capacity {capacity}: {value} is above 100; cores are percent of one card, ask for several devices with count"
    )]
    CoresAboveCard {
        /// Name of the capacity as written.
        capacity: String,
        /// The amount.
        value: Quantity,
    },
}

/// `name` without the domain of this driver.
#[must_use]
pub fn unqualified(name: &str) -> &str {
    name.strip_prefix(names::DRIVER)
        .and_then(|rest| rest.strip_prefix('/'))
        .unwrap_or(name)
}

/// Parses and checks the capacity requests of one request for devices of this driver.
///
/// # Errors
/// Names the first capacity that is certainly a mistake.
pub fn check_capacity(
    requests: &BTreeMap<String, RawQuantity>,
) -> Result<BTreeMap<String, Quantity>, RequestError> {
    requests
        .iter()
        .map(|(capacity, raw)| {
            let value = Quantity::try_from(raw).map_err(|source| RequestError::Quantity {
                capacity: capacity.clone(),
                source,
            })?;
            let capacity = capacity.clone();
            let name = unqualified(&capacity);
            if value.is_negative() {
                return Err(RequestError::Negative { capacity, value });
            }
            if value.is_zero() && matches!(name, names::capacity::MEMORY | names::capacity::SLOTS) {
                return Err(RequestError::Zero { capacity });
            }
            if name == names::capacity::CORES && value > Quantity::count(100) {
                return Err(RequestError::CoresAboveCard { capacity, value });
            }
            Ok((capacity, value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(capacity: &str, value: &str) -> Result<Quantity, String> {
        let requests = BTreeMap::from([(capacity.to_owned(), RawQuantity(value.to_owned()))]);
        check_capacity(&requests)
            .map(|parsed| parsed[capacity])
            .map_err(|error| error.to_string())
    }

    #[test]
    fn sound_amounts_pass() {
        assert_eq!(check("memory", "8Gi"), Ok(Quantity::bytes(8 << 30)));
        assert_eq!(check("cores", "0"), Ok(Quantity::ZERO));
        assert_eq!(
            check("gpu.drava.dev/cores", "100"),
            Ok(Quantity::count(100))
        );
        assert_eq!(
            check("other.example.com/cores", "101"),
            Ok(Quantity::count(101))
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (capacity, value, message) in [
            (
                "memory",
                "0",
                "capacity memory: 0 asks for nothing; leave it out for the default or ask for an amount",
            ),
            ("memory", "-1Gi", "capacity memory: -1Gi is negative"),
            ("cores", "-5", "capacity cores: -5 is negative"),
            (
                "gpu.drava.dev/slots",
                "0",
                "capacity gpu.drava.dev/slots: 0 asks for nothing; leave it out for the default or ask for an amount",
            ),
            (
                "cores",
                "101",
                "capacity cores: 101 is above 100; cores are percent of one card, ask for several devices with count",
            ),
            (
                "gpu.drava.dev/cores",
                "100500m",
                "capacity gpu.drava.dev/cores: 100500m is above 100; cores are percent of one card, ask for several devices with count",
            ),
            (
                "memory",
                "8GB",
                "capacity memory: \"8GB\" is not a quantity: unknown suffix \"GB\", use one of n u m k M G T P E Ki Mi Gi Ti Pi Ei",
            ),
        ] {
            assert_eq!(check(capacity, value), Err(message.to_owned()));
        }
    }
}
