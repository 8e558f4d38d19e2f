//! The Helm hooks of `helm uninstall`.
//!
//! Before the release is removed, [`check`] refuses while claims have devices: without the node driver kubelet cannot
//! unprepare them, and their pods would hang in Terminating. After it, [`clean`] removes what Helm does not know.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use drava_allocator::usage::AllocatedDevice;
use drava_api::leader::{GpuControllerLeader, LEADER_NAME};
use drava_api::listed::Listed;
use drava_api::names;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::pods::pod;
use crate::write::lease::LEASE_NAME;
use crate::write::writes::FIELD_MANAGER;

mod nodes;

/// Number of claims that the refusal names.
const MAX_NAMES: usize = 10;
/// Time that the pods of the node driver have for their end.
const DRIVER_END: Duration = Duration::from_secs(60);

/// Why the release cannot be removed, or its objects not be cleaned up.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// Claims have devices.
    #[error(
        "{count} claims have GPUs of drava, and their pods could not end without the node driver: {names}. Delete the pods, \
         or move them with `kubectl drava drain <node>`, then run `helm uninstall` again. `helm uninstall --no-hooks` removes \
         drava in spite of them"
    )]
    InUse {
        /// Number of claims.
        count: usize,
        /// Some of them, with their pods.
        names: String,
    },
    /// Pods of the node driver do not end.
    #[error(
        "pods of the node driver still exist: {0}; delete them, then run `helm uninstall` again"
    )]
    DriverRuns(String),
    /// A request failed.
    #[error("cannot {action}")]
    Request {
        /// What was attempted.
        action: &'static str,
        /// Cause.
        #[source]
        source: kube::Error,
    },
}

fn failed(action: &'static str) -> impl FnOnce(kube::Error) -> UninstallError {
    move |source| UninstallError::Request { action, source }
}

/// Checks that no claim has devices of the driver.
///
/// # Errors
/// When claims have devices, with their names, or the claims cannot be listed.
pub async fn check(client: &Client) -> Result<(), UninstallError> {
    let claims = Api::<Listed<ResourceClaim>>::all(client.clone());
    let listed = claims.list(&ListParams::default()).await;
    let (claims, unreadable) = Listed::split(listed.map_err(failed("list ResourceClaims"))?.items);
    let in_use = claims.iter().filter_map(use_of);
    let unreadable = unreadable
        .iter()
        .filter(|claim| !AllocatedDevice::of_unreadable(claim).is_empty())
        .map(ToString::to_string);
    let in_use: Vec<String> = in_use.chain(unreadable).collect();
    if in_use.is_empty() {
        return Ok(());
    }
    let mut names = in_use
        .iter()
        .take(MAX_NAMES)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if in_use.len() > MAX_NAMES {
        names.push_str(", …");
    }
    Err(UninstallError::InUse {
        count: in_use.len(),
        names,
    })
}

/// Returns the name of a claim with devices of the driver, and its pods.
fn use_of(claim: &ResourceClaim) -> Option<String> {
    if AllocatedDevice::of_claim(claim).is_empty() {
        return None;
    }
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    let consumers = claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    let pods: Vec<&str> = consumers.map(|consumer| consumer.name.as_str()).collect();
    Some(if pods.is_empty() {
        format!("{namespace}/{name}")
    } else {
        format!("{namespace}/{name} (pods {})", pods.join(" "))
    })
}

/// Removes the allocation gates of pods, the files of the driver on the nodes by a pod from `node_pod`, the slices of the
/// driver, the rules of `kubectl drava cordon`, the Lease and the name of the leader.
///
/// # Errors
/// When a request fails. What was removed before stays removed; the next call removes the rest.
pub async fn clean(
    client: &Client,
    namespace: &str,
    node_pod: Option<&Pod>,
) -> Result<(), UninstallError> {
    wait_for_end_of_driver(client, namespace).await?;
    remove_gates(client).await?;
    let slices = Api::<Listed<ResourceSlice>>::all(client.clone());
    let ours = ListParams::default().fields(&format!("spec.driver={}", names::DRIVER));
    if let Some(pod) = node_pod {
        let listed = slices.list(&ours).await;
        let (published, _) = Listed::split(listed.map_err(failed("list ResourceSlices"))?.items);
        let left = nodes::clean(client, namespace, pod, nodes::nodes(&published)).await?;
        if !left.is_empty() {
            tracing::warn!(nodes = ?left, "the files of the node driver stay: driver.stateDir of the chart and /run/drava");
        }
    }
    delete_all(&slices, &ours)
        .await
        .map_err(failed("delete ResourceSlices"))?;
    remove_taint_rules(client).await?;
    let leases = Api::<Lease>::namespaced(client.clone(), namespace);
    delete(&leases, LEASE_NAME)
        .await
        .map_err(failed("delete the Lease"))?;
    delete(
        &Api::<GpuControllerLeader>::all(client.clone()),
        LEADER_NAME,
    )
    .await
    .map_err(failed("delete the GpuControllerLeader"))?;
    tracing::info!("removed gates, ResourceSlices, the Lease and the GpuControllerLeader");
    Ok(())
}

