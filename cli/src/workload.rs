//! Workloads, and the claims that their pods have had.

use std::collections::BTreeMap;
use std::fmt::Debug;

use anyhow::Context as _;
use drava_api::recommendation::{PodOwner, job_of};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What creates pods that are alike, with one of their claims.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Workload {
    pub(crate) namespace: String,
    pub(crate) kind: String,
    pub(crate) name: String,
    /// Name of the claim in the pods.
    pub(crate) claim: String,
}

impl Workload {
    /// Returns kind and name as the arguments of kubectl: `deployment/web`.
    pub(crate) fn reference(&self) -> String {
        format!("{}/{}", self.kind.to_lowercase(), self.name)
    }

    /// Returns whether Kubernetes would call a claim of a pod of this workload so, by the name alone: pod and claim may be gone.
    ///
    /// The name of a claim from a template is that of the pod, that of the claim in the pod, and five generated characters.
    fn has_had(&self, namespace: &str, claim: &str) -> bool {
        let pod = claim
            .rsplit_once('-')
            .and_then(|(stem, _)| stem.strip_suffix(&self.claim)?.strip_suffix('-'));
        let Some(pod) = pod.filter(|_| namespace == self.namespace) else {
            return false;
        };
        let before = |parts: usize| pod.rsplitn(parts + 1, '-').nth(parts) == Some(&self.name);
        let is_index = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let has_index = |parts: usize| pod.rsplit('-').nth(parts).is_some_and(is_index);
        match self.kind.as_str() {
            "Pod" => pod == self.name,
            // The hash of the ReplicaSet, and generated characters.
            "Deployment" => before(2),
            "ReplicaSet" | "StatefulSet" | "DaemonSet" => before(1),
            // Pods of an indexed job have their index before the generated characters.
            "Job" => before(1) || (before(2) && has_index(1)),
            // Its Jobs have the minute for which they were created at the end of their names.
            "CronJob" => (before(2) && has_index(1)) || (before(3) && has_index(1) && has_index(2)),
            _ => false,
        }
    }
}

/// Workloads with pods in the cluster, and their claims.
#[derive(Debug, Default)]
pub(crate) struct Workloads {
    /// Workload of each claim by namespace and name.
    living: BTreeMap<(String, String), Workload>,
    /// Number of living claims of each workload.
    pub(crate) counts: BTreeMap<Workload, usize>,
}

impl Workloads {
    /// Reads the workloads of the pods of a namespace, or of all.
    ///
    /// # Errors
    /// When the API server does not list the pods, or their Jobs.
    pub(crate) async fn read(client: &Client, namespace: Option<&str>) -> anyhow::Result<Self> {
        let pods: Vec<Pod> = list(client, namespace).await?;
        // Those of a CronJob are one workload.
        let jobs: Vec<Job> = match pods.iter().any(|pod| job_of(&pod.metadata).is_some()) {
            true => list(client, namespace).await?,
            false => Vec::new(),
        };
        Ok(Self::of(&pods, &jobs))
    }

    /// Returns the workloads of pods, of which some are of these Jobs.
    pub(crate) fn of(pods: &[Pod], jobs: &[Job]) -> Self {
        let mut workloads = Self::default();
        for (namespace, claim, workload) in pods.iter().flat_map(|pod| claims_of(pod, jobs)) {
            let key = (namespace, claim);
            if workloads.living.insert(key, workload.clone()).is_none() {
                *workloads.counts.entry(workload).or_default() += 1;
            }
        }
        workloads
    }

    /// Returns the workload whose pods have, or have had, a claim.
    pub(crate) fn find(&self, namespace: &str, claim: &str) -> Option<&Workload> {
        let key = (namespace.to_owned(), claim.to_owned());
        let living = self.living.get(&key);
        living.or_else(|| {
            let first = Workload {
                namespace: namespace.to_owned(),
                ..Workload::default()
            };
            let workloads = self.counts.range(first..).map(|(workload, _)| workload);
            let mut workloads = workloads.take_while(|workload| workload.namespace == namespace);
            workloads.find(|workload| workload.has_had(namespace, claim))
        })
    }

    /// Returns whether a pod of the cluster has the claim.
    pub(crate) fn is_living(&self, namespace: &str, claim: &str) -> bool {
        let key = (namespace.to_owned(), claim.to_owned());
        self.living.contains_key(&key)
    }
}

/// Lists the objects of a kind in a namespace, or in all.
async fn list<K>(client: &Client, namespace: Option<&str>) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let objects: Api<K> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let found = objects.list(&ListParams::default()).await;
    let found = found.with_context(|| {
        let plural = K::plural(&());
        format!("cannot list {plural}; with -n, those of one namespace are enough")
    })?;
    Ok(found.items)
}

