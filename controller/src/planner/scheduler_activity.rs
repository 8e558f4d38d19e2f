//! Signs of life of kube-scheduler: it binds or rejects a pod, reserves a claim, or releases one.

use drava_allocator::pod::{rejection, scheduler};
use k8s_openapi::api::core::v1::Pod;

use super::Planner;

impl Planner {
    /// Returns whether this version of a pending pod has another rejection by its scheduler than the one before.
    pub(super) fn is_newly_rejected(&self, uid: &str, pod: &Pod) -> bool {
        let rejected = rejection(pod);
        let before = self.backlog.queue.get(uid);
        rejected.is_some() && before.is_some_and(|before| rejection(&before.pod) != rejected)
    }

    /// Notes whether this version of a pod shows that kube-scheduler runs. The versions in the first lists do not.
    pub(super) fn note_scheduler_activity(
        &mut self,
        pod: &Pod,
        is_newly_bound: bool,
        is_newly_rejected: bool,
    ) {
        let mut served = self.world.settings.schedulers.iter();
        if self.world.is_synced() && served.any(|served| served == scheduler(pod)) {
            self.commitments.is_scheduler_active |=
                (is_newly_bound && !is_static(pod)) || is_newly_rejected;
        }
    }
}

/// Returns whether kubelet has created the pod, without a scheduler.
fn is_static(pod: &Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.kind == "Node")
}
