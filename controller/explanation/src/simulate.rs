//! `kubectl drava simulate`: where pods of a manifest would run, without creating them.

use std::collections::BTreeSet;

use drava_allocator::pod_request::PodRequest;
use drava_allocator::{pod, usage::AllocatedDevice};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim, PodTemplateSpec};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::changes::{self, Change, changes_text};
use crate::defaults::{self, Overheads};
use crate::explain::Settings;
use crate::snapshot::Snapshot;
use crate::table::table;

/// Result of a simulation: the pods in the order of the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    pods: Vec<SimulatedPod>,
    /// Workloads that are not simulated, with the cause.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    skipped: Vec<String>,
}

/// Result for one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct SimulatedPod {
    pod: String,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "camelCase")]
enum Outcome {
    /// The pod fits.
    Placed {
        node: String,
        /// `claim: pool/device`.
        devices: Vec<String>,
        /// Why this node and these devices.
        reason: String,
    },
    /// The pod does not fit.
    Pending {
        reason: String,
        /// After each of them the pod fits.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        changes: Vec<Change>,
    },
    /// The pod requests no devices of this driver.
    NoGpuRequest,
}

/// Why a manifest is not simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// An object has invalid fields.
    #[error("cannot read {subject}")]
    Unreadable {
        /// Kind and name.
        subject: String,
        /// What is invalid.
        source: serde_json::Error,
    },
    /// More pods than allowed.
    #[error("the manifests have more than {0} pods; simulate fewer replicas")]
    TooMany(usize),
    /// A template is unknown.
    #[error(
        "cannot simulate pod {pod}: ResourceClaimTemplate {name} is neither in the manifests nor in the cluster"
    )]
    TemplateMissing {
        /// Namespace and name.
        pod: String,
        /// Namespace and name.
        name: String,
    },
    /// A claim is unknown.
    #[error(
        "cannot simulate pod {pod}: ResourceClaim {name} is neither in the manifests nor in the cluster"
    )]
    ClaimMissing {
        /// Namespace and name.
        pod: String,
        /// Namespace and name.
        name: String,
    },
    /// Two pods of the manifests use an unallocated claim.
    #[error(
        "cannot simulate pod {pod}: ResourceClaim {name} is used by another pod of the manifests; simulate one of them"
    )]
    ClaimShared {
        /// Namespace and name.
        pod: String,
        /// Namespace and name.
        name: String,
    },
}

/// Objects of the manifests that a simulation needs.
#[derive(Debug, Default)]
struct Manifest {
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
    templates: Vec<ResourceClaimTemplate>,
    /// Overhead of the runtime classes of the manifests.
    overheads: Overheads,
    skipped: Vec<String>,
}

/// Simulates the pods of the documents, at most `limit`, one after the other, each beside those before it.
///
/// # Errors
/// When a document is not a pod, a known workload, a claim or a claim template.
pub fn run(
    snapshot: &mut Snapshot,
    templates: Vec<ResourceClaimTemplate>,
    documents: Vec<Value>,
    namespace: &str,
    replicas: Option<usize>,
    limit: usize,
    settings: &Settings,
) -> Result<Report, SimulateError> {
    let mut manifest = Manifest::default();
    for document in documents {
        manifest.add(document, namespace, replicas, limit)?;
    }
    // Objects of the manifest replace those of the cluster.
    manifest.templates.extend(templates);
    let mut overheads = snapshot.overheads.clone();
    overheads.append(&mut manifest.overheads);
    let mut used = BTreeSet::new();
    let mut pods = Vec::new();
    for (number, mut pod) in std::mem::take(&mut manifest.pods).into_iter().enumerate() {
        pod.metadata.uid = Some(format!("simulated-pod-{number}"));
        defaults::set(&mut pod, &overheads);
        let name = format!(
            "{}/{}",
            pod.metadata.namespace.as_deref().unwrap_or_default(),
            pod.metadata.name.as_deref().unwrap_or_default()
        );
        let outcome = simulate(snapshot, &manifest, &pod, &mut used, settings)?;
        pods.push(SimulatedPod { pod: name, outcome });
    }
    Ok(Report {
        pods,
        skipped: manifest.skipped,
    })
}

