//! Companion claims: claims that no pod names, and that add capacity to the shares of a prepared claim, their base. Pure.
//!
//! A companion has the label [`COMPANION_LABEL`](names::COMPANION_LABEL) with the UID of its base. Each of its requests has the
//! name of a request of the base, and is allocated on the device of that request. It is reserved for a pod of the base, which
//! owns it. kubelet does not know it, and the API server keeps it while the pod exists.
//!
//! Tenants write these claims. A grant therefore needs all of that, and a claim that is prepared by itself adds nothing: its
//! capacity would be used twice.

use std::collections::BTreeSet;

use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::plan::{self, PlanError};
use super::record::ClaimRecord;
use super::{Grant, Prepared, Share};
use crate::gpus::capacity::ShareTotals;
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};

/// A companion with devices of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    /// The claim.
    pub claim: ClaimRef,
    /// UID of its base.
    pub base: ClaimUid,
    /// Whether its capacity is to be given back: it is being deleted, or is no companion any more.
    pub is_ending: bool,
    /// UIDs of the pods that reserve it.
    pub pods: BTreeSet<String>,
    /// What it adds.
    pub additions: Vec<Addition>,
}

/// What one device of a companion adds to a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addition {
    /// Name of the request.
    pub request: String,
    /// Name of the device.
    pub device: String,
    /// ID of the share of the companion.
    pub share: ShareId,
    /// The amounts.
    pub amounts: ShareTotals,
}

impl Companion {
    /// Returns what it adds to a device of its base, if it is a companion of it.
    #[must_use]
    pub fn addition_to(&self, device: &Prepared) -> Option<&Addition> {
        let mut additions = self.additions.iter();
        additions.find(|addition| {
            (&addition.request, &addition.device) == (&device.request, &device.device)
        })
    }
}

/// Returns the base that the label of a claim names.
#[must_use]
pub fn base(claim: &ResourceClaim) -> Option<ClaimUid> {
    let labels = claim.metadata.labels.as_ref()?;
    ClaimUid::parse(labels.get(names::COMPANION_LABEL)?).ok()
}

/// Reads a companion. `None` for other claims, and without an allocation on the node with this pool.
///
/// # Errors
/// When the allocation is invalid.
pub fn read(claim: &ResourceClaim, pool: &str) -> Result<Option<Companion>, PlanError> {
    let (Some(base), Some(identity)) = (base(claim), plan::claim_ref(&claim.metadata)) else {
        return Ok(None);
    };
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_deref());
    let results = results.unwrap_or_default().iter();
    let ours = results.filter(|result| result.driver == names::DRIVER && result.pool == pool);
    let additions = ours.map(|result| {
        let (share, amounts) = plan::amounts(result)?;
        Ok(Addition {
            request: plan::main_request(&result.request).to_owned(),
            device: result.device.clone(),
            share,
            amounts,
        })
    });
    let additions: Vec<Addition> = additions.collect::<Result<_, PlanError>>()?;
    if additions.is_empty() {
        return Ok(None);
    }
    let consumers = status.and_then(|status| status.reserved_for.as_ref());
    let consumers = consumers.into_iter().flatten();
    Ok(Some(Companion {
        claim: identity,
        base,
        is_ending: claim.metadata.deletion_timestamp.is_some(),
        pods: consumers.map(|consumer| consumer.uid.clone()).collect(),
        additions,
    }))
}

/// What is known of the companions of one base.
#[derive(Debug, Clone, Default)]
pub struct Companions {
    /// The companions that exist.
    pub present: Vec<Companion>,
    /// UIDs of claims of which it is not known whether they are companions.
    pub unknown: BTreeSet<ClaimUid>,
    /// UIDs of the pods that reserve the base.
    pub pods: BTreeSet<String>,
}

