//! Explanation of a pending pod: one line for an event, verdicts per node and device for the long form.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use drava_api::Quantity;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::Pod;

use crate::claim::{ClaimError, ClaimProblem};
use crate::pod;

/// Why a pod cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Explanation {
    /// The claims cannot be served, regardless of the cluster.
    Rejected {
        /// Code of the reason.
        reason: Reason,
        /// Text for the user.
        message: String,
    },
    /// The obstacle on each node with devices.
    Nodes(Arc<NodeVerdicts>),
}

/// Verdicts on the nodes. Reason and summary are made once, on demand.
#[derive(Debug, Default)]
pub struct NodeVerdicts {
    verdicts: Vec<Arc<NodeVerdict>>,
    digest: OnceLock<(Reason, String)>,
}

impl Deref for NodeVerdicts {
    type Target = [Arc<NodeVerdict>];

    fn deref(&self) -> &Self::Target {
        &self.verdicts
    }
}

impl PartialEq for NodeVerdicts {
    fn eq(&self, other: &Self) -> bool {
        self.verdicts == other.verdicts
    }
}

impl Eq for NodeVerdicts {}

impl NodeVerdicts {
    fn digest(&self) -> &(Reason, String) {
        self.digest.get_or_init(|| {
            let groups = grouped(&self.verdicts);
            let Some(first) = groups.first() else {
                let summary = format!(
                    "{}: no node publishes devices of {}; check that the node driver is running",
                    Reason::NoDevices,
                    drava_api::names::DRIVER
                );
                return (Reason::NoDevices, summary);
            };
            let texts: Vec<_> = groups.iter().map(Group::text).collect();
            let summary = format!("0/{} nodes: {}", self.verdicts.len(), texts.join(", "));
            (first.reason, summary)
        })
    }
}

/// Why a pod does not fit on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVerdict {
    /// Name of the node.
    pub node: String,
    /// Code of the closest rejection.
    pub reason: Reason,
    /// Detail of the reason; may be empty.
    pub detail: String,
    /// Closeness of the rejection; of equal reasons the closest is quoted.
    pub closeness: (u8, Quantity),
    /// Every rejected device of the request that failed; none after a decision by a ranking.
    pub devices: Vec<DeviceVerdict>,
}

/// Why one device cannot serve the request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceVerdict {
    /// Name of the device.
    pub device: String,
    /// Code of the reason.
    pub reason: Reason,
    /// Detail of the reason; may be empty.
    pub detail: String,
}

/// Most details quoted for one reason.
const MAX_DETAILS: usize = 3;

impl Explanation {
    /// Creates a rejection of the claims.
    #[must_use]
    pub fn rejected(reason: Reason, message: impl Into<String>) -> Self {
        Self::Rejected {
            reason,
            message: message.into(),
        }
    }

    /// Creates the explanation of a claim in a namespace whose limits are not known so far.
    #[must_use]
    pub fn unknown_namespace(namespace: &str) -> Self {
        Self::rejected(
            Reason::NamespaceUnknown,
            format!(
                "the labels of namespace {namespace} are not known so far, and quotas or policies select by them; the controller goes \
                 on when it has read the namespace"
            ),
        )
    }

    /// Creates the explanation of a pod whose scheduler is not one of `served`.
    #[must_use]
    pub fn scheduler_not_served(pod: &Pod, served: &[String]) -> Self {
        Self::rejected(
            Reason::SchedulerNotServed,
            format!(
                "the controller allocates for pods of {}, this pod has schedulerName {}; change it, or add it to \
                 scheduling.schedulerNames of the chart",
                served.join(", "),
                pod::scheduler(pod)
            ),
        )
    }

    /// Creates an explanation from the obstacle on each node.
    #[must_use]
    pub fn of_nodes(verdicts: Vec<Arc<NodeVerdict>>) -> Self {
        Self::Nodes(Arc::new(NodeVerdicts {
            verdicts,
            digest: OnceLock::new(),
        }))
    }

    /// Returns whether the search for devices gave up on every node on which the pod can run.
    #[must_use]
    pub fn gave_up(&self) -> bool {
        let Self::Nodes(verdicts) = self else {
            return false;
        };
        let mut admitted = verdicts
            .iter()
            .filter(|verdict| verdict.reason != Reason::NodeUnfit)
            .peekable();
        admitted.peek().is_some() && admitted.all(|verdict| verdict.reason == Reason::SearchLimit)
    }

