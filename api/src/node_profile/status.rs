//! Status of a profile: reports of the node drivers. Pure.
//!
//! Each node driver writes the entry of its own node, so the status is bounded: [`MAX_NODES`] entries, those with something
//! to do first. Why: `docs/adr/0017-bounded-profile-status.md`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition_state::ConditionState;

/// Maximum number of nodes in the status of a profile.
pub const MAX_NODES: usize = 64;

/// Maximum number of waiting devices in the entry of a node.
pub const MAX_WAITING: usize = 16;

/// Number of nodes in the message of a condition.
const NAMED: usize = 3;

/// Type of the condition that is true when all listed nodes publish what the profile says.
pub const APPLIED: &str = "Applied";

/// Type of the condition that is true when another profile selects a node of this profile.
pub const CONFLICT: &str = "Conflict";

/// Type of the condition that is true when a GPU needs a reset to be published as the profile says.
pub const RESET_REQUIRED: &str = "ResetRequired";

/// Reports of the node drivers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeProfileStatus {
    /// Generation of the profile that the newest entry describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of nodes of the profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>")]
    pub node_count: Option<u32>,
    /// At most 64 nodes of the profile; nodes with waiting devices or conflicts replace others.
    #[serde(default)]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub nodes: Vec<NodeStatus>,
    /// `Applied`: all listed nodes publish what the profile says. `Conflict`: another profile selects a node of this profile.
    /// `ResetRequired`: a GPU needs a reset to be published as the profile says.
    #[serde(default)]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// State of a profile on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub name: String,
    /// State of the profile on the node.
    pub state: NodeState,
    /// Generation of the profile that the entry describes.
    pub observed_generation: i64,
    /// Other profiles that select the node. The first of all by name applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 253)))]
    pub conflicts: Vec<String>,
    /// Devices that the node publishes as before, for example because a claim holds them; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub waiting: Vec<WaitingDevice>,
}

/// State of a profile on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NodeState {
    /// The node publishes what the profile says.
    Applied,
    /// The node publishes devices as before, for example because claims hold them.
    Waiting,
    /// MIG mode of a GPU must change, which takes a reset of the GPU.
    ResetRequired,
    /// Another profile applies.
    Conflict,
}

/// A device that is published as before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitingDevice {
    /// Name of the device.
    #[schemars(length(max = 128))]
    pub device: String,
    /// The change that waits, and for what.
    #[schemars(length(max = 512))]
    pub reason: String,
}

impl NodeStatus {
    fn is_remarkable(&self) -> bool {
        self.state != NodeState::Applied || !self.conflicts.is_empty()
    }
}

