//! What is true: the observed objects, and what follows from them alone.
//!
//! The world knows nothing of what is promised, who waits or what was said. Its cluster also assumes what is promised, so that
//! no decision takes it again.

use std::collections::BTreeSet;

use drava_allocator::cluster::Cluster;
use drava_allocator::object::ObjectKey;
use drava_api::listed::Change;
use k8s_openapi::api::core::v1::Pod;

use super::ended_pods::EndedPods;
use super::settings::Settings;
use super::unreadable::UnreadableObjects;
use crate::live_pods::LivePods;
use crate::pod_group::PodGroups;
use crate::watches::Kind;

/// See the [module](self).
pub(super) struct World {
    pub(super) settings: Settings,
    /// Kinds whose first list is incomplete.
    pub(super) unlisted: BTreeSet<Kind>,
    /// Changes of pods before all PodGroups are known, which say to which gangs they belong.
    pub(super) early_pods: Vec<Change<Pod>>,
    pub(super) cluster: Cluster,
    pub(super) live_pods: LivePods,
    pub(super) pod_groups: PodGroups,
    pub(super) ended_pods: EndedPods,
    /// Claim templates.
    pub(super) templates: BTreeSet<ObjectKey>,
    pub(super) unreadable: UnreadableObjects,
}

impl World {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            unlisted: Kind::ALL.into_iter().collect(),
            early_pods: Vec::new(),
            cluster: Cluster::default(),
            live_pods: LivePods::default(),
            pod_groups: PodGroups::default(),
            ended_pods: EndedPods::default(),
            templates: BTreeSet::new(),
            unreadable: UnreadableObjects::new(),
        }
    }

    /// Returns whether the complete lists of all kinds have been observed.
    pub(super) fn is_synced(&self) -> bool {
        self.unlisted.is_empty()
    }

    /// Returns whether the complete lists of all PodGroups have been observed.
    pub(super) fn knows_pod_groups(&self) -> bool {
        !self.unlisted.iter().any(|kind| kind.is_pod_groups())
    }
}
