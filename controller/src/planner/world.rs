//! What is true: the observed objects, and what follows from them alone.
//!
//! The world knows nothing of what is promised, who waits or what was said. Its cluster also assumes what is promised, so that
//! no decision takes it again.

use std::collections::BTreeSet;

use drava_allocator::cluster::Cluster;
use drava_allocator::object::ObjectKey;

use super::ended_pods::EndedPods;
use super::settings::Settings;
use super::unreadable::UnreadableObjects;
use crate::live_pods::LivePods;
use crate::pod_group::PodGroups;

/// See the [module](self).
pub(super) struct World {
    pub(super) settings: Settings,
    /// Whether the complete lists of all kinds have been observed.
    pub(super) is_synced: bool,
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
            is_synced: false,
            cluster: Cluster::default(),
            live_pods: LivePods::default(),
            pod_groups: PodGroups::default(),
            ended_pods: EndedPods::default(),
            templates: BTreeSet::new(),
            unreadable: UnreadableObjects::new(),
        }
    }
}
