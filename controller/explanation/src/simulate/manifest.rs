//! The objects of manifests: pods of workloads as the controllers of Kubernetes create them, and what those use.

use std::collections::BTreeSet;

use drava_allocator::capacity::Amounts;
use drava_allocator::claim::ClaimId;
use drava_allocator::cluster::Cluster;
use drava_allocator::node::PodDemand;
use drava_allocator::object::object_key;
use drava_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim, PodTemplateSpec, Toleration};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::SimulateError;
use crate::advice;
use crate::defaults::Overheads;
use crate::growth;
use crate::snapshot::Snapshot;

/// Most pods of a simulation: each is kept in memory. No cluster of Kubernetes has more.
const MAX_PODS: usize = 150_000;

/// Taints below `node.kubernetes.io` that the pods of a DaemonSet tolerate.
const DAEMON_TOLERATIONS: [&str; 6] = [
    "not-ready",
    "unreachable",
    "disk-pressure",
    "memory-pressure",
    "pid-pressure",
    "unschedulable",
];

/// Objects of the manifests that a simulation needs.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    pub(super) pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
    pub(super) templates: Vec<ResourceClaimTemplate>,
    pub(super) classes: Vec<DeviceClass>,
    /// Overhead of the runtime classes of the manifests.
    pub(super) overheads: Overheads,
    pub(super) skipped: Vec<String>,
}

impl Manifest {
    pub(super) fn add(
        &mut self,
        document: Value,
        namespace: &str,
        replicas: Option<usize>,
        cluster: &Cluster,
    ) -> Result<(), SimulateError> {
        let kind = document["kind"].as_str().unwrap_or_default().to_owned();
        let name = document["metadata"]["name"].as_str().unwrap_or_default();
        let subject = format!("{kind} {name}");
        let number = |pointer: &str| {
            let number = document.pointer(pointer).and_then(Value::as_u64);
            number.and_then(|number| usize::try_from(number).ok())
        };
        let is_of_volcano = document["apiVersion"]
            .as_str()
            .is_some_and(|version| version.starts_with("batch.volcano.sh/"));
        match kind.as_str() {
            "Job" if is_of_volcano => {
                for (task, pods) in tasks_of(&document, &subject)? {
                    self.add_pods(&task, namespace, replicas.unwrap_or(pods))?;
                }
            }
            "List" => {
                for item in document["items"].as_array().into_iter().flatten() {
                    self.add(item.clone(), namespace, replicas, cluster)?;
                }
            }
            "Pod" => {
                let pod: Pod = read(document, &subject)?;
                self.add_pods(&pod, namespace, replicas.unwrap_or(1))?;
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
                let pod = pod_of(document.pointer("/spec/template"), &document, &subject)?;
                self.add_pods(&pod, namespace, replicas.or(count).unwrap_or(1))?;
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
            "DeviceClass" => self.classes.push(read(document, &subject)?),
            "RuntimeClass" => {
                let class: RuntimeClass = read(document, &subject)?;
                let overhead = class.overhead.and_then(|overhead| overhead.pod_fixed);
                self.overheads.extend(class.metadata.name.zip(overhead));
            }
            "DaemonSet" => {
                let pod = pod_of(document.pointer("/spec/template"), &document, &subject)?;
                let before = self.pods.len();
                self.add_daemons(&pod, namespace, cluster)?;
                if self.pods.len() == before {
                    self.skipped
                        .push(format!("{subject} has no pods: no node admits them"));
                }
            }
            "CronJob" => self.skipped.push(format!(
                "{subject} is not simulated, because its number of pods depends on the time; use its pod template in a Pod"
            )),
            // Objects without pods, such as Services, change nothing.
            _ => {}
        }
        Ok(())
    }

    /// Returns whether there is nothing to simulate, and nothing to say about.
    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.skipped.is_empty() && self.companions().next().is_none()
    }

    /// Returns the claims that add to shares of running pods.
    pub(super) fn companions(&self) -> impl Iterator<Item = &ResourceClaim> {
        let claims = self.claims.iter();
        claims.filter(|claim| growth::base_uid(claim).is_some())
    }

