//! `kubectl drava explain job`: why a job has no pods, as far as Kueue says it, and which of its pods wait.
//!
//! A suspended job has no pods, so drava knows nothing of it.

use anyhow::bail;
use drava_explanation::printable;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde_json::Value;

use crate::tenant;

/// Versions of Kueue's API, the newest first.
const KUEUE_VERSIONS: [&str; 2] = ["v1beta2", "v1beta1"];

/// Label of a job with its queue of Kueue.
const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";

/// Label of the pods of a job.
const JOB_LABEL: &str = "batch.kubernetes.io/job-name";

/// State of a job.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    job: String,
    is_suspended: bool,
    summary: String,
    /// Pods that are not bound to a node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pending_pods: Vec<String>,
}

/// A workload of Kueue.
struct Workload {
    name: String,
    is_active: bool,
    /// Type, status and message of each condition.
    conditions: Vec<(String, String, String)>,
}

/// Explains a job.
///
/// # Errors
/// When the job does not exist, or an object cannot be read.
pub(crate) async fn explain(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Report> {
    let jobs: Api<Job> = Api::namespaced(client.clone(), namespace);
    let qualified = format!("{namespace}/{name}");
    let found = jobs.get_opt(name).await;
    let found = found.map_err(|error| tenant::refused(error, &format!("read job {qualified}")))?;
    let Some(job) = found else {
        bail!("cannot find job {name} in namespace {namespace}; use -n for another namespace");
    };
    if is_suspended(&job) {
        let workload = workload_of(client, namespace, &job).await?;
        return Ok(Report {
            job: qualified,
            is_suspended: true,
            summary: suspended(&job, namespace, workload.as_ref()),
            pending_pods: Vec::new(),
        });
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of_job = ListParams::default().labels(&format!("{JOB_LABEL}={name}"));
    let pods = pods.list(&of_job).await;
    let action = format!("list the pods of job {qualified}");
    let pods = pods.map_err(|error| tenant::refused(error, &action))?;
    Ok(of_pods(namespace, name, &pods.items))
}

fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true)
}

/// Returns Kueue's workload of a job; none if it has none, or Kueue is not installed.
async fn workload_of(
    client: &Client,
    namespace: &str,
    job: &Job,
) -> anyhow::Result<Option<Workload>> {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    for version in KUEUE_VERSIONS {
        let resource = ApiResource {
            group: "kueue.x-k8s.io".to_owned(),
            version: version.to_owned(),
            api_version: format!("kueue.x-k8s.io/{version}"),
            kind: "Workload".to_owned(),
            plural: "workloads".to_owned(),
        };
        let all: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        match all.list(&ListParams::default()).await {
            Ok(workloads) => {
                let is_of_job = |workload: &&DynamicObject| {
                    let owners = workload.metadata.owner_references.iter().flatten();
                    owners.into_iter().any(|owner| owner.uid == uid)
                };
                return Ok(workloads.items.iter().find(is_of_job).map(Workload::read));
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(tenant::refused(error, "list the workloads of Kueue")),
        }
    }
    Ok(None)
}

impl Workload {
    fn read(object: &DynamicObject) -> Self {
        let text = |value: &Value| printable(value.as_str().unwrap_or_default());
        let conditions = object.data["status"]["conditions"].as_array();
        let conditions = conditions.into_iter().flatten().map(|condition| {
            (
                text(&condition["type"]),
                text(&condition["status"]),
                text(&condition["message"]),
            )
        });
        Self {
            name: object.name_any(),
            is_active: object.data["spec"]["active"] != false,
            conditions: conditions.collect(),
        }
    }
}

/// Returns why a job is suspended.
fn suspended(job: &Job, namespace: &str, workload: Option<&Workload>) -> String {
    let Some(workload) = workload else {
        if let Some(queue) = job.labels().get(QUEUE_LABEL) {
            return format!(
                "suspended; its label {QUEUE_LABEL} names queue {queue}, and Kueue has no workload of the job so far: check that \
                 Kueue runs, and that it manages the jobs of namespace {namespace}"
            );
        }
        return format!(
            "suspended, and no workload of Kueue has the job; `kubectl patch job {} -n {namespace} --type=merge -p \
             '{{\"spec\":{{\"suspend\":false}}}}'` starts it",
            job.name_any()
        );
    };
    let Workload {
        name,
        is_active,
        conditions,
    } = workload;
    if !is_active {
        return format!("suspended: workload {name} of Kueue is not active; set its spec.active");
    }
    // In the order in which a workload passes them.
    let open = ["QuotaReserved", "Admitted"].into_iter().find_map(|kind| {
        let mut found = conditions.iter();
        let (_, status, message) = found.find(|(of, ..)| of == kind)?;
        (status != "True").then(|| format!("{kind} is {status}: {message}"))
    });
    match open {
        Some(open) => format!("suspended by Kueue, workload {name}: {open}"),
        None => format!("suspended; Kueue has not decided on workload {name}, or starts the job"),
    }
}

/// Returns which pods of a job wait.
fn of_pods(namespace: &str, name: &str, pods: &[Pod]) -> Report {
    let pending = pods.iter().filter(|pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        drava_allocator::pod::node(pod).is_none() && matches!(phase, None | Some("Pending"))
    });
    let pending: Vec<String> = pending.map(ResourceExt::name_any).collect();
    let summary = match (pods.len(), pending.as_slice()) {
        (0, _) => "not suspended, and without pods; check the job's events".to_owned(),
        (_, []) => "not suspended, and no pod waits for a node".to_owned(),
        (_, [first, ..]) => format!(
            "not suspended; pods that wait: {}; `kubectl drava explain pod {first} -n {namespace}` says why",
            pending.len()
        ),
    };
    Report {
        job: format!("{namespace}/{name}"),
        is_suspended: false,
        summary,
        pending_pods: pending,
    }
}

