//! GpuPolicies of the cluster, and the placement policies that result for a claim.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::config::Placement;
use drava_api::policy::{GpuPolicy, GpuPolicySpec, PolicyLevel, PreemptionLimits, Preference};

use super::Cluster;
use crate::claim::ClaimSpec;
use crate::pod_request::PodRequest;

impl Cluster {
    /// Adds or replaces a policy. Returns whether decisions may change.
    pub fn upsert_policy(&mut self, policy: &GpuPolicy) -> bool {
        let name = policy.metadata.name.clone().unwrap_or_default();
        let before = self.policies.insert(name, policy.spec.clone());
        before.as_ref() != Some(&policy.spec)
    }

    /// Removes a policy.
    pub fn remove_policy(&mut self, name: &str) {
        self.policies.remove(name);
    }

    /// Returns the request with the placement policies of its claims resolved; `None` if no GpuPolicy exists.
    pub(crate) fn with_policies(&self, pod_request: &PodRequest) -> Option<PodRequest> {
        if self.policies.is_empty() {
            return None;
        }
        let mut resolved = pod_request.clone();
        for claim in &mut resolved.claims {
            (claim.placement, claim.prefer) = self.placement_of(claim);
        }
        Some(resolved)
    }

    fn placement_of(&self, claim: &ClaimSpec) -> (Placement, Option<Preference>) {
        let classes: BTreeSet<&str> = claim
            .requests
            .iter()
            .flat_map(|request| &request.alternatives)
            .map(|alternative| alternative.class.as_str())
            .collect();
        let settings = self.policies_of(&claim.id.namespace, &classes);
        let (own, of_class) = (claim.own_placement, claim.class_placement);
        let placement = Placement {
            node: resolve(own.node, of_class.node, settings, |policy| policy.node),
            gpu: resolve(own.gpu, of_class.gpu, settings, |policy| policy.gpu),
        };
        let prefer = settings.iter().flatten().find_map(|policy| policy.prefer);
        (placement, prefer)
    }

    /// Returns the policies of the namespace, of the classes and of the cluster that apply to claims.
    fn policies_of(
        &self,
        namespace: &str,
        classes: &BTreeSet<&str>,
    ) -> [Option<&GpuPolicySpec>; 3] {
        let no_labels = BTreeMap::new();
        let labels = self.labels_of(namespace).unwrap_or(&no_labels);
        let first = |level: PolicyLevel| {
            // Sorted by name.
            self.policies.values().find(|policy| {
                policy.level() == level
                    && match level {
                        PolicyLevel::Namespace => policy.selects_namespace(labels),
                        PolicyLevel::Class => {
                            classes.iter().any(|class| policy.selects_class(class))
                        }
                        PolicyLevel::Cluster => true,
                    }
            })
        };
        [
            PolicyLevel::Namespace,
            PolicyLevel::Class,
            PolicyLevel::Cluster,
        ]
        .map(first)
    }

    /// Returns whether a policy limits evictions.
    #[must_use]
    pub fn has_preemption_limits(&self) -> bool {
        self.policies
            .values()
            .any(|policy| policy.preemption.is_some())
    }

    /// Returns the limits of evictions for a pod of the namespace whose claims use these classes. The policy of the
    /// namespace precedes that of a class, and that of the cluster comes last, for each limit.
    #[must_use]
    pub fn preemption_limits(&self, namespace: &str, classes: &BTreeSet<&str>) -> PreemptionLimits {
        if self.policies.is_empty() {
            return PreemptionLimits::default();
        }
        let policies = self.policies_of(namespace, classes);
        let limits = || {
            policies
                .iter()
                .flatten()
                .filter_map(|policy| policy.preemption)
        };
        PreemptionLimits {
            delay_seconds: limits().find_map(|limits| limits.delay_seconds),
            minimum_runtime_seconds: limits().find_map(|limits| limits.minimum_runtime_seconds),
        }
    }

    /// Returns the policies that do not apply to some claims that they select, each with the name of the one that does.
    #[must_use]
    pub fn policy_conflicts(&self) -> BTreeMap<&str, &str> {
        let mut conflicts = BTreeMap::new();
        for (name, policy) in &self.policies {
            let before = self.policies.range(..name.clone());
            let winner = before
                .filter(|(_, other)| other.level() == policy.level())
                .find(|(_, other)| contradict(other, policy) && self.overlap(other, policy));
            if let Some((winner, _)) = winner {
                conflicts.insert(name.as_str(), winner.as_str());
            }
        }
        conflicts
    }

    /// Returns whether both policies, of one level, select the same claims.
    fn overlap(&self, one: &GpuPolicySpec, other: &GpuPolicySpec) -> bool {
        match one.level() {
            PolicyLevel::Cluster => true,
            PolicyLevel::Class => {
                let mut classes = one.device_classes.iter().flatten();
                classes.any(|class| other.selects_class(class))
            }
            PolicyLevel::Namespace => self
                .namespace_labels()
                .any(|labels| one.selects_namespace(labels) && other.selects_namespace(labels)),
        }
    }
}

/// Resolves one field: from the config of the claim and of its class, and from the policies of namespace, class and cluster.
fn resolve<T>(
    own: Option<T>,
    of_class: Option<T>,
    settings: [Option<&GpuPolicySpec>; 3],
    field: impl Fn(&GpuPolicySpec) -> Option<T>,
) -> Option<T> {
    let mut applied = settings.into_iter().flatten();
    let applied = applied.find(|policy| field(policy).is_some());
    let [namespace, class, cluster] = settings.map(|policy| policy.and_then(&field));
    own.filter(|_| applied.is_none_or(GpuPolicySpec::allows_override))
        .or(namespace)
        .or(of_class)
        .or(class)
        .or(cluster)
}

fn contradict(one: &GpuPolicySpec, other: &GpuPolicySpec) -> bool {
    let settings = |policy: &GpuPolicySpec| {
        (
            policy.node,
            policy.gpu,
            policy.allows_override(),
            policy.prefer,
            policy.preemption,
        )
    };
    settings(one) != settings(other)
}
