//! `kubectl drava explain claim`: the devices of a claim and their reason, or why its pods are pending.

use drava_allocator::pod;
use drava_allocator::usage::AllocatedDevice;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use super::{ExplainError, Report as PodReport, Settings, placement_reason, pod_with_changes};
use crate::growth;
use crate::snapshot::Snapshot;
use crate::suspension;

/// State of a claim with its explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    claim: String,
    /// The claim to whose share this one adds, as its companion.
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<Base>,
    #[serde(flatten)]
    state: State,
}

/// The claim to whose share a companion adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Base {
    /// UID in the label of the companion.
    uid: String,
    /// Its name; `None` if the namespace has no such claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// `device of pool pool`.
    devices: Vec<String>,
}

/// Returns the name of the claim to whose share a claim adds, if it is a companion of a claim of its namespace.
#[must_use]
pub fn base_name(companion: &ResourceClaim, claims: &[ResourceClaim]) -> Option<String> {
    Base::of(companion, claims)?.name
}

impl Base {
    fn of(companion: &ResourceClaim, claims: &[ResourceClaim]) -> Option<Self> {
        let uid = growth::base_uid(companion)?;
        let namespace = &companion.metadata.namespace;
        let base = claims.iter().find(|claim| {
            claim.metadata.uid.as_deref() == Some(uid) && claim.metadata.namespace == *namespace
        });
        Some(Self {
            uid: uid.to_owned(),
            name: base.and_then(|base| base.metadata.name.clone()),
            devices: base.map(devices).unwrap_or_default(),
        })
    }

    fn text(&self) -> String {
        match &self.name {
            Some(name) => format!("adds to claim {name}"),
            None => format!(
                "adds to a claim with the UID {}, which the namespace does not have",
                self.uid
            ),
        }
    }
}

/// Returns the devices of a claim, each as `device of pool pool`.
fn devices(claim: &ResourceClaim) -> Vec<String> {
    AllocatedDevice::of_claim(claim)
        .iter()
        .map(|device| format!("{} of pool {}", device.device, device.pool))
        .collect()
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
        /// The pods that use the claim, or with which it goes as a companion.
        pods: Vec<PodReport>,
        /// Why it is not allocated, for a companion.
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<String>,
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
    let base = Base::of(claim, &snapshot.claims);
    let status = claim.status.as_ref();
    let state = if status.is_some_and(|status| status.allocation.is_some()) {
        let devices = devices(claim);
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
        let claim = claim.clone();
        // A tenant does not see the devices: the controller answers for the pod.
        let is_known = base.is_some() && snapshot.cluster.usable_pools().next().is_some();
        let why = is_known.then(|| growth::of_claim(snapshot, &claim, settings.policies));
        let why = why.flatten();
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
            why,
        }
    };
    Ok(Report {
        claim: format!("{namespace}/{name}"),
        base,
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
        if let State::Pending { pods, .. } = &mut self.state {
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
                let base = self.base.as_ref().map(|base| format!("; {}", base.text()));
                format!(
                    "claim {claim}: allocated {}; {pods}{}\n{}at allocation: {}\n",
                    devices.join(", "),
                    base.unwrap_or_default(),
                    suspended.unwrap_or_default(),
                    reason.unwrap_or(
                        "no reason recorded; the controller has not allocated the claim"
                    )
                )
            }
            State::OtherDriver => {
                format!("claim {claim}: allocated to devices of other drivers\n")
            }
            State::Pending { pods, why } if let Some(base) = &self.base => {
                let devices = match base.devices.as_slice() {
                    [] => String::new(),
                    devices => format!(", which has {}", devices.join(", ")),
                };
                let reports: Vec<String> = pods.iter().map(PodReport::text).collect();
                let why = match why {
                    Some(why) => format!("it {why}\n"),
                    None if pods.is_empty() => format!(
                        "the events of claim {claim} say why it has not been allocated so far\n"
                    ),
                    None => reports.join("\n"),
                };
                format!(
                    "claim {claim}: not allocated; it {}{devices}\n{why}",
                    base.text()
                )
            }
            State::Pending { pods, .. } if pods.is_empty() => format!(
                "claim {claim}: no pod uses the claim; the controller allocates it for the first pod that does\n"
            ),
            State::Pending { pods, .. } => {
                let reports: Vec<String> = pods.iter().map(PodReport::text).collect();
                format!("claim {claim}: not allocated\n{}", reports.join("\n"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use drava_api::names;

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
    fn names_the_claim_to_which_a_companion_adds() {
        let mut claims = snapshot().claims;
        let index = claims.iter().position(|claim| {
            claim.status.is_none() && claim.metadata.name.as_deref() == Some("big")
        });
        let companion = index.expect("a claim without devices");
        let base = claims[0].metadata.uid.clone().expect("a UID");
        let mut text = |base: &str| {
            let labels = [(names::COMPANION_LABEL.to_owned(), base.to_owned())];
            claims[companion].metadata.labels = Some(labels.into());
            let mut snapshot = snapshot_with(claims.clone());
            let report = explain(&mut snapshot, "default", "big", &settings()).expect("a claim");
            report.text()
        };
        assert_eq!(
            text(&base),
            "claim default/big: not allocated; it adds to claim a, which has gpu-0-vgpu of pool n1/gpus\nit is not allocated: \
             InvalidCompanion: the claim has no pod as its controlling owner; set the pod that it is for in metadata.ownerReferences\n"
        );
        let odd = text("another");
        assert!(
            odd.contains("with the UID another, which the namespace does not have"),
            "{odd}"
        );
    }

    #[test]
    fn says_why_companion_waits() {
        let mut claims = snapshot().claims;
        let companion = claims
            .iter_mut()
            .find(|claim| claim.metadata.name.as_deref() == Some("big"))
            .expect("a claim");
        crate::fixture::make_companion(companion, "uid-a", "a-pod");
        let mut snapshot = snapshot_with(claims);
        let report = explain(&mut snapshot, "default", "big", &settings()).expect("a claim");
        assert_eq!(
            report.text(),
            "claim default/big: not allocated; it adds to claim a, which has gpu-0-vgpu of pool n1/gpus\nit is not allocated: \
             InsufficientMemory: most free memory 56 GiB on n1/gpu-0; only gpu-0-vgpu of pool n1/gpus counts, where claim a has its \
             share\n"
        );
        let json = serde_json::to_value(&report).expect("JSON");
        assert!(json["why"].is_string(), "{json}");
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