/// Returns the devices of a base with the grants that end, before new ones.
///
/// A grant ends when its companion is being deleted, or is known to be gone, and stays until it is [given back](give_back): the
/// programs of the share use its memory, even if another claim was given it.
#[must_use]
pub fn retain(base: &ClaimRecord, companions: &Companions) -> Vec<Prepared> {
    let mut devices = base.devices.clone();
    let shares = devices.iter_mut().filter_map(Prepared::share_mut);
    for grant in shares.flat_map(|share| &mut share.grants) {
        let mut present = companions.present.iter();
        let present = present.find(|companion| companion.claim.uid == grant.claim.uid);
        grant.is_ending |= match present {
            Some(companion) => companion.is_ending,
            None => !companions.unknown.contains(&grant.claim.uid),
        };
    }
    devices
}

/// Returns the devices of a base with what a companion adds to them; `None` if it adds nothing, or nothing more.
#[must_use]
pub fn grow(
    base: &ClaimRef,
    devices: &[Prepared],
    companion: &Companion,
    pods: &BTreeSet<String>,
) -> Option<Vec<Prepared>> {
    if !is_companion(companion, base, pods) {
        return None;
    }
    let mut grown = devices.to_vec();
    for device in &mut grown {
        let added = companion.addition_to(device);
        let Some(share) = device.share_mut() else {
            continue;
        };
        let is_known = |grant: &Grant| grant.claim.uid == companion.claim.uid;
        if share.grants.iter().any(is_known) {
            continue;
        }
        share.grants.extend(added.map(|addition| Grant {
            claim: companion.claim.clone(),
            memory_bytes: addition.amounts.memory_bytes,
            cores: addition.amounts.cores,
            slots: addition.amounts.slots,
            is_ending: false,
        }));
    }
    (grown != devices).then_some(grown)
}

/// Returns whether a companion may add to this base, which these pods reserve.
fn is_companion(companion: &Companion, base: &ClaimRef, pods: &BTreeSet<String>) -> bool {
    !companion.is_ending
        && companion.base == base.uid
        && companion.claim.namespace == base.namespace
        && companion.pods.len() == 1
        && companion.pods.is_subset(pods)
}

/// Removes the grants that end, from the shares whose limits and use are low enough.
pub fn give_back(devices: &mut [Prepared], is_low_enough: impl Fn(&Share) -> bool) {
    let shares = devices.iter_mut().filter_map(Prepared::share_mut);
    for share in shares.filter(|share| share.kept() != share.held()) {
        if is_low_enough(share) {
            share.grants.retain(|grant| !grant.is_ending);
        }
    }
}

