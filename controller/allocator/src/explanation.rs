//! The answer to "why is my pod pending": one line for an event, verdicts per node and device for the long form.

use std::collections::BTreeMap;

use drava_api::Quantity;

use crate::claim::{ClaimError, ClaimProblem};
use crate::reason::Reason;

/// Why a pod has no place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Explanation {
    /// Nothing in the cluster could change it.
    Refused {
        /// Code.
        reason: Reason,
        /// For the user.
        message: String,
    },
    /// What stands in the way on each node that has devices.
    Nodes(Vec<NodeVerdict>),
}

/// Why a pod does not fit on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVerdict {
    /// Name of the node.
    pub node: String,
    /// The nearest miss.
    pub reason: Reason,
    /// Its particulars; may be empty.
    pub detail: String,
    /// How near it was; of equal reasons, the nearest is quoted.
    pub nearness: (u8, Quantity),
    /// Every device that was looked at for the request that failed.
    pub devices: Vec<DeviceVerdict>,
}

/// Why one device does not serve the request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceVerdict {
    /// Name of the device.
    pub device: String,
    /// Code.
    pub reason: Reason,
    /// Its particulars; may be empty.
    pub detail: String,
}

/// Details quoted for one reason.
const QUOTED_DETAILS: usize = 3;

impl Explanation {
    /// Refused for this reason.
    #[must_use]
    pub fn refused(reason: Reason, message: impl Into<String>) -> Self {
        Self::Refused {
            reason,
            message: message.into(),
        }
    }

    /// Code of the reason: of the most nodes, where they differ.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::Refused { reason, .. } => *reason,
            Self::Nodes(verdicts) => grouped(verdicts)
                .first()
                .map_or(Reason::NoDevices, |group| group.reason),
        }
    }

    /// One line: `0/12 nodes: 7 InsufficientMemory (largest free piece 6 GiB on n3/gpu-2), 3 Unhealthy`.
    #[must_use]
    pub fn summary(&self) -> String {
        match self {
            Self::Refused { reason, message } => format!("{reason}: {message}"),
            Self::Nodes(verdicts) if verdicts.is_empty() => format!(
                "{}: no node publishes devices of {}; is the node driver running there?",
                Reason::NoDevices,
                drava_api::names::DRIVER
            ),
            Self::Nodes(verdicts) => {
                let groups: Vec<_> = grouped(verdicts).iter().map(Group::text).collect();
                format!("0/{} nodes: {}", verdicts.len(), groups.join(", "))
            }
        }
    }
}

impl From<ClaimError> for Explanation {
    fn from(error: ClaimError) -> Self {
        let reason = match error.problem {
            ClaimProblem::MixedDrivers { .. } => Reason::MixedDrivers,
            ClaimProblem::UnknownClass { .. } => Reason::UnknownClass,
            ClaimProblem::Amount { .. } => Reason::InvalidRequest,
            ClaimProblem::Config { .. } => Reason::InvalidConfig,
            ClaimProblem::Unsupported { .. } => Reason::Unsupported,
        };
        Self::refused(reason, error.to_string())
    }
}

struct Group {
    reason: Reason,
    count: usize,
    details: Vec<String>,
}

impl Group {
    fn text(&self) -> String {
        let Self {
            reason,
            count,
            details,
        } = self;
        if details.is_empty() {
            format!("{count} {reason}")
        } else {
            format!("{count} {reason} ({})", details.join("; "))
        }
    }
}

/// Verdicts by reason, the most frequent first.
fn grouped(verdicts: &[NodeVerdict]) -> Vec<Group> {
    let mut by_reason: BTreeMap<Reason, Vec<&NodeVerdict>> = BTreeMap::new();
    for verdict in verdicts {
        by_reason.entry(verdict.reason).or_default().push(verdict);
    }
    let mut groups: Vec<_> = by_reason
        .into_iter()
        .map(|(reason, mut members)| {
            let count = members.len();
            members.sort_by(|a, b| {
                b.nearness
                    .cmp(&a.nearness)
                    .then_with(|| a.node.cmp(&b.node))
            });
            let mut details: Vec<String> = Vec::new();
            let quoted = match reason {
                // The nearest miss says it all; the others would only repeat it with worse figures.
                Reason::InsufficientMemory
                | Reason::InsufficientCores
                | Reason::SlotsExhausted
                | Reason::InsufficientCapacity
                | Reason::InsufficientDevices
                | Reason::ExclusiveConflict
                | Reason::TopologyUnsatisfied
                | Reason::SearchLimit => 1,
                _ => QUOTED_DETAILS,
            };
            for member in members {
                if details.len() < quoted
                    && !member.detail.is_empty()
                    && !details.contains(&member.detail)
                {
                    details.push(member.detail.clone());
                }
            }
            Group {
                reason,
                count,
                details,
            }
        })
        .collect();
    groups.sort_by(|a, b| b.count.cmp(&a.count).then(a.reason.cmp(&b.reason)));
    groups
}
