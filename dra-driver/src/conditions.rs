//! What must be true for the driver to be ready, and why it is not. `/readyz` and the log show it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use tokio::sync::watch;

/// Something that readiness needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The state, run and CDI directories can be used.
    Directories,
    /// libvgpu.so and the CDI hook are installed on the node.
    Artifacts,
    /// The cards and the user-space GPU driver are known.
    Gpus,
    /// kubelet has registered the driver.
    Registered,
    /// The ResourceSlices are published.
    Published,
}

impl Condition {
    const ALL: [Self; 5] = [
        Self::Directories,
        Self::Artifacts,
        Self::Gpus,
        Self::Registered,
        Self::Published,
    ];
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Directories => "directories",
            Self::Artifacts => "artifacts",
            Self::Gpus => "gpus",
            Self::Registered => "registered",
            Self::Published => "published",
        })
    }
}

/// State of all conditions: nothing when met, otherwise why not.
type States = BTreeMap<Condition, Result<(), String>>;

/// The conditions of this process; clones share them.
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
    /// Sets one, and logs it where it changes.
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

    /// Sees that one has changed; which, [`Conditions::unmet`] says.
    pub(crate) fn watch(&self) -> watch::Receiver<States> {
        self.0.subscribe()
    }

    /// Nothing when ready, otherwise what is missing and why.
    #[must_use]
    pub fn unmet(&self) -> Vec<(Condition, String)> {
        let states = self.0.borrow();
        states
            .iter()
            .filter_map(|(condition, state)| Some((*condition, state.clone().err()?)))
            .collect()
    }

    /// What is missing and why, each time that it has stayed the same for `settled`.
    pub async fn each_lasting(
        &self,
        settled: Duration,
        mut tell: impl FnMut(&[(Condition, String)]),
    ) {
        let mut states = self.0.subscribe();
        let mut told = Vec::new();
        loop {
            let unmet = self.unmet();
            tokio::select! {
                // It fails only with its sender, which `self` holds.
                _ = states.changed() => {}
                () = tokio::time::sleep(settled), if unmet != told => {
                    tell(&unmet);
                    told = unmet;
                }
            }
        }
    }

    /// Returns when all are met.
    pub async fn ready(&self) {
        // It fails only with its sender, which `self` holds.
        let _ = self
            .0
            .subscribe()
            .wait_for(|states| states.values().all(Result::is_ok))
            .await;
    }
}
