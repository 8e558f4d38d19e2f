//! Gangs: their PodGroups, and those that are incomplete.
//!
//! kube-scheduler has bound some members of an incomplete gang, but not as many as it needs, for example because another pod
//! has taken the CPUs of a node meanwhile. The bound members are evicted, so that the gang holds nothing.

use std::time::Duration;

use tokio::time::Instant;

use super::Planner;
use super::wake::Wake;
use crate::action::{Action, Eviction, EvictionCause, OwnCause, Victim};
use crate::decide::queue::pending_pod;
use crate::pods::gang::{self, GangName};
use crate::pods::pod_group::PodGroupChange;

/// Number of times that a member of a gang is tried to be bound, on other nodes if there are any.
const TRIES: u32 = 3;

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
            self.backlog.wake(Wake::Above(priority));
            let members = self.world.live_pods.members(gang);
            let members: Vec<String> = members.map(|(uid, _)| uid.to_owned()).collect();
            for uid in members {
                self.note_holder(&uid);
            }
        }
        let members: Vec<_> = self
            .backlog
            .queue
            .iter()
            .map(|pending| &pending.pod)
            .filter(|pod| gang::reference(pod).is_some())
            .cloned()
            .collect();
        for pod in members {
            self.pod_applied(pod);
        }
        if let Some((gang, _)) = changed {
            self.backlog.wake(Wake::Gang(gang));
        }
    }

    /// Starts the eviction of the bound members of the gangs that did not start in time.
    pub(super) fn end_incomplete_gangs(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let after = self.start_timeout();
        for gang in self.world.live_pods.due_incomplete(now, after) {
            let state = format!(
                "incomplete gang {}: {} of {} members were bound within {} s",
                gang.name,
                gang.bound.len(),
                gang.min,
                after.as_secs()
            );
            let victims = gang.bound.into_iter().map(|pod| Victim {
                pod: pod.reference,
                priority: pod.priority,
            });
            actions.push(Action::Evict(Eviction {
                cause: EvictionCause::Own(OwnCause::IncompleteGang, state),
                victims: victims.collect(),
            }));
        }
    }

    /// Returns when [`Self::end_incomplete_gangs`] is due.
    pub(super) fn next_gang_end(&self) -> Option<Instant> {
        self.world.live_pods.next_incomplete(self.start_timeout())
    }

    /// Returns how long the tries of a member take at most: on a node where it was not bound it is held back before each.
    fn start_timeout(&self) -> Duration {
        let timeout = self.world.settings.release_after;
        let holds = (0..TRIES - 1).map(|timeouts| pending_pod::hold(timeout, timeouts));
        timeout.saturating_mul(TRIES) + holds.sum::<Duration>()
    }
}
