//! Gangs: pods that are allocated together or not at all. Annotations define them; those of a PodGroup's pods are set by its
//! watch.

use std::fmt;

use drava_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION, VOLCANO_GROUP_ANNOTATION};
use k8s_openapi::api::core::v1::Pod;

/// Label with the name of a pod's PodGroup of the coscheduling plugin.
pub const COSCHEDULING_LABEL: &str = "scheduling.x-k8s.io/pod-group";

/// Annotation with the CompositePodGroup of a PodGroup. The watch drops it from pods that have it themselves.
pub const COMPOSITE_ANNOTATION: &str = "gpu.drava.dev/gang-composite";

/// An API with a PodGroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodGroupApi {
    /// `scheduling.k8s.io`, named by `spec.schedulingGroup` (KEP-4671).
    Kubernetes,
    /// `scheduling.volcano.sh`, named by an annotation.
    Volcano,
    /// `scheduling.x-k8s.io`, named by a label.
    Coscheduling,
}

impl PodGroupApi {
    /// All APIs.
    pub const ALL: [Self; 3] = [Self::Kubernetes, Self::Volcano, Self::Coscheduling];

    /// Returns group and version of the API.
    #[must_use]
    pub const fn api_version(self) -> &'static str {
        match self {
            Self::Kubernetes => "scheduling.k8s.io/v1beta1",
            Self::Volcano => "scheduling.volcano.sh/v1beta1",
            Self::Coscheduling => "scheduling.x-k8s.io/v1alpha1",
        }
    }
}

/// Reference of a pod to its PodGroup: API, namespace, name.
pub type Reference = (PodGroupApi, String, String);

/// Namespace and name of a gang. A PodGroup and a gang of annotations with the same name are two gangs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GangName {
    namespace: String,
    name: String,
    /// API of its PodGroup; `None` for a gang of annotations.
    api: Option<PodGroupApi>,
}

impl GangName {
    /// Creates the name of a PodGroup.
    #[must_use]
    pub fn of_group(api: PodGroupApi, namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            api: Some(api),
        }
    }

    /// Returns `namespace/name`.
    #[must_use]
    pub fn qualified(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

impl fmt::Display for GangName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The gang of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gang {
    /// Its name.
    pub name: GangName,
    /// Number of pods that the gang needs to start, at least 1.
    pub min: usize,
}

/// Why the annotations of a pod do not define a gang.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GangError {
    /// The gang has no minimum.
    #[error(
        "gang {0} has no minimum; set annotation {GANG_MIN_ANNOTATION} to the number of pods that it needs to start, or create \
         its PodGroup"
    )]
    MinMissing(GangName),
    /// The annotation is not a positive number.
    #[error(
        "annotation {GANG_MIN_ANNOTATION} of gang {gang} is {value:?}; use a number of pods from 1 on"
    )]
    MinInvalid {
        /// The gang.
        gang: GangName,
        /// Value of the annotation.
        value: String,
    },
    /// The PodGroup is a part of another group.
    #[error(
        "PodGroup {gang} belongs to CompositePodGroup {composite}, whose groups drava cannot start together; create it \
         without spec.parentCompositePodGroupName"
    )]
    Composite {
        /// The gang.
        gang: GangName,
        /// Name of the other group.
        composite: String,
    },
    /// Pending members name different minimums.
    #[error(
        "members of gang {gang} have different minimums, {} and {}; set the same {GANG_MIN_ANNOTATION} in all of them",
        .minimums[0], .minimums[1]
    )]
    Contradictory {
        /// The gang.
        gang: GangName,
        /// Two of the minimums.
        minimums: [usize; 2],
    },
}

impl GangError {
    /// Members of a gang have these two minimums.
    #[must_use]
    pub fn contradictory(gang: GangName, one: usize, other: usize) -> Self {
        Self::Contradictory {
            gang,
            minimums: [one.min(other), one.max(other)],
        }
    }
}

/// Returns the name of the pod's gang.
#[must_use]
pub fn name_of(pod: &Pod) -> Option<GangName> {
    let annotations = pod.metadata.annotations.as_ref()?;
    Some(GangName {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: annotations.get(GANG_ANNOTATION)?.clone(),
        api: reference(pod).map(|(api, ..)| api),
    })
}

/// Returns the pod's gang; `None` if the pod belongs to none.
///
/// # Errors
/// When the annotations do not define a gang.
pub fn of(pod: &Pod) -> Result<Option<Gang>, GangError> {
    let Some(name) = name_of(pod) else {
        return Ok(None);
    };
    let annotation = |name: &str| pod.metadata.annotations.as_ref()?.get(name);
    if let Some(composite) = annotation(COMPOSITE_ANNOTATION) {
        return Err(GangError::Composite {
            gang: name,
            composite: composite.clone(),
        });
    }
    let value = annotation(GANG_MIN_ANNOTATION);
    match value.map(|value| (value, value.trim().parse::<usize>())) {
        None => Err(GangError::MinMissing(name)),
        Some((_, Ok(min))) if min > 0 => Ok(Some(Gang { name, min })),
        Some((value, _)) => Err(GangError::MinInvalid {
            gang: name,
            value: value.clone(),
        }),
    }
}

/// Returns the PodGroup of a pod. A pod with its own gang annotation that names no PodGroup has none.
#[must_use]
pub fn reference(pod: &Pod) -> Option<Reference> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let annotation = |name: &str| pod.metadata.annotations.as_ref()?.get(name).cloned();
    let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).cloned();
    let group = pod.spec.as_ref().and_then(|spec| {
        let group = spec.scheduling_group.as_ref()?;
        group.pod_group_name.clone()
    });
    let (api, name) = group
        .map(|name| (PodGroupApi::Kubernetes, name))
        .or_else(|| Some((PodGroupApi::Volcano, annotation(VOLCANO_GROUP_ANNOTATION)?)))
        .or_else(|| Some((PodGroupApi::Coscheduling, label(COSCHEDULING_LABEL)?)))?;
    // Resolved before, or of this name anyway.
    let is_own = annotation(GANG_ANNOTATION).is_some_and(|gang| gang != name);
    (!is_own).then_some((api, namespace, name))
}
