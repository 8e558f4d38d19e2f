//! Gangs: pods that are allocated together or not at all. Annotations define them, or a [PodGroup](crate::pods::pod_group).

use std::fmt;

use drava_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use k8s_openapi::api::core::v1::Pod;

use crate::pods::pod_group::{self, COMPOSITE_ANNOTATION, PodGroupApi};

/// Namespace and name of a gang. A PodGroup and a gang of annotations with the same name are two gangs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GangName {
    namespace: String,
    name: String,
    /// API of its PodGroup; `None` for a gang of annotations.
    api: Option<PodGroupApi>,
}

impl GangName {
    /// Creates the name of a PodGroup.
    pub(crate) fn of_group(api: PodGroupApi, namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            api: Some(api),
        }
    }

    /// Returns `namespace/name`.
    pub(crate) fn qualified(&self) -> String {
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
pub(crate) struct Gang {
    /// Its name.
    pub(crate) name: GangName,
    /// Number of pods that the gang needs to start, at least 1.
    pub(crate) min: usize,
}

/// Why the annotations of a pod do not define a gang.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GangError {
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

/// Returns the name of the pod's gang.
pub(crate) fn name_of(pod: &Pod) -> Option<GangName> {
    let annotations = pod.metadata.annotations.as_ref()?;
    Some(GangName {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: annotations.get(GANG_ANNOTATION)?.clone(),
        api: pod_group::reference(pod).map(|(api, ..)| api),
    })
}

/// Returns the pod's gang; `None` if the pod belongs to none.
///
/// # Errors
/// When the annotations do not define a gang.
pub(crate) fn of(pod: &Pod) -> Result<Option<Gang>, GangError> {
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
