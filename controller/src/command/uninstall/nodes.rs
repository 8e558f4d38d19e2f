//! Files of the node driver on the nodes, which a pod on each node removes after the end of the driver.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};

use super::{UninstallError, delete, failed, is_missing};

/// Longest wait for the pods.
const END: Duration = Duration::from_secs(60);

/// Returns the nodes that published devices.
pub(super) fn nodes(slices: &[ResourceSlice]) -> BTreeSet<String> {
    let nodes = slices
        .iter()
        .filter_map(|slice| slice.spec.node_name.clone());
    nodes.collect()
}

/// Returns the pod that removes the files of a node. Without a scheduler: it must run on this node, whatever its taints.
fn pod_on(template: &Pod, node: &str, index: usize) -> Pod {
    let mut pod = template.clone();
    pod.metadata.name = Some(format!("drava-uninstall-node-{index}"));
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(node.to_owned());
    }
    pod
}

/// Runs the pod `template` on each node, and returns the nodes whose files remain.
///
/// # Errors
/// When a request fails. A node that does not answer is no error: its files stay.
pub(super) async fn clean(
    client: &Client,
    namespace: &str,
    template: &Pod,
    nodes: BTreeSet<String>,
) -> Result<Vec<String>, UninstallError> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let mut running = Vec::new();
    for (index, node) in nodes.into_iter().enumerate() {
        let pod = pod_on(template, &node, index);
        let name = pod.name_any();
        let created = pods.create(&PostParams::default(), &pod).await;
        created.map_err(failed("create the pod that removes the files of a node"))?;
        running.push((name, node));
    }
    let names: Vec<String> = running.iter().map(|(name, _)| name.clone()).collect();
    let deadline = tokio::time::Instant::now() + END;
    let mut left = Vec::new();
    while !running.is_empty() && tokio::time::Instant::now() < deadline {
        let mut waiting = Vec::new();
        for (name, node) in running {
            match phase(&pods, &name).await?.as_str() {
                "Succeeded" => {}
                "Failed" => left.push(node),
                _ => waiting.push((name, node)),
            }
        }
        running = waiting;
        if !running.is_empty() {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
    left.extend(running.into_iter().map(|(_, node)| node));
    for name in names {
        delete(&pods, &name)
            .await
            .map_err(failed("delete the pod that removes the files of a node"))?;
    }
    Ok(left)
}

/// Returns the phase of a pod; a deleted pod has failed.
async fn phase(pods: &Api<Pod>, name: &str) -> Result<String, UninstallError> {
    match pods.get(name).await {
        Ok(pod) => Ok(pod
            .status
            .and_then(|status| status.phase)
            .unwrap_or_default()),
        Err(error) if is_missing(&error) => Ok("Failed".to_owned()),
        Err(error) => Err(failed("get the pod that removes the files of a node")(
            error,
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::object;

    #[test]
    fn one_pod_runs_on_each_node_with_devices() {
        let slice = |name: &str, node: Option<&str>| -> ResourceSlice {
            object(json!({
                "metadata": {"name": name},
                "spec": {
                    "driver": "gpu.drava.dev", "nodeName": node,
                    "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                },
            }))
        };
        let slices = [
            slice("a", Some("n1")),
            slice("b", Some("n1")),
            slice("c", None),
        ];
        assert_eq!(nodes(&slices), BTreeSet::from(["n1".to_owned()]));
        let template: Pod = object(json!({"spec": {"containers": [{"name": "c"}]}}));
        let pod = pod_on(&template, "n1", 0);
        assert_eq!(
            pod.spec.and_then(|spec| spec.node_name).as_deref(),
            Some("n1")
        );
    }
}
