//! Changes of PodGroups.

use super::Planner;
use crate::pods::gang::GangName;
use crate::pods::pod_group::{self, PodGroupChange};

impl Planner {
    /// Observes a PodGroup, or whether PodGroups are served. Pods are resolved again, as if they had changed.
    pub fn pod_group(&mut self, change: PodGroupChange) {
        let changed = match &change {
            PodGroupChange::Group {
                api,
                namespace,
                name,
                spec,
            } => Some((GangName::of_group(*api, namespace, name), spec.clone())),
            PodGroupChange::Served(..) => None,
        };
        if !self.world.pod_groups.observe(change) {
            return;
        }
        if let Some((gang, spec)) = &changed
            && let Some(priority) = self.world.live_pods.set_group(gang, spec.as_ref())
        {
            // Its pods can be evicted for more pods.
            self.backlog.queue.activate_above(priority);
        }
        let members: Vec<_> = self
            .backlog
            .queue
            .iter()
            .map(|pending| &pending.pod)
            .filter(|pod| pod_group::reference(pod).is_some())
            .cloned()
            .collect();
        for pod in members {
            self.pod_applied(pod);
        }
        if let Some((gang, _)) = changed {
            self.backlog.queue.activate_gang(&gang);
        }
    }
}
