//! Kueue: the workloads by which it admits jobs and pods, and why it does not.

use drava_explanation::explain::{Report, State};
use drava_explanation::printable;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

use crate::tenant;

/// Label of a job or a pod with its queue.
pub(crate) const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";

/// Scheduling gate of a pod that Kueue has not admitted.
const ADMISSION_GATE: &str = "kueue.x-k8s.io/admission";

/// Versions of the API, the newest first.
const VERSIONS: [&str; 2] = ["v1beta2", "v1beta1"];

/// Kueue in a cluster, or in a namespace.
#[derive(Debug, Default)]
pub(crate) enum Kueue {
    /// It could not be read.
    #[default]
    Unknown,
    /// The API server does not serve workloads.
    NotInstalled,
    /// These are its workloads.
    Installed(Vec<Workload>),
}

/// A job or a pod that Kueue admits.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// UIDs of the job, or of the pods.
    owners: Vec<String>,
    is_active: bool,
    /// Type, status and message of each condition.
    conditions: Vec<(String, String, String)>,
}

/// State of a workload whose job or pod does not start.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// A user has switched it off.
    Inactive,
    /// It waits for this reason.
    Waiting(String),
    /// Kueue has given no reason, or has admitted it.
    Undecided,
}

impl Kueue {
    /// Reads the workloads of a namespace, or of all.
    ///
    /// # Errors
    /// When the workloads cannot be listed.
    pub(crate) async fn fetch(client: &Client, namespace: Option<&str>) -> anyhow::Result<Self> {
        for version in VERSIONS {
            let resource = ApiResource {
                group: "kueue.x-k8s.io".to_owned(),
                version: version.to_owned(),
                api_version: format!("kueue.x-k8s.io/{version}"),
                kind: "Workload".to_owned(),
                plural: "workloads".to_owned(),
            };
            let client = client.clone();
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(client, namespace, &resource),
                None => Api::all_with(client, &resource),
            };
            match api.list(&ListParams::default()).await {
                Ok(workloads) => {
                    let workloads = workloads.items.iter().map(Workload::read);
                    return Ok(Self::Installed(workloads.collect()));
                }
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(tenant::refused(error, "list the workloads of Kueue")),
            }
        }
        Ok(Self::NotInstalled)
    }

    /// Returns the workload of a job or pod.
    pub(crate) fn workload_of(&self, uid: &str) -> Option<&Workload> {
        match self {
            Self::Installed(workloads) => workloads.iter().find(|workload| {
                let mut owners = workload.owners.iter();
                owners.any(|owner| owner == uid)
            }),
            Self::Unknown | Self::NotInstalled => None,
        }
    }

    /// Returns why a pod has the gate of Kueue.
    fn gates(&self, pod: &Pod) -> Option<String> {
        let workload = self.workload_of(pod.metadata.uid.as_deref().unwrap_or_default());
        match (self, workload) {
            (Self::Unknown, _) => None,
            (Self::NotInstalled, _) => Some(format!(
                "Kueue, which removes gate {ADMISSION_GATE}, is not installed"
            )),
            (Self::Installed(_), None) => Some(
                "Kueue has no workload of the pod so far: check that it runs, and that it manages the pods of the namespace"
                    .to_owned(),
            ),
            (Self::Installed(_), Some(workload)) => {
                let name = &workload.name;
                Some(match workload.admission() {
                    Admission::Inactive => {
                        format!("workload {name} of Kueue is not active; set its spec.active")
                    }
                    Admission::Waiting(reason) => format!("Kueue, workload {name}: {reason}"),
                    Admission::Undecided => {
                        format!("Kueue has not decided on workload {name}, or removes the gate")
                    }
                })
            }
        }
    }
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
        let owners = object.metadata.owner_references.iter().flatten();
        Self {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            owners: owners.map(|owner| owner.uid.clone()).collect(),
            is_active: object.data["spec"]["active"] != false,
            conditions: conditions.collect(),
        }
    }

    /// Returns why the workload is not admitted.
    pub(crate) fn admission(&self) -> Admission {
        if !self.is_active {
            return Admission::Inactive;
        }
        // In the order in which a workload passes them.
        let open = ["QuotaReserved", "Admitted"].into_iter().find_map(|kind| {
            let mut found = self.conditions.iter();
            let (_, status, message) = found.find(|(of, ..)| of == kind)?;
            (status != "True").then(|| format!("{kind} is {status}: {message}"))
        });
        open.map_or(Admission::Undecided, Admission::Waiting)
    }
}

