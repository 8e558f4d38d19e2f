//! Status of the profiles: the entry of this node.
//!
//! The drivers of all nodes write the same object, each with the resource version that it read, so no entry is lost. A
//! driver also removes the entries of nodes on which no node driver publishes devices; each driver checks one entry at a
//! time. An entry that was removed by mistake, because kubelet had deleted the slices of its node, is written again.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::names;
use drava_api::node_profile::status::MAX_WAITING;
use drava_api::node_profile::{
    GpuNodeProfile, GpuNodeProfileStatus, NodeSettings, NodeState, NodeStatus, ProfileVersion,
    WaitingDevice,
};
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Intervals, Objects};
use crate::kubelet::claims::cached_list;
use crate::publish::writer::Published;
use crate::report::{Reporter, Subject};

/// Time between two attempts to write a status.
const RETRY: Duration = Duration::from_secs(2);

/// Delay of a write for each node in the status, at most: the nodes of a profile react to its change at the same time.
const SPREAD: Duration = Duration::from_millis(20);

/// Writes the entries of this node.
pub struct StatusWriter {
    /// Client of the API server.
    pub client: Client,
    /// Name of the node.
    pub node: String,
    /// The profiles.
    pub profiles: watch::Receiver<Objects<GpuNodeProfile>>,
    /// What the slices of the node show.
    pub published: watch::Receiver<Published>,
    /// Queue of events.
    pub reporter: Reporter,
    /// Times between periodic checks.
    pub intervals: Intervals,
}

/// Returns the entries of a node by profile; `None` until the node published its devices.
#[must_use]
pub fn entries(node: &str, published: &Published) -> Option<BTreeMap<String, NodeStatus>> {
    let NodeSettings {
        profile,
        overridden,
        ..
    } = published.settings.as_ref()?;
    let Some(profile) = profile else {
        return Some(BTreeMap::new());
    };
    let waiting = waiting(published);
    let state = if !published.resets.is_empty() {
        NodeState::ResetRequired
    } else if waiting.is_empty() {
        NodeState::Applied
    } else {
        NodeState::Waiting
    };
    let entry = |version: &ProfileVersion, state, conflicts, waiting| {
        let entry = NodeStatus {
            name: node.to_owned(),
            state,
            observed_generation: version.generation,
            conflicts,
            waiting,
        };
        (version.name.clone(), entry)
    };
    let others = overridden.iter().map(|other| other.name.clone());
    let applied = entry(
        profile,
        state,
        others.take(MAX_CONFLICTS).collect(),
        waiting,
    );
    let overridden = overridden.iter().map(|other| {
        let conflicts = vec![profile.name.clone()];
        entry(other, NodeState::Conflict, conflicts, Vec::new())
    });
    Some([applied].into_iter().chain(overridden).collect())
}

/// Maximum number of profiles in an entry.
const MAX_CONFLICTS: usize = 16;

fn waiting(published: &Published) -> Vec<WaitingDevice> {
    let reasons = published
        .retained
        .values()
        .flat_map(|retained| &retained.reasons);
    let of_profile = reasons.filter(|(_, reason)| reason.is_of_profile());
    let retained = of_profile.map(|(device, reason)| WaitingDevice {
        device: device.clone(),
        reason: format!(
            "{reason}; no new allocations, published as before until no claim holds it"
        ),
    });
    let resets = published.resets.iter();
    resets
        .map(|(device, reason)| WaitingDevice {
            device: device.clone(),
            reason: reason.clone(),
        })
        .chain(retained)
        .take(MAX_WAITING)
        .collect()
}

