//! PodGroups of Kubernetes, Volcano and the coscheduling plugin: gangs whose minimum is in an object of its own.
//!
//! A pod of a PodGroup gets the annotations of a gang, and those with the other properties of the group, when it is observed,
//! so that everything else knows one kind of gang. The annotations of the pod itself take precedence.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::gang::{COMPOSITE_ANNOTATION, PodGroupApi, Reference, reference};
use drava_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use k8s_openapi::api::core::v1::Pod;

const SINGLE: &str = "single";
const ALL: &str = "all";

/// Annotation with the priority of a PodGroup. The watch drops it, and those below, from pods that have them themselves.
const PRIORITY_ANNOTATION: &str = "gpu.drava.dev/gang-priority";
/// Annotation that says whether the pods of a PodGroup may preempt others.
const PREEMPTION_ANNOTATION: &str = "gpu.drava.dev/gang-may-preempt";
/// Annotation with the [`Disruption`] of a PodGroup's pods.
const DISRUPTION_ANNOTATION: &str = "gpu.drava.dev/gang-disruption";

/// Which pods of a gang end when one is evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Disruption {
    /// Those beyond the minimum alone, the others together.
    #[default]
    Elastic,
    /// Each alone.
    Single,
    /// All together.
    All,
}

/// What a PodGroup says of its pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupSpec {
    /// Number of pods that it needs to start, at least 1.
    pub min: usize,
    /// Priority of its pods, instead of their own.
    pub priority: Option<i32>,
    /// Whether its pods may preempt others, instead of what they say themselves.
    pub may_preempt: Option<bool>,
    /// Which of its pods end together.
    pub disruption: Disruption,
    /// The CompositePodGroup to which it belongs.
    pub composite: Option<String>,
}

/// An observation of PodGroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodGroupChange {
    /// The API server serves the API, or does not.
    Served(PodGroupApi, bool),
    /// A PodGroup exists, or does not.
    Group {
        /// Its API.
        api: PodGroupApi,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its specification; `None` if it does not exist.
        spec: Option<GroupSpec>,
    },
}

/// The known PodGroups.
#[derive(Debug, Default)]
pub(crate) struct PodGroups {
    served: BTreeSet<PodGroupApi>,
    groups: BTreeMap<Reference, GroupSpec>,
}

impl PodGroups {
    /// Applies an observation. Returns whether something has changed.
    pub(crate) fn observe(&mut self, change: PodGroupChange) -> bool {
        match change {
            PodGroupChange::Served(api, true) => self.served.insert(api),
            PodGroupChange::Served(api, false) => self.served.remove(&api),
            PodGroupChange::Group {
                api,
                namespace,
                name,
                spec,
            } => {
                let reference = (api, namespace, name);
                match spec {
                    Some(spec) => {
                        let before = self.groups.insert(reference, spec.clone());
                        before != Some(spec)
                    }
                    None => self.groups.remove(&reference).is_some(),
                }
            }
        }
    }

    /// Sets the gang annotations of a pod from its PodGroup. Without the PodGroup the gang has no minimum so far.
    pub(crate) fn resolve(&self, pod: &mut Pod) {
        let Some(reference) = reference(pod) else {
            return;
        };
        if !self.served.contains(&reference.0) {
            return;
        }
        let group = self.groups.get(&reference);
        let disruption = group.and_then(|group| match group.disruption {
            Disruption::Elastic => None,
            Disruption::Single => Some(SINGLE.to_owned()),
            Disruption::All => Some(ALL.to_owned()),
        });
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(GANG_ANNOTATION.to_owned(), reference.2);
        let of_group = [
            (
                GANG_MIN_ANNOTATION,
                group.map(|group| group.min.to_string()),
            ),
            (
                PRIORITY_ANNOTATION,
                group.and_then(|group| Some(group.priority?.to_string())),
            ),
            (
                PREEMPTION_ANNOTATION,
                group.and_then(|group| Some(group.may_preempt?.to_string())),
            ),
            (DISRUPTION_ANNOTATION, disruption),
            (
                COMPOSITE_ANNOTATION,
                group.and_then(|group| group.composite.clone()),
            ),
        ];
        for (name, value) in of_group {
            match value {
                Some(value) => annotations.insert(name.to_owned(), value),
                None => annotations.remove(name),
            };
        }
    }
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(name).map(String::as_str)
}

/// Returns the priority that the PodGroup of a pod gives it.
pub(crate) fn priority(pod: &Pod) -> Option<i32> {
    annotation(pod, PRIORITY_ANNOTATION)?.parse().ok()
}

/// Returns whether the PodGroup of a pod lets it preempt others; `None` if the group says nothing.
pub(crate) fn may_preempt(pod: &Pod) -> Option<bool> {
    annotation(pod, PREEMPTION_ANNOTATION)?.parse().ok()
}

/// Returns which pods of the gang of a pod end together.
pub(crate) fn disruption(pod: &Pod) -> Disruption {
    match annotation(pod, DISRUPTION_ANNOTATION) {
        Some(SINGLE) => Disruption::Single,
        Some(ALL) => Disruption::All,
        Some(_) | None => Disruption::Elastic,
    }
}

