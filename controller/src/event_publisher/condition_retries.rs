//! Conditions of pods whose write failed. Pure.
//!
//! A condition is written again with increasing delays, for about a minute, unless a newer condition of the pod is written
//! meanwhile. After that it is written with the next event or change of the pod.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::pod_condition::PodConditionUpdate;

/// Delay before the first repeated write; doubles with each.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Number of repeated writes of a condition.
const MAX_RETRIES: u32 = 6;
/// Maximum number of pods.
const MAX_PODS: usize = 4096;

/// Conditions to write again, by the UID of the pod.
#[derive(Debug, Default)]
pub(super) struct ConditionRetries(BTreeMap<String, Retry>);

#[derive(Debug)]
struct Retry {
    update: PodConditionUpdate,
    /// Number of failed writes.
    failures: u32,
    /// Time of the next write; `None` while it is in flight.
    due: Option<Instant>,
}

impl ConditionRetries {
    /// Returns the time of the next write.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(|retry| retry.due).min()
    }

    /// Returns a condition whose write is due.
    pub(super) fn start_due(&mut self, now: Instant) -> Option<PodConditionUpdate> {
        let is_due = |retry: &&mut Retry| retry.due.is_some_and(|due| due <= now);
        let retry = self.0.values_mut().find(is_due)?;
        retry.due = None;
        Some(retry.update.clone())
    }

    /// A newer condition of the pod is written, or the write needs no repetition.
    pub(super) fn forget(&mut self, update: &PodConditionUpdate) {
        if let Some(uid) = &update.pod.uid {
            self.0.remove(uid);
        }
    }

    /// A write failed. Returns whether it is repeated.
    pub(super) fn failed(&mut self, update: PodConditionUpdate, now: Instant) -> bool {
        let Some(uid) = update.pod.uid.clone() else {
            return false;
        };
        let failures = self.0.remove(&uid).map_or(0, |retry| retry.failures);
        let is_repeated = failures < MAX_RETRIES && self.0.len() < MAX_PODS;
        if is_repeated {
            let retry = Retry {
                update,
                failures: failures + 1,
                due: Some(now + FIRST_DELAY * 2u32.pow(failures)),
            };
            self.0.insert(uid, retry);
        }
        is_repeated
    }
}
