//! What a user sees who may read one namespace only: their own objects, and the explanation of the controller.
//!
//! Each answer comes with one line on standard error that says what is left out.

use std::time::Duration;

use anyhow::{anyhow, bail};
use drava_allocator::reason::bytes;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::explanation::{
    PlacementExplanation, PlacementExplanationSpec, PlacementExplanationStatus,
};
use drava_api::names::{self, ALLOCATED_CONDITION, capacity};
use drava_explanation::explain::ExplainError;
use drava_explanation::snapshot::ListError;
use drava_explanation::{explain, snapshot, table};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

/// Longest wait for the controller's explanation: it reads the requests every two seconds.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(250);
/// Time after which the controller deletes an explanation that this command could not delete, seconds.
const TTL_SECONDS: u32 = 60;

/// Explanation of a pod without the cluster's state.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Explained {
    pod: String,
    #[serde(flatten)]
    status: PlacementExplanationStatus,
}

/// Returns why the user may not list objects of all namespaces; every other failure is the error of the command.
///
/// # Errors
/// Every other failure.
pub(crate) fn limit(error: ListError) -> Result<String, ListError> {
    match error {
        ListError::Forbidden(plural) => Ok(plural),
        error => Err(error),
    }
}

/// Says on standard error what an answer leaves out.
pub(crate) fn note(plural: &str, instead: &str) {
    eprintln!("note: you may not list {plural} in all namespaces; {instead}");
}

/// Explains a pod: by the controller on request, or else by the pod's condition.
///
/// # Errors
/// When the pod does not exist or cannot be read.
pub(crate) async fn explain_pod(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Explained> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod = match pods.get_opt(name).await {
        Ok(Some(pod)) => pod,
        Ok(None) => bail!(ExplainError::PodMissing {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }),
        Err(error) => {
            return Err(refused(
                error,
                &format!("get pods in namespace {namespace}"),
            ));
        }
    };
    let status = match explained_by_controller(client, namespace, name).await {
        Ok(Some(status)) => status,
        // Not permitted, not installed, or no controller answers.
        Ok(None) | Err(_) => of_condition(&pod),
    };
    Ok(Explained {
        pod: format!("{namespace}/{name}"),
        status,
    })
}

/// Asks the controller for an explanation; none if it does not answer in time.
async fn explained_by_controller(
    client: &Client,
    namespace: &str,
    pod: &str,
) -> kube::Result<Option<PlacementExplanationStatus>> {
    let requests: Api<PlacementExplanation> = Api::namespaced(client.clone(), namespace);
    let mut request = PlacementExplanation::new(
        "",
        PlacementExplanationSpec {
            pod_name: pod.to_owned(),
            ttl_seconds: Some(TTL_SECONDS),
        },
    );
    request.metadata.name = None;
    request.metadata.generate_name = Some("kubectl-drava-".to_owned());
    let name = requests
        .create(&PostParams::default(), &request)
        .await?
        .name_any();
    let deadline = Instant::now() + PATIENCE;
    let mut found = Ok(None);
    while Instant::now() < deadline {
        found = requests.get(&name).await.map(|request| request.status);
        if !matches!(found, Ok(None)) {
            break;
        }
        tokio::time::sleep(POLL).await;
    }
    // The controller deletes it otherwise.
    let _ = requests.delete(&name, &DeleteParams::default()).await;
    found
}

/// Returns what the condition of a pod says.
fn of_condition(pod: &Pod) -> PlacementExplanationStatus {
    let status = pod.status.as_ref();
    let mut conditions = status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let own = conditions.find(|condition| condition.type_ == ALLOCATED_CONDITION);
    let node = drava_allocator::pod::node(pod);
    let (state, summary) = match (own, node) {
        (_, Some(node)) => ("Placed", format!("bound to node {node}")),
        (Some(condition), None) if condition.status == "True" => (
            "Allocated",
            "allocated; kube-scheduler has not bound the pod, check the pod's events".to_owned(),
        ),
        (Some(condition), None) => {
            let message = condition.message.clone().unwrap_or_default();
            ("Waiting", message.replace(char::is_control, " "))
        }
        (None, None) => (
            "Unknown",
            format!(
                "the pod has no condition {ALLOCATED_CONDITION}: it requests no devices of {}, or the controller has not \
                 decided",
                names::DRIVER
            ),
        ),
    };
    PlacementExplanationStatus {
        state: state.to_owned(),
        summary,
        ..PlacementExplanationStatus::default()
    }
}

impl Explained {
    /// Formats the explanation as that of `explain` with all permissions.
    pub(crate) fn text(&self) -> String {
        let status = &self.status;
        let mut text = format!("pod {}: {}\n", self.pod, status.summary);
        if !status.blockers.is_empty() {
            let rows = status.blockers.iter().map(|blocker| {
                vec![
                    blocker.node.clone(),
                    blocker.device.clone().unwrap_or_else(|| "–".to_owned()),
                    blocker.reason.clone(),
                    blocker.detail.clone(),
                ]
            });
            text.push('\n');
            text.push_str(&table(
                &["NODE", "DEVICE", "REASON", "DETAIL"],
                rows.collect(),
            ));
        }
        if !status.changes.is_empty() {
            text.push_str(&format!(
                "\npod {} fits after one of these changes:\n",
                self.pod
            ));
            for change in &status.changes {
                text.push_str(&format!("- {change}\n"));
            }
        }
        text
    }
}

