//! Signs of life of kube-scheduler: it binds or rejects a pod, reserves a claim, or releases one.

use drava_allocator::pod::{rejection, scheduler};
use k8s_openapi::api::core::v1::Pod;

use super::Planner;

impl Planner {
    /// Notes whether this version of a pod shows that kube-scheduler runs. The versions in the first lists do not.
    pub(super) fn note_scheduler_activity(&mut self, uid: &str, pod: &Pod, is_newly_bound: bool) {
        let mut served = self.settings.schedulers.iter();
        if !self.is_synced || !served.any(|served| served == scheduler(pod)) {
            return;
        }
        let rejected = rejection(pod);
        let is_rejected = rejected.is_some() && {
            let before = self.queue.get(uid);
            before.is_some_and(|before| rejection(&before.pod) != rejected)
        };
        self.is_scheduler_active |= (is_newly_bound && !is_static(pod)) || is_rejected;
    }
}

/// Returns whether kubelet has created the pod, without a scheduler.
fn is_static(pod: &Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.kind == "Node")
}