/// Waits until the pods of the node driver have ended: they would publish the slices again.
async fn wait_for_end_of_driver(client: &Client, namespace: &str) -> Result<(), UninstallError> {
    let pods = Api::<Listed<Pod>>::namespaced(client.clone(), namespace);
    let drivers = ListParams::default()
        .labels("app.kubernetes.io/name=drava,app.kubernetes.io/component=driver");
    let deadline = tokio::time::Instant::now() + DRIVER_END;
    loop {
        let listed = pods
            .list(&drivers)
            .await
            .map_err(failed("list pods"))?
            .items;
        if listed.is_empty() {
            return Ok(());
        }
        if tokio::time::Instant::now() >= deadline {
            let names: Vec<String> = listed.iter().map(ResourceExt::name_any).collect();
            return Err(UninstallError::DriverRuns(names.join(", ")));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Removes the gate of all pods: no controller does it after the uninstallation.
async fn remove_gates(client: &Client) -> Result<(), UninstallError> {
    let pending = ListParams::default().fields("status.phase=Pending");
    let listed = Api::<Listed<Pod>>::all(client.clone()).list(&pending).await;
    let (pods, _) = Listed::split(listed.map_err(failed("list pods"))?.items);
    let gates: BTreeSet<(String, String)> = pods
        .iter()
        .filter(|pod| pod::has_allocation_gate(pod))
        .map(|pod| (pod.namespace().unwrap_or_default(), pod.name_any()))
        .collect();
    let gate = json!({"$patch": "delete", "name": names::ALLOCATION_GATE});
    let patch = Patch::Strategic(json!({"spec": {"schedulingGates": [gate]}}));
    for (namespace, name) in gates {
        let pods = Api::<Listed<Pod>>::namespaced(client.clone(), &namespace);
        match pods
            .patch(&name, &PatchParams::apply(FIELD_MANAGER), &patch)
            .await
        {
            Err(error) if !is_missing(&error) => {
                return Err(failed("remove the gate of a pod")(error));
            }
            _ => tracing::info!(namespace, pod = name, "removed the gate"),
        }
    }
    Ok(())
}

/// Removes the DeviceTaintRules of `kubectl drava cordon` and `drain`. A server without this API has none.
async fn remove_taint_rules(client: &Client) -> Result<(), UninstallError> {
    let rules = Api::<Listed<DeviceTaintRule>>::all(client.clone());
    let listed = match rules.list(&ListParams::default()).await {
        Err(error) if is_missing(&error) => return Ok(()),
        listed => Listed::split(listed.map_err(failed("list DeviceTaintRules"))?.items).0,
    };
    for rule in listed {
        if rule.spec.taint.key == names::CORDONED_TAINT {
            delete(&rules, &rule.name_any())
                .await
                .map_err(failed("delete a DeviceTaintRule"))?;
        }
    }
    Ok(())
}

async fn delete_all<K>(api: &Api<K>, params: &ListParams) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    for object in api.list(params).await? {
        delete(api, &object.name_any()).await?;
    }
    Ok(())
}

/// Deletes an object, if it exists.
async fn delete<K>(api: &Api<K>, name: &str) -> Result<(), kube::Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(error) if !is_missing(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{claim, object};

    #[test]
    fn names_claim_with_devices_and_its_pods() {
        let mut claim = claim("a", "8Gi");
        assert_eq!(use_of(&claim), None, "no allocation");
        let of_driver = |driver: &str| {
            json!({"allocation": {"devices": {"results": [{
                "driver": driver, "pool": "n1/gpus", "device": "gpu-0", "request": "gpu",
            }]}}, "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]})
        };
        claim.status = Some(object(of_driver("gpu.example.com")));
        assert_eq!(use_of(&claim), None, "of another driver");
        claim.status = Some(object(of_driver(names::DRIVER)));
        assert_eq!(use_of(&claim).as_deref(), Some("default/a (pods p)"));
    }

    #[test]
    fn refusal_says_what_to_do() {
        let error = UninstallError::InUse {
            count: 1,
            names: "default/a (pods p)".to_owned(),
        };
        let text = error.to_string();
        assert!(
            text.contains("default/a (pods p)") && text.contains("kubectl drava drain"),
            "{text}"
        );
    }
}
