//! Volumes that limit the nodes of a pod: those that are bound, by their node affinity and zone labels, and those that are
//! provisioned for the node of their first pod, by the topologies that their StorageClass allows. Sources: the plugins
//! VolumeBinding and VolumeZone of kube-scheduler.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
    PersistentVolumeClaim,
};
use k8s_openapi::api::storage::v1::StorageClass;

use super::Cluster;
use crate::node::{NodeInfo, PodDemand};
use crate::object::{ObjectKey, object_key};

/// Volumes of the cluster, reduced to where they are accessible.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    claims: BTreeMap<ObjectKey, VolumeClaim>,
    /// By name; those that are accessible on every node are missing.
    volumes: BTreeMap<String, Volume>,
    /// Topologies of the StorageClasses that limit them.
    classes: BTreeMap<String, NodeSelector>,
}

/// Where a volume is accessible.
#[derive(Debug, Default, PartialEq)]
struct Volume {
    affinity: Option<NodeSelector>,
    /// Values of the zone labels of the volume, which the node must have.
    zones: Vec<(&'static str, BTreeSet<String>)>,
}

/// Labels of zones and regions, each with its name before Kubernetes 1.17.
const ZONE_LABELS: [(&str, &str); 2] = [
    (
        "topology.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/zone",
    ),
    (
        "topology.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/region",
    ),
];

/// Returns whether a label of a PersistentVolume decides where it is accessible.
#[must_use]
pub fn is_zone_label(name: &str) -> bool {
    let mut labels = ZONE_LABELS.iter();
    labels.any(|(label, old)| name == *label || name == *old)
}

impl Volume {
    fn of(volume: &PersistentVolume) -> Self {
        let affinity = volume.spec.as_ref().and_then(|spec| {
            let affinity = spec.node_affinity.as_ref()?;
            affinity.required.clone()
        });
        let labels = volume.metadata.labels.as_ref();
        let keys = ZONE_LABELS.iter().flat_map(|(key, old)| [*key, *old]);
        let zones = keys.filter_map(|key| Some((key, zones(labels?.get(key)?)?)));
        Self {
            affinity,
            zones: zones.collect(),
        }
    }

    /// Returns whether the volume is accessible on a node. A node without any zone label is in every zone.
    fn is_accessible(&self, name: &str, node: &NodeInfo) -> bool {
        let affinity = self.affinity.as_ref();
        let has_label =
            |(key, old): &(&str, &str)| node.label(key).is_some() || node.label(old).is_some();
        let in_zone = |(key, zones): &(&str, BTreeSet<String>)| {
            let current = ZONE_LABELS.iter().find(|(_, old)| old == key);
            let value = node.label(key).or_else(|| node.label(current?.0));
            value.is_some_and(|value| zones.contains(value))
        };
        affinity.is_none_or(|affinity| node.selected_by(name, affinity))
            && (!ZONE_LABELS.iter().any(has_label) || self.zones.iter().all(in_zone))
    }
}

/// Returns the zones of a label, which are separated by `__`; `None` if one is empty.
fn zones(label: &str) -> Option<BTreeSet<String>> {
    let zones = label.split("__").map(str::trim);
    zones
        .map(|zone| (!zone.is_empty()).then(|| zone.to_owned()))
        .collect()
}

#[derive(Debug, Default, PartialEq)]
struct VolumeClaim {
    /// Name of the bound volume.
    volume: Option<String>,
    class: Option<String>,
}

impl Volumes {
    /// Returns whether the volume of a claim is accessible on a node, or can be provisioned there.
    fn is_accessible(&self, claim: &ObjectKey, name: &str, node: &NodeInfo) -> bool {
        let Some(claim) = self.claims.get(claim) else {
            return true;
        };
        match (&claim.volume, &claim.class) {
            (Some(volume), _) => {
                let volume = self.volumes.get(volume);
                volume.is_none_or(|volume| volume.is_accessible(name, node))
            }
            (None, Some(class)) => {
                let class = self.classes.get(class);
                class.is_none_or(|selector| node.selected_by(name, selector))
            }
            (None, None) => true,
        }
    }
}

impl Cluster {
    /// Adds or replaces a PersistentVolumeClaim.
    pub fn upsert_volume_claim(&mut self, claim: &PersistentVolumeClaim) {
        let filled = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let spec = claim.spec.as_ref();
        let reduced = VolumeClaim {
            volume: spec.and_then(|spec| filled(&spec.volume_name)),
            class: spec.and_then(|spec| filled(&spec.storage_class_name)),
        };
        let key = object_key(&claim.metadata);
        self.volumes.claims.insert(key, reduced);
    }

    /// Removes a PersistentVolumeClaim.
    pub fn remove_volume_claim(&mut self, key: &ObjectKey) {
        self.volumes.claims.remove(key);
    }

    /// Adds or replaces a PersistentVolume.
    pub fn upsert_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.metadata.name.clone().unwrap_or_default();
        let reduced = Volume::of(volume);
        match reduced == Volume::default() {
            false => self.volumes.volumes.insert(name, reduced),
            true => self.volumes.volumes.remove(&name),
        };
    }

    /// Removes a PersistentVolume.
    pub fn remove_volume(&mut self, name: &str) {
        self.volumes.volumes.remove(name);
    }

    /// Adds or replaces a StorageClass.
    pub fn upsert_storage_class(&mut self, class: &StorageClass) {
        let name = class.metadata.name.clone().unwrap_or_default();
        let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        match allowed(class).filter(|_| waits) {
            Some(selector) => self.volumes.classes.insert(name, selector),
            None => self.volumes.classes.remove(&name),
        };
    }

    /// Removes a StorageClass.
    pub fn remove_storage_class(&mut self, name: &str) {
        self.volumes.classes.remove(name);
    }

    /// Checks whether the volumes of a pod are accessible on a node.
    ///
    /// # Errors
    /// The first volume that is not.
    pub(crate) fn admits_volumes(
        &self,
        name: &str,
        node: &NodeInfo,
        pod: &PodDemand,
    ) -> Result<(), String> {
        for claim in &pod.volume_claims {
            if !self.volumes.is_accessible(claim, name, node) {
                return Err(format!(
                    "the volume of PersistentVolumeClaim {} is not accessible",
                    claim.1
                ));
            }
        }
        Ok(())
    }
}

/// Returns the topologies that a StorageClass allows; `None` if all.
fn allowed(class: &StorageClass) -> Option<NodeSelector> {
    let topologies = class.allowed_topologies.as_ref()?;
    let terms = topologies.iter().map(|topology| {
        let labels = topology.match_label_expressions.iter().flatten();
        let requirement = labels.map(|label| NodeSelectorRequirement {
            key: label.key.clone(),
            operator: "In".to_owned(),
            values: Some(label.values.clone()),
        });
        NodeSelectorTerm {
            match_expressions: Some(requirement.collect()),
            match_fields: None,
        }
    });
    let node_selector_terms: Vec<NodeSelectorTerm> = terms.collect();
    (!node_selector_terms.is_empty()).then_some(NodeSelector {
        node_selector_terms,
    })
}

#[cfg(test)]
mod tests;