fn simulate(
    snapshot: &mut Snapshot,
    manifest: &Manifest,
    pod: &Pod,
    used: &mut BTreeSet<String>,
    settings: &Settings,
) -> Result<Outcome, SimulateError> {
    let entries = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let claims = entries
        .map(|entry| {
            Ok((
                entry.name.clone(),
                manifest.claim(snapshot, pod, entry, used)?,
            ))
        })
        .collect::<Result<Vec<(String, ResourceClaim)>, SimulateError>>()?;
    let named: Vec<(&str, &ResourceClaim)> = claims
        .iter()
        .map(|(name, claim)| (name.as_str(), claim))
        .collect();
    let pending = |reason: String| Outcome::Pending {
        reason,
        changes: Vec::new(),
    };
    let cluster = &snapshot.cluster;
    let request = match PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors) {
        Ok(request) => request,
        Err(error) => return Ok(pending(error.to_string())),
    };
    if request.claims.is_empty() {
        return Ok(match request.unallocatable {
            Some(explanation) => pending(explanation.summary()),
            None => Outcome::NoGpuRequest,
        });
    }
    if !pod::is_served(pod, &settings.schedulers) {
        let explanation = drava_allocator::explanation::Explanation::scheduler_not_served(
            pod,
            &settings.schedulers,
        );
        return Ok(pending(explanation.summary()));
    }
    let placement = match snapshot.cluster.decide(&request, settings.policies) {
        Ok(placement) => placement,
        Err(explanation) => {
            return Ok(Outcome::Pending {
                reason: explanation.summary(),
                changes: changes::find(snapshot, pod, &claims, settings.policies),
            });
        }
    };
    snapshot.cluster.assume(&placement);
    snapshot
        .cluster
        .assume_pod(&request.uid, &placement.node, &request.demand);
    let device =
        |device: &AllocatedDevice| format!("{}: {}/{}", device.request, device.pool, device.device);
    let devices = placement
        .claims
        .iter()
        .flat_map(|claim| claim.allocated_devices());
    let reasons: Vec<String> = placement
        .claims
        .iter()
        .map(|claim| placement.reason(claim))
        .collect();
    Ok(Outcome::Placed {
        devices: devices.map(|allocated| device(&allocated)).collect(),
        reason: reasons.join("; "),
        node: placement.node,
    })
}

impl Manifest {
    fn add(
        &mut self,
        document: Value,
        namespace: &str,
        replicas: Option<usize>,
        limit: usize,
    ) -> Result<(), SimulateError> {
        let kind = document["kind"].as_str().unwrap_or_default().to_owned();
        let name = document["metadata"]["name"].as_str().unwrap_or_default();
        let subject = format!("{kind} {name}");
        let number = |pointer: &str| {
            let number = document.pointer(pointer).and_then(Value::as_u64);
            number.and_then(|number| usize::try_from(number).ok())
        };
        match kind.as_str() {
            "List" => {
                for item in document["items"].as_array().into_iter().flatten() {
                    self.add(item.clone(), namespace, replicas, limit)?;
                }
            }
            "Pod" => {
                let pod: Pod = read(document, &subject)?;
                self.add_pods(&pod, namespace, replicas.unwrap_or(1), limit)?;
            }
            "Deployment" | "ReplicaSet" | "StatefulSet" | "Job" => {
                let count = match kind.as_str() {
                    // The job controller starts no more pods than are to complete.
                    "Job" => {
                        let completions = number("/spec/completions").unwrap_or(usize::MAX);
                        Some(number("/spec/parallelism").unwrap_or(1).min(completions))
                    }
                    _ => number("/spec/replicas"),
                };
                let template: PodTemplateSpec =
                    read(document["spec"]["template"].clone(), &subject)?;
                let mut metadata = template.metadata.unwrap_or_default();
                metadata.name = document["metadata"]["name"].as_str().map(str::to_owned);
                metadata.namespace = document["metadata"]["namespace"]
                    .as_str()
                    .map(str::to_owned);
                let pod = Pod {
                    metadata,
                    spec: template.spec,
                    status: None,
                };
                self.add_pods(&pod, namespace, replicas.or(count).unwrap_or(1), limit)?;
            }
            "ResourceClaim" => {
                let mut claim: ResourceClaim = read(document, &subject)?;
                claim
                    .metadata
                    .namespace
                    .get_or_insert_with(|| namespace.to_owned());
                claim.metadata.uid = Some(format!("simulated-claim-{}", self.claims.len()));
                claim.status = None;
                self.claims.push(claim);
            }
            "ResourceClaimTemplate" => {
                let mut template: ResourceClaimTemplate = read(document, &subject)?;
                template
                    .metadata
                    .namespace
                    .get_or_insert_with(|| namespace.to_owned());
                self.templates.push(template);
            }
            "RuntimeClass" => {
                let class: RuntimeClass = read(document, &subject)?;
                let overhead = class.overhead.and_then(|overhead| overhead.pod_fixed);
                self.overheads.extend(class.metadata.name.zip(overhead));
            }
            "DaemonSet" | "CronJob" => self.skipped.push(format!(
                "{subject} is not simulated, because its number of pods depends on {}; use its pod template in a Pod",
                if kind == "CronJob" { "the time" } else { "the nodes" }
            )),
            // Objects without pods, such as Services, change nothing.
            _ => {}
        }
        Ok(())
    }

