//! `kubectl drava simulate`: where pods of a manifest would run, without creating them.
//!
//! A gang of the manifest starts as a whole or not at all, as the controller allocates it. No pod is suspended or evicted.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::explanation::Explanation;
use drava_allocator::gang::{self, GangError};
use drava_allocator::object::object_key;
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::{pod, usage::AllocatedDevice};
use drava_api::names::is_device_plugin_resource;
use drava_api::reason::Reason;
use drava_compatibility::ResourceTable;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde_json::Value;

use crate::changes::{self, Change};
use crate::defaults;
use crate::explain::{Settings, unknown_class};
use crate::growth;
use crate::snapshot::Snapshot;

use manifest::Manifest;

mod manifest;
mod report;

/// Result of a simulation: the pods in the order of the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    pods: Vec<SimulatedPod>,
    /// Companions of the manifests, which add to shares of running pods.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    growths: Vec<SimulatedGrowth>,
    /// Number of pods that fit, of those that request devices.
    fitting: usize,
    requesting: usize,
    /// Workloads that are not simulated, with the cause.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    skipped: Vec<String>,
    /// Likely mistakes in the claims, claim templates and pods of the manifests, and what the simulation does not know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    advice: Vec<String>,
}

/// Result for one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct SimulatedPod {
    pod: String,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Result for one companion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct SimulatedGrowth {
    /// Namespace and name.
    claim: String,
    /// Whether it fits.
    fits: bool,
    /// Where, or why not.
    detail: String,
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
    /// The pod requests GPUs as other systems do.
    Untranslated {
        /// Their extended resources.
        resources: Vec<String>,
    },
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
    /// Neither pods nor claims that add to shares.
    #[error(
        "the manifests have no pods: name those of pods or workloads with -f, and for workloads without replicas set --replicas"
    )]
    NoPods,
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

/// Simulates the pods of the documents, one after the other, each beside those before it.
///
/// # Errors
/// When a document cannot be read, and when the documents have no pods or too many.
pub fn run(
    snapshot: &mut Snapshot,
    templates: Vec<ResourceClaimTemplate>,
    documents: Vec<Value>,
    namespace: &str,
    replicas: Option<usize>,
    settings: &Settings,
) -> Result<Report, SimulateError> {
    let mut manifest = Manifest::default();
    for document in documents {
        manifest.add(document, namespace, replicas, &snapshot.cluster)?;
    }
    if manifest.is_empty() {
        return Err(SimulateError::NoPods);
    }
    // Objects of the manifest replace those of the cluster.
    for class in std::mem::take(&mut manifest.classes) {
        snapshot.cluster.upsert_class(class);
    }
    let mut advice = manifest.advice_on_claims(snapshot);
    advice.extend(snapshot.omission());
    manifest.templates.extend(templates);
    advice.extend(manifest.advice_on_pods(snapshot));
    let mut overheads = snapshot.overheads.clone();
    overheads.append(&mut manifest.overheads);
    snapshot.hold_reservations(None);
    let mut members = Vec::new();
    let mut names = BTreeMap::new();
    for (number, mut pod) in std::mem::take(&mut manifest.pods).into_iter().enumerate() {
        pod.metadata.uid = Some(format!("simulated-pod-{number}"));
        // Claims are named after their pods, and two workloads may have one name.
        let earlier = names.entry(object_key(&pod.metadata)).or_insert(0);
        *earlier += 1;
        if *earlier > 1 {
            let (_, name) = object_key(&pod.metadata);
            pod.metadata.name = Some(format!("{name} ({earlier})"));
        }
        defaults::set(&mut pod, &overheads);
        members.push(pod);
    }
    let mut simulation = Simulation {
        snapshot,
        manifest: &manifest,
        settings,
        used: BTreeSet::new(),
        last_rejection: None,
    };
    let mut outcomes: Vec<Option<Outcome>> = vec![None; members.len()];
    for (index, pod) in members.iter().enumerate() {
        if outcomes.get(index).is_some_and(Option::is_some) {
            continue;
        }
        let indices: Vec<usize> = match gang::name_of(pod) {
            None => vec![index],
            Some(name) => {
                let later = members.iter().enumerate().skip(index);
                let of_gang =
                    later.filter(|(_, other)| gang::name_of(other).as_ref() == Some(&name));
                of_gang.map(|(index, _)| index).collect()
            }
        };
        let group: Vec<&Pod> = indices
            .iter()
            .filter_map(|index| members.get(*index))
            .collect();
        let decided = simulation.decide_group(&group)?;
        for (index, outcome) in indices.into_iter().zip(decided) {
            if let Some(slot) = outcomes.get_mut(index) {
                *slot = Some(outcome);
            }
        }
    }
    let companions = manifest.companions();
    let companions: Vec<&ResourceClaim> = companions.collect();
    let growths = (0..companions.len()).filter_map(|index| {
        let (earlier, rest) = companions.split_at_checked(index)?;
        Some(grow(snapshot, rest.first()?, earlier, settings))
    });
    let growths = growths.collect();
    let pairs = members.iter().zip(&outcomes);
    let preempting: BTreeSet<String> = pairs
        .filter_map(|(pod, outcome)| preemption_note(pod, outcome.as_ref()?))
        .collect();
    advice.extend(preempting);
    let pods: Vec<SimulatedPod> = members
        .iter()
        .zip(outcomes)
        .filter_map(|(pod, outcome)| {
            let pod = qualified(pod);
            outcome.map(|outcome| SimulatedPod { pod, outcome })
        })
        .collect();
    let count = |is: fn(&Outcome) -> bool| pods.iter().filter(|pod| is(&pod.outcome)).count();
    Ok(Report {
        fitting: count(|outcome| matches!(outcome, Outcome::Placed { .. })),
        requesting: count(|outcome| {
            matches!(outcome, Outcome::Placed { .. } | Outcome::Pending { .. })
        }),
        pods,
        growths,
        skipped: manifest.skipped,
        advice,
    })
}

