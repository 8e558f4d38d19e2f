//! The allocation in a claim's status, as kube-scheduler would write it for the same devices.

use std::collections::BTreeMap;

use drava_allocator::capacity::Amounts;
use drava_allocator::placement::{ClaimPlacement, DevicePlacement};
use drava_allocator::usage::DeviceAccess;
use drava_api::names;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceClass,
    DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Builds the allocation. `share_id` returns a new lowercase UUID for each share.
#[must_use]
pub fn build(
    claim: &ResourceClaim,
    placement: &ClaimPlacement,
    node: &str,
    classes: &BTreeMap<String, DeviceClass>,
    now: Time,
    mut share_id: impl FnMut() -> String,
) -> AllocationResult {
    let results = placement
        .devices
        .iter()
        .map(|device| result(device, &mut share_id))
        .collect();
    let config = config(claim, placement, classes);
    AllocationResult {
        // Otherwise kube-scheduler adds the timestamp when binding, which the API server rejects permanently.
        allocation_timestamp: Some(now),
        devices: Some(DeviceAllocationResult {
            config: (!config.is_empty()).then_some(config),
            results: Some(results),
        }),
        node_selector: Some(only_node(node)),
    }
}

/// Returns the only form that the API server recognizes when it authorizes the driver of the node (KEP-4817).
fn only_node(node: &str) -> NodeSelector {
    NodeSelector {
        node_selector_terms: vec![NodeSelectorTerm {
            match_expressions: None,
            match_fields: Some(vec![NodeSelectorRequirement {
                key: "metadata.name".to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![node.to_owned()]),
            }]),
        }],
    }
}

fn result(
    device: &DevicePlacement,
    share_id: &mut impl FnMut() -> String,
) -> DeviceRequestAllocationResult {
    let share = match &device.access {
        DeviceAccess::Exclusive | DeviceAccess::Admin(None) => None,
        DeviceAccess::Share(amounts, _)
        | DeviceAccess::Suspended(amounts)
        | DeviceAccess::Admin(Some(amounts)) => Some(amounts),
    };
    let non_empty = |list: &Vec<String>| (!list.is_empty()).then(|| list.clone());
    DeviceRequestAllocationResult {
        admin_access: matches!(device.access, DeviceAccess::Admin(_)).then_some(true),
        binding_conditions: non_empty(&device.device.binding_conditions),
        binding_failure_conditions: non_empty(&device.device.binding_failure_conditions),
        consumed_capacity: share.map(raw),
        device: device.device.name.to_string(),
        driver: names::DRIVER.to_owned(),
        pool: device.pool.clone(),
        request: device.request.clone(),
        share_id: share.map(|_| share_id()),
        skip_node_operations: None,
        tolerations: (!device.tolerations.is_empty()).then(|| device.tolerations.clone()),
    }
}

fn raw(amounts: &Amounts) -> BTreeMap<String, RawQuantity> {
    amounts
        .iter()
        .map(|(name, amount)| (name.clone(), RawQuantity::from(*amount)))
        .collect()
}

/// Returns the config of each class with its requests, then the config of the claim. A list of all requests is written
/// as an empty list.
fn config(
    claim: &ResourceClaim,
    placement: &ClaimPlacement,
    classes: &BTreeMap<String, DeviceClass>,
) -> Vec<DeviceAllocationConfiguration> {
    let mut selected: Vec<(&str, &str)> = Vec::new();
    for device in &placement.devices {
        if !selected.contains(&(device.request.as_str(), device.class.as_str())) {
            selected.push((&device.request, &device.class));
        }
    }
    let mut class_names: Vec<&str> = selected.iter().map(|(_, class)| *class).collect();
    let mut seen = Vec::new();
    class_names.retain(|class| {
        !seen.contains(class) && {
            seen.push(*class);
            true
        }
    });

    let of_classes = class_names.into_iter().flat_map(|class| {
        let requests: Vec<String> = selected
            .iter()
            .filter(|(_, of)| *of == class)
            .map(|(request, _)| (*request).to_owned())
            .collect();
        let entries = classes
            .get(class)
            .and_then(|class| class.spec.as_ref()?.config.as_deref())
            .unwrap_or_default();
        entries
            .iter()
            .map(move |entry| DeviceAllocationConfiguration {
                opaque: entry.opaque.clone(),
                requests: Some(requests.clone()),
                source: "FromClass".to_owned(),
            })
    });
    let of_claim = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.devices.as_ref()?.config.as_deref())
        .unwrap_or_default()
        .iter()
        .filter(|entry| {
            let requests = entry.requests.as_deref().unwrap_or_default();
            requests.is_empty()
                || selected
                    .iter()
                    .any(|(request, _)| names_request(requests, request))
        })
        .map(|entry| DeviceAllocationConfiguration {
            opaque: entry.opaque.clone(),
            requests: entry.requests.clone(),
            source: "FromClaim".to_owned(),
        });
    of_classes
        .chain(of_claim)
        .map(|mut entry| {
            let requests = entry.requests.as_deref().unwrap_or_default();
            if selected
                .iter()
                .all(|(request, _)| names_request(requests, request))
            {
                entry.requests = None;
            }
            entry
        })
        .collect()
}

/// Returns whether a list of request names covers the request with this result name.
fn names_request(requests: &[String], request: &str) -> bool {
    let main = request.split_once('/').map_or(request, |(main, _)| main);
    requests.iter().any(|name| name == request || name == main)
}

#[cfg(test)]
mod tests;
