//! What a user sees who may read one namespace only: their own objects, and the explanation of the controller.
//!
//! Each answer comes with one line on standard error that says what is left out.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::anyhow;
use drava_allocator::reason::bytes;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::Quantity;
use drava_api::explanation::{
    PlacementExplanation, PlacementExplanationSpec, PlacementExplanationStatus,
};
use drava_api::names::{self, capacity};
use drava_explanation::explain::claim::base_name;
use drava_explanation::explain::{self, ExplainError, Report};
use drava_explanation::growth;
use drava_explanation::snapshot::{self, ListError};
use drava_explanation::table;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::decision;
use crate::natural;
use crate::top::{Access, Mode, SuspendedAmounts};

/// Longest wait for the controller's explanation: it reads the requests every two seconds.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(250);
/// Time after which the controller deletes an explanation that this command could not delete, seconds.
const TTL_SECONDS: u32 = 60;

/// Where an explanation comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The objects of the namespace.
    Namespace,
    /// The controller, on request.
    Controller,
    /// The condition that the controller has written in the pod.
    Condition(Silence),
}

/// Why the controller does not explain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The user may not ask.
    Forbidden,
    /// The definition of the requests is not installed.
    NotServed,
    /// No controller answers in time.
    NoAnswer,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let silence = match self {
            Self::Namespace => return f.write_str("the answer comes from the namespace"),
            Self::Controller => return f.write_str("the answer comes from the controller"),
            Self::Condition(silence) => silence,
        };
        f.write_str("the answer comes from the condition of the pod, because ")?;
        match silence {
            Silence::Forbidden => f.write_str("you may not create placementexplanations"),
            Silence::NotServed => {
                f.write_str("the API server does not serve placementexplanations")
            }
            Silence::NoAnswer => write!(
                f,
                "no controller answered within {} seconds",
                PATIENCE.as_secs()
            ),
        }
    }
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
pub(crate) fn note(plural: &str, instead: impl fmt::Display) {
    eprintln!("note: you may not list {plural} in all namespaces; {instead}");
}

/// Says on standard error what an answer does not consider, if anything.
pub(crate) fn note_left_out(left_out: &[String]) {
    if !left_out.is_empty() {
        eprintln!(
            "note: you may not read {}; the answer does not consider them",
            left_out.join(", ")
        );
    }
}

/// Refuses options for a decision of this command where the controller decides.
///
/// # Errors
/// When an option is given.
pub(crate) fn refuse_options(
    plural: &str,
    decision: &decision::DecisionOptions,
) -> anyhow::Result<()> {
    let given = decision.given();
    anyhow::ensure!(
        given.is_empty(),
        "you may not list {plural} in all namespaces, so the controller decides with its own settings; leave out {}",
        given.join(" and ")
    );
    Ok(())
}

