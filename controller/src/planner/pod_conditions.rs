//! Conditions of pods that wait for GPUs, and of those that no longer do.

use drava_api::event::EventReason;

use super::{DecisionTime, Planner};
use crate::action::Action;
use crate::pod_condition::{self, PodConditionUpdate};

impl Planner {
    /// Adds the writes of conditions: of each pod that an event reports as unschedulable, and of the pods that no longer wait.
    /// The limits of events hold for them, too. The publisher repeats failed writes for a while; then they are repeated with
    /// the next event or change of the pod.
    pub(super) fn write_pod_conditions(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let now = time.time.0;
        let of_event = |action: &Action| -> Option<PodConditionUpdate> {
            let Action::PublishEvent(event) = action else {
                return None;
            };
            let is_waiting = event.reason == EventReason::GpuUnschedulable;
            let uid = event.regarding.uid.as_ref().filter(|_| is_waiting)?;
            let pod = &self.queue.get(uid)?.pod;
            pod_condition::unallocated(pod, event.reason.as_str(), &event.message, now)
        };
        let mut updates: Vec<PodConditionUpdate> = actions.iter().filter_map(of_event).collect();
        let allocated = std::mem::take(&mut self.newly_allocated).into_iter();
        updates.extend(allocated.map(|pod| pod_condition::allocated(pod, now)));
        actions.extend(updates.into_iter().map(Action::WritePodCondition));
    }
}
