//! What is against the suspension of a share: its config, its pod, and the host memory of its node.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::reason::bytes;
use drava_allocator::usage::AllocatedDevice;
use drava_api::{Quantity, names, suspension};
use drava_explanation::suspension as share;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::Write;
use super::step::{Answer, View};
use crate::decide::planner::Planner;

impl Planner {
    /// Returns whether a claim can be suspended instead of an eviction of its pod.
    pub(super) fn can_suspend(&self, key: &ObjectKey) -> bool {
        let suspensions = &self.commitments.suspensions;
        let is_busy =
            suspensions.claims.contains_key(key) || suspensions.protected.contains_key(key);
        let claim = self.commitments.ledger.claim(key).filter(|_| !is_busy);
        claim.is_some_and(|claim| {
            View::of(claim, true).answer == Answer::Running
                && self.suspension_problem(claim).is_none()
        })
    }

    /// Returns why the shares of a claim cannot be suspended; `None` if nothing is known against it.
    fn suspension_problem(&self, claim: &ResourceClaim) -> Option<String> {
        let key = object_key(&claim.metadata);
        if let Err(problem) = share::check(claim) {
            return Some(problem);
        }
        let Some((_, pod)) = self.pod_of(&key).filter(|(_, pod)| pod.is_bound) else {
            return Some("it is not reserved for one pod alone that is bound to a node".to_owned());
        };
        if pod.grace_period_end.is_some() || claim.metadata.deletion_timestamp.is_some() {
            return Some("it or its pod is being deleted".to_owned());
        }
        if pod.gang.is_some() {
            return Some(
                "its pod is a member of a gang, whose other members would wait for it".to_owned(),
            );
        }
        if self.share_of_pod(pod).as_ref() != Some(&key) {
            return Some("its pod has more than one claim for devices of drava".to_owned());
        }
        pod.host_traits.problem(share::memory_of(claim))
    }

    /// Returns why the shares of a claim cannot be suspended, also if that is what is suspended on its node already.
    pub(super) fn suspension_problem_now(&self, claim: &ResourceClaim) -> Option<String> {
        let problem = self.suspension_problem(claim);
        problem.or_else(|| self.host_memory_problem([claim], &self.suspended_memory()))
    }

    /// Returns which node has too little host memory for the suspension of these claims, together with what is suspended there.
    pub(super) fn host_memory_problem<'a>(
        &self,
        claims: impl IntoIterator<Item = &'a ResourceClaim>,
        suspended: &BTreeMap<String, Quantity>,
    ) -> Option<String> {
        let mut demands: BTreeMap<String, (Quantity, Quantity)> = BTreeMap::new();
        for claim in claims {
            let devices = AllocatedDevice::of_claim(claim);
            let Some(device) = devices.first() else {
                continue;
            };
            let cluster = &self.world.cluster;
            let Some(limit) = cluster.suspend_host_memory(&device.pool, &device.device) else {
                continue;
            };
            let (_, demand) = demands
                .entry(device.pool.clone())
                .or_insert((limit, Quantity::ZERO));
            *demand += share::memory_of(claim);
        }
        demands.into_iter().find_map(|(pool, (limit, demand))| {
            let used = suspended.get(&pool).copied().unwrap_or(Quantity::ZERO);
            let node = names::node_of_pool(&pool).unwrap_or(&pool);
            (used + demand > limit).then(|| {
                format!(
                    "the suspended shares of node {node} may have {} of host memory (suspend.hostMemory of its GpuNodeProfile); they \
                     have {}, and {} more are necessary",
                    bytes(limit),
                    bytes(used),
                    bytes(demand)
                )
            })
        })
    }

    /// Returns the memory of the shares that are suspended, or on their way there or back, by pool.
    pub(super) fn suspended_memory(&self) -> BTreeMap<String, Quantity> {
        let suspensions = &self.commitments.suspensions;
        let mut memory: BTreeMap<String, Quantity> = BTreeMap::new();
        let intended = suspensions.claims.iter().filter(|(key, known)| {
            let claim = self.commitments.ledger.claim(key);
            // What the node has refused stays on the GPU.
            let is_intended = claim.is_some_and(|claim| {
                suspension::is_intended(&claim.metadata) && suspension::refusal(claim).is_none()
            });
            known.write == Write::Intending || is_intended
        });
        let intended = intended.map(|(key, _)| key);
        let holding: BTreeSet<&ObjectKey> = intended.chain(&suspensions.answered).collect();
        for key in holding {
            let claim = self.commitments.ledger.claim(key);
            // A node that was restarted has no copy any more.
            let Some(claim) = claim.filter(|claim| !suspension::is_lost(claim)) else {
                continue;
            };
            let device = AllocatedDevice::of_claim(claim).into_iter().next();
            let pool = device.map(|device| device.pool).unwrap_or_default();
            *memory.entry(pool).or_insert(Quantity::ZERO) += share::memory_of(claim);
        }
        memory
    }

    /// Returns whether the nodes have the host memory for the suspension of these pods' shares.
    pub(in crate::decide::planner) fn has_host_memory(&self, victims: &BTreeSet<String>) -> bool {
        let pods = victims
            .iter()
            .filter_map(|uid| self.world.live_pods.get(uid));
        let claims = pods.filter_map(|pod| {
            let key = self.share_of_pod(pod)?;
            self.commitments.ledger.claim(&key)
        });
        let claims = claims.map(|claim| &**claim);
        self.host_memory_problem(claims, &self.suspended_memory())
            .is_none()
    }
}