/// Explains a pod: by the controller on request, or else by the pod's condition.
///
/// # Errors
/// When the pod does not exist or cannot be read, or the request fails.
pub(crate) async fn explain_pod(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<(Report, Source)> {
    let missing = || ExplainError::PodMissing {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    let pod = get(client, namespace, name).await?;
    match explained_by_controller(client, namespace, name).await? {
        Ok(status) => {
            let report = Report::of_status(&pod, status).ok_or_else(missing)?;
            Ok((report, Source::Controller))
        }
        Err(silence) => Ok((Report::of_condition(&pod), Source::Condition(silence))),
    }
}

/// Asks the controller for an explanation.
///
/// # Errors
/// When the request fails for another reason than a silent controller.
async fn explained_by_controller(
    client: &Client,
    namespace: &str,
    pod: &str,
) -> anyhow::Result<Result<PlacementExplanationStatus, Silence>> {
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
    let name = match requests.create(&PostParams::default(), &request).await {
        Ok(request) => request.name_any(),
        Err(error) => return silence(error).map(Err),
    };
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
    match found {
        Ok(status) => Ok(status.ok_or(Silence::NoAnswer)),
        Err(error) => silence(error).map(Err),
    }
}

/// Returns why the controller does not explain.
///
/// # Errors
/// Every other failure.
fn silence(error: kube::Error) -> anyhow::Result<Silence> {
    match &error {
        kube::Error::Api(status) if status.code == 403 => Ok(Silence::Forbidden),
        kube::Error::Api(status) if status.code == 404 => Ok(Silence::NotServed),
        _ => Err(anyhow::Error::new(error).context("cannot ask the controller for an explanation")),
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
) -> anyhow::Result<(explain::claim::Report, Source)> {
    let claims = list::<ResourceClaim>(client, namespace).await?;
    let pods = list::<Pod>(client, namespace).await?;
    let users = pods
        .iter()
        .filter(|pod| drava_allocator::pod::claims(pod).any(|(_, object)| object == Some(name)));
    let mut users: Vec<String> = users.map(ResourceExt::name_any).collect();
    let claim = claims.iter().find(|claim| claim.name_any() == name);
    let companion = claim.filter(|claim| growth::base_uid(claim).is_some());
    let owner = companion.and_then(growth::owner);
    let mut owned = pods
        .iter()
        .filter(|pod| pod.uid().as_ref() == owner.map(|owner| &owner.uid));
    users.extend(owned.next().map(ResourceExt::name_any));
    let mut snapshot = snapshot::Snapshot::new(&[], &[], &[], &[], claims, Vec::new());
    let settings = decision::defaults();
    let report = explain::claim::explain(&mut snapshot, namespace, name, &settings)?;
    let mut source = Source::Namespace;
    let mut reports = Vec::new();
    for pod in users.iter().filter(|_| !report.is_allocated()) {
        let (report, of_pod) = explain_pod(client, namespace, pod).await?;
        reports.push(report);
        // The controller answers for all pods or for none.
        source = of_pod;
    }
    Ok((report.with_pods(reports), source))
}

/// A GPU of which claims of a namespace have a part: what [`Gpu`](crate::top::Gpu) has, as far as the claims show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OwnGpu {
    node: String,
    gpu: String,
    mode: Mode,
    memory: OwnAmount,
    cores: OwnAmount,
    pub(crate) claims: Vec<OwnClaim>,
}

/// Amount of a GPU that the claims of a namespace have; absent for devices that they have alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct OwnAmount {
    #[serde(skip_serializing_if = "Option::is_none")]
    allocated: Option<u64>,
}

/// A claim of a namespace with a device of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OwnClaim {
    /// Namespace and name.
    name: String,
    pub(crate) namespace: String,
    device: String,
    pub(crate) access: Access,
    /// Name of the claim to whose share it adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    adds_to: Option<String>,
    /// Bytes; absent for a device that the claim has alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory: Option<u64>,
    /// Percent of GPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<u64>,
    /// What it gets back when it is resumed, if it is suspended.
    #[serde(skip_serializing_if = "Option::is_none")]
    suspended: Option<SuspendedAmounts>,
    pub(crate) pods: Vec<String>,
}

impl OwnClaim {
    /// Names the pods, and whether the share is suspended.
    fn pods_text(&self) -> String {
        let suspended = match self.access {
            Access::Suspended => Some("(suspended)".to_owned()),
            Access::Whole | Access::Share | Access::Partition => None,
        };
        let pods = Some(self.pods.join(", ")).filter(|pods| !pods.is_empty());
        let adds = self.adds_to.iter().map(|base| format!("(adds to {base})"));
        let parts: Vec<String> = pods.into_iter().chain(adds).chain(suspended).collect();
        parts.join(" ")
    }
}

/// Returns the GPUs of the claims of the namespace.
///
/// # Errors
/// When the claims cannot be listed.
pub(crate) async fn gpus(client: &Client, namespace: &str) -> anyhow::Result<Vec<OwnGpu>> {
    Ok(gpus_of(&list::<ResourceClaim>(client, namespace).await?))
}