impl Report {
    /// Formats the report as text.
    pub(crate) fn text(&self) -> String {
        format!("job {}: {}\n", self.job, self.summary)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workload(active: bool, conditions: &Value) -> Workload {
        let object = json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": "job-j-1"},
            "spec": {"active": active}, "status": {"conditions": conditions},
        });
        Workload::read(&serde_json::from_value(object).expect("a workload"))
    }

    #[test]
    fn says_what_kueue_says() {
        let quota = "couldn't assign flavors to pod set main: insufficient unused quota\u{1b} for nvidia.com/gpu";
        let waiting = json!([{"type": "QuotaReserved", "status": "False", "message": quota}]);
        let checked = json!([
            {"type": "Admitted", "status": "False", "message": "The workload has not all checks ready"},
            {"type": "QuotaReserved", "status": "True", "message": "Quota reserved"},
        ]);
        for (workload, text) in [
            (
                workload(true, &waiting),
                "suspended by Kueue, workload job-j-1: QuotaReserved is False: couldn't assign flavors to pod set main: \
                 insufficient unused quota  for nvidia.com/gpu",
            ),
            (
                workload(true, &checked),
                "suspended by Kueue, workload job-j-1: Admitted is False: The workload has not all checks ready",
            ),
            (
                workload(false, &waiting),
                "suspended: workload job-j-1 of Kueue is not active; set its spec.active",
            ),
            (
                workload(true, &json!([])),
                "suspended; Kueue has not decided on workload job-j-1, or starts the job",
            ),
        ] {
            assert_eq!(suspended(&job(&json!({})), "a", Some(&workload)), text);
        }
    }

    fn job(labels: &Value) -> Job {
        let job = json!({"metadata": {"name": "j", "labels": labels}});
        serde_json::from_value(job).expect("a job")
    }

    #[test]
    fn says_that_job_has_no_workload() {
        assert_eq!(
            suspended(&job(&json!({})), "a", None),
            "suspended, and no workload of Kueue has the job; `kubectl patch job j -n a --type=merge -p \
             '{\"spec\":{\"suspend\":false}}'` starts it"
        );
        assert_eq!(
            suspended(&job(&json!({QUEUE_LABEL: "gpus"})), "a", None),
            "suspended; its label kueue.x-k8s.io/queue-name names queue gpus, and Kueue has no workload of the job so far: check \
             that Kueue runs, and that it manages the jobs of namespace a"
        );
    }

    #[test]
    fn names_pods_that_wait() {
        let pod = |name: &str, node: Option<&str>, phase: &str| {
            let pod = json!({
                "metadata": {"name": name}, "spec": {"containers": [], "nodeName": node}, "status": {"phase": phase},
            });
            serde_json::from_value(pod).expect("a pod")
        };
        let pods = [
            pod("a", Some("n"), "Running"),
            pod("b", None, "Pending"),
            pod("c", None, "Failed"),
        ];
        let report = of_pods("a", "j", &pods);
        assert_eq!(
            report.text(),
            "job a/j: not suspended; pods that wait: 1; `kubectl drava explain pod b -n a` says why\n"
        );
        assert_eq!(report.pending_pods, ["b"]);
        let none = of_pods("a", "j", &[]);
        assert_eq!(
            none.summary,
            "not suspended, and without pods; check the job's events"
        );
    }
}
