//! What the controller records in an allocation: for which pod, and why the node and the devices were selected.
//!
//! The record is an entry of the allocation's config, so it is written together with the allocation and is as immutable. It is
//! opaque config of [`names::RECORD_DRIVER`], so node drivers of all versions ignore it. Its source is the class: what the author
//! of a claim writes gets the source `FromClaim` in the allocation.

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, OpaqueDeviceConfiguration, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::names;

/// Value of `kind`.
pub const KIND: &str = "PlacementRecord";

/// Source of the entry.
const SOURCE: &str = "FromClass";

/// Maximum number of config entries that the API server accepts in an allocation.
const MAX_ENTRIES: usize = 64;
/// Maximum length of the reason; the API server accepts 10 KiB of parameters.
const MAX_REASON_BYTES: usize = 4096;

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementRecord {
    /// UID of the pod for which the claim was allocated.
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Why the node and the devices were selected, for users.
    pub reason: String,
}

impl PlacementRecord {
    /// Adds the record to an allocation, unless its config is full.
    pub fn add_to(&self, allocation: &mut AllocationResult) {
        let devices = allocation.devices.get_or_insert_default();
        let config = devices.config.get_or_insert_default();
        if config.len() >= MAX_ENTRIES {
            return;
        }
        let mut end = self.reason.len().min(MAX_REASON_BYTES);
        while !self.reason.is_char_boundary(end) {
            end -= 1;
        }
        let parameters = json!({
            "apiVersion": names::API_VERSION,
            "kind": KIND,
            "podUID": self.pod_uid,
            "reason": self.reason.get(..end).unwrap_or_default(),
        });
        config.push(DeviceAllocationConfiguration {
            opaque: Some(OpaqueDeviceConfiguration {
                driver: names::RECORD_DRIVER.to_owned(),
                parameters: RawExtension(parameters),
            }),
            requests: None,
            source: SOURCE.to_owned(),
        });
    }

    /// Returns the record of a claim's allocation.
    #[must_use]
    pub fn of(claim: &ResourceClaim) -> Option<Self> {
        parameters_of(claim).and_then(|parameters| Self::deserialize(parameters).ok())
    }

    /// Returns the UID of the pod for which the claim was allocated.
    #[must_use]
    pub fn pod_uid(claim: &ResourceClaim) -> Option<&str> {
        parameters_of(claim)?.get("podUID")?.as_str()
    }
}

fn parameters_of(claim: &ResourceClaim) -> Option<&Value> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    let config = allocation.devices.as_ref()?.config.as_ref()?;
    let of_class = config.iter().rev().filter(|entry| entry.source == SOURCE);
    of_class
        .filter_map(|entry| entry.opaque.as_ref())
        .filter(|opaque| opaque.driver == names::RECORD_DRIVER)
        .map(|opaque| &opaque.parameters.0)
        .find(|parameters| {
            let is = |key, value| parameters.get(key).and_then(Value::as_str) == Some(value);
            is("apiVersion", names::API_VERSION) && is("kind", KIND)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(reason: &str) -> PlacementRecord {
        PlacementRecord {
            pod_uid: "pod-p".to_owned(),
            reason: reason.to_owned(),
        }
    }

    fn allocated(allocation: AllocationResult) -> ResourceClaim {
        let mut claim = ResourceClaim::default();
        claim.status.get_or_insert_default().allocation = Some(allocation);
        claim
    }

    #[test]
    fn is_read_from_the_allocation() {
        let mut allocation = AllocationResult::default();
        record("only feasible node").add_to(&mut allocation);
        let claim = allocated(allocation);
        assert_eq!(PlacementRecord::pod_uid(&claim), Some("pod-p"));
        assert_eq!(
            PlacementRecord::of(&claim),
            Some(record("only feasible node"))
        );
        assert_eq!(PlacementRecord::of(&ResourceClaim::default()), None);
    }

    #[test]
    fn is_never_read_from_what_a_claim_has() {
        let mut allocation = AllocationResult::default();
        record("only feasible node").add_to(&mut allocation);
        for change in [
            |entry: &mut DeviceAllocationConfiguration| entry.source = "FromClaim".to_owned(),
            |entry: &mut DeviceAllocationConfiguration| {
                entry.opaque.as_mut().unwrap().driver = names::DRIVER.to_owned();
            },
        ] {
            let mut forged = allocation.clone();
            let config = forged.devices.as_mut().unwrap().config.as_mut().unwrap();
            change(&mut config[0]);
            assert_eq!(PlacementRecord::pod_uid(&allocated(forged)), None);
        }
    }

    #[test]
    fn stays_within_the_limits_of_the_api_server() {
        let mut allocation = AllocationResult::default();
        record(&"ä".repeat(9000)).add_to(&mut allocation);
        let found = PlacementRecord::of(&allocated(allocation.clone())).unwrap();
        assert_eq!(found.reason, "ä".repeat(MAX_REASON_BYTES / 2));
        for _ in 0..100 {
            record("r").add_to(&mut allocation);
        }
        assert_eq!(
            allocation.devices.unwrap().config.unwrap().len(),
            MAX_ENTRIES
        );
    }
}