/// Returns the GPUs of claims by node and number.
pub(crate) fn gpus_of(claims: &[ResourceClaim]) -> Vec<OwnGpu> {
    let mut gpus: BTreeMap<(String, String), Vec<OwnClaim>> = BTreeMap::new();
    for claim in claims {
        for (pool, of_claim) in devices_of(claim, claims) {
            let node = names::node_of_pool(&pool).unwrap_or(&pool).to_owned();
            let number = names::gpu_number(&of_claim.device);
            let gpu = number.map_or_else(|| of_claim.device.clone(), names::gpu_device);
            gpus.entry((node, gpu)).or_default().push(of_claim);
        }
    }
    let gpus = gpus.into_iter().map(|((node, gpu), claims)| {
        let sum = |amount: fn(&OwnClaim) -> Option<u64>| OwnAmount {
            allocated: claims.iter().map(amount).sum(),
        };
        OwnGpu {
            node,
            gpu,
            mode: match claims.first().map(|claim| claim.access) {
                None => Mode::Free,
                Some(Access::Whole) => Mode::Whole,
                Some(Access::Share | Access::Suspended) => Mode::Shared,
                Some(Access::Partition) => Mode::Partitioned,
            },
            memory: sum(|claim| claim.memory),
            cores: sum(|claim| claim.cores),
            claims,
        }
    });
    let mut gpus: Vec<OwnGpu> = gpus.collect();
    gpus.sort_by(|one, other| {
        let by_node = natural::compare(&one.node, &other.node);
        by_node.then_with(|| natural::compare(&one.gpu, &other.gpu))
    });
    gpus
}

/// Returns the devices of a claim, each with its pool.
fn devices_of(claim: &ResourceClaim, claims: &[ResourceClaim]) -> Vec<(String, OwnClaim)> {
    let base = base_name(claim, claims);
    let consumers = claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    let pods: Vec<String> = consumers.map(|consumer| consumer.name.clone()).collect();
    let own = |device: AllocatedDevice| {
        let amount = |name: &str| match &device.access {
            DeviceAccess::Share(amounts, _) => amounts.get(name)?.to_u64_rounded_up(),
            DeviceAccess::Suspended(_) => Some(0),
            DeviceAccess::Exclusive | DeviceAccess::Admin(_) => None,
        };
        let of_claim = OwnClaim {
            name: device.claim.to_string(),
            namespace: device.claim.namespace.clone(),
            adds_to: base.clone(),
            memory: amount(capacity::MEMORY),
            cores: amount(capacity::CORES),
            // The amounts of a share are in its claim.
            suspended: SuspendedAmounts::of(&device.access, |_| Quantity::ZERO),
            access: match &device.access {
                DeviceAccess::Share(..) => Access::Share,
                DeviceAccess::Suspended(_) => Access::Suspended,
                _ if names::gpu_of_mig_device(&device.device).is_some() => Access::Partition,
                DeviceAccess::Exclusive | DeviceAccess::Admin(_) => Access::Whole,
            },
            device: device.device,
            pods: pods.clone(),
        };
        (device.pool, of_claim)
    };
    AllocatedDevice::of_claim(claim)
        .into_iter()
        // Administrators watch a GPU that others have.
        .filter(|device| !matches!(device.access, DeviceAccess::Admin(_)))
        .map(own)
        .collect()
}

/// Returns the answer for a namespace without allocated claims.
pub(crate) fn without_claims(namespace: &str) -> String {
    format!("no claim of namespace {namespace} is allocated\n")
}