impl StatusWriter {
    /// Writes until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut check = tokio::time::interval_at(
            Instant::now() + self.intervals.entries,
            self.intervals.entries,
        );
        let mut round = 0;
        let mut retry: Option<Instant> = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.profiles.changed() => if changed.is_err() { return },
                changed = self.published.changed() => if changed.is_err() { return },
                () = at(retry) => {}
                _ = check.tick() => {
                    self.remove_stale_entry(round).await;
                    round += 1;
                    continue;
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.spread()) => {}
            }
            retry = match self.write_all().await {
                Ok(()) => None,
                Err(error) => {
                    tracing::debug!(
                        error = describe(&error),
                        "cannot write the status of a node profile"
                    );
                    Some(Instant::now() + RETRY)
                }
            };
        }
    }

    fn readable(&mut self) -> Vec<GpuNodeProfile> {
        let profiles = self.profiles.borrow_and_update();
        let profiles = profiles.iter().flat_map(BTreeMap::values);
        profiles.cloned().collect()
    }

    /// Returns how long this node waits before it writes, so that not all nodes write at once.
    fn spread(&mut self) -> Duration {
        let listed = self.readable();
        let listed = listed.iter().filter_map(|profile| profile.status.as_ref());
        let listed = listed.map(|status| status.nodes.len()).max().unwrap_or(0);
        let window = SPREAD.saturating_mul(u32::try_from(listed).unwrap_or(u32::MAX));
        let window_ms = u32::try_from(window.as_millis()).unwrap_or(u32::MAX);
        let position = crc32fast::hash(self.node.as_bytes());
        Duration::from_millis(u64::from(position.checked_rem(window_ms).unwrap_or(0)))
    }

    async fn write_all(&mut self) -> Result<(), kube::Error> {
        let wanted = entries(&self.node, &self.published.borrow_and_update());
        let Some(wanted) = wanted else {
            return Ok(());
        };
        for profile in self.readable() {
            let version = profile.to_version();
            let entry = wanted.get(&version.name);
            // The slices follow an older version of the profile so far.
            if entry.is_some_and(|entry| entry.observed_generation != version.generation) {
                continue;
            }
            let status = profile.status.clone().unwrap_or_default();
            if status.is_outdated(&self.node, entry) {
                self.write(&profile, &status, &self.node, entry.cloned())
                    .await?;
                self.report(version, status.node(&self.node), entry);
            }
        }
        Ok(())
    }

    /// Writes the entry of a node.
    async fn write(
        &self,
        profile: &GpuNodeProfile,
        status: &GpuNodeProfileStatus,
        node: &str,
        entry: Option<NodeStatus>,
    ) -> Result<(), kube::Error> {
        let version = profile.to_version();
        let selected = match status.is_full() {
            true => Some(self.count_selected(profile).await?),
            false => None,
        };
        let now = Time(Timestamp::now());
        let status = status.with_node(node, entry, version.generation, selected, &now);
        let patch = json!({
            "metadata": {"resourceVersion": profile.metadata.resource_version},
            "status": status,
        });
        let profiles: Api<GpuNodeProfile> = Api::all(self.client.clone());
        let params = PatchParams::default();
        // After a conflict with another node, the watch shows the version to write next.
        let patch = Patch::Merge(patch);
        let patched = profiles.patch_status(&version.name, &params, &patch);
        patched.await.map(drop)
    }

    /// Returns the number of nodes that a profile selects. Each of them may write its entry at the same time: the API server
    /// answers from memory.
    async fn count_selected(&self, profile: &GpuNodeProfile) -> Result<usize, kube::Error> {
        let selector = profile.spec.node_selector.iter();
        let terms: Vec<_> = selector
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let nodes: Api<Listed<PartialObjectMeta<NodeObject>>> = Api::all(self.client.clone());
        let params = cached_list().labels(&terms.join(","));
        Ok(nodes.list(&params).await?.items.len())
    }

    /// Raises an event on a profile whose entry starts to wait or to conflict.
    fn report(
        &self,
        profile: ProfileVersion,
        before: Option<&NodeStatus>,
        now: Option<&NodeStatus>,
    ) {
        let Some(now) = now else {
            return;
        };
        let node = &self.node;
        let (reason, note) = match now.state {
            NodeState::Applied => return,
            NodeState::Conflict => {
                let others = now.conflicts.join(", ");
                let note = format!(
                    "node {node}: profile {others} selects the node too and applies, because its name is first; change a \
                     nodeSelector"
                );
                (EventReason::ProfileConflict, note)
            }
            NodeState::Waiting | NodeState::ResetRequired => {
                let devices = now.waiting.iter();
                let devices: Vec<_> = devices
                    .map(|waiting| format!("{} ({})", waiting.device, waiting.reason))
                    .collect();
                let note = format!("node {node}: {}", devices.join("; "));
                let reason = match now.state {
                    NodeState::ResetRequired => EventReason::ResetRequired,
                    NodeState::Applied | NodeState::Waiting | NodeState::Conflict => {
                        EventReason::ProfileWaiting
                    }
                };
                (reason, note)
            }
        };
        let is_known = before.is_some_and(|before| {
            (before.state, &before.conflicts, &before.waiting)
                == (now.state, &now.conflicts, &now.waiting)
        });
        if !is_known {
            self.reporter.event(Subject::Profile(profile), reason, note);
        }
    }

    /// Checks one entry of each profile, and removes it if no node driver publishes devices on the node.
    async fn remove_stale_entry(&mut self, round: usize) {
        for profile in self.readable() {
            let Some(status) = &profile.status else {
                continue;
            };
            let others = status.nodes.iter().filter(|entry| entry.name != self.node);
            let others: Vec<_> = others.collect();
            let Some(entry) = round
                .checked_rem(others.len())
                .and_then(|index| others.get(index))
            else {
                continue;
            };
            let removed = async {
                if self.publishes(&entry.name).await? {
                    return Ok(());
                }
                tracing::info!(
                    node = entry.name,
                    profile = profile.to_version().name,
                    "removing the status of a node without node driver"
                );
                self.write(&profile, status, &entry.name, None).await
            };
            if let Err(error) = removed.await {
                tracing::debug!(
                    error = describe(&error),
                    "cannot check the status of a node profile"
                );
            }
        }
    }

    /// Returns whether a node driver publishes devices on a node.
    async fn publishes(&self, node: &str) -> Result<bool, kube::Error> {
        let slices: Api<Listed<PartialObjectMeta<ResourceSlice>>> = Api::all(self.client.clone());
        let fields = format!("spec.driver={},spec.nodeName={node}", names::DRIVER);
        let params = ListParams::default().fields(&fields).limit(1);
        Ok(!slices.list(&params).await?.items.is_empty())
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