/// Returns namespace, name and workload of each claim of a pod. A claim that the pod names itself is its own workload: several
/// pods may use it.
fn claims_of(pod: &Pod, jobs: &[Job]) -> Vec<(String, String, Workload)> {
    let namespace = pod.namespace().unwrap_or_default();
    let job = job_of(&pod.metadata).and_then(|owner| {
        let mut jobs = jobs.iter().map(|job| &job.metadata);
        jobs.find(|job| job.uid.as_ref() == Some(&owner.uid))
    });
    let PodOwner { kind, name } = PodOwner::of(&pod.metadata, job);
    let spec = pod.spec.iter();
    let claims = spec.flat_map(|spec| spec.resource_claims.iter().flatten());
    let statuses = pod.status.iter();
    let statuses = statuses.flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let generated: BTreeMap<&str, &str> = statuses
        .filter_map(|status| Some((status.name.as_str(), status.resource_claim_name.as_deref()?)))
        .collect();
    let read = |(kind, name, claim): (&str, &str, &str), of: &str| {
        let workload = Workload {
            namespace: namespace.clone(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            claim: claim.to_owned(),
        };
        (namespace.clone(), of.to_owned(), workload)
    };
    let claims = claims.filter_map(|claim| {
        if let Some(named) = &claim.resource_claim_name {
            return Some(read(("ResourceClaim", named, named), named));
        }
        let of = generated.get(claim.name.as_str())?;
        Some(read((&kind, &name, &claim.name), of))
    });
    claims.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workload(kind: &str, name: &str) -> Workload {
        Workload {
            namespace: "a".to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            claim: "gpu".to_owned(),
        }
    }

    #[test]
    fn knows_claims_of_pods_that_are_gone() {
        for (kind, name, claim, has_had) in [
            ("Deployment", "web", "web-5d9c-x7k2p-gpu-abcde", true),
            // Another Deployment, whose name starts alike.
            ("Deployment", "web", "web-api-5d9c-x7k2p-gpu-abcde", false),
            (
                "Deployment",
                "web-api",
                "web-api-5d9c-x7k2p-gpu-abcde",
                true,
            ),
            ("Deployment", "web", "web-5d9c-x7k2p-other-abcde", false),
            ("StatefulSet", "db", "db-0-gpu-abcde", true),
            ("StatefulSet", "db", "db-gpu-abcde", false),
            ("Job", "train", "train-x7k2p-gpu-abcde", true),
            ("Job", "train", "train-12-x7k2p-gpu-abcde", true),
            ("Job", "train", "train-big-x7k2p-gpu-abcde", false),
            ("CronJob", "night", "night-29401200-x7k2p-gpu-abcde", true),
            ("CronJob", "night", "night-29401200-3-x7k2p-gpu-abcde", true),
            ("CronJob", "night", "night-x7k2p-gpu-abcde", false),
            ("CronJob", "night", "night-big-x7k2p-gpu-abcde", false),
            ("Pod", "one", "one-gpu-abcde", true),
            ("Pod", "one", "one-0-gpu-abcde", false),
            ("PyTorchJob", "p", "p-worker-0-gpu-abcde", false),
        ] {
            let found = workload(kind, name).has_had("a", claim);
            assert_eq!(found, has_had, "{kind} {name}: {claim}");
            assert!(!workload(kind, name).has_had("b", claim), "{claim}");
        }
    }

    #[test]
    fn counts_claims_by_workload() {
        let pod = |name: &str, owner: Option<(&str, &str)>| {
            let owners = owner.map(|(kind, name)| {
                json!([{"apiVersion": "batch/v1", "kind": kind, "name": name, "uid": "u", "controller": true}])
            });
            serde_json::from_value(json!({
                "metadata": {
                    "namespace": "a", "name": name, "labels": {"pod-template-hash": "5d9c"},
                    "ownerReferences": owners,
                },
                "spec": {"containers": [], "resourceClaims": [
                    {"name": "gpu", "resourceClaimTemplateName": "t"},
                    {"name": "both", "resourceClaimName": "named"},
                    {"name": "none", "resourceClaimTemplateName": "t"},
                ]},
                "status": {"resourceClaimStatuses": [
                    {"name": "gpu", "resourceClaimName": format!("{name}-gpu-abcde")}, {"name": "none"},
                ]},
            }))
            .expect("a pod")
        };
        let replica_set = Some(("ReplicaSet", "web-5d9c"));
        let pods: Vec<Pod> = vec![
            pod("web-5d9c-aaaaa", replica_set),
            pod("web-5d9c-bbbbb", replica_set),
            pod("alone", None),
            pod("set-0", Some(("LeaderWorkerSet", "set"))),
            pod("night-29-aaaaa", Some(("Job", "night-29"))),
        ];
        let job = json!({"metadata": {"name": "night-29", "uid": "u", "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "CronJob", "name": "night", "uid": "n", "controller": true},
        ]}});
        let found = Workloads::of(&pods, &[serde_json::from_value(job).expect("a job")]);
        let named = Workload {
            claim: "named".to_owned(),
            ..workload("ResourceClaim", "named")
        };
        let expected = BTreeMap::from([
            (workload("Deployment", "web"), 2),
            (workload("Pod", "alone"), 1),
            (workload("LeaderWorkerSet", "set"), 1),
            (workload("CronJob", "night"), 1),
            (named.clone(), 1),
        ]);
        assert_eq!(found.counts, expected);
        for (claim, workload) in [
            ("named", Some(&named)),
            ("set-0-gpu-abcde", Some(&workload("LeaderWorkerSet", "set"))),
            (
                "web-7777-ccccc-gpu-xxxxx",
                Some(&workload("Deployment", "web")),
            ),
            ("other-gpu-abcde", None),
        ] {
            assert_eq!(found.find("a", claim), workload, "{claim}");
        }
        assert!(found.is_living("a", "web-5d9c-aaaaa-gpu-abcde"));
        assert!(!found.is_living("a", "web-7777-ccccc-gpu-xxxxx"));
    }
}