/// Formats the GPUs of the claims of a namespace as a table, a line for each claim.
pub(crate) fn gpus_text(namespace: &str, gpus: &[OwnGpu]) -> String {
    if gpus.is_empty() {
        return without_claims(namespace);
    }
    let rows = gpus.iter().flat_map(|gpu| {
        gpu.claims.iter().map(|claim| {
            let all = || "all".to_owned();
            let name = claim.name.split_once('/');
            vec![
                name.map_or(claim.name.as_str(), |(_, name)| name)
                    .to_owned(),
                gpu.node.clone(),
                claim.device.clone(),
                claim
                    .memory
                    .map_or_else(all, |memory| bytes(drava_api::Quantity::bytes(memory))),
                claim.cores.map_or_else(all, |cores| format!("{cores}%")),
                claim.pods_text(),
            ]
        })
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

/// Reads an object of a namespace.
///
/// # Errors
/// In one line, also when it does not exist.
pub(crate) async fn get<K>(client: &Client, namespace: &str, name: &str) -> anyhow::Result<K>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let objects = Api::<K>::namespaced(client.clone(), namespace);
    let kind = K::kind(&()).to_lowercase();
    let action = format!("get {kind} {name} in namespace {namespace}");
    let found = objects.get_opt(name).await;
    let found = found.map_err(|error| refused(error, &action))?;
    found.ok_or_else(|| {
        anyhow!("cannot find {kind} {name} in namespace {namespace}; use -n for another namespace")
    })
}

/// Returns the error of a request, in one line, with what the API server says: it names the missing permission, or the policy
/// that refused an object.
pub(crate) fn refused(error: kube::Error, action: &str) -> anyhow::Error {
    match &error {
        kube::Error::Api(status) if status.code == 403 => {
            anyhow!("you may not {action}: {}", status.message)
        }
        kube::Error::Api(status) => anyhow!("cannot {action}: {}", status.message),
        _ => anyhow::Error::new(error).context(format!("cannot {action}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn lists_devices_of_own_claims() {
        let snapshot = drava_explanation::fixture::snapshot();
        let gpus = gpus_of(&snapshot.claims);
        assert_eq!(
            gpus_text("default", &gpus),
            "\
CLAIM   NODE   DEVICE       MEMORY   CORES   PODS
a       n1     gpu-0-vgpu   8 GiB    30%     a-pod
b       n1     gpu-0-vgpu   16 GiB   0%
w       n1     gpu-1        all      all     w-pod
"
        );
        assert_eq!(
            gpus_text("x", &[]),
            "no claim of namespace x is allocated\n"
        );
    }

    #[test]
    fn administrative_access_is_no_device_of_a_tenant() {
        let mut claims = drava_explanation::fixture::snapshot().claims;
        let whole = claims
            .iter_mut()
            .find(|claim| claim.metadata.name.as_deref() == Some("w"));
        let status = whole.and_then(|claim| claim.status.as_mut());
        let allocation = status.and_then(|status| status.allocation.as_mut());
        let devices = allocation.and_then(|allocation| allocation.devices.as_mut());
        let results = devices.and_then(|devices| devices.results.as_mut());
        for result in results.expect("a device") {
            result.admin_access = Some(true);
        }
        let text = gpus_text("default", &gpus_of(&claims));
        assert!(!text.contains("all"), "{text}");
    }

    #[test]
    fn names_suspended_shares() {
        let mut snapshot = drava_explanation::fixture::snapshot();
        for claim in &mut snapshot.claims {
            drava_explanation::fixture::suspend(claim);
        }
        let text = gpus_text("default", &gpus_of(&snapshot.claims));
        let lines: Vec<&str> = text.lines().skip(1).collect();
        let endings = [
            "0 B      0%      a-pod (suspended)",
            "0 B      0%      (suspended)",
            "w-pod",
        ];
        assert_eq!(lines.len(), endings.len(), "{text}");
        for (line, ending) in lines.iter().zip(endings) {
            assert!(line.ends_with(ending), "{text}");
        }
    }

    /// Removes what a tenant does not see from what an administrator sees.
    fn without_unknown(seen: &Value, all: &Value) -> Value {
        match (seen, all) {
            (Value::Object(seen), Value::Object(all)) => {
                let fields = seen.iter().map(|(name, value)| {
                    let of_all = all.get(name).expect("a field of the schema");
                    (name.clone(), without_unknown(value, of_all))
                });
                Value::Object(fields.collect())
            }
            (Value::Array(seen), Value::Array(all)) => {
                assert_eq!(seen.len(), all.len(), "{seen:?}");
                let items = seen.iter().zip(all);
                items
                    .map(|(seen, all)| without_unknown(seen, all))
                    .collect()
            }
            _ => all.clone(),
        }
    }

    #[test]
    fn tenant_sees_a_part_of_what_an_administrator_sees() {
        let mut claims = drava_explanation::fixture::snapshot().claims;
        let base = claims[0].metadata.uid.clone().expect("a UID");
        let labels = [(names::COMPANION_LABEL.to_owned(), base)];
        claims[1].metadata.labels = Some(labels.into());
        drava_explanation::fixture::suspend(&mut claims[0]);
        let snapshot = drava_explanation::fixture::snapshot_with(claims);
        let seen = serde_json::to_value(gpus_of(&snapshot.claims)).expect("JSON");
        let all = serde_json::to_value(crate::top::gpus(&snapshot)).expect("JSON");
        assert_eq!(seen, without_unknown(&seen, &all));
        assert_eq!(seen[0]["memory"]["allocated"], 16_u64 << 30);
    }

    #[test]
    fn names_silent_controller() {
        assert_eq!(
            Source::Condition(Silence::NoAnswer).to_string(),
            "the answer comes from the condition of the pod, because no controller answered within 10 seconds"
        );
    }
}
