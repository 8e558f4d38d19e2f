//! When an instance may ask kubelet to take it.
//!
//! Kubelet calls the instance that registered last. During a rolling update that is the new one, so it must be able to
//! do what the old one does: one that looks for the GPU driver in the wrong place stays behind the one that works, is
//! not ready, and the update stops. Where nobody else serves the node it registers whatever is missing: unprepare
//! needs neither GPUs nor libraries, and what is missing then appears in the events of the pods.

use tokio::sync::watch;

use crate::conditions::{Condition, Conditions};

/// What must be true to serve as well as any other instance.
const NEEDED: [Condition; 2] = [Condition::Gpus, Condition::Artifacts];

/// Whether another instance serves this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has looked yet.
    Unknown,
    /// Another one is active.
    Beside,
    /// This is the active one.
    Active,
}

/// Returns when this instance may register; meanwhile the condition says why it waits.
pub async fn turn(conditions: &Conditions, mut standing: watch::Receiver<Standing>) {
    let mut states = conditions.watch();
    loop {
        let present = *standing.borrow_and_update();
        states.mark_unchanged();
        let missing: Vec<String> = conditions
            .unmet()
            .into_iter()
            .filter(|(condition, _)| NEEDED.contains(condition))
            .map(|(condition, reason)| format!("{condition}: {reason}"))
            .collect();
        if missing.is_empty() || present == Standing::Active {
            return;
        }
        if present == Standing::Beside {
            conditions.set(
                Condition::Registered,
                Err(format!(
                    "another instance serves this node and goes on until this one can: {}",
                    missing.join("; ")
                )),
            );
        }
        tokio::select! {
            // Both fail only with their senders, which live as long as the driver.
            _ = states.changed() => {}
            _ = standing.changed() => {}
        }
    }
}
