//! GpuPolicies of the cluster, and the placement policies that result for a claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use drava_api::config::Placement;
use drava_api::policy::{
    GpuPolicy, GpuPolicySpec, IdlePolicy, PolicyLevel, PreemptionLimits, Preference,
};

use super::Cluster;
use crate::claim::ClaimSpec;
use crate::pod_request::PodRequest;
use crate::steps;

/// GpuPolicies by name.
#[derive(Debug, Default)]
pub(super) struct Policies {
    by_name: BTreeMap<String, GpuPolicySpec>,
    /// The conflicts between them, until a policy or the labels of a namespace change.
    conflicts: OnceLock<BTreeMap<String, String>>,
}

impl Policies {
    /// Returns the policies.
    pub(super) fn values(&self) -> impl Iterator<Item = &GpuPolicySpec> {
        self.by_name.values()
    }

    /// The labels of a namespace have changed.
    pub(super) fn namespace_changed(&mut self) {
        self.conflicts.take();
    }
}

impl Cluster {
    /// Adds or replaces a policy. Returns whether decisions may change.
    pub fn upsert_policy(&mut self, policy: &GpuPolicy) -> bool {
        let name = policy.metadata.name.clone().unwrap_or_default();
        let policies = &mut self.policies;
        let before = policies.by_name.insert(name, policy.spec.clone());
        let is_changed = before.as_ref() != Some(&policy.spec);
        if is_changed {
            policies.conflicts.take();
        }
        is_changed
    }

    /// Removes a policy.
    pub fn remove_policy(&mut self, name: &str) {
        self.policies.by_name.remove(name);
        self.policies.conflicts.take();
    }

    /// Returns the request with the placement policies of its claims resolved; `None` if no GpuPolicy exists.
    pub(crate) fn with_policies(&self, pod_request: &PodRequest) -> Option<PodRequest> {
        if self.policies.by_name.is_empty() {
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
        if self.policies.by_name.is_empty() {
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

    /// Returns what is done with idle shares of the namespace whose claims use these classes.
    #[must_use]
    pub fn idle_policy(&self, namespace: &str, classes: &BTreeSet<&str>) -> Option<IdlePolicy> {
        let policies = self.policies_of(namespace, classes);
        policies.iter().flatten().find_map(|policy| policy.idle)
    }

    /// Returns the policies that do not apply to some claims that they select, each with the name of the one that does.
    #[must_use]
    pub fn policy_conflicts(&self) -> &BTreeMap<String, String> {
        let conflicts = &self.policies.conflicts;
        conflicts.get_or_init(|| self.find_conflicts())
    }

    fn find_conflicts(&self) -> BTreeMap<String, String> {
        let policies = &self.policies.by_name;
        // The policies that select a namespace, each combination once.
        let of_namespaces = policies.iter();
        let of_namespaces: Vec<(&String, &GpuPolicySpec)> = of_namespaces
            .filter(|(_, policy)| policy.level() == PolicyLevel::Namespace)
            .collect();
        let selected = steps::counted(self.namespace_labels()).map(|labels| {
            let policies = of_namespaces.iter();
            let selecting = policies.filter(|(_, policy)| policy.selects_namespace(labels));
            selecting.map(|(name, _)| *name).collect()
        });
        let selected: BTreeSet<BTreeSet<&String>> = match of_namespaces.is_empty() {
            true => BTreeSet::new(),
            false => selected.collect(),
        };
        // Both are of one level.
        let overlap = |(name, one): (&String, &GpuPolicySpec), (other_name, other)| match one
            .level()
        {
            PolicyLevel::Cluster => true,
            PolicyLevel::Class => {
                let mut classes = one.device_classes.iter().flatten();
                classes.any(|class| GpuPolicySpec::selects_class(other, class))
            }
            PolicyLevel::Namespace => {
                let mut selected = selected.iter();
                selected.any(|selecting| selecting.contains(name) && selecting.contains(other_name))
            }
        };
        let mut conflicts = BTreeMap::new();
        for (name, policy) in policies {
            let before = policies.range(..name.clone());
            let winner = before
                .filter(|(_, other)| other.level() == policy.level())
                .find(|other| contradict(other.1, policy) && overlap(*other, (name, policy)));
            if let Some((winner, _)) = winner {
                conflicts.insert(name.clone(), winner.clone());
            }
        }
        conflicts
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
            policy.idle,
        )
    };
    settings(one) != settings(other)
}