/// Explains a claim of the namespace: its devices, or its pods.
///
/// # Errors
/// When the claim does not exist or cannot be read.
pub(crate) async fn explain_claim(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<String> {
    let claims = list::<ResourceClaim>(client, namespace).await?;
    let pods = list::<Pod>(client, namespace).await?;
    let users = pods
        .iter()
        .filter(|pod| drava_allocator::pod::claims(pod).any(|(_, object)| object == Some(name)));
    let users: Vec<String> = users.map(ResourceExt::name_any).collect();
    let mut snapshot = snapshot::Snapshot::new(&[], &[], &[], &[], claims, Vec::new());
    let settings = crate::decision::defaults();
    let report = explain::claim::explain(&mut snapshot, namespace, name, &settings)?;
    if report.is_allocated() {
        return Ok(report.text());
    }
    let mut text = format!("claim {namespace}/{name}: not allocated\n");
    for pod in users {
        text.push_str(&explain_pod(client, namespace, &pod).await?.text());
    }
    Ok(text)
}

/// The devices of the claims of a namespace.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OwnDevice {
    claim: String,
    pool: String,
    device: String,
    /// Bytes; absent for a device that the claim has alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<u64>,
    /// Percent of GPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<u64>,
    pods: Vec<String>,
}

/// Returns the devices of the claims of the namespace.
///
/// # Errors
/// When the claims cannot be listed.
pub(crate) async fn devices(client: &Client, namespace: &str) -> anyhow::Result<Vec<OwnDevice>> {
    let claims = list::<ResourceClaim>(client, namespace).await?;
    Ok(claims.iter().flat_map(devices_of).collect())
}

fn devices_of(claim: &ResourceClaim) -> Vec<OwnDevice> {
    let consumers = claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    let pods: Vec<String> = consumers.map(|consumer| consumer.name.clone()).collect();
    let own = |device: AllocatedDevice| {
        let amount = |name: &str| match &device.access {
            DeviceAccess::Share(amounts) => amounts.get(name)?.to_u64_rounded_up(),
            DeviceAccess::Exclusive | DeviceAccess::Admin(_) => None,
        };
        OwnDevice {
            claim: device.claim.name.clone(),
            memory: amount(capacity::MEMORY),
            cores: amount(capacity::CORES),
            pool: device.pool,
            device: device.device,
            pods: pods.clone(),
        }
    };
    AllocatedDevice::of_claim(claim)
        .into_iter()
        .map(own)
        .collect()
}

/// Formats the devices of a namespace as a table.
pub(crate) fn devices_text(namespace: &str, devices: &[OwnDevice]) -> String {
    if devices.is_empty() {
        return format!("no claim of namespace {namespace} is allocated\n");
    }
    let rows = devices.iter().map(|device| {
        let all = || "all".to_owned();
        vec![
            device.claim.clone(),
            device.pool.trim_end_matches("/gpus").to_owned(),
            device.device.clone(),
            device
                .memory
                .map_or_else(all, |memory| bytes(drava_api::Quantity::bytes(memory))),
            device.cores.map_or_else(all, |cores| format!("{cores}%")),
            device.pods.join(", "),
        ]
    });
    let header = ["CLAIM", "NODE", "DEVICE", "MEMORY", "CORES", "PODS"];
    table(&header, rows.collect())
}

/// Lists the objects of a namespace.
///
/// # Errors
/// In one line.
pub(crate) async fn list<K>(client: &Client, namespace: &str) -> anyhow::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let objects = Api::<K>::namespaced(client.clone(), namespace);
    let listed = objects.list(&ListParams::default()).await;
    let plural = K::plural(&());
    let action = format!("list {plural} in namespace {namespace}");
    Ok(listed.map_err(|error| refused(error, &action))?.items)
}

/// Returns the error of a request; in one line if the user may not do this.
fn refused(error: kube::Error, action: &str) -> anyhow::Error {
    match &error {
        kube::Error::Api(status) if status.code == 403 => anyhow!("you may not {action}"),
        _ => anyhow::Error::new(error).context(format!("cannot {action}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(conditions: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "team-a"},
            "status": {"conditions": conditions},
        }))
        .expect("a pod")
    }

    #[test]
    fn explains_by_condition() {
        let condition = |status: &str, message: &str| json!([{"type": ALLOCATED_CONDITION, "status": status, "message": message}]);
        for (conditions, state, summary) in [
            (
                condition("False", "0/1 nodes:\u{1b} full"),
                "Waiting",
                "0/1 nodes:  full",
            ),
            (
                condition("True", ""),
                "Allocated",
                "allocated; kube-scheduler has not bound the pod",
            ),
            (
                json!([]),
                "Unknown",
                "the pod has no condition gpu.drava.dev/Allocated",
            ),
        ] {
            let status = of_condition(&pod(&conditions));
            assert_eq!(status.state, state);
            assert!(status.summary.starts_with(summary), "{}", status.summary);
        }
        let explained = Explained {
            pod: "team-a/p".to_owned(),
            status: PlacementExplanationStatus {
                changes: vec!["request at most 1Mi".to_owned()],
                ..of_condition(&pod(&condition("False", "full")))
            },
        };
        assert_eq!(
            explained.text(),
            "pod team-a/p: full\n\npod team-a/p fits after one of these changes:\n- request at most 1Mi\n"
        );
    }

    #[test]
    fn lists_devices_of_own_claims() {
        let snapshot = drava_explanation::fixture::snapshot();
        let devices: Vec<_> = snapshot.claims.iter().flat_map(devices_of).collect();
        assert_eq!(
            devices_text("default", &devices),
            "\
CLAIM   NODE   DEVICE       MEMORY   CORES   PODS
a       n1     gpu-0-vgpu   8 GiB    30%     a-pod
b       n1     gpu-0-vgpu   16 GiB   0%
w       n1     gpu-1        all      all     w-pod
"
        );
        assert_eq!(
            devices_text("x", &[]),
            "no claim of namespace x is allocated\n"
        );
    }
}