    fn add_pods(
        &mut self,
        pod: &Pod,
        namespace: &str,
        count: usize,
        limit: usize,
    ) -> Result<(), SimulateError> {
        if count > limit.saturating_sub(self.pods.len()) {
            return Err(SimulateError::TooMany(limit));
        }
        for number in 0..count {
            let mut pod = pod.clone();
            pod.metadata
                .namespace
                .get_or_insert_with(|| namespace.to_owned());
            if count > 1 {
                let name = pod.metadata.name.unwrap_or_default();
                pod.metadata.name = Some(format!("{name}-{number}"));
            }
            self.pods.push(pod);
        }
        Ok(())
    }

    /// Returns the claim of a pod's entry: that of a template is new.
    fn claim(
        &self,
        snapshot: &Snapshot,
        pod: &Pod,
        entry: &PodResourceClaim,
        used: &mut BTreeSet<String>,
    ) -> Result<ResourceClaim, SimulateError> {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let pod_name = || {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            format!("{namespace}/{name}")
        };
        if let Some(name) = &entry.resource_claim_template_name {
            let template = self.templates.iter().find(|template| {
                template.metadata.name.as_ref() == Some(name)
                    && template.metadata.namespace.as_ref() == Some(&namespace)
            });
            let template = template.ok_or_else(|| SimulateError::TemplateMissing {
                pod: pod_name(),
                name: format!("{namespace}/{name}"),
            })?;
            let mut claim = ResourceClaim {
                spec: template.spec.as_ref().and_then(|spec| spec.spec.clone()),
                ..ResourceClaim::default()
            };
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            claim.metadata.name = Some(format!("{uid}-{}", entry.name));
            claim.metadata.uid = Some(format!("{uid}-{}", entry.name));
            claim.metadata.namespace = Some(namespace.clone());
            return Ok(claim);
        }
        let name = entry.resource_claim_name.as_deref().unwrap_or_default();
        let mut claims = self.claims.iter().chain(&snapshot.claims);
        let claim = claims.find(|claim| {
            claim.metadata.name.as_deref() == Some(name)
                && claim.metadata.namespace.as_ref() == Some(&namespace)
        });
        let claim = claim.ok_or_else(|| SimulateError::ClaimMissing {
            pod: pod_name(),
            name: format!("{namespace}/{name}"),
        })?;
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let is_allocated = claim
            .status
            .as_ref()
            .is_some_and(|status| status.allocation.is_some());
        if !is_allocated && !used.insert(uid) {
            return Err(SimulateError::ClaimShared {
                pod: pod_name(),
                name: format!("{namespace}/{name}"),
            });
        }
        Ok(claim.clone())
    }
}

fn read<T: DeserializeOwned>(document: Value, subject: &str) -> Result<T, SimulateError> {
    serde_json::from_value(document).map_err(|source| SimulateError::Unreadable {
        subject: subject.to_owned(),
        source,
    })
}

impl Report {
    /// Returns whether every pod fits.
    #[must_use]
    pub fn all_fit(&self) -> bool {
        let mut pods = self.pods.iter();
        pods.all(|pod| !matches!(pod.outcome, Outcome::Pending { .. }))
    }

    /// Formats the report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let rows = self.pods.iter().map(|pod| {
            let (node, detail) = match &pod.outcome {
                Outcome::Placed {
                    node,
                    devices,
                    reason,
                } => (node.as_str(), format!("{} ({reason})", devices.join(", "))),
                Outcome::Pending { reason, .. } => ("–", reason.clone()),
                Outcome::NoGpuRequest => ("–", "requests no devices of drava".to_owned()),
            };
            vec![pod.pod.clone(), node.to_owned(), detail]
        });
        let mut text = table(&["POD", "NODE", "DETAIL"], rows.collect());
        for skipped in &self.skipped {
            text.push_str(&format!("{skipped}\n"));
        }
        for pod in &self.pods {
            if let Outcome::Pending { changes, .. } = &pod.outcome {
                text.push_str(&changes_text(&pod.pod, changes));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests;
