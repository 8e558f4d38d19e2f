//! `kubectl drava explain job`: why a job has no pods, as far as Kueue says it, and which of its pods wait.
//!
//! A suspended job has no pods, so drava knows nothing of it.

use anyhow::bail;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;

use crate::kueue::{Admission, Kueue, QUEUE_LABEL, Workload};
use crate::tenant;

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
        let uid = job.metadata.uid.as_deref().unwrap_or_default();
        let kueue = Kueue::fetch(client, Some(namespace)).await?;
        let workload = kueue.workload_of(uid);
        return Ok(Report {
            job: qualified,
            is_suspended: true,
            summary: suspended(&job, namespace, workload),
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
    let name = &workload.name;
    match workload.admission() {
        Admission::Inactive => {
            format!("suspended: workload {name} of Kueue is not active; set its spec.active")
        }
        Admission::Waiting(reason) => format!("suspended by Kueue, workload {name}: {reason}"),
        Admission::Undecided => {
            format!("suspended; Kueue has not decided on workload {name}, or starts the job")
        }
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
    use serde_json::{Value, json};

    use super::*;

    fn workload(active: bool, conditions: &Value) -> Workload {
        crate::kueue::tests::workload("a", "job-j-1", "uid", active, conditions)
    }

    #[test]
    fn says_what_kueue_says() {
        let waiting = json!([{"type": "QuotaReserved", "status": "False", "message": "no quota"}]);
        for (workload, text) in [
            (
                workload(true, &waiting),
                "suspended by Kueue, workload job-j-1: QuotaReserved is False: no quota",
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
