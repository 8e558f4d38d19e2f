//! Why the claims of a pod cannot be used for it, before any device is considered.

use std::borrow::Borrow;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::object::ObjectKey;
use crate::pod;

/// Why a claim cannot be used for a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimProblem {
    /// The claim of a template does not exist so far.
    #[error("{}", not_created(.entry, .template, *.has_template))]
    NotCreated {
        /// Name of the claim in the pod.
        entry: String,
        /// Name of the template.
        template: String,
        /// Whether the template exists, if that is known.
        has_template: Option<bool>,
    },
    /// The pod names a claim that does not exist.
    #[error("claim {0} does not exist; create it, or delete the pod")]
    Missing(String),
    /// The claim is being deleted.
    #[error(
        "claim {0} is being deleted, and exists until its last pod ends; create it again then, or name another claim"
    )]
    Deleting(String),
    /// The claim was created for another pod.
    #[error("claim {claim} was created for pod {owner} alone; name another claim, or a template")]
    OfOtherPod {
        /// Name of the claim.
        claim: String,
        /// Name of its pod.
        owner: String,
    },
    /// This build cannot read the claim.
    #[error("claim {claim} cannot be read ({cause}); repair or delete it")]
    Unreadable {
        /// Name of the claim.
        claim: String,
        /// Field and cause.
        cause: String,
    },
}

fn not_created(entry: &str, template: &str, has_template: Option<bool>) -> String {
    const REFUSED: &str =
        "the event FailedResourceClaimCreation of the pod says why, for example a ResourceQuota";
    match has_template {
        Some(false) => format!(
            "claim template {template} does not exist; create it, or correct the name in spec.resourceClaims"
        ),
        Some(true) => {
            format!("claim {entry} is not created from its template {template}; {REFUSED}")
        }
        None => format!(
            "claim {entry} is not created from its template {template}; create the template if it is missing; otherwise {REFUSED}"
        ),
    }
}

impl ClaimProblem {
    /// Returns whether the API server or kube-controller-manager may end the problem by itself, as in the first moment of a pod.
    #[must_use]
    pub const fn may_be_momentary(&self) -> bool {
        matches!(self, Self::NotCreated { .. } | Self::Missing(_))
    }
}

/// The claims of a cluster, as far as they are known.
pub trait Claims<C: Borrow<ResourceClaim>> {
    /// Returns a claim.
    fn claim(&self, key: &ObjectKey) -> Option<C>;

    /// Returns why a claim cannot be read; `None` for one that can or does not exist.
    fn unreadable(&self, key: &ObjectKey) -> Option<String>;

    /// Returns whether a template exists, if that is known.
    fn has_template(&self, key: &ObjectKey) -> Option<bool>;
}

/// Returns the claims of a pod with their names in the pod.
///
/// # Errors
/// With the first claim that the pod cannot use. A bound pod can use a claim that is being deleted.
pub fn resolve<C: Borrow<ResourceClaim>>(
    pod: &Pod,
    known: &impl Claims<C>,
) -> Result<Vec<(String, C)>, ClaimProblem> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let is_bound = pod::node(pod).is_some();
    pod::claims(pod)
        .map(|(entry, object)| {
            let Some(name) = object else {
                let template = template(pod, entry);
                let key = (namespace.clone(), template.clone());
                return Err(ClaimProblem::NotCreated {
                    entry: entry.to_owned(),
                    has_template: known.has_template(&key),
                    template,
                });
            };
            let key = (namespace.clone(), name.to_owned());
            let Some(claim) = known.claim(&key) else {
                return Err(match known.unreadable(&key) {
                    Some(cause) => ClaimProblem::Unreadable {
                        claim: key.1,
                        cause,
                    },
                    None => ClaimProblem::Missing(key.1),
                });
            };
            let metadata = &claim.borrow().metadata;
            if metadata.deletion_timestamp.is_some() && !is_bound {
                return Err(ClaimProblem::Deleting(key.1));
            }
            if let Some(owner) = other_owner(claim.borrow(), pod) {
                return Err(ClaimProblem::OfOtherPod {
                    claim: key.1,
                    owner: owner.to_owned(),
                });
            }
            Ok((entry.to_owned(), claim))
        })
        .collect()
}

/// Returns the name of the template of an entry of the pod.
fn template(pod: &Pod, entry: &str) -> String {
    let entries = pod.spec.iter();
    let mut entries = entries.flat_map(|spec| spec.resource_claims.iter().flatten());
    let found = entries.find(|candidate| candidate.name == entry);
    found
        .and_then(|entry| entry.resource_claim_template_name.clone())
        .unwrap_or_default()
}

/// Returns the name of the pod for which the claim was created, if it is another one.
fn other_owner<'a>(claim: &'a ResourceClaim, pod: &Pod) -> Option<&'a str> {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    let other = owners.find(|owner| {
        owner.kind == "Pod"
            && owner.controller == Some(true)
            && Some(&owner.uid) != pod.metadata.uid.as_ref()
    });
    other.map(|owner| owner.name.as_str())
}