/// Returns whether a share of `after` holds more than in `before`, the same devices.
#[must_use]
pub fn is_growth(before: &[Prepared], after: &[Prepared]) -> bool {
    let held = |device: &Prepared| device.share().map(Share::held).unwrap_or_default();
    before
        .iter()
        .zip(after)
        .any(|(before, after)| held(before).max(held(after)) != held(before))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gpus::capacity::MIB;
    use crate::prepare::Access;
    use crate::prepare::record::fixture;

    const BASE: &str = "00000000-0000-4000-8000-000000000001";
    const ADDED: &str = "00000000-0000-4000-8000-000000000002";
    const POOL: &str = "node-1/gpus";

    fn record() -> ClaimRecord {
        let amounts = ShareTotals {
            memory_bytes: 8192 * MIB,
            cores: 20,
            slots: 1,
        };
        fixture::record(1, POOL, amounts)
    }

    /// Returns a companion of 4 GiB, changed at a JSON pointer.
    fn companion(pointer: &str, value: serde_json::Value) -> Option<Companion> {
        let mut claim = json!({
            "metadata": {
                "name": "more", "namespace": "default", "uid": ADDED,
                "labels": {"gpu.drava.dev/companion-of": BASE},
                "deletionTimestamp": null,
            },
            "spec": {},
            "status": {
                "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-1"}],
                "allocation": {"devices": {"results": [{
                    "driver": "gpu.drava.dev", "pool": POOL, "device": "gpu-0-vgpu", "request": "gpu",
                    "shareID": ADDED,
                    "consumedCapacity": {"memory": "4Gi", "cores": "10", "slots": "1"},
                }]}},
            },
        });
        if !pointer.is_empty() {
            *claim.pointer_mut(pointer).unwrap() = value;
        }
        read(&serde_json::from_value(claim).unwrap(), POOL).unwrap()
    }

    fn followed(record: &ClaimRecord, companions: Option<Companion>) -> Share {
        let companions = Companions {
            present: companions.into_iter().collect(),
            unknown: BTreeSet::new(),
            pods: BTreeSet::from(["pod-1".to_owned()]),
        };
        let mut devices = retain(record, &companions);
        for companion in &companions.present {
            let grown = grow(&record.claim, &devices, companion, &companions.pods);
            devices = grown.unwrap_or(devices);
        }
        devices.first().unwrap().share().unwrap().clone()
    }

    fn with(share: Share) -> ClaimRecord {
        let mut record = record();
        record.devices[0].access = Access::Share(share);
        record
    }

    #[test]
    fn companion_adds_to_share_of_its_request() {
        let share = followed(&record(), companion("", json!(null)));
        let sum = ShareTotals {
            memory_bytes: 12_288 * MIB,
            cores: 30,
            slots: 2,
        };
        assert_eq!((share.held(), share.kept()), (sum, sum));
        assert!(is_growth(&record().devices, &with(share.clone()).devices));
        assert!(!is_growth(&with(share.clone()).devices, &record().devices));
        // Once only.
        assert_eq!(
            followed(&with(share.clone()), companion("", json!(null))),
            share
        );
    }

    #[test]
    fn claim_that_is_no_companion_of_this_share_adds_nothing() {
        let result = "/status/allocation/devices/results/0";
        let cases = [
            ("/metadata/namespace".to_owned(), json!("other")),
            (
                "/metadata/labels".to_owned(),
                json!({"gpu.drava.dev/companion-of": ADDED}),
            ),
            ("/metadata/labels".to_owned(), json!({})),
            (
                "/metadata/deletionTimestamp".to_owned(),
                json!("2026-11-28T00:00:00Z"),
            ),
            ("/status/reservedFor/0/uid".to_owned(), json!("pod-2")),
            ("/status/reservedFor".to_owned(), json!([])),
            (format!("{result}/device"), json!("gpu-1-vgpu")),
            (format!("{result}/request"), json!("other")),
            (format!("{result}/pool"), json!("node-2/gpus")),
            (format!("{result}/driver"), json!("gpu.nvidia.com")),
        ];
        for (pointer, value) in cases {
            let share = followed(&record(), companion(&pointer, value));
            assert_eq!(share.grants, [], "{pointer}");
        }
    }

    #[test]
    fn ending_grant_is_held_until_use_is_low_enough() {
        let grown = with(followed(&record(), companion("", json!(null))));
        let deleted = companion("/metadata/deletionTimestamp", json!("2026-11-28T00:00:00Z"));
        let ending = with(followed(&grown, deleted.clone()));
        let share = ending.devices[0].share().unwrap();
        assert_eq!(share.held().memory_bytes, 12_288 * MIB);
        assert_eq!(share.kept().memory_bytes, 8192 * MIB);
        let mut devices = ending.devices.clone();
        give_back(&mut devices, |_| false);
        assert_eq!(devices, ending.devices);
        give_back(&mut devices, |_| true);
        assert_eq!(devices, record().devices);
        // It does not come back while the companion is being deleted.
        assert_eq!(
            followed(&with(devices[0].share().unwrap().clone()), deleted).grants,
            []
        );
        // A companion that exists is never given back.
        let mut devices = grown.devices.clone();
        give_back(&mut devices, |_| true);
        assert_eq!(devices, grown.devices);
    }

    /// Its finalizer was removed, and its memory is still in use.
    #[test]
    fn grant_of_companion_that_is_gone_is_held_until_given_back() {
        let grown = with(followed(&record(), companion("", json!(null))));
        let share = followed(&grown, None);
        assert_eq!(share.held().memory_bytes, 12_288 * MIB);
        assert_eq!(share.kept().memory_bytes, 8192 * MIB);
        let unknown = Companions {
            unknown: BTreeSet::from([ClaimUid::parse(ADDED).unwrap()]),
            ..Companions::default()
        };
        assert_eq!(retain(&grown, &unknown), grown.devices);
    }
}