/// Decides on a companion, beside the pods of the manifests and the companions before it.
fn grow(
    snapshot: &mut Snapshot,
    companion: &ResourceClaim,
    earlier: &[&ResourceClaim],
    settings: &Settings,
) -> SimulatedGrowth {
    let (namespace, name) = object_key(&companion.metadata);
    let placed = growth::place(snapshot, companion, earlier, settings.policies);
    let (fits, detail) = match &placed {
        Ok(placement) => {
            snapshot.cluster.assume(placement);
            let devices = placement.claims.iter().flat_map(|claim| &claim.devices);
            let devices: Vec<String> = devices
                .map(|placed| format!("{}/{}", placement.node, placed.device.display_name()))
                .collect();
            (true, devices.join(", "))
        }
        Err(why) => (false, why.summary()),
    };
    SimulatedGrowth {
        claim: format!("{namespace}/{name}"),
        fits,
        detail,
    }
}

/// Returns that others may be suspended or evicted for a pod that does not fit.
fn preemption_note(pod: &Pod, outcome: &Outcome) -> Option<String> {
    let Outcome::Pending { changes, .. } = outcome else {
        return None;
    };
    let lowest = changes.iter().filter_map(Change::lowest_ending).min()?;
    let spec = pod.spec.as_ref()?;
    if spec.preemption_policy.as_deref() == Some("Never") {
        return None;
    }
    let of = match (spec.priority, &spec.priority_class_name) {
        (Some(priority), _) if priority > lowest => format!("priority {priority}"),
        (None, Some(class)) => format!("priority class {class}"),
        _ => return None,
    };
    Some(format!(
        "for a pod of {of}, pods of lower priority are suspended or evicted if it fits then; the simulation leaves that out"
    ))
}

/// Returns namespace and name of a pod.
fn qualified(pod: &Pod) -> String {
    let (namespace, name) = object_key(&pod.metadata);
    format!("{namespace}/{name}")
}

