//! The fields of a pod that the translation reads.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use super::finding::{Refusal, RefusalCause, Refusals};

/// A pod or pod template. Fields that are absent and fields that are null are equal.
#[derive(Debug, Default, Deserialize)]
pub(super) struct PodView {
    pub(super) metadata: Option<Metadata>,
    pub(super) spec: Spec,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Metadata {
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    init_containers: Option<Vec<Container>>,
    containers: Option<Vec<Container>>,
    pub(super) scheduler_name: Option<String>,
    resource_claims: Option<Vec<Named>>,
    pub(super) runtime_class_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Named {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
    resources: Option<Resources>,
    env: Option<Vec<Variable>>,
    restart_policy: Option<String>,
    security_context: Option<SecurityContext>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Resources {
    pub(super) limits: Option<BTreeMap<String, Value>>,
    pub(super) requests: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct Variable {
    name: String,
    value: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SecurityContext {
    privileged: Option<bool>,
}

/// List of containers of a pod spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContainerList {
    Init,
    Main,
}

impl ContainerList {
    /// Returns the field of the pod spec.
    pub(super) const fn field(self) -> &'static str {
        match self {
            Self::Init => "initContainers",
            Self::Main => "containers",
        }
    }
}

/// A container with its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContainerRef<'a> {
    pub(super) list: ContainerList,
    pub(super) index: usize,
    pub(super) container: &'a Container,
}

impl fmt::Display for ContainerRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spec.{}[{}]", self.list.field(), self.index)
    }
}

impl<'a> ContainerRef<'a> {
    /// Returns whether the container ends before the next one starts.
    pub(super) fn is_sequential(&self) -> bool {
        self.list == ContainerList::Init
            && self.container.restart_policy.as_deref() != Some("Always")
    }

    /// Returns the limits and requests of the container.
    pub(super) fn resources(&self) -> impl Iterator<Item = (&'static str, &'a str, &'a Value)> {
        let resources = self.container.resources.iter();
        resources.flat_map(|resources| {
            let limits = resources.limits.iter().flatten();
            let requests = resources.requests.iter().flatten();
            limits
                .map(|(name, value)| ("limits", name.as_str(), value))
                .chain(requests.map(|(name, value)| ("requests", name.as_str(), value)))
        })
    }

    /// Returns the literal value of an environment variable.
    pub(super) fn variable(&self, name: &str) -> Option<&'a str> {
        let mut variables = self.container.env.iter().flatten();
        // The last one of equal names is effective.
        variables
            .rfind(|variable| variable.name == name)
            .and_then(|variable| variable.value.as_deref())
    }

    pub(super) fn is_privileged(&self) -> bool {
        let context = self.container.security_context.as_ref();
        context.and_then(|context| context.privileged) == Some(true)
    }
}

impl PodView {
    pub(super) fn decode(pod: &Value) -> Result<Self, Refusals> {
        serde_path_to_error::deserialize(pod).map_err(|error| {
            Refusals(vec![Refusal {
                field: error.path().to_string(),
                cause: RefusalCause::Malformed {
                    problem: error.into_inner().to_string(),
                },
            }])
        })
    }

    /// Returns the init containers, then the containers.
    pub(super) fn containers(&self) -> impl Iterator<Item = ContainerRef<'_>> {
        [
            (ContainerList::Init, &self.spec.init_containers),
            (ContainerList::Main, &self.spec.containers),
        ]
        .into_iter()
        .flat_map(|(list, containers)| {
            let containers = containers.iter().flatten().enumerate();
            containers.map(move |(index, container)| ContainerRef {
                list,
                index,
                container,
            })
        })
    }

    pub(super) fn annotation(&self, name: &str) -> Option<&str> {
        let annotations = self.metadata.as_ref()?.annotations.as_ref()?;
        annotations.get(name).map(String::as_str)
    }

    /// Returns a name for the claim that no other claim of the pod has.
    pub(super) fn free_claim_name(&self) -> String {
        let names: Vec<&str> = self
            .spec
            .resource_claims
            .iter()
            .flatten()
            .map(|claim| claim.name.as_str())
            .collect();
        // One more candidate than names, so one is free.
        (0..=names.len())
            .map(|number| match number {
                0 => "gpu".to_owned(),
                number => format!("gpu-{number}"),
            })
            .find(|name| !names.contains(&name.as_str()))
            .unwrap_or_default()
    }
}
