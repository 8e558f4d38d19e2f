//! `kubectl drava explain claim`: the devices of a claim and their reason, or why its pods are pending.

use drava_allocator::pod;
use drava_allocator::usage::AllocatedDevice;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

use super::{ExplainError, Report as PodReport, Settings, placement_reason, pod_with_changes};
use crate::snapshot::Snapshot;
use crate::suspension;

/// State of a claim with its explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    claim: String,
    #[serde(flatten)]
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state")]
enum State {
    /// The claim has devices.
    Allocated {
        /// `device of pool pool`.
        devices: Vec<String>,
        /// Reason that the controller recorded with the allocation; scores are those at that time.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// Names of the pods that have reserved the claim.
        pods: Vec<String>,
        /// For what its share is suspended, and what it waits for.
        #[serde(skip_serializing_if = "Option::is_none")]
        suspended: Option<String>,
    },
    /// The claim is allocated to devices of other drivers.
    OtherDriver,
    /// The claim has no devices.
    Pending {
        /// The pods that use the claim.
        pods: Vec<PodReport>,
    },
}

/// Explains a claim.
///
/// # Errors
/// If the claim does not exist.
pub fn explain(
    snapshot: &mut Snapshot,
    namespace: &str,
    name: &str,
    settings: &Settings,
) -> Result<Report, ExplainError> {
    let mut claims = snapshot.claims.iter();
    let found = claims.find(|claim| {
        claim.metadata.namespace.as_deref() == Some(namespace)
            && claim.metadata.name.as_deref() == Some(name)
    });
    let claim = found.ok_or_else(|| ExplainError::ClaimMissing {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    })?;
    let status = claim.status.as_ref();
    let state = if status.is_some_and(|status| status.allocation.is_some()) {
        let devices: Vec<String> = AllocatedDevice::of_claim(claim)
            .iter()
            .map(|device| format!("{} of pool {}", device.device, device.pool))
            .collect();
        let consumers = status.iter();
        let consumers = consumers.flat_map(|status| status.reserved_for.iter().flatten());
        match devices.is_empty() {
            true => State::OtherDriver,
            false => State::Allocated {
                devices,
                reason: placement_reason(claim),
                pods: consumers.map(|consumer| consumer.name.clone()).collect(),
                suspended: suspension::state(&snapshot.cluster, claim),
            },
        }
    } else {
        let uses = |candidate: &&Pod| {
            candidate.metadata.namespace.as_deref() == Some(namespace)
                && pod::claims(candidate).any(|(_, object)| object == Some(name))
        };
        let users = snapshot.pods.iter().filter(uses);
        let names: Vec<String> = users.filter_map(|pod| pod.metadata.name.clone()).collect();
        let reports = names
            .iter()
            .map(|pod| pod_with_changes(snapshot, namespace, pod, settings));
        State::Pending {
            pods: reports.collect::<Result<_, ExplainError>>()?,
        }
    };
    Ok(Report {
        claim: format!("{namespace}/{name}"),
        state,
    })
}

impl Report {
    /// Returns whether the claim has devices.
    #[must_use]
    pub const fn is_allocated(&self) -> bool {
        matches!(self.state, State::Allocated { .. } | State::OtherDriver)
    }

    /// Returns the report with the pods that use the claim, if it has no devices.
    #[must_use]
    pub fn with_pods(mut self, users: Vec<PodReport>) -> Self {
        if let State::Pending { pods } = &mut self.state {
            *pods = users;
        }
        self
    }

    /// Formats the report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let claim = &self.claim;
        match &self.state {
            State::Allocated {
                devices,
                reason,
                pods,
                suspended,
            } => {
                let pods = match pods.as_slice() {
                    [] => "no pod has reserved it".to_owned(),
                    pods => format!("reserved for {}", pods.join(", ")),
                };
                let reason = reason.as_deref();
                let suspended = suspended.as_ref().map(|state| format!("{state}\n"));
                format!(
                    "claim {claim}: allocated {}; {pods}\n{}at allocation: {}\n",
                    devices.join(", "),
                    suspended.unwrap_or_default(),
                    reason.unwrap_or(
                        "no reason recorded; the controller has not allocated the claim"
                    )
                )
            }
            State::OtherDriver => {
                format!("claim {claim}: allocated to devices of other drivers\n")
            }
            State::Pending { pods } if pods.is_empty() => format!(
                "claim {claim}: no pod uses the claim; the controller allocates it for the first pod that does\n"
            ),
            State::Pending { pods } => {
                let reports: Vec<String> = pods.iter().map(PodReport::text).collect();
                format!("claim {claim}: not allocated\n{}", reports.join("\n"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{settings, snapshot, snapshot_with, suspend};

    fn text(name: &str) -> String {
        match explain(&mut snapshot(), "default", name, &settings()) {
            Ok(report) => report.text(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn shows_devices_and_pods_of_allocated_claim() {
        let allocated = text("a");
        assert!(
            allocated.starts_with(
                "claim default/a: allocated gpu-0-vgpu of pool n1/gpus; reserved for a-pod\n"
            ),
            "{allocated}"
        );
        assert!(
            text("b").contains("no pod has reserved it"),
            "{}",
            text("b")
        );
    }

    #[test]
    fn says_what_suspended_claim_waits_for() {
        let mut claims = snapshot().claims;
        suspend(&mut claims[0]);
        let mut snapshot = snapshot_with(claims);
        let report = explain(&mut snapshot, "default", "a", &settings()).expect("a claim");
        let text = report.text();
        let state = "\nits share is suspended for pod default/urgent since 2026-01-01T00:00:00Z; there is room on its GPU: ";
        assert!(text.contains(state), "{text}");
        assert!(!self::text("a").contains("suspended"), "it runs");
    }

    #[test]
    fn explains_pods_of_pending_claim() {
        let pending = text("big");
        assert!(
            pending.starts_with("claim default/big: not allocated\npod default/big: 0/1 nodes"),
            "{pending}"
        );
    }

    #[test]
    fn names_missing_claim() {
        let missing = text("nothing");
        assert!(
            missing.starts_with("cannot find claim nothing in namespace default"),
            "{missing}"
        );
    }
}