/// Returns whether a pod waits for its admission.
pub(crate) fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.iter().flat_map(|spec| &spec.scheduling_gates);
    gates.flatten().any(|gate| gate.name == ADMISSION_GATE)
}

/// Adds to the explanation of a pod why Kueue has not admitted it. Where that cannot be read, a note says so.
pub(crate) async fn complete(client: &Client, namespace: &str, name: &str, report: &mut Report) {
    if report.state != State::Gated {
        return;
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let Ok(Some(pod)) = pods.get_opt(name).await else {
        return;
    };
    if !is_gated(&pod) {
        return;
    }
    match Kueue::fetch(client, Some(namespace)).await {
        Ok(kueue) => {
            if let Some(reason) = kueue.gates(&pod) {
                report.summary.push_str("; ");
                report.summary.push_str(&reason);
            }
        }
        Err(error) => eprintln!("note: {error}; the answer lacks Kueue's reason"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn workload(
        namespace: &str,
        name: &str,
        owner: &str,
        active: bool,
        conditions: &Value,
    ) -> Workload {
        let object = json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
            "metadata": {"namespace": namespace, "name": name, "ownerReferences": [
                {"apiVersion": "v1", "kind": "Any", "name": "any", "uid": owner},
            ]},
            "spec": {"active": active}, "status": {"conditions": conditions},
        });
        Workload::read(&serde_json::from_value(object).expect("a workload"))
    }

    #[test]
    fn names_first_condition_that_is_open() {
        let quota = "couldn't assign flavors to pod set main: insufficient unused quota\u{1b} for nvidia.com/gpu";
        let waiting = json!([{"type": "QuotaReserved", "status": "False", "message": quota}]);
        let checked = json!([
            {"type": "Admitted", "status": "False", "message": "The workload has not all checks ready"},
            {"type": "QuotaReserved", "status": "True", "message": "Quota reserved"},
        ]);
        let admission = |active: bool, conditions: &Value| {
            workload("a", "w", "uid", active, conditions).admission()
        };
        assert_eq!(
            admission(true, &waiting),
            Admission::Waiting(
                "QuotaReserved is False: couldn't assign flavors to pod set main: insufficient unused quota  for nvidia.com/gpu"
                    .to_owned()
            )
        );
        assert_eq!(
            admission(true, &checked),
            Admission::Waiting(
                "Admitted is False: The workload has not all checks ready".to_owned()
            )
        );
        assert_eq!(admission(false, &waiting), Admission::Inactive);
        assert_eq!(admission(true, &json!([])), Admission::Undecided);
    }

    #[test]
    fn finds_workload_of_gated_pod() {
        let pod = |gate: &str| {
            let pod = json!({
                "metadata": {"name": "p", "uid": "2"},
                "spec": {"containers": [], "schedulingGates": [{"name": gate}]},
            });
            serde_json::from_value::<Pod>(pod).expect("a pod")
        };
        assert!(is_gated(&pod(ADMISSION_GATE)));
        assert!(!is_gated(&pod("gpu.drava.dev/allocation")));
        let waiting = json!([{"type": "QuotaReserved", "status": "False", "message": "no quota"}]);
        let kueue = Kueue::Installed(vec![
            workload("a", "other", "1", true, &json!([])),
            workload("a", "pod-p", "2", true, &waiting),
        ]);
        let reason = |kueue: &Kueue| kueue.gates(&pod(ADMISSION_GATE));
        assert_eq!(
            reason(&kueue).as_deref(),
            Some("Kueue, workload pod-p: QuotaReserved is False: no quota")
        );
        assert!(
            reason(&Kueue::Installed(Vec::new())).is_some_and(|text| text.contains("no workload"))
        );
        assert!(reason(&Kueue::NotInstalled).is_some_and(|text| text.contains("not installed")));
        assert_eq!(reason(&Kueue::Unknown), None);
    }
}
