//! What the API server adds to a pod before it stores it, as far as decisions depend on it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Pod overhead by the name of the RuntimeClass.
pub(crate) type Overheads = BTreeMap<String, BTreeMap<String, Quantity>>;

/// Sets the defaults of the API server: requests from limits, host ports on the network of the host, and the overhead of the
/// runtime class.
pub(crate) fn set(pod: &mut Pod, overheads: &Overheads) {
    let Some(spec) = &mut pod.spec else { return };
    let is_host_network = spec.host_network == Some(true);
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        set_requests(container);
        if is_host_network {
            for port in container.ports.iter_mut().flatten() {
                port.host_port.get_or_insert(port.container_port);
            }
        }
    }
    set_pod_requests(spec);
    if spec.overhead.is_none()
        && let Some(class) = &spec.runtime_class_name
    {
        spec.overhead = overheads.get(class).cloned();
    }
}

fn set_requests(container: &mut Container) {
    let Some(resources) = &mut container.resources else {
        return;
    };
    for (name, limit) in resources.limits.iter().flatten() {
        let requests = resources.requests.get_or_insert_default();
        requests
            .entry(name.clone())
            .or_insert_with(|| limit.clone());
    }
}

/// A limit of the whole pod is its request, unless a container requests the resource.
fn set_pod_requests(spec: &mut PodSpec) {
    let containers = spec.containers.iter();
    let requested: Vec<String> = containers
        .flat_map(|container| container.resources.iter())
        .flat_map(|resources| resources.requests.iter().flatten())
        .map(|(name, _)| name.clone())
        .collect();
    let Some(resources) = &mut spec.resources else {
        return;
    };
    for (name, limit) in resources.limits.iter().flatten() {
        if !requested.contains(name) {
            let requests = resources.requests.get_or_insert_default();
            requests
                .entry(name.clone())
                .or_insert_with(|| limit.clone());
        }
    }
}
