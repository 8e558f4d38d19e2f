//! Selectors that compare an attribute with a placeholder for an unknown value: a GPU of which the value is unknown has no such
//! attribute, so the evaluation fails there.

use drava_api::names;
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceSelector};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::state::ClusterState;
use super::{Fault, Finding};

/// An attribute with a value that stands for an unknown one elsewhere.
struct Placeholder {
    attribute: &'static str,
    value: &'static str,
    fix: &'static str,
}

const PLACEHOLDERS: [Placeholder; 2] = [
    Placeholder {
        attribute: names::attribute::NUMA_NODE,
        value: "-1",
        fix: r#"use device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1), or leave the selector out"#,
    },
    Placeholder {
        attribute: names::attribute::NVLINK_DOMAIN,
        value: "none",
        fix: r#"use device.attributes["gpu.drava.dev"].?nvlinkDomain.orValue("none"), or leave the selector out"#,
    },
];

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = Vec::new();
    for class in &state.classes {
        let selectors = class.spec.iter();
        let selectors = selectors.flat_map(|spec| spec.selectors.iter().flatten());
        findings.extend(of_object("deviceclass", &class.metadata, selectors));
    }
    for claim in &state.claims {
        let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
        let selectors = devices.into_iter().flat_map(selectors);
        findings.extend(of_object("resourceclaim", &claim.metadata, selectors));
    }
    for template in state.templates.iter().flatten() {
        let spec = template.spec.as_ref().and_then(|spec| spec.spec.as_ref());
        let devices = spec.and_then(|spec| spec.devices.as_ref());
        let selectors = devices.into_iter().flat_map(selectors);
        let found = of_object("resourceclaimtemplate", &template.metadata, selectors);
        findings.extend(found);
    }
    findings
}

fn selectors(devices: &DeviceClaim) -> impl Iterator<Item = &DeviceSelector> {
    devices.requests.iter().flatten().flat_map(|request| {
        let exactly = request.exactly.iter();
        let exactly = exactly.flat_map(|request| request.selectors.iter().flatten());
        let alternatives = request.first_available.iter().flatten();
        exactly.chain(alternatives.flat_map(|request| request.selectors.iter().flatten()))
    })
}

fn of_object<'a>(
    kind: &str,
    metadata: &ObjectMeta,
    selectors: impl Iterator<Item = &'a DeviceSelector>,
) -> Vec<Finding> {
    let expressions = selectors.filter_map(|selector| Some(&selector.cel.as_ref()?.expression));
    let used = expressions.flat_map(|expression| {
        PLACEHOLDERS
            .iter()
            .filter(|placeholder| placeholder.is_used_in(expression))
    });
    let name = metadata.name.as_deref().unwrap_or_default();
    let object = match &metadata.namespace {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    };
    used.map(|placeholder| Finding {
        fault: Fault::PlaceholderSelector,
        object: object.clone(),
        problem: format!(
            "a selector compares {} with {}, which no GPU publishes",
            placeholder.name(),
            placeholder.value
        ),
        fix: placeholder.fix.to_owned(),
    })
    .collect()
}

impl Placeholder {
    /// Returns the name without the domain.
    fn name(&self) -> &str {
        self.attribute
            .rsplit_once('/')
            .map_or(self.attribute, |(_, name)| name)
    }

    /// Returns whether an expression names the attribute and the value, without a default for devices that lack it.
    fn is_used_in(&self, expression: &str) -> bool {
        let has_default = expression.contains(&format!("?{}", self.name()))
            || expression.contains(&format!("[?\"{}\"]", self.name()))
            || expression.contains(&format!("[?'{}']", self.name()));
        expression.contains(self.name()) && !has_default && expression.contains(self.value)
    }
}