impl GpuNodeProfileStatus {
    /// Returns the entry of a node.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeStatus> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Returns whether no further node fits.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.nodes.len() >= MAX_NODES
    }

    /// Returns whether the entry of `node` differs from `wanted`, and a write would change that.
    #[must_use]
    pub fn is_outdated(&self, node: &str, wanted: Option<&NodeStatus>) -> bool {
        match (self.node(node), wanted) {
            (present @ Some(_), wanted) => present != wanted,
            (None, Some(wanted)) => !self.is_full() || self.replaceable(wanted).is_some(),
            (None, None) => false,
        }
    }

    /// Returns the status with `entry` as the entry of `node`. `selected` is the number of nodes that the profile selects,
    /// which counts when the list is full.
    #[must_use]
    pub fn with_node(
        &self,
        node: &str,
        entry: Option<NodeStatus>,
        generation: i64,
        selected: Option<usize>,
        now: &Time,
    ) -> Self {
        let mut status = self.clone();
        status.nodes.retain(|present| present.name != node);
        if let Some(entry) = entry {
            let replaceable = status.replaceable(&entry);
            match (status.is_full(), replaceable) {
                (false, _) => status.nodes.push(entry),
                (true, Some(position)) => {
                    status.nodes.remove(position);
                    status.nodes.push(entry);
                }
                (true, None) => {}
            }
        }
        status.nodes.sort_by(|one, other| one.name.cmp(&other.name));
        let listed = status.nodes.len();
        let count = match (status.is_full(), selected) {
            (true, Some(selected)) => selected.max(listed),
            (true, None) | (false, _) => listed,
        };
        status.node_count = Some(u32::try_from(count).unwrap_or(u32::MAX));
        status.observed_generation = status.observed_generation.max(Some(generation));
        for (kind, state) in [
            (APPLIED, status.applied()),
            (CONFLICT, status.conflict()),
            (RESET_REQUIRED, status.reset_required()),
        ] {
            let condition =
                state.condition(kind, &status.conditions, status.observed_generation, now);
            status.conditions.retain(|before| before.type_ != kind);
            status.conditions.push(condition);
        }
        status
    }

    /// Returns the position of an entry that gives its place to `entry`: the last one that reports nothing.
    fn replaceable(&self, entry: &NodeStatus) -> Option<usize> {
        let position = self.nodes.iter().rposition(|node| !node.is_remarkable());
        position.filter(|_| entry.is_remarkable())
    }

    fn applied(&self) -> ConditionState {
        let pending = |state| self.nodes.iter().filter(move |node| node.state == state);
        let (waiting, conflicting) = (pending(NodeState::Waiting), pending(NodeState::Conflict));
        let (reason, message) = if self.nodes.is_empty() {
            (
                "NoNodes",
                "no node with the node driver matches nodeSelector".to_owned(),
            )
        } else if pending(NodeState::Waiting).next().is_some() {
            let names = names(waiting.map(|node| node.name.as_str()));
            (
                "DevicesWaiting",
                format!("devices are published as before on {names}; see status.nodes"),
            )
        } else if pending(NodeState::ResetRequired).next().is_some() {
            let names = names(pending(NodeState::ResetRequired).map(|node| node.name.as_str()));
            (
                "ResetRequired",
                format!("a GPU must be reset on {names}; see status.nodes for the commands"),
            )
        } else if pending(NodeState::Conflict).next().is_some() {
            let names = names(conflicting.map(|node| node.name.as_str()));
            (
                "OverlappingProfiles",
                format!("another profile applies on {names}"),
            )
        } else {
            (
                "AllApplied",
                "all listed nodes publish what the profile says".to_owned(),
            )
        };
        ConditionState {
            is_true: reason == "AllApplied",
            reason,
            message,
        }
    }

    fn conflict(&self) -> ConditionState {
        let mut conflicting = self.nodes.iter().filter(|node| !node.conflicts.is_empty());
        match conflicting.next() {
            Some(node) => ConditionState {
                is_true: true,
                reason: "OverlappingProfiles",
                message: format!(
                    "profiles {} select node {} too; the first by name applies, so change a nodeSelector",
                    names(node.conflicts.iter().map(String::as_str)),
                    node.name
                ),
            },
            None => ConditionState {
                is_true: false,
                reason: "NoOverlap",
                message: "no other profile selects a listed node".to_owned(),
            },
        }
    }

    fn reset_required(&self) -> ConditionState {
        let mut nodes = self.nodes.iter();
        match nodes.find(|node| node.state == NodeState::ResetRequired) {
            Some(node) => ConditionState {
                is_true: true,
                reason: "MigMode",
                message: match node.waiting.first() {
                    Some(WaitingDevice { device, reason }) => {
                        format!("node {}, {device}: {reason}", node.name)
                    }
                    None => format!("node {}", node.name),
                },
            },
            None => ConditionState {
                is_true: false,
                reason: "NoReset",
                message: "no GPU of a listed node needs a reset".to_owned(),
            },
        }
    }
}

/// Returns the first names and the number of the others.
fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<_> = names.collect();
    let more = all.len().saturating_sub(NAMED);
    let named = all.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
    match more {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