    /// Returns the verdicts on the nodes.
    #[must_use]
    pub fn verdicts(&self) -> &[Arc<NodeVerdict>] {
        match self {
            Self::Rejected { .. } => &[],
            Self::Nodes(verdicts) => verdicts,
        }
    }

    /// Returns whether both are from one decision about nodes.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nodes(one), Self::Nodes(other)) => Arc::ptr_eq(one, other),
            (Self::Rejected { .. } | Self::Nodes(_), _) => false,
        }
    }

    /// Returns the code of the reason; of several, that of the most nodes.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::Rejected { reason, .. } => *reason,
            Self::Nodes(verdicts) => verdicts.digest().0,
        }
    }

    /// Returns the nodes on which the pod cannot run regardless of devices.
    pub fn unfit_nodes(&self) -> impl Iterator<Item = &str> {
        self.verdicts()
            .iter()
            .filter(|verdict| verdict.reason == Reason::NodeUnfit)
            .map(|verdict| verdict.node.as_str())
    }

    /// Returns whether a quota is in the way on every node on which the pod can run, so that no released device helps, except
    /// one that counts against the quota. Valid for a single request without alternatives.
    #[must_use]
    pub fn is_quota_only(&self) -> bool {
        let Self::Nodes(verdicts) = self else {
            return false;
        };
        // Whatever is allocated, these devices do not serve the request.
        let is_lasting = |device: &DeviceVerdict| {
            matches!(
                device.reason,
                Reason::QuotaExceeded | Reason::TypeMismatch | Reason::SelectorMismatch
            )
        };
        verdicts
            .iter()
            .any(|verdict| verdict.reason == Reason::QuotaExceeded)
            && verdicts.iter().all(|verdict| match verdict.reason {
                Reason::NodeUnfit => true,
                Reason::QuotaExceeded => verdict.devices.iter().all(is_lasting),
                // All devices came less close than these.
                Reason::TypeMismatch | Reason::SelectorMismatch => true,
                _ => !verdict.devices.is_empty() && verdict.devices.iter().all(is_lasting),
            })
    }

    /// Returns one line: `0/12 nodes: 7 InsufficientMemory (most free memory 6 GiB on n3/gpu-2), 3 Unhealthy`.
    #[must_use]
    pub fn summary(&self) -> String {
        match self {
            Self::Rejected { reason, message } => format!("{reason}: {message}"),
            Self::Nodes(verdicts) => verdicts.digest().1.clone(),
        }
    }
}

impl From<ClaimError> for Explanation {
    fn from(error: ClaimError) -> Self {
        let reason = match error.problem {
            ClaimProblem::MixedDrivers { .. } => Reason::MixedDrivers,
            ClaimProblem::DriverUnspecified { .. } => Reason::DriverUnspecified,
            ClaimProblem::UnknownClass { .. } => Reason::UnknownClass,
            ClaimProblem::Amount { .. } => Reason::InvalidRequest,
            ClaimProblem::Config { .. } => Reason::InvalidConfig,
            ClaimProblem::Unsupported { .. } => Reason::Unsupported,
            ClaimProblem::Incompatible { .. } => Reason::IncompatibleClaims,
        };
        Self::rejected(reason, error.to_string())
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

/// Groups verdicts by reason, the most frequent first.
fn grouped(verdicts: &[Arc<NodeVerdict>]) -> Vec<Group> {
    let mut by_reason: BTreeMap<Reason, Vec<&NodeVerdict>> = BTreeMap::new();
    for verdict in verdicts {
        by_reason.entry(verdict.reason).or_default().push(verdict);
    }
    let mut groups: Vec<_> = by_reason
        .into_iter()
        .map(|(reason, mut members)| {
            let count = members.len();
            members.sort_by(|a, b| {
                b.closeness
                    .cmp(&a.closeness)
                    .then_with(|| a.node.cmp(&b.node))
            });
            let mut details: Vec<String> = Vec::new();
            let max_details = match reason {
                // Others repeat the closest rejection with lower amounts.
                Reason::InsufficientMemory
                | Reason::InsufficientCores
                | Reason::SlotsExhausted
                | Reason::InsufficientCapacity
                | Reason::InsufficientDevices
                | Reason::ExclusiveConflict
                | Reason::TopologyUnsatisfied
                | Reason::QuotaExceeded
                | Reason::SearchLimit => 1,
                _ => MAX_DETAILS,
            };
            for member in members {
                if details.len() < max_details
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