/// Returns the outcome of a pod without claims for devices of this driver.
fn without_claims(pod: &Pod) -> Outcome {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.chain(&spec.containers)
    });
    let resources = containers.filter_map(|container| container.resources.as_ref());
    let amounts = resources.flat_map(|resources| [&resources.limits, &resources.requests]);
    // Charts render a zero for none.
    let amounts = amounts.flatten().flatten();
    let names = amounts.filter(|(_, amount)| amount.0 != "0");
    let names = names.map(|(name, _)| name);
    let table = ResourceTable::default();
    // NVIDIA's plugin can give its resources other names, such as nvidia.com/gpu-a100.
    let is_gpu = |name: &str| {
        table.contains(name)
            || is_device_plugin_resource(name)
            || name.starts_with("nvidia.com/gpu")
    };
    let resources: BTreeSet<&String> = names.filter(|name| is_gpu(name)).collect();
    match resources.is_empty() {
        true => Outcome::NoGpuRequest,
        false => Outcome::Untranslated {
            resources: resources.into_iter().cloned().collect(),
        },
    }
}

/// A simulation of pods one after the other.
struct Simulation<'a> {
    snapshot: &'a mut Snapshot,
    manifest: &'a Manifest,
    settings: &'a Settings,
    /// UIDs of the claims that pods of the manifests use.
    used: BTreeSet<String>,
    /// The last pod that does not fit: one like it has the same changes.
    last_rejection: Option<(String, Vec<Change>)>,
}

/// Decision for one pod.
enum Decided {
    /// The outcome of a pod that takes nothing.
    Without(Outcome),
    /// A placement, which is assumed.
    Placed(Box<(PodRequest, Placement)>),
}

