//! Validation of the amounts that a claim requests.
//!
//! The API server accepts any quantity, and kube-scheduler rounds zero up to the smallest share. drava rejects amounts that
//! are certainly a mistake, with a message in the pod's events.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use crate::quantity::ParseQuantityError;
use crate::{Quantity, names};

/// Error of a capacity request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The value is not a quantity.
    #[error("capacity {capacity}: {source}")]
    Quantity {
        /// Name of the capacity in the claim.
        capacity: String,
        /// Cause.
        source: ParseQuantityError,
    },
    /// The amount is below zero.
    #[error("capacity {capacity}: {value} is negative")]
    Negative {
        /// Name of the capacity in the claim.
        capacity: String,
        /// The amount.
        value: Quantity,
    },
    /// The amount is zero bytes or zero slots.
    #[error(
        "capacity {capacity}: 0 is not an amount; request more, or omit the capacity for its default"
    )]
    Zero {
        /// Name of the capacity in the claim.
        capacity: String,
    },
    /// The amount exceeds 100 percent of a GPU.
    #[error(
        "capacity {capacity}: {value} exceeds 100; cores are percent of one GPU; use count for several devices"
    )]
    CoresAboveGpu {
        /// Name of the capacity in the claim.
        capacity: String,
        /// The amount.
        value: Quantity,
    },
}

/// Returns `name` without the domain of this driver.
#[must_use]
pub fn unqualified(name: &str) -> &str {
    name.strip_prefix(names::DRIVER)
        .and_then(|rest| rest.strip_prefix('/'))
        .unwrap_or(name)
}

/// Parses and validates the capacities of one request for devices of this driver.
///
/// # Errors
/// With the first invalid capacity.
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
                return Err(RequestError::CoresAboveGpu { capacity, value });
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
    fn accepts_valid_amounts() {
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
    fn names_invalid_amounts() {
        for (capacity, value, message) in [
            (
                "memory",
                "0",
                "capacity memory: 0 is not an amount; request more, or omit the capacity for its default",
            ),
            ("memory", "-1Gi", "capacity memory: -1Gi is negative"),
            ("cores", "-5", "capacity cores: -5 is negative"),
            (
                "gpu.drava.dev/slots",
                "0",
                "capacity gpu.drava.dev/slots: 0 is not an amount; request more, or omit the capacity for its default",
            ),
            (
                "cores",
                "101",
                "capacity cores: 101 exceeds 100; cores are percent of one GPU; use count for several devices",
            ),
            (
                "gpu.drava.dev/cores",
                "100500m",
                "capacity gpu.drava.dev/cores: 100500m exceeds 100; cores are percent of one GPU; use count for several devices",
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