    fn add_pods(&mut self, pod: &Pod, namespace: &str, count: usize) -> Result<(), SimulateError> {
        if count > MAX_PODS.saturating_sub(self.pods.len()) {
            return Err(SimulateError::TooMany(MAX_PODS));
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

    /// Adds a pod for each node for which the DaemonSet controller creates one: not where taints or selectors exclude it.
    fn add_daemons(
        &mut self,
        pod: &Pod,
        namespace: &str,
        cluster: &Cluster,
    ) -> Result<(), SimulateError> {
        let mut pod = pod.clone();
        let spec = pod.spec.get_or_insert_default();
        let tolerations = spec.tolerations.get_or_insert_default();
        tolerations.extend(DAEMON_TOLERATIONS.map(|key| Toleration {
            key: Some(format!("node.kubernetes.io/{key}")),
            operator: Some("Exists".to_owned()),
            ..Toleration::default()
        }));
        let mut without_requests = pod.clone();
        let spec = without_requests.spec.get_or_insert_default();
        (spec.resources, spec.overhead) = (None, None);
        let init = spec.init_containers.iter_mut().flatten();
        for container in init.chain(&mut spec.containers) {
            container.resources = None;
        }
        let demand = PodDemand::of(&without_requests);
        let nodes: Vec<&str> = cluster
            .node_names()
            .filter(|name| {
                let node = cluster.node(name);
                node.is_some_and(|node| {
                    let used = Amounts::new();
                    node.admits(name, &demand, &used, &cluster.classes).is_ok()
                })
            })
            .collect();
        for node in nodes {
            let mut daemon = pod.clone();
            let name = daemon.metadata.name.unwrap_or_default();
            daemon.metadata.name = Some(format!("{name}-{node}"));
            // The controller sets an affinity to the same effect.
            daemon.spec.get_or_insert_default().node_name = Some(node.to_owned());
            self.add_pods(&daemon, namespace, 1)?;
        }
        Ok(())
    }

    /// Returns the likely mistakes in the claims and claim templates of the manifests.
    pub(super) fn advice_on_claims(&self, snapshot: &Snapshot) -> Vec<String> {
        let known = snapshot.known();
        let claims = self.claims.iter().filter_map(|claim| {
            let id = ClaimId::of(claim);
            let object = format!("claim {id}");
            Some((id.namespace, object, "spec", claim.spec.as_ref()?))
        });
        let templates = self.templates.iter().filter_map(|template| {
            let (namespace, name) = object_key(&template.metadata);
            let spec = &template.spec.as_ref()?.spec;
            let object = format!("claim template {namespace}/{name}");
            Some((namespace, object, "spec.spec", spec.as_ref()?))
        });
        let of_claims = claims
            .chain(templates)
            .flat_map(|(namespace, object, root, spec)| {
                let advice = advice::of_claim(&namespace, spec, root, known).into_iter();
                advice.map(move |text| format!("{object}: {text}"))
            });
        of_claims.collect()
    }

    /// Returns the likely mistakes in the pods of the manifests.
    pub(super) fn advice_on_pods(&self, snapshot: &Snapshot) -> Vec<String> {
        let mut found = Vec::new();
        // The pods of a workload are equal.
        let mut known = BTreeSet::new();
        for pod in &self.pods {
            for text in advice::of_pod(pod, &self.own_entries(snapshot, pod)) {
                let (namespace, name) = object_key(&pod.metadata);
                if known.insert((namespace.clone(), text.clone())) {
                    found.push(format!("pod {namespace}/{name}: {text}"));
                }
            }
        }
        found
    }

    /// Returns the names of the pod's claims that request devices of this driver.
    fn own_entries(&self, snapshot: &Snapshot, pod: &Pod) -> BTreeSet<String> {
        let entries = pod
            .spec
            .iter()
            .flat_map(|spec| spec.resource_claims.iter().flatten());
        let own = entries.filter(|entry| {
            // A missing claim is an error of the simulation.
            let claim = self.claim(snapshot, pod, entry, &mut BTreeSet::new());
            claim.is_ok_and(|claim| snapshot.is_own(&claim))
        });
        own.map(|entry| entry.name.clone()).collect()
    }

    /// Returns the claim of a pod's entry: that of a template is new.
    pub(super) fn claim(
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
            // Its name as the API server generates it is unknown.
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            claim.metadata.name = Some(format!("{} of template {name} of pod {pod}", entry.name));
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

/// Returns a pod of the template of a workload, with the name of the workload.
fn pod_of(template: Option<&Value>, workload: &Value, subject: &str) -> Result<Pod, SimulateError> {
    let template = template.cloned().unwrap_or_default();
    let template: PodTemplateSpec = read(template, subject)?;
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.name = workload["metadata"]["name"].as_str().map(str::to_owned);
    metadata.namespace = workload["metadata"]["namespace"]
        .as_str()
        .map(str::to_owned);
    Ok(Pod {
        metadata,
        spec: template.spec,
        status: None,
    })
}

/// Returns a pod of each task of Volcano's Job, with its number of pods. They are a gang, as those of its PodGroup.
fn tasks_of(job: &Value, subject: &str) -> Result<Vec<(Pod, usize)>, SimulateError> {
    let tasks = job.pointer("/spec/tasks").and_then(Value::as_array);
    let replicas = |task: &Value| task["replicas"].as_u64().unwrap_or(1);
    let min = job.pointer("/spec/minAvailable").and_then(Value::as_u64);
    // As Volcano's webhook sets it.
    let min = min.filter(|min| *min > 0).unwrap_or_else(|| {
        let tasks = tasks.into_iter().flatten();
        let of_tasks = tasks.map(|task| task["minAvailable"].as_u64().unwrap_or(replicas(task)));
        of_tasks.fold(0, u64::saturating_add)
    });
    let name = job["metadata"]["name"].as_str().unwrap_or_default();
    let pods = tasks
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(index, task)| {
            let scheduler = job.pointer("/spec/schedulerName").and_then(Value::as_str);
            let mut pod = pod_of(task.pointer("/template"), job, subject)?;
            if let Some(name) = &mut pod.metadata.name {
                // As Volcano names a task without a name.
                let task = task["name"].as_str().map(str::to_owned);
                let task = task.unwrap_or_else(|| format!("default{index}"));
                *name = format!("{name}-{task}");
            }
            let spec = pod.spec.get_or_insert_default();
            // Volcano's webhook sets its own scheduler.
            let scheduler = scheduler.unwrap_or("volcano").to_owned();
            spec.scheduler_name = spec.scheduler_name.take().or(Some(scheduler));
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.extend([
                (GANG_ANNOTATION.to_owned(), name.to_owned()),
                (GANG_MIN_ANNOTATION.to_owned(), min.to_string()),
            ]);
            Ok((pod, usize::try_from(replicas(task)).unwrap_or(usize::MAX)))
        });
    pods.collect()
}

fn read<T: DeserializeOwned>(document: Value, subject: &str) -> Result<T, SimulateError> {
    serde_json::from_value(document).map_err(|source| SimulateError::Unreadable {
        subject: subject.to_owned(),
        source,
    })
}
