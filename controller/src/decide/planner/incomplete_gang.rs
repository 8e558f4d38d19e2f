//! Incomplete gangs: kube-scheduler has bound some members, but not as many as the gang needs, for example because another
//! pod has taken the CPUs of a node meanwhile. The bound members are evicted, so that the gang holds nothing.

use std::time::Duration;

use tokio::time::Instant;

use super::Planner;
use crate::action::{Action, Eviction, EvictionCause, Victim};
use crate::decide::queue::pending_pod;

/// Number of times that a member of a gang is tried to be bound, on other nodes if there are any.
const TRIES: u32 = 3;

impl Planner {
    /// Starts the eviction of the bound members of the gangs that did not start in time.
    pub(super) fn end_incomplete_gangs(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let after = self.start_timeout();
        for gang in self.world.live_pods.due_incomplete(now, after) {
            let state = format!(
                "gang {}: {} of {} members were bound within {} s",
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
                cause: EvictionCause::IncompleteGang(state),
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