#[cfg(test)]
mod tests {
    use drava_allocator::gang::{self, COSCHEDULING_LABEL};
    use drava_api::names::VOLCANO_GROUP_ANNOTATION;
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::object;

    fn pod(metadata: &Value, spec: &Value) -> Pod {
        let mut pod = json!({"metadata": metadata, "spec": spec});
        pod["metadata"]["namespace"] = json!("default");
        pod["spec"]["containers"] = json!([]);
        object(pod)
    }

    fn change(api: PodGroupApi, min: Option<usize>) -> PodGroupChange {
        PodGroupChange::Group {
            api,
            namespace: "default".to_owned(),
            name: "g".to_owned(),
            spec: min.map(|min| GroupSpec {
                min,
                ..GroupSpec::default()
            }),
        }
    }

    #[test]
    fn pod_has_minimum_of_its_group() {
        let cases = [
            (
                PodGroupApi::Kubernetes,
                pod(
                    &json!({}),
                    &json!({"schedulingGroup": {"podGroupName": "g"}}),
                ),
            ),
            (
                PodGroupApi::Volcano,
                pod(
                    &json!({"annotations": {VOLCANO_GROUP_ANNOTATION: "g"}}),
                    &json!({}),
                ),
            ),
            (
                PodGroupApi::Coscheduling,
                pod(&json!({"labels": {COSCHEDULING_LABEL: "g"}}), &json!({})),
            ),
        ];
        for (api, mut pod) in cases {
            let mut groups = PodGroups::default();
            groups.resolve(&mut pod);
            assert_eq!(gang::of(&pod), Ok(None), "{api:?} is not served");
            assert!(groups.observe(PodGroupChange::Served(api, true)));
            groups.resolve(&mut pod);
            assert!(gang::of(&pod).is_err(), "the group does not exist");
            assert!(groups.observe(change(api, Some(3))));
            assert!(!groups.observe(change(api, Some(3))), "no change");
            groups.resolve(&mut pod);
            assert_eq!(gang::of(&pod).unwrap().unwrap().min, 3);
            assert!(groups.observe(change(api, None)));
            groups.resolve(&mut pod);
            assert!(gang::of(&pod).is_err(), "the group was deleted");
        }
    }

    #[test]
    fn pod_has_priority_and_disruption_of_its_group() {
        let mut groups = PodGroups::default();
        groups.observe(PodGroupChange::Served(PodGroupApi::Kubernetes, true));
        let mut member = pod(
            &json!({}),
            &json!({"schedulingGroup": {"podGroupName": "g"}, "priority": 0}),
        );
        let mut set = |spec: GroupSpec| {
            groups.observe(PodGroupChange::Group {
                api: PodGroupApi::Kubernetes,
                namespace: "default".to_owned(),
                name: "g".to_owned(),
                spec: Some(spec),
            });
            groups.resolve(&mut member);
            (
                crate::pods::pod::priority(&member),
                disruption(&member),
                gang::of(&member),
            )
        };
        let spec = GroupSpec {
            min: 2,
            priority: Some(7),
            disruption: Disruption::All,
            ..GroupSpec::default()
        };
        let (priority, all, gang) = set(spec.clone());
        assert_eq!((priority, all), (7, Disruption::All));
        assert_eq!(gang.unwrap().unwrap().min, 2);
        let (_, single, composite) = set(GroupSpec {
            disruption: Disruption::Single,
            composite: Some("job".to_owned()),
            ..spec
        });
        assert_eq!(single, Disruption::Single);
        assert_eq!(
            composite.unwrap_err().to_string(),
            "PodGroup g belongs to CompositePodGroup job, whose groups drava cannot start together; create it without \
             spec.parentCompositePodGroupName"
        );
    }

    #[test]
    fn own_annotations_take_precedence() {
        let annotations = json!({
            "gpu.drava.dev/gang": "own", "gpu.drava.dev/gang-min": "2", VOLCANO_GROUP_ANNOTATION: "g",
        });
        let mut pod = pod(&json!({"annotations": annotations}), &json!({}));
        let mut groups = PodGroups::default();
        groups.observe(PodGroupChange::Served(PodGroupApi::Volcano, true));
        groups.observe(change(PodGroupApi::Volcano, Some(5)));
        groups.resolve(&mut pod);
        assert_eq!(gang::of(&pod).unwrap().unwrap().min, 2);
    }

    #[test]
    fn annotation_with_name_of_group_gates_and_keeps_its_minimum() {
        let annotations = json!({"gpu.drava.dev/gang": "g", VOLCANO_GROUP_ANNOTATION: "g"});
        let mut pod = pod(&json!({"annotations": annotations}), &json!({}));
        assert!(gang::name_of(&pod).is_some(), "the webhook gates it");
        let mut groups = PodGroups::default();
        groups.observe(PodGroupChange::Served(PodGroupApi::Volcano, true));
        groups.observe(change(PodGroupApi::Volcano, Some(5)));
        groups.resolve(&mut pod);
        assert_eq!(gang::of(&pod).unwrap().unwrap().min, 5);
    }
}
