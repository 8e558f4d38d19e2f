//! Readiness conditions of the driver, shown by `/readyz`, in the log and in events.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use tokio::sync::watch;

/// Condition of readiness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The state, run and CDI directories are writable.
    Directories,
    /// libvgpu.so and the CDI hook are installed on the node.
    Artifacts,
    /// This build can read all claim records of the node.
    Records,
    /// The GPUs and the NVIDIA driver's user-space files were discovered.
    Gpus,
    /// The node profiles and the labels of the node are known.
    Profiles,
    /// No device plugin or other DRA driver offers the GPUs.
    Exclusive,
    /// Kubelet registered the driver.
    Registered,
    /// The ResourceSlices are published.
    Published,
}

impl Condition {
    const ALL: [Self; 8] = [
        Self::Directories,
        Self::Artifacts,
        Self::Records,
        Self::Gpus,
        Self::Profiles,
        Self::Exclusive,
        Self::Registered,
        Self::Published,
    ];
}

impl Condition {
    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Directories => "directories",
            Self::Artifacts => "artifacts",
            Self::Records => "records",
            Self::Gpus => "gpus",
            Self::Profiles => "profiles",
            Self::Exclusive => "exclusive",
            Self::Registered => "registered",
            Self::Published => "published",
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// States of all conditions; the error is the reason why a condition is not met.
type States = BTreeMap<Condition, Result<(), String>>;

/// Conditions of this process; clones share the states.
#[derive(Debug, Clone)]
pub struct Conditions(watch::Sender<States>);

impl Default for Conditions {
    fn default() -> Self {
        let unmet = |condition| (condition, Err("not yet".to_owned()));
        Self(watch::Sender::new(
            Condition::ALL.into_iter().map(unmet).collect(),
        ))
    }
}

impl Conditions {
    /// Sets a condition and logs a change.
    pub fn set(&self, condition: Condition, state: Result<(), String>) {
        self.0.send_if_modified(|states| {
            if states.get(&condition) == Some(&state) {
                return false;
            }
            match &state {
                Ok(()) => tracing::info!(%condition, "condition met"),
                Err(reason) => tracing::warn!(%condition, %reason, "condition not met"),
            }
            states.insert(condition, state);
            true
        });
    }

    /// Returns a receiver that is notified of changes.
    pub(crate) fn watch(&self) -> watch::Receiver<States> {
        self.0.subscribe()
    }

    /// Returns the unmet conditions with their reasons; empty when the driver is ready.
    #[must_use]
    pub fn unmet(&self) -> Vec<(Condition, String)> {
        let states = self.0.borrow();
        states
            .iter()
            .filter_map(|(condition, state)| Some((*condition, state.clone().err()?)))
            .collect()
    }

    /// Returns all conditions and whether each is met.
    #[must_use]
    pub fn states(&self) -> Vec<(Condition, bool)> {
        let states = self.0.borrow();
        let state =
            |(condition, state): (&Condition, &Result<(), String>)| (*condition, state.is_ok());
        states.iter().map(state).collect()
    }

    /// Calls `report` with the unmet conditions whenever they stay unchanged for `settled`.
    pub async fn each_settled(
        &self,
        settled: Duration,
        mut report: impl FnMut(&[(Condition, String)]),
    ) {
        let mut states = self.0.subscribe();
        let mut reported = Vec::new();
        loop {
            let unmet = self.unmet();
            tokio::select! {
                // Fails only when the sender is dropped; `self` holds it.
                _ = states.changed() => {}
                () = tokio::time::sleep(settled), if unmet != reported => {
                    report(&unmet);
                    reported = unmet;
                }
            }
        }
    }

    /// Returns when all conditions are met.
    pub async fn ready(&self) {
        // Fails only when the sender is dropped; `self` holds it.
        let _ = self
            .0
            .subscribe()
            .wait_for(|states| states.values().all(Result::is_ok))
            .await;
    }
}