impl Simulation<'_> {
    /// Decides pods that start together, or a single one.
    fn decide_group(&mut self, pods: &[&Pod]) -> Result<Vec<Outcome>, SimulateError> {
        let mut decided = Vec::new();
        for pod in pods {
            decided.push(self.decide(pod)?);
        }
        match self.obstacle(pods, &decided) {
            Some(explanation) => Ok(self.give_up(decided, &explanation.summary())),
            None => Ok(decided.into_iter().map(Decided::outcome).collect()),
        }
    }

    /// Returns why these pods of a gang do not start, if they do not; none for a pod without a gang.
    fn obstacle(&self, pods: &[&Pod], decided: &[Decided]) -> Option<Explanation> {
        let invalid =
            |error: GangError| Explanation::rejected(Reason::InvalidGang, error.to_string());
        let gang = match gang::of(pods.first()?) {
            Ok(gang) => gang?,
            Err(error) => return Some(invalid(error)),
        };
        let existing: Vec<&Pod> = self.snapshot.members(&gang.name).collect();
        let mut members = pods.iter().chain(&existing);
        let other = members.find_map(|pod| {
            let other = gang::of(pod).ok()??;
            (other.min != gang.min).then_some(other.min)
        });
        if let Some(other) = other {
            return Some(invalid(GangError::contradictory(
                gang.name, gang.min, other,
            )));
        }
        let started = existing.iter().filter(|pod| pod::node(pod).is_some());
        let started = started.count();
        let fitting = decided.iter().filter(|decided| !decided.is_pending());
        let fitting = started + fitting.count();
        if started >= gang.min || fitting >= gang.min {
            return None;
        }
        let total = existing.len() + pods.len();
        let text = if total < gang.min {
            format!("{total} of {} members exist", gang.min)
        } else {
            let mut rejected = pods.iter().zip(decided);
            let rejected = rejected.find_map(|(pod, decided)| match decided {
                Decided::Without(Outcome::Pending { reason, .. }) => {
                    Some(format!("; pod {}: {reason}", qualified(pod)))
                }
                Decided::Without(_) | Decided::Placed(_) => None,
            });
            let rejected = rejected.unwrap_or_default();
            format!("{fitting} of {} members fit{rejected}", gang.min)
        };
        let text = format!("gang {}: {text}", gang.name);
        Some(Explanation::rejected(Reason::WaitingForGang, text))
    }

    /// Takes back the placements of a gang that does not start.
    fn give_up(&mut self, decided: Vec<Decided>, reason: &str) -> Vec<Outcome> {
        let cluster = &mut self.snapshot.cluster;
        let outcomes = decided.into_iter().map(|decided| match decided {
            Decided::Without(
                unaffected @ (Outcome::NoGpuRequest | Outcome::Untranslated { .. }),
            ) => unaffected,
            Decided::Without(Outcome::Pending { changes, .. }) => Outcome::Pending {
                reason: reason.to_owned(),
                changes,
            },
            Decided::Without(Outcome::Placed { .. }) | Decided::Placed(_) => {
                if let Decided::Placed(placed) = &decided {
                    let (request, placement) = &**placed;
                    for claim in &placement.claims {
                        cluster.forget(&(claim.claim.namespace.clone(), claim.claim.name.clone()));
                    }
                    cluster.forget_pod(&request.uid);
                }
                Outcome::Pending {
                    reason: reason.to_owned(),
                    changes: Vec::new(),
                }
            }
        });
        outcomes.collect()
    }

    /// Decides a pod, and assumes its placement.
    fn decide(&mut self, pod: &Pod) -> Result<Decided, SimulateError> {
        let Self {
            snapshot,
            manifest,
            settings,
            used,
            last_rejection,
        } = self;
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
        let pending = |reason: String| {
            Decided::Without(Outcome::Pending {
                reason,
                changes: Vec::new(),
            })
        };
        let cluster = &snapshot.cluster;
        let request = match PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors) {
            Ok(request) => request,
            Err(error) => return Ok(pending(Explanation::from(error).summary())),
        };
        if request.claims.is_empty() {
            let impossible = request
                .unallocatable
                .or_else(|| unknown_class(cluster, &named));
            return Ok(match impossible {
                Some(explanation) => pending(explanation.summary()),
                None => Decided::Without(without_claims(pod)),
            });
        }
        if !pod::is_served(pod, &settings.schedulers) {
            let explanation = Explanation::scheduler_not_served(pod, &settings.schedulers);
            return Ok(pending(explanation.summary()));
        }
        let placement = match snapshot.cluster.decide(&request, settings.policies) {
            Ok(placement) => placement,
            Err(explanation) => {
                snapshot.lift_reservations();
                let own = object_key(&pod.metadata);
                let reserved = snapshot.waits_for_reserved(&own, &request, settings.policies);
                snapshot.hold_reservations(None);
                let reserved = reserved.map(|held| held.explanation(None));
                let reason = reserved.unwrap_or(explanation).summary();
                let known = last_rejection.take().filter(|(same, _)| *same == reason);
                let changes = match known {
                    Some((_, changes)) => changes,
                    None => changes::find(snapshot, pod, &claims, settings.policies),
                };
                *last_rejection = Some((reason.clone(), changes.clone()));
                return Ok(Decided::Without(Outcome::Pending { reason, changes }));
            }
        };
        snapshot.cluster.assume(&placement);
        snapshot
            .cluster
            .assume_pod(&request.uid, &placement.node, &request.demand);
        Ok(Decided::Placed(Box::new((request, placement))))
    }
}

impl Decided {
    const fn is_pending(&self) -> bool {
        matches!(self, Self::Without(Outcome::Pending { .. }))
    }

    fn outcome(self) -> Outcome {
        let placement = match self {
            Self::Without(outcome) => return outcome,
            Self::Placed(placed) => placed.1,
        };
        let device = |device: &AllocatedDevice| {
            format!("{}: {}/{}", device.request, device.pool, device.device)
        };
        let devices = placement
            .claims
            .iter()
            .flat_map(|claim| claim.allocated_devices());
        let reasons: Vec<String> = placement
            .claims
            .iter()
            .map(|claim| placement.reason(claim))
            .collect();
        Outcome::Placed {
            devices: devices.map(|allocated| device(&allocated)).collect(),
            reason: reasons.join("; "),
            node: placement.node,
        }
    }
}

#[cfg(test)]
mod tests;
