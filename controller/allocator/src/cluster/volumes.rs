//! Volumes that limit the nodes of a pod: those that are bound, by their node affinity, and those that are provisioned for the
//! node of their first pod, by the topologies that their StorageClass allows. Source: the plugin VolumeBinding of kube-scheduler.

use std::collections::BTreeMap;

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
    volumes: BTreeMap<String, NodeSelector>,
    /// Topologies of the StorageClasses that limit them.
    classes: BTreeMap<String, NodeSelector>,
}

#[derive(Debug, Default, PartialEq)]
struct VolumeClaim {
    /// Name of the bound volume.
    volume: Option<String>,
    class: Option<String>,
}

impl Volumes {
    /// Returns where the volume of a claim is accessible, or can be provisioned; `None` if on every node.
    fn selector(&self, claim: &ObjectKey) -> Option<&NodeSelector> {
        let claim = self.claims.get(claim)?;
        match &claim.volume {
            Some(volume) => self.volumes.get(volume),
            None => self.classes.get(claim.class.as_ref()?),
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
        let affinity = volume.spec.as_ref().and_then(|spec| {
            let affinity = spec.node_affinity.as_ref()?;
            affinity.required.clone()
        });
        match affinity {
            Some(affinity) => self.volumes.volumes.insert(name, affinity),
            None => self.volumes.volumes.remove(&name),
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
            let selector = self.volumes.selector(claim);
            if selector.is_some_and(|selector| !node.selected_by(name, selector)) {
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
