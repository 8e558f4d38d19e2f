//! GPUs of which more is allocated than they have, by any writer: reported, and repaired as far as possible.
//!
//! The newest allocation of this controller that no pod has reserved is released, one at a time. A reserved one may be in
//! use, so it is only reported; the node driver rejects what does not fit.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::object::ObjectKey;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::Planner;
use crate::action::event::{PendingEvent, ReleaseReason};
use crate::pods::claim;

/// Over-commits as reported last: claims by pool and GPU.
#[derive(Debug, Default)]
pub(super) struct Overcommits(BTreeMap<(String, String), BTreeSet<ObjectKey>>);

impl Planner {
    /// Starts repairs, and returns the events of over-commits that are not reported.
    pub(super) fn review_overcommits(&mut self) -> Vec<PendingEvent> {
        let mut found = BTreeMap::new();
        let mut events = Vec::new();
        for overcommit in self.world.cluster.overcommits() {
            self.repair(&overcommit.gpu, &overcommit.claims);
            let key = (overcommit.pool, overcommit.gpu);
            if self.reporter.overcommits.0.get(&key) != Some(&overcommit.claims) {
                for claim in overcommit
                    .claims
                    .iter()
                    .filter_map(|key| self.commitments.ledger.claim(key))
                {
                    let users = users_of(claim);
                    let event = |user| {
                        PendingEvent::overcommitted(
                            user,
                            &overcommit.node,
                            &key.1,
                            &overcommit.claims,
                        )
                    };
                    events.extend(users.into_iter().map(event));
                }
            }
            found.insert(key, overcommit.claims);
        }
        self.reporter.overcommits.0 = found;
        events
    }

    /// Makes the release of the newest unreserved allocation due, unless a write to one of the claims is in flight.
    fn repair(&mut self, gpu: &str, claims: &BTreeSet<ObjectKey>) {
        if claims
            .iter()
            .any(|key| self.commitments.ledger.is_in_flight(key))
        {
            return;
        }
        let newest = claims
            .iter()
            .filter(|key| self.commitments.ledger.is_unreserved(key))
            .max_by_key(|key| {
                self.commitments
                    .ledger
                    .claim(key)
                    .map(|claim| age_order(claim))
            });
        if let Some(key) = newest {
            let gpu = gpu.to_owned();
            self.commitments
                .ledger
                .release_now(key, ReleaseReason::Overcommitted { gpu });
        }
    }
}

/// Sort key of allocations, the newest last: the time of the allocation, then the version of the claim.
fn age_order(claim: &ResourceClaim) -> (Option<jiff::Timestamp>, u64) {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let time = allocation.and_then(|allocation| allocation.allocation_timestamp.as_ref());
    let version = claim.metadata.resource_version.as_deref();
    (
        time.map(|time| time.0),
        version
            .and_then(|version| version.parse().ok())
            .unwrap_or_default(),
    )
}

/// Returns the pods that have reserved the claim, or the claim.
fn users_of(claim: &ResourceClaim) -> Vec<ObjectReference> {
    let status = claim.status.as_ref();
    let consumers = status.and_then(|status| status.reserved_for.as_deref());
    let pods = consumers.unwrap_or_default().iter();
    let pods: Vec<ObjectReference> = pods
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: claim.metadata.namespace.clone(),
            name: Some(consumer.name.clone()),
            uid: Some(consumer.uid.clone()),
            ..ObjectReference::default()
        })
        .collect();
    if pods.is_empty() {
        vec![claim::reference(claim)]
    } else {
        pods
    }
}
