//! Snapshot of the cluster's state.

use std::fmt::Debug;

use drava_allocator::cluster::Cluster;
use drava_allocator::taint::rule_from_v1beta2;
use drava_api::names;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::api::resource::v1beta2;
use kube::api::ListParams;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

/// Objects of the cluster, read once.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) cluster: Cluster,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) pods: Vec<Pod>,
}

impl Snapshot {
    pub(crate) fn new(
        nodes: &[Node],
        slices: &[ResourceSlice],
        taint_rules: &[DeviceTaintRule],
        classes: Vec<DeviceClass>,
        claims: Vec<ResourceClaim>,
        pods: Vec<Pod>,
    ) -> Self {
        let mut cluster = Cluster::default();
        for node in nodes {
            cluster.upsert_node(node);
        }
        for class in classes {
            cluster.upsert_class(class);
        }
        for slice in slices {
            cluster.upsert_slice(slice);
        }
        for rule in taint_rules {
            cluster.upsert_taint_rule(rule);
        }
        for claim in &claims {
            cluster.upsert_claim(claim);
        }
        for pod in &pods {
            cluster.upsert_pod(pod);
        }
        Self {
            cluster,
            claims,
            pods,
        }
    }
}

/// Reads the cluster.
///
/// # Errors
/// If a kind cannot be listed.
pub(crate) async fn take(client: &Client) -> anyhow::Result<Snapshot> {
    let ours = ListParams::default().fields(&format!("spec.driver={}", names::DRIVER));
    let all = ListParams::default();
    let (nodes, slices, rules, classes, claims, pods) = tokio::try_join!(
        list::<Node>(client, &all),
        list::<ResourceSlice>(client, &ours),
        list_taint_rules(client),
        list::<DeviceClass>(client, &all),
        list::<ResourceClaim>(client, &all),
        list::<Pod>(client, &all),
    )?;
    Ok(Snapshot::new(
        &nodes, &slices, &rules, classes, claims, pods,
    ))
}

/// Lists the DeviceTaintRules in the version that is served; none if no version is.
async fn list_taint_rules(client: &Client) -> anyhow::Result<Vec<DeviceTaintRule>> {
    let all = ListParams::default();
    match list::<DeviceTaintRule>(client, &all).await {
        Err(error) if is_not_served(&error) => {}
        rules => return rules,
    }
    match list::<v1beta2::DeviceTaintRule>(client, &all).await {
        Err(error) if is_not_served(&error) => Ok(Vec::new()),
        rules => Ok(rules?.into_iter().map(rule_from_v1beta2).collect()),
    }
}

fn is_not_served(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 404)
}

/// Lists the objects of a kind in all namespaces.
///
/// # Errors
/// With a hint about the permission or version that is missing.
pub(crate) async fn list<K>(client: &Client, params: &ListParams) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let listed = Api::<K>::all(client.clone()).list(params).await;
    let plural = K::plural(&());
    let objects = listed.map_err(|error| {
        let hint = match &error {
            kube::Error::Api(status) if status.code == 403 => {
                format!("; `kubectl auth can-i list {plural} -A` shows whether you may")
            }
            kube::Error::Api(status) if status.code == 404 => {
                "; resource.k8s.io/v1 is available since Kubernetes 1.34".to_owned()
            }
            _ => String::new(),
        };
        anyhow::Error::new(error).context(format!("cannot list {plural} in all namespaces{hint}"))
    })?;
    Ok(objects.items)
}
